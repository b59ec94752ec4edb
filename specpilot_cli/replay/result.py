"""What replay returns."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from specpilot_cli.replay.intervals import Estimate
from specpilot_cli.replay.modes import Mode


@dataclass(frozen=True, slots=True, eq=False)
class ReplayRow:
    """One policy at one node budget.

    nodes: drafted tokens per step; rows: nodes + 1, the root included; both None for the oracle.
    tau: total tokens over total steps of all requests. benchmarks: the same per benchmark;
    benchmark_mean: their equal-weight mean. gain: tau over the full chain's on this recording.
    expected_tau: the drafter's own estimate at the same anchors, None where it has none.
    tokens, steps [R] int64: per request, in the recording's order. lengths [P + 2] int64: steps
    by the tokens they committed, None where they were not counted. mean_nodes: nodes spent per
    step, below `nodes` for a policy that need not spend its budget. step_s: mean seconds per step,
    step_basis: the weakest way in which its times were obtained, and speedup: over plain decoding
    (Eq. 3); None without step times.
    """

    policy: str
    nodes: int | None
    rows: int | None
    tau: Estimate
    benchmarks: dict[str, Estimate]
    benchmark_mean: Estimate
    gain: Estimate
    expected_tau: float | None
    tokens: npt.NDArray[np.int64]
    steps: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int64] | None = None
    mean_nodes: float | None = None
    step_s: float | None = None
    speedup: float | None = None
    step_basis: str | None = None


@dataclass(frozen=True, slots=True, eq=False)
class ReplayResult:
    """All rows of one replay and what they were computed from.

    recall_by_position [P] float64: how often the true token is among the candidates, over all
    recorded anchors with a known token there. chain_mismatch_ratio: share of stock chains that
    are not the argmax walk over the recorded scores (DSpark's: of those inside the lattice).
    stock_outside_by_position [P]: how often stock's own token is not a candidate at all.
    projected_because: why the speedups are projections; empty where times and recording are of one
    deployment, None without step times.
    """

    mode: Mode
    bias: str
    positions: int
    temperature: float
    rows: list[ReplayRow]
    n_requests: int
    n_anchors: int
    recall_by_position: npt.NDArray[np.float64]
    chain_mismatch_ratio: float
    stock_outside_by_position: npt.NDArray[np.float64] | None = None
    projected_because: tuple[str, ...] | None = None

    def curve(self, policy: str) -> dict[int, float]:
        """τ by node budget of one policy; empty for the oracle."""
        return {
            row.nodes: row.tau.value
            for row in self.rows
            if row.policy == policy and row.nodes is not None
        }

    def row(self, policy: str, nodes: int | None) -> ReplayRow:
        """The row of a policy at a budget; KeyError if it was not asked for."""
        for row in self.rows:
            if row.policy == policy and row.nodes == nodes:
                return row
        raise KeyError(f"{policy} at {nodes} nodes")
