"""The loop that all replays share: judge policies step by step, add up, and estimate τ.

Steps come in parts of whole requests, and only sums per request are kept, so a recording of any
length is replayed in the memory of one part.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from specpilot_cli.replay.anchors import ReplayOptions, StepCost, Steps
from specpilot_cli.replay.intervals import (
    Estimate,
    gain_estimate,
    mean_of_estimates,
    tau_estimate,
)
from specpilot_cli.replay.modes import Mode, commit_lengths, judged_anchors
from specpilot_cli.replay.policy import UNLIMITED, StepPolicy, Trace
from specpilot_cli.replay.result import ReplayRow
from specpilot_cli.schema.lattice import LatticeMetadata

S = TypeVar("S", bound=Steps)
Int64 = npt.NDArray[np.int64]


@dataclass(slots=True)
class Tally:
    """Sums of one policy at one budget over the parts seen so far."""

    policy: str
    budget: int | None
    slot: int
    cost: StepCost | None
    lengths: Int64  # steps by tokens committed
    tokens: list[Int64] = field(default_factory=list)
    steps: list[Int64] = field(default_factory=list)
    expected: float | None = 0.0
    nodes: float = 0.0
    seconds: float = 0.0
    used: npt.NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, dtype=np.bool_))

    def add(
        self,
        steps: Steps,
        trace: Trace,
        committed: npt.NDArray[np.int32],
        mask: npt.NDArray[np.bool_],
    ) -> None:
        """Count the steps in `mask`, [A] bool, of a policy that commits `committed`, [A]."""
        tokens, n_steps = per_request(steps, committed, mask)
        self.tokens.append(tokens)
        self.steps.append(n_steps)
        self.lengths += np.bincount(committed[mask], minlength=self.lengths.size)
        if trace.expected is None:
            self.expected = None
        elif self.expected is not None:
            self.expected += float(trace.expected[mask, self.slot].sum())
        if self.budget is None:
            return
        used = trace.nodes_used(self.budget)
        nodes = np.full(int(mask.sum()), self.budget) if used is None else used[mask]
        self.nodes += float(nodes.sum())
        if self.cost is not None:
            seconds = np.asarray(self.cost.seconds)
            self.seconds += float(seconds[nodes].sum())
            seen = np.bincount(nodes, minlength=seconds.size) > 0
            self.used = seen if self.used.size == 0 else self.used | seen

    def row(self, metadata: LatticeMetadata, base: tuple[Int64, Int64]) -> ReplayRow:
        """τ and what belongs to it; base: tokens and steps [R] of the full chain."""
        tokens, steps = np.concatenate(self.tokens), np.concatenate(self.steps)
        n_steps = int(steps.sum())
        tau = tau_estimate(tokens, steps)
        benchmarks = _by_benchmark(metadata, tokens, steps)
        step_s = self.seconds / n_steps if self.cost is not None and self.budget else None
        return ReplayRow(
            policy=self.policy,
            nodes=self.budget,
            rows=None if self.budget is None else self.budget + 1,
            tau=tau,
            benchmarks=benchmarks,
            benchmark_mean=mean_of_estimates(list(benchmarks.values())),
            gain=gain_estimate(tokens, steps, *base),
            expected_tau=None if self.expected is None else 1.0 + self.expected / n_steps,
            tokens=tokens,
            steps=steps,
            lengths=self.lengths,
            mean_nodes=None if self.budget is None else self.nodes / n_steps,
            step_s=step_s,
            step_basis=None if step_s is None or self.cost is None else self.cost.basis(self.used),
            speedup=(
                tau.value * self.cost.ar_step_s / step_s
                if self.cost is not None and step_s is not None
                else None
            ),
        )


def run_policies(
    parts: Iterable[S],
    policies: Sequence[tuple[StepPolicy[S], list[int | None]]],
    chain: StepPolicy[S],
    *,
    metadata: LatticeMetadata,
    n_positions: int,
    mode: Mode,
    options: ReplayOptions,
) -> list[ReplayRow]:
    """One row per policy and budget (None = none applies) over all parts, in the order given.

    `chain` is what gains are over, and whose anchors the anchored mode uses. Raises InputError if
    step times do not reach a budget or if there is nothing to replay.
    """
    _check_cost(policies, options.step_cost)
    tallies = [
        [
            Tally(policy.name, budget, slot, options.step_cost, np.zeros(n_positions + 2, np.int64))
            for slot, budget in enumerate(wanted)
        ]
        for policy, wanted in policies
    ]
    base: list[tuple[Int64, Int64]] = []
    for steps in parts:
        trace = chain.trace(steps, options, [n_positions])
        stock = commit_lengths(steps, trace.accepted(n_positions))
        base.append(per_request(steps, stock, judged_anchors(steps, mode, stock, stock)))
        for (policy, wanted), own in zip(policies, tallies, strict=True):
            limits = [UNLIMITED if budget is None else budget for budget in wanted]
            traced = policy.trace(steps, options, limits)
            for tally, limit in zip(own, limits, strict=True):
                committed = commit_lengths(steps, traced.accepted(limit))
                mask = judged_anchors(steps, mode, committed, stock)
                tally.add(steps, traced, committed, mask)
    tokens, n_steps = (np.concatenate([pair[i] for pair in base]) for i in (0, 1))
    return [tally.row(metadata, (tokens, n_steps)) for own in tallies for tally in own]


def per_request(
    steps: Steps, committed: npt.NDArray[np.int32], mask: npt.NDArray[np.bool_]
) -> tuple[Int64, Int64]:
    """Tokens and steps of every request, [R] each, over the anchors in `mask`."""
    request = steps.request[mask]
    tokens = np.bincount(request, weights=committed[mask], minlength=steps.n_requests)
    count = np.bincount(request, minlength=steps.n_requests)
    return tokens.astype(np.int64), count.astype(np.int64)


def _check_cost(
    policies: Sequence[tuple[StepPolicy[S], list[int | None]]], cost: StepCost | None
) -> None:
    budgets = [budget for _, wanted in policies for budget in wanted if budget is not None]
    if cost is not None and budgets:
        cost.check(max(budgets))


def _by_benchmark(metadata: LatticeMetadata, tokens: Int64, steps: Int64) -> dict[str, Estimate]:
    names = np.array([request.benchmark for request in metadata.requests])
    result: dict[str, Estimate] = {}
    for name in dict.fromkeys(names.tolist()):
        member = names == name
        if steps[member].sum() > 0:
            result[name] = tau_estimate(tokens[member], steps[member])
    return result
