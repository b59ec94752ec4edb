"""From all answers of all sessions to the result."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from specpilot_cli.paired_bench.promotion import decide, measure_noise
from specpilot_cli.paired_bench.ratios import (
    cells,
    estimate_gain,
    identical_requests,
    log_ratios,
    mean_rate,
    pooled_tau,
    summarise_system,
)
from specpilot_cli.paired_bench.types import (
    AR,
    BASELINE,
    BASELINE_AGAIN,
    CANDIDATE,
    ArSpeedup,
    BenchmarkResult,
    ClientCost,
    Decision,
    GainEstimate,
    LevelNoise,
    LevelResult,
    Noise,
    PairedBenchSettings,
    RequestGain,
    SystemSummary,
    TimedRequest,
)
from specpilot_cli.schema.bench_run import BenchRunEnd

# Above these, a number of the result needs a remark.
_MUCH_CACHED = 0.10
_CACHED_APART = 0.05
_BUSY_CLIENT = 0.5
_SLOW_REFILL = 0.01


class Analysis:
    """The numbers of a complete measurement; every answer of every session must be there.

    rows: of the comparison alone, at any number of batch sizes.
    """

    def __init__(
        self, rows: Sequence[TimedRequest], settings: PairedBenchSettings, noise: Noise
    ) -> None:
        self.settings = settings
        self.rows = [row for row in rows if row.session == "ab"]
        self.noise = noise
        self.ratios = log_ratios(self.rows, CANDIDATE, BASELINE)
        self.same = identical_requests(self.rows, CANDIDATE, BASELINE)
        self.gain = self._estimate(cells(self.ratios))
        self.decision: Decision = decide(
            self.gain.lower_bound_ratio,
            nu_log=noise.nu_log,
            identical=all(self.same.values()),
            settings=settings,
        )

    def _estimate(self, values: Mapping[str, Sequence[float]]) -> GainEstimate:
        return estimate_gain(
            values,
            nu=self.noise.nu_log,
            n_sessions=len(self.noise.sessions),
            confidence=self.settings.confidence,
        )

    def systems(self) -> tuple[SystemSummary, ...]:
        """Each system of the A/B session, baseline first."""
        return tuple(summarise_system(self.rows, name) for name in self._names())

    def _names(self) -> list[str]:
        present = {row.system for row in self.rows}
        return [name for name in (BASELINE, CANDIDATE, AR) if name in present]

    def benchmarks(self) -> tuple[BenchmarkResult, ...]:
        """Candidate over baseline in each benchmark."""
        results = []
        for name, values in cells(self.ratios).items():
            own = [row for row in self.rows if row.benchmark == name]
            by_system = {s: [row for row in own if row.system == s] for s in self._names()}
            results.append(
                BenchmarkResult(
                    name=name,
                    n_requests=len(values),
                    n_identical=sum(self.same[request] for request in self.ratios[name]),
                    gain=self._estimate({name: values}),
                    rate_tok_per_s={s: mean_rate(found) for s, found in by_system.items()},
                    tau={s: pooled_tau(found) for s, found in by_system.items()},
                )
            )
        return tuple(results)

    def levels(self) -> tuple[LevelResult, ...]:
        """The comparison at each batch size alone, with that size's own A/A noise."""
        if len(self.settings.batches) == 1:
            return ()
        nu = {level.batch: level.nu_log for level in self.noise.levels}
        found = []
        for batch in self.settings.batches:
            noise = replace(self.noise, nu_log=nu.get(batch, self.noise.nu_log))
            alone = replace(self.settings, batches=(batch,))
            own = Analysis([row for row in self.rows if row.batch == batch], alone, noise)
            found.append(LevelResult(batch, own.gain, own.benchmarks(), own.systems()))
        return tuple(found)

    def over_ar(self) -> tuple[ArSpeedup, ...]:
        """Speedups over plain decoding; empty if it did not take part."""
        if AR not in self._names():
            return ()
        speedups = []
        for system in (BASELINE, CANDIDATE):
            values = cells(log_ratios(self.rows, system, AR))
            speedups.append(
                ArSpeedup(
                    system=system,
                    overall=self._estimate(values),
                    benchmarks={name: self._estimate({name: z}) for name, z in values.items()},
                )
            )
        return tuple(speedups)

    def requests(self) -> tuple[RequestGain, ...]:
        """Each request's gain, in serving order within its benchmark."""
        return tuple(
            RequestGain(request, name, math.exp(z), self.same[request])
            for name, values in self.ratios.items()
            for request, z in values.items()
        )


