"""Make the drafter's probabilities right: recall per position and one temperature.

A lattice's scores are normalised over its candidates, as if the true token were always one of
them, so expected τ is too high and deep paths are overrated. Two corrections, fitted on half of the
requests and judged on the other half: every score of position j gains log r_j, where r_j is the
share of true paths that are still in the lattice at j, and all scores are divided by one
temperature, the one that gives the recorded continuations the highest likelihood.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from specpilot_cli.errors import InputError
from specpilot_cli.replay.anchors import (
    AS_RECORDED,
    Anchors,
    ReplayOptions,
    line_up,
    positions_in_use,
)
from specpilot_cli.replay.intervals import Estimate, gain_estimate
from specpilot_cli.replay.modes import Mode
from specpilot_cli.replay.result import ReplayResult
from specpilot_cli.replay.run import DEFAULT_NODES, replay
from specpilot_cli.replay.split import RequestSubset, requests_with_steps, two_folds
from specpilot_cli.schema.lattice import LatticeMetadata, LatticeSource
from specpilot_cli.ui import Reporter, SilentReporter

_LOG_TEMPERATURE = (math.log(0.2), math.log(5.0))  # outside, a drafter is broken, not miscalibrated
_MAX_ROWS = 200_000  # score rows that decide the temperature; more would not move its third digit
_SEARCH_STEPS = 40
_GOLDEN = (math.sqrt(5.0) - 1.0) / 2.0


@dataclass(frozen=True, slots=True)
class Fit:
    """recall [P]: see the module docstring; n_positions: true candidates behind the temperature."""

    temperature: float
    recall: tuple[float, ...]
    n_positions: int


@dataclass(frozen=True, slots=True, eq=False)
class Calibration:
    """A fit, and best-first replay of the other half of the requests before and after it.

    fitted [R] bool: requests of the recording that the fit saw. judged_recall [P]: the recall of
    the other half, for comparison. shared_benchmarks: whether any benchmark has requests in both.
    """

    fit: Fit
    fitted: npt.NDArray[np.bool_]
    judged_recall: tuple[float, ...]
    before: ReplayResult
    after: ReplayResult
    shared_benchmarks: bool

    def gain(self, nodes: int) -> Estimate:
        """τ calibrated over τ as recorded, paired by request."""
        new, old = (result.row("best-first", nodes) for result in (self.after, self.before))
        return gain_estimate(new.tokens, new.steps, old.tokens, old.steps)

    @property
    def error_before(self) -> float:
        """How far the drafter's expected τ is from the realised one: mean |ratio − 1|."""
        return _prediction_error(self.before)

    @property
    def error_after(self) -> float:
        """The same with the fitted recall and temperature."""
        return _prediction_error(self.after)

    @property
    def warning(self) -> str | None:
        """What to say where the fit predicts the judged half worse than the recorded scores do."""
        if self.error_after <= self.error_before:
            return None
        halves = "" if self.shared_benchmarks else ", and the halves share no benchmark"
        return (
            f"calibration makes the prediction worse on the judged half: expected τ is off by "
            f"{self.error_after:.1%} with it and by {self.error_before:.1%} without "
            f"({int(self.fitted.sum())} requests fitted, {self.before.n_requests} judged{halves}); "
            "do not use this fit"
        )


def calibrate(
    recording: LatticeSource,
    *,
    nodes: Sequence[int] = DEFAULT_NODES,
    mode: Mode | None = None,
    options: ReplayOptions = AS_RECORDED,
    reporter: Reporter = SilentReporter(),
) -> Calibration:
    """Fit on one half of the requests, replay the other half with and without the fit.

    Warns where the fit makes the prediction of that half worse. Raises InputError with fewer than
    two requests that have something to replay, or for a drafter without conditional scores.
    """
    if recording.metadata.drafter_kind == "dflash":
        raise InputError(
            "calibration needs scores given the predecessor, which a dflash drafter does not have",
            where="--calibrate",
            hint="its probabilities are over the whole vocabulary already; replay them as they are",
        )
    active = requests_with_steps(recording)
    if np.count_nonzero(active) < 2:
        raise InputError(
            "calibration needs two requests with steps, one to fit and one to judge",
            where="--calibrate",
            hint="record more requests",
        )
    fitted = two_folds(recording.metadata, active) == 0
    fit = fit_calibration(RequestSubset(recording, fitted), options)
    judged = RequestSubset(recording, ~fitted & active)
    changed = replace(options, temperature=fit.temperature, recall=fit.recall)
    before, after = (
        replay(judged, ["best-first"], nodes=nodes, mode=mode, options=used, reporter=reporter)
        for used in (options, changed)
    )
    found = Calibration(
        fit, fitted, path_recall(judged, options)[0], before, after,
        shared_benchmarks=_share_benchmarks(recording.metadata, fitted, active),
    )  # fmt: skip
    if found.warning is not None:
        reporter.warn(found.warning)
    return found


