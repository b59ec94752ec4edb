"""At which anchors a policy is judged: the three ways, and what each gets wrong.

A policy that accepts more skips more anchors and lands on others, so the set of anchors belongs to
the policy. Judging every policy on one fixed set is cheaper to record, but biased.
"""

from __future__ import annotations

from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from specpilot_cli.errors import InputError
from specpilot_cli.replay.anchors import Steps
from specpilot_cli.schema.lattice import LatticeMetadata

Mode = Literal["trajectory", "anchored", "dense-mean"]

MODES: tuple[Mode, ...] = get_args(Mode)

MODE_BIAS: dict[Mode, str] = {
    "trajectory": "each policy judged at the anchors it lands on itself: unbiased",
    "anchored": "every policy judged at the anchors where the chain stood: "
    "exact for the chain, biased for any policy that would land elsewhere",
    "dense-mean": "every policy judged at all output positions: biased, usually upwards, because "
    "easy passages, which a policy crosses in few steps, count once per token",
}


def resolve_mode(metadata: LatticeMetadata, requested: Mode | None) -> Mode:
    """The mode to use: trajectory where the recording allows it, or what was asked for.

    Raises InputError if an anchored recording is asked for what it cannot answer.
    """
    if metadata.mode == "dense":
        return requested or "trajectory"
    if requested in (None, "anchored"):
        return "anchored"
    raise InputError(
        f"mode `{requested}` needs a lattice at every output position, "
        "but this recording is anchored",
        where="--mode",
        hint="make a dense recording with `specpilot record`, or use `--mode anchored`",
    )


def commit_lengths(anchors: Steps, accepted: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    """Tokens committed from each anchor, [A] int32: accepted + bonus, cut at the output's end."""
    return np.asarray(np.minimum(accepted + 1, anchors.remaining), dtype=np.int32)


def judged_anchors(
    anchors: Steps,
    mode: Mode,
    committed: npt.NDArray[np.int32],
    chain_committed: npt.NDArray[np.int32],
) -> npt.NDArray[np.bool_]:
    """The anchors that count as steps of a policy that commits `committed`, [A] bool."""
    everywhere = mode == "dense-mean" or (
        mode == "anchored" and anchors.metadata.mode == "anchored"
    )
    if everywhere:
        return np.ones(anchors.n_anchors, dtype=np.bool_)
    own = committed if mode == "trajectory" else chain_committed
    return trajectory(anchors, own)


def trajectory(anchors: Steps, committed: npt.NDArray[np.int32]) -> npt.NDArray[np.bool_]:
    """The anchors visited from each request's first one by advancing `committed`, [A] bool.

    Needs a dense recording: there, anchors of a request follow each other one token apart.
    """
    from specpilot_kernels.trees.trace import visited_anchors

    return visited_anchors(committed, anchors.first, anchors.count)