def noise_of(
    rows: Sequence[TimedRequest], settings: PairedBenchSettings, *, same_launch: bool
) -> Noise:
    """The A/A noise in `rows`, over all batch sizes and at each; the comparison is passed over."""
    sessions: dict[str, list[TimedRequest]] = defaultdict(list)
    for row in rows:
        if row.session != "ab":
            sessions[row.session].append(row)

    def measured(batch: int | None) -> Noise:
        return measure_noise(
            {
                name: cells(
                    log_ratios(
                        (row for row in found if batch in (None, row.batch)),
                        BASELINE_AGAIN, BASELINE,
                    )
                )
                for name, found in sessions.items()
            },
            same_launch=same_launch,
            settings=settings,
        )  # fmt: skip

    levels = tuple(LevelNoise(batch, measured(batch).nu_log) for batch in settings.batches)
    return replace(measured(None), levels=levels)


def client_cost(ends: Sequence[BenchRunEnd]) -> ClientCost:
    """The client's own times over all runs."""
    overhead = [value for end in ends for value in end.call_overhead_s]
    gaps = [value for end in ends for value in end.refill_gaps_s]
    lags = [value for end in ends for value in end.loop_lag_p99_s]
    spread = np.percentile(gaps, [50, 99]) if gaps else None
    served = sum(end.served_s for end in ends)
    return ClientCost(
        call_overhead_p50_s=float(np.median(overhead)),
        refill_gap_p50_s=None if spread is None else float(spread[0]),
        refill_gap_p99_s=None if spread is None else float(spread[1]),
        cpu_ratio=sum(end.client_cpu_s for end in ends) / served if served > 0 else 0.0,
        loop_lag_p99_s=max(lags) if lags else None,
    )


def noise_remarks(noise: Noise) -> list[str]:
    """What weakens the A/A noise."""
    said = []
    if noise.provisional:
        n = len(noise.sessions)
        said.append(
            f"the A/A noise rests on {n} session{'s' if n > 1 else ''}; three or more are needed "
            "before the threshold can be trusted"
        )
    if any(session.promoted for session in noise.sessions):
        said.append("an A/A session would have been promoted: this set-up is too noisy")
    return said


def remarks(analysis: Analysis, systems: Sequence[SystemSummary], client: ClientCost) -> list[str]:
    """What weakens the result without voiding it."""
    said = noise_remarks(analysis.noise)
    known = [(s.name, s.cached_ratio) for s in systems if s.cached_ratio is not None]
    for name, cached in known:
        if cached > _MUCH_CACHED:
            said.append(f"{name} took {cached:.0%} of its prompt tokens from the prefix cache")
    shares = [cached for _, cached in known]
    if shares and max(shares) - min(shares) > _CACHED_APART:
        said.append("the systems used their prefix caches to different degrees")
    for system in systems:
        if system.n_unstable:
            said.append(
                f"{system.name} gave other tokens in another run for {system.n_unstable} request(s)"
            )
    if client.cpu_ratio > _BUSY_CLIENT:
        said.append(
            f"the client used {client.cpu_ratio:.0%} of a processor: it may set the pace itself"
        )
    typical_s = float(np.median([row.answer.elapsed_s for row in analysis.rows]))
    gap = client.refill_gap_p50_s
    if gap is not None and gap > _SLOW_REFILL * typical_s:
        said.append(f"the client took {gap * 1000:.2f} ms to send the next request")
    return said