def _prediction_error(result: ReplayResult) -> float:
    ratios = [row.expected_tau / row.tau.value for row in result.rows if row.expected_tau]
    return float(np.abs(np.array(ratios) - 1.0).mean())


def _share_benchmarks(
    metadata: LatticeMetadata, fitted: npt.NDArray[np.bool_], active: npt.NDArray[np.bool_]
) -> bool:
    names = [request.benchmark for request in metadata.requests]
    halves = (fitted & active, ~fitted & active)
    first, second = (
        {name for name, own in zip(names, half, strict=True) if own} for half in halves
    )
    return bool(first & second)


def fit_calibration(source: LatticeSource, options: ReplayOptions) -> Fit:
    """Recall and temperature of these requests, every anchor counted once."""
    recall, n_true = path_recall(source, options)
    stride = max(1, n_true // _MAX_ROWS)
    found = [true_rows(line_up(part, options), stride) for part in source.parts()]
    rows = np.concatenate([part for part, _ in found])
    true = np.concatenate([part for _, part in found])
    temperature = _best_temperature(rows, true) if len(true) else 1.0
    return Fit(temperature, recall, len(true))


def path_recall(source: LatticeSource, options: ReplayOptions) -> tuple[tuple[float, ...], int]:
    """Share of true paths, in the lattice so far, whose next token is a candidate too, [P].

    Half a success and half a failure are added, so that a rare position is neither 0 nor 1. Also
    returns how many true tokens were candidates on such paths.
    """
    n_positions = positions_in_use(source, options)
    hits, tried = np.zeros(n_positions), np.zeros(n_positions)
    for part in source.parts():
        anchors = line_up(part, options)
        inside = np.logical_and.accumulate(anchors.truth_in_lattice(), axis=1)
        before = np.concatenate([np.ones_like(inside[:, :1]), inside[:, :-1]], axis=1)
        tried += (before & (anchors.truth >= 0)).sum(axis=0)
        hits += inside.sum(axis=0)
    return tuple(((hits + 0.5) / (tried + 1.0)).tolist()), int(hits.sum())


def true_rows(
    anchors: Anchors, stride: int
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]:
    """Recorded scores along the true paths: every `stride`-th row [m, K], true candidates [m].

    Rows whose true candidate has probability zero are left out: no temperature mends them.
    """
    inside = np.logical_and.accumulate(anchors.truth_in_lattice(), axis=1)
    anchor, position = np.nonzero(inside)
    anchor, position = anchor[::stride], position[::stride]
    index = (anchors.candidate_ids == anchors.truth[:, :, None]).argmax(axis=-1)
    before = np.where(position > 0, index[anchor, np.maximum(position - 1, 0)], 0)
    rows = anchors.recording.edge[anchors.step[anchor], position, before].astype(np.float64)
    true = index[anchor, position]
    possible = np.isfinite(rows[np.arange(len(true)), true])
    return rows[possible], true[possible]


def half_names(metadata: LatticeMetadata, chosen: npt.NDArray[np.bool_]) -> list[str]:
    """Ids of the chosen requests."""
    requests = metadata.requests
    return [item.request_id for item, own in zip(requests, chosen, strict=True) if own]


def _best_temperature(rows: npt.NDArray[np.float64], true: npt.NDArray[np.int64]) -> float:
    """Golden section over log T: the likelihood is concave in 1/T, so it has one peak."""
    at = np.arange(len(true))

    def loss(log_temperature: float) -> float:
        scaled = rows / math.exp(log_temperature)
        top = scaled.max(axis=1)
        norm = top + np.log(np.exp(scaled - top[:, None]).sum(axis=1))
        return float((norm - scaled[at, true]).mean())

    low, high = _LOG_TEMPERATURE
    for _ in range(_SEARCH_STEPS):
        span = _GOLDEN * (high - low)
        left, right = high - span, low + span
        low, high = (low, right) if loss(left) < loss(right) else (left, high)
    return math.exp((low + high) / 2.0)
