"""Replay policies over a recording and estimate τ(N) (paper §3.1, §6.4)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from specpilot_cli.errors import InputError
from specpilot_cli.replay.anchors import (
    AS_RECORDED,
    Anchors,
    ReplayOptions,
    line_up,
    nothing_to_replay,
    positions_in_use,
    prepare,
)
from specpilot_cli.replay.core import run_policies
from specpilot_cli.replay.facts import LatticeFacts
from specpilot_cli.replay.modes import (
    MODE_BIAS,
    Mode,
    commit_lengths,
    resolve_mode,
    trajectory,
)
from specpilot_cli.replay.policies import ChainPolicy, default_policies, find_policy
from specpilot_cli.replay.policy import UNLIMITED, Policy, StepPolicy
from specpilot_cli.replay.result import ReplayResult
from specpilot_cli.schema.lattice import LatticeMetadata, LatticeRecording, LatticeSource
from specpilot_cli.ui import Reporter, SilentReporter

DEFAULT_NODES = (8, 16, 32, 63)
MAX_NODES = 4096  # beyond any verify pass; a slip of the keyboard should not take all memory
_NO_BUDGET = ("chain", "oracle")
_MISMATCH_WARNING_RATIO = 0.001  # above rounding ties between raw and normalised scores


def replay(
    recording: LatticeSource,
    policies: Sequence[str] | None = None,
    *,
    nodes: Sequence[int] = DEFAULT_NODES,
    mode: Mode | None = None,
    options: ReplayOptions = AS_RECORDED,
    reporter: Reporter = SilentReporter(),
) -> ReplayResult:
    """Tokens per step of each policy at each node budget.

    `recording` is one in memory, or files that are read in parts. `nodes` exclude the root;
    `policies` default to `default_policies`, and `mode` to what the recording supports best.
    Raises InputError on unknown names or unfit options.
    """
    budgets = check_nodes(nodes)
    metadata = recording.metadata
    n_positions = positions_in_use(recording, options)
    kind = metadata.drafter_kind
    names = default_policies(options, kind) if policies is None else dict.fromkeys(policies)
    found = [find_policy(name, kind) for name in names]
    used_mode = resolve_mode(metadata, mode)
    warn_if_packed(metadata, budgets, options, reporter)
    if (cost := options.step_cost) is not None:
        cost.warn_of_block(metadata, reporter)
    chosen = _fitted(found, recording, budgets, options, reporter)
    facts = LatticeFacts.empty(n_positions)
    rows = run_policies(
        _parts(recording, options, facts, reporter),
        chosen,
        ChainPolicy(),
        metadata=metadata,
        n_positions=n_positions,
        mode=used_mode,
        options=options,
    )
    _warn_of_mismatch(facts, reporter)
    return ReplayResult(
        mode=used_mode,
        bias=MODE_BIAS[used_mode],
        positions=n_positions,
        temperature=options.temperature,
        rows=rows,
        n_requests=facts.requests,
        n_anchors=facts.anchors,
        recall_by_position=facts.recall,
        chain_mismatch_ratio=facts.chain_mismatch,
        stock_outside_by_position=facts.stock_outside,
        projected_because=None if cost is None else cost.projected_because(metadata),
    )


def replay_accept_lengths(
    recording: LatticeRecording,
    policy: str,
    n_nodes: int | None = None,
    *,
    options: ReplayOptions = AS_RECORDED,
) -> list[npt.NDArray[np.int32]]:
    """Tokens committed at each step of each request, the bonus included.

    One int32 array per recorded request, in order; a request's array sums to its output length
    minus one, the token of prefill. `n_nodes` may be None for the full chain and for the oracle.
    This is what a live engine must reproduce step by step. Raises InputError on an anchored
    recording.
    """
    resolve_mode(recording.metadata, "trajectory")
    anchors = prepare(recording, options)
    found = find_policy(policy, recording.metadata.drafter_kind)
    if n_nodes is None and policy not in _NO_BUDGET:
        raise InputError(
            f"policy `{policy}` needs a node budget", where="n_nodes", hint="give --nodes"
        )
    limit = UNLIMITED if n_nodes is None else check_nodes([n_nodes])[0]
    fitted = found.fitted(recording, options, [limit])
    committed = commit_lengths(anchors, fitted.trace(anchors, options, [limit]).accepted(limit))
    visited = trajectory(anchors, committed)
    return [
        committed[start : start + count][visited[start : start + count]]
        for start, count in zip(anchors.first, anchors.count, strict=True)
    ]


def check_nodes(nodes: Sequence[int]) -> list[int]:
    """Node budgets ascending and unique; InputError if none or unfit."""
    if not nodes or min(nodes) < 1 or max(nodes) > MAX_NODES:
        raise InputError(
            f"node budgets must be whole numbers from 1 to {MAX_NODES}",
            where="--nodes",
            hint="give budgets such as `8,16,32`; the root is not counted",
        )
    return sorted(set(nodes))


def warn_if_packed(
    metadata: LatticeMetadata, budgets: Sequence[int], options: ReplayOptions, reporter: Reporter
) -> None:
    """Warn where `budgets`, ascending, or the options read scores that packing dropped."""
    packed = metadata.packed
    if packed is None:
        return
    changed = options.temperature != 1.0 or options.recall is not None
    if budgets[-1] > packed.exact_nodes or options.top_k > packed.top_k or changed:
        reporter.warn(
            f"this packed recording kept the scores that trees of up to {packed.exact_nodes} nodes "
            f"and --top-k {packed.top_k} read at temperature 1; beyond that, τ is approximate"
        )


def _fitted(
    policies: Sequence[Policy],
    recording: LatticeSource,
    budgets: Sequence[int],
    options: ReplayOptions,
    reporter: Reporter,
) -> list[tuple[StepPolicy[Anchors], list[int | None]]]:
    """Each policy ready to trace, with the budgets that it reports."""
    n_positions = positions_in_use(recording, options)
    chosen: list[tuple[StepPolicy[Anchors], list[int | None]]] = []
    for policy in policies:
        wanted = policy.budgets(budgets, n_positions)
        limits = [UNLIMITED if budget is None else budget for budget in wanted]
        chosen.append((policy.fitted(recording, options, limits, reporter=reporter), wanted))
    return chosen


def _parts(
    recording: LatticeSource, options: ReplayOptions, facts: LatticeFacts, reporter: Reporter
) -> Iterator[Anchors]:
    """The recording's parts lined up, with their facts counted as they pass."""
    done, total = 0, len(recording.metadata.requests)
    for part in recording.parts():
        anchors = line_up(part, options)
        facts.add(anchors)
        yield anchors
        done += part.n_requests
        reporter.progress("replay: requests", done, total)
    if facts.anchors == 0:
        raise nothing_to_replay()


def _warn_of_mismatch(facts: LatticeFacts, reporter: Reporter) -> None:
    if facts.chain_mismatch > _MISMATCH_WARNING_RATIO:
        reporter.warn(
            f"the recorded stock chain leaves the argmax of the recorded scores at "
            f"{facts.chain_mismatch:.1%} of the steps; scores and stock choice may not belong "
            "together"
        )
