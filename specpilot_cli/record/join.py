"""Joins recorded steps with answers. A request that is not complete is left out whole.

The server numbers a step by the tokens before its anchor, so the anchor's output position is
`prefix_len` minus the prompt's length. Steps past the last position that has a successor are
dropped: with overlapped scheduling a server takes one more step after a request has ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from specpilot_cli.errors import MeasurementInvalid
from specpilot_cli.record.shards import Arrays, RequestRows
from specpilot_cli.schema.raw_lattice import Mode
from specpilot_kernels.trees import edge_log_probs

# BF16 logits of about 32 are an eighth apart: DSPARK adds its bias in that type, and so may pick a
# token that is this far below the best one in float32.
_STOCK_TOLERANCE_NATS = 0.3
# A lattice of another step would agree at few positions; ties and rounding cost none or one.
_STOCK_AGREEMENT = 0.99

_LATTICE = ("candidate_ids", "unary", "unary_logsumexp", "stock_choice")


class Incomplete(Exception):
    """Why one request has no complete recording."""


def join_request(
    rows: RequestRows | None,
    *,
    prompt_len: int,
    output_ids: Sequence[int],
    mode: Mode,
    empty: Arrays,
) -> Arrays:
    """Tensors of one request's steps in the lattice file's terms, `step_position` among them.

    Raises Incomplete if a step is missing, or does not continue the output. `empty`: what a
    request without steps has, one that ended with its first token.
    """
    if len(output_ids) == 1:
        return empty
    if rows is None:
        raise Incomplete("no step of it was recorded")
    raw = rows.joined()
    position = raw["prefix_len"].astype(np.int64) - prompt_len
    kept = _last_of_each(position, len(output_ids) - 1)
    raw = {name: array[kept] for name, array in raw.items()}
    position = position[kept]
    _check_steps(position, raw, np.asarray(output_ids), mode)
    return {
        "step_position": position,
        "edge": edge_log_probs(raw["scores"]),
        **{name: raw[name] for name in _LATTICE},
    }


def no_steps(positions: int, candidates: int) -> Arrays:
    """The tensors of `join_request` with no step in them."""
    return {
        "step_position": np.empty(0, dtype=np.int64),
        "edge": np.empty((0, positions, candidates, candidates), dtype=np.float32),
        "candidate_ids": np.empty((0, positions, candidates), dtype=np.int32),
        "unary": np.empty((0, positions, candidates), dtype=np.float32),
        "unary_logsumexp": np.empty((0, positions), dtype=np.float32),
        "stock_choice": np.empty((0, positions), dtype=np.int32),
    }


def _last_of_each(position: npt.NDArray[np.int64], end: int) -> npt.NDArray[np.int64]:
    """Indices of the positions in 0..end - 1, rising; of a repeated one the last.

    A request that was put back and prefilled again repeats steps; only the last one counted.
    """
    if position.size and position.min() < 0:
        raise Incomplete("a step lies inside the prompt: are its token ids the server's?")
    found, from_end = np.unique(position[::-1], return_index=True)
    last = position.size - 1 - from_end
    return np.asarray(last[found < end])


def _check_steps(
    position: npt.NDArray[np.int64], raw: Arrays, output: npt.NDArray[Any], mode: Mode
) -> None:
    end = len(output) - 1
    if np.any(raw["anchor"] != output[position]):
        first = int(position[np.argmax(raw["anchor"] != output[position])])
        raise Incomplete(f"the step at output position {first} has another anchor than the answer")
    if mode == "dense":
        missing = np.setdiff1d(np.arange(end), position)
    else:
        reached = np.concatenate([[0], position + raw["commit_len"]])
        # Each step must stand where the one before it came to; the last may pass the end.
        missing = np.append(
            reached[:-1][reached[:-1] != position], reached[-1:][reached[-1:] < end]
        )
    if missing.size:
        raise Incomplete(f"the step at output position {int(missing[0])} is missing")


def stock_outside(steps: Arrays) -> npt.NDArray[np.bool_]:
    """Where stock's choice is none of the candidates, bool [S, L]; DSPARK's may be."""
    inside = (steps["candidate_ids"] == steps["stock_choice"][..., None]).any(axis=-1)
    return np.asarray(~inside)


def check_stock(steps: Arrays, algorithm: str) -> None:
    """Raise MeasurementInvalid unless stock's chains follow the best edges of the lattices.

    Both were recorded independently, so this notices a lattice that belongs to another step.
    """
    if not steps["stock_choice"].size:
        return
    match = steps["candidate_ids"] == steps["stock_choice"][..., None]
    inside = match.any(axis=-1)
    chosen = match.argmax(axis=-1)
    before = np.concatenate([np.zeros_like(chosen[:, :1]), chosen[:, :-1]], axis=1)
    known = inside.copy()
    known[:, 1:] &= inside[:, :-1]
    row = np.take_along_axis(steps["edge"], before[..., None, None], axis=2)[:, :, 0]
    own = np.take_along_axis(row, chosen[..., None], axis=-1)[..., 0]
    agrees = row.max(axis=-1) - own <= _STOCK_TOLERANCE_NATS
    ratio = float(agrees[known].mean()) if known.any() else 0.0
    lost = float((~inside).mean())
    if ratio < _STOCK_AGREEMENT or (algorithm == "DFLASH" and lost > 1 - _STOCK_AGREEMENT):
        raise MeasurementInvalid(
            f"the recorded lattices do not belong to the drafts: stock's chain follows the best "
            f"edge at {ratio:.1%} of its positions, and leaves the candidates at {lost:.1%}",
            hint="does the server draft greedily? record again, and report this if it stays",
        )
