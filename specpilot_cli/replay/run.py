"""Replay policies over a recording and estimate τ(N) (paper §3.1, §6.4)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from specpilot_cli.errors import InputError
from specpilot_cli.replay.anchors import AS_RECORDED, Anchors, ReplayOptions, prepare
from specpilot_cli.replay.intervals import (
    Estimate,
    gain_estimate,
    mean_of_estimates,
    tau_estimate,
)
from specpilot_cli.replay.modes import (
    MODE_BIAS,
    Mode,
    commit_lengths,
    judged_anchors,
    resolve_mode,
    trajectory,
)
from specpilot_cli.replay.policies import ChainPolicy, default_policies, find_policy
from specpilot_cli.replay.policy import UNLIMITED, Trace
from specpilot_cli.replay.result import ReplayResult, ReplayRow
from specpilot_cli.schema.lattice import LatticeRecording
from specpilot_cli.ui import Reporter, SilentReporter

DEFAULT_NODES = (8, 16, 32, 63)
MAX_NODES = 4096  # beyond any verify pass; a slip of the keyboard should not take all memory
_NO_BUDGET = ("chain", "oracle")
_MISMATCH_WARNING_RATIO = 0.001  # above rounding ties between raw and normalised scores


def replay(
    recording: LatticeRecording,
    policies: Sequence[str] | None = None,
    *,
    nodes: Sequence[int] = DEFAULT_NODES,
    mode: Mode | None = None,
    options: ReplayOptions = AS_RECORDED,
    reporter: Reporter = SilentReporter(),
) -> ReplayResult:
    """Tokens per step of each policy at each node budget.

    `nodes` exclude the root; `policies` default to `default_policies`, and `mode` to what the
    recording supports best. Raises InputError on unknown names or unfit options.
    """
    budgets = check_nodes(nodes)
    names = default_policies(options) if policies is None else dict.fromkeys(policies)
    chosen = [find_policy(name) for name in names]
    used_mode = resolve_mode(recording, mode)
    anchors = prepare(recording, options)
    chain = ChainPolicy().trace(anchors, options, [anchors.n_positions])
    chain_committed = commit_lengths(anchors, chain.accepted(anchors.n_positions))
    chain_mask = judged_anchors(anchors, used_mode, chain_committed, chain_committed)
    base = _per_request(anchors, chain_committed, chain_mask)
    rows: list[ReplayRow] = []
    for policy in chosen:
        wanted = policy.budgets(budgets, anchors.n_positions)
        limits = [UNLIMITED if budget is None else budget for budget in wanted]
        trace = policy.trace(anchors, options, limits, reporter=reporter)
        for slot, budget in enumerate(wanted):
            committed = commit_lengths(anchors, trace.accepted(limits[slot]))
            mask = judged_anchors(anchors, used_mode, committed, chain_committed)
            row = _row(anchors, policy.name, budget, slot, trace, committed, mask, base)
            rows.append(with_cost(row, trace.nodes_used(limits[slot]), mask, options))
    mismatch = chain_mismatch_ratio(anchors)
    if mismatch > _MISMATCH_WARNING_RATIO:
        reporter.warn(
            f"the recorded stock chain leaves the argmax of the recorded scores at "
            f"{mismatch:.1%} of the steps; scores and stock choice may not belong together"
        )
    return ReplayResult(
        mode=used_mode,
        bias=MODE_BIAS[used_mode],
        positions=anchors.n_positions,
        temperature=options.temperature,
        rows=rows,
        n_requests=int(np.count_nonzero(anchors.count)),
        n_anchors=anchors.n_anchors,
        recall_by_position=recall_by_position(anchors),
        chain_mismatch_ratio=mismatch,
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
    resolve_mode(recording, "trajectory")
    anchors = prepare(recording, options)
    found = find_policy(policy)
    if n_nodes is None and policy not in _NO_BUDGET:
        raise InputError(
            f"policy `{policy}` needs a node budget", where="n_nodes", hint="give --nodes"
        )
    limit = UNLIMITED if n_nodes is None else check_nodes([n_nodes])[0]
    committed = commit_lengths(anchors, found.trace(anchors, options, [limit]).accepted(limit))
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


def recall_by_position(anchors: Anchors) -> npt.NDArray[np.float64]:
    """How often the true token is a candidate, by position, over all anchors, [P] float64."""
    known = (anchors.truth >= 0).sum(axis=0)
    found = (anchors.truth_in_lattice() & (anchors.truth >= 0)).sum(axis=0)
    return np.asarray(np.where(known > 0, found / np.maximum(known, 1), np.nan), dtype=np.float64)


def chain_mismatch_ratio(anchors: Anchors) -> float:
    """Share of anchors where the stock chain is not the argmax walk over the edges."""
    recording, n_positions = anchors.recording, anchors.n_positions
    choice = recording.stock_choice[anchors.step, :n_positions]
    index = np.zeros(anchors.n_anchors, dtype=np.int64)
    differs = np.zeros(anchors.n_anchors, dtype=np.bool_)
    for position in range(n_positions):
        index = recording.edge[anchors.step, position, index].argmax(axis=-1)
        token = recording.candidate_ids[anchors.step, position, index]
        differs |= token != choice[:, position]
    return float(differs.mean())


def _row(
    anchors: Anchors,
    policy: str,
    budget: int | None,
    slot: int,
    trace: Trace,
    committed: npt.NDArray[np.int32],
    mask: npt.NDArray[np.bool_],
    base: tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]],
) -> ReplayRow:
    tokens, steps = _per_request(anchors, committed, mask)
    names = [request.benchmark for request in anchors.recording.metadata.requests]
    benchmarks = _by_benchmark(names, tokens, steps)
    expected = None if trace.expected is None else 1.0 + float(trace.expected[mask, slot].mean())
    return ReplayRow(
        policy=policy,
        nodes=budget,
        rows=None if budget is None else budget + 1,
        tau=tau_estimate(tokens, steps),
        benchmarks=benchmarks,
        benchmark_mean=mean_of_estimates(list(benchmarks.values())),
        gain=gain_estimate(tokens, steps, *base),
        expected_tau=expected,
        tokens=tokens,
        steps=steps,
    )


def with_cost(
    row: ReplayRow,
    used: npt.NDArray[np.int32] | None,
    mask: npt.NDArray[np.bool_],
    options: ReplayOptions,
) -> ReplayRow:
    """The row with its nodes per step and, given step times, what its steps cost."""
    if row.nodes is None:
        return row
    nodes = np.full(int(mask.sum()), row.nodes) if used is None else used[mask]
    cost = options.step_cost
    if cost is None:
        return replace(row, mean_nodes=float(nodes.mean()))
    if row.nodes >= len(cost.seconds):
        raise InputError(
            f"no step time for {row.nodes} nodes",
            where="--step-times",
            hint="time that many rows: `specpilot profile --step-times FILE --rows N`",
        )
    step_s = float(np.asarray(cost.seconds)[nodes].mean())
    speedup = row.tau.value * cost.ar_step_s / step_s
    return replace(row, mean_nodes=float(nodes.mean()), step_s=step_s, speedup=speedup)


def _per_request(
    anchors: Anchors, committed: npt.NDArray[np.int32], mask: npt.NDArray[np.bool_]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    request, n_requests = anchors.request[mask], anchors.recording.n_requests
    tokens = np.bincount(request, weights=committed[mask], minlength=n_requests)
    steps = np.bincount(request, minlength=n_requests)
    return tokens.astype(np.int64), steps.astype(np.int64)


def _by_benchmark(
    names: Sequence[str], tokens: npt.NDArray[np.int64], steps: npt.NDArray[np.int64]
) -> dict[str, Estimate]:
    result: dict[str, Estimate] = {}
    for name in dict.fromkeys(names):
        member = np.array([item == name for item in names])
        if steps[member].sum() > 0:
            result[name] = tau_estimate(tokens[member], steps[member])
    return result
