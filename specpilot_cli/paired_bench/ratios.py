"""From timed answers to log-ratios per request, and to a system's rates, latencies and tau.

A rate is end to end: output tokens over the time from submitting a request to its last byte, so
faster prefill counts. Tokens are those the server reports ids for, never chunks or re-tokenised
text.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from specpilot_cli import stats
from specpilot_cli.paired_bench.types import (
    GainEstimate,
    SystemSummary,
    TimedRequest,
)

# benchmark -> request id -> ln(rate of one system / rate of another), averaged over runs
LogRatios = dict[str, dict[str, float]]


def log_ratios(rows: Iterable[TimedRequest], numerator: str, denominator: str) -> LogRatios:
    """Mean log-ratio of each request over runs and batch sizes, by benchmark, in serving order.

    A request that was served at several batch sizes is one cluster. `rows` are the answers of one
    session. ValueError if a request lacks an answer of either system in some run: pairs with a
    hole are never averaged.
    """
    rates: dict[tuple[str, str, tuple[int, int]], float] = {}
    benchmark: dict[str, str] = {}
    times: set[tuple[int, int]] = set()
    for row in rows:
        if row.system in (numerator, denominator):
            time = (row.batch, row.run)
            rates[row.system, row.request_id, time] = row.answer.rate_tok_per_s
            benchmark.setdefault(row.request_id, row.benchmark)
            times.add(time)
    grouped: LogRatios = {}
    for request_id, name in benchmark.items():
        per_run = []
        for time in sorted(times):
            above = rates.get((numerator, request_id, time))
            below = rates.get((denominator, request_id, time))
            if above is None or below is None:
                raise ValueError(f"request {request_id!r} has no complete pair in run {time[1]}")
            per_run.append([math.log(above / below)])
        grouped.setdefault(name, {})[request_id] = float(stats.mean_over_runs(per_run)[0])
    return grouped


def cells(ratios: LogRatios) -> dict[str, list[float]]:
    """The estimator's input: per-request values of each benchmark."""
    return {name: list(values.values()) for name, values in ratios.items()}


def estimate_gain(
    ratios: Mapping[str, Sequence[float]], *, nu: float, n_sessions: int, confidence: float
) -> GainEstimate:
    """Gain over the given cells; nu (log units) from `n_sessions` sessions widens the interval."""
    estimate = stats.clustered_log_gain(ratios)
    interval = stats.two_sided_interval(
        estimate, nu=nu, n_sessions=n_sessions, confidence=confidence
    )
    return GainEstimate(
        gain_ratio=estimate.gain,
        low_ratio=interval.low,
        high_ratio=interval.high,
        lower_bound_ratio=stats.lower_bound(estimate, confidence=confidence),
        log_gain=estimate.log_gain,
        se_log=estimate.se,
        df=estimate.df,
        n_requests=estimate.n_requests,
    )


def identical_requests(rows: Iterable[TimedRequest], system: str, other: str) -> dict[str, bool]:
    """Whether all of a request's output tokens were equal, in every run and at every batch size."""
    outputs = _outputs(rows)
    requests = {request_id for (name, request_id) in outputs if name == system}
    same: dict[str, bool] = {}
    for request_id in requests:
        mine, theirs = outputs[system, request_id], outputs[other, request_id]
        same[request_id] = len({*mine.values(), *theirs.values()}) == 1
    return same


def pooled_tau(rows: Iterable[TimedRequest]) -> float | None:
    """Tokens committed per exact pass: sum of (tokens - 1) over sum of verify steps.

    The first token comes from prefill. None if some answer reports no steps (no speculation).
    """
    tokens = steps = 0
    for row in rows:
        if row.answer.verify_steps is None:
            return None
        tokens += row.answer.completion_tokens - 1
        steps += row.answer.verify_steps
    return tokens / steps if steps else None


def mean_rate(rows: Iterable[TimedRequest]) -> float:
    """Geometric mean of the end-to-end rates, tokens per second."""
    return stats.geometric_mean([row.answer.rate_tok_per_s for row in rows])


def summarise_system(rows: Iterable[TimedRequest], system: str) -> SystemSummary:
    """Rates, latencies, tau and stability of one system; `rows` are those of the A/B session.

    The rate weighs benchmarks equally, as the gain does.
    """
    own = [row for row in rows if row.system == system]
    names = dict.fromkeys(row.benchmark for row in own)
    rates = [mean_rate(row for row in own if row.benchmark == name) for name in names]
    answers = [row.answer for row in own]
    ttft = np.percentile([a.time_to_first_token_s for a in answers], [50, 90, 99])
    gaps = [
        (a.last_byte_s - a.first_byte_s) / (a.completion_tokens - 1)
        for a in answers
        if a.completion_tokens > 1 and a.last_byte_s > a.first_byte_s
    ]
    itl = np.percentile(gaps, [50, 90, 99]) if gaps else None
    cached = [a.cached_tokens for a in answers if a.cached_tokens is not None]
    steps = [a.verify_steps for a in answers if a.verify_steps is not None]
    outputs = _outputs(own)
    return SystemSummary(
        name=system,
        rate_tok_per_s=stats.geometric_mean(rates),
        decode_rate_tok_per_s=stats.geometric_mean([1 / g for g in gaps]) if gaps else None,
        ttft_p50_s=float(ttft[0]),
        ttft_p90_s=float(ttft[1]),
        ttft_p99_s=float(ttft[2]),
        inter_token_p50_s=None if itl is None else float(itl[0]),
        inter_token_p90_s=None if itl is None else float(itl[1]),
        inter_token_p99_s=None if itl is None else float(itl[2]),
        tau=pooled_tau(own),
        completion_tokens=sum(a.completion_tokens for a in answers),
        verify_steps=sum(steps) if len(steps) == len(answers) else None,
        cached_ratio=(
            sum(cached) / sum(a.prompt_tokens for a in answers)
            if len(cached) == len(answers)
            else None
        ),
        n_unstable=sum(len(set(by_time.values())) > 1 for by_time in outputs.values()),
    )


def _outputs(
    rows: Iterable[TimedRequest],
) -> dict[tuple[str, str], dict[tuple[int, int], str]]:
    """(system, request id) -> (batch, run) -> hash of the output ids."""
    found: dict[tuple[str, str], dict[tuple[int, int], str]] = defaultdict(dict)
    for row in rows:
        found[row.system, row.request_id][row.batch, row.run] = row.output_digest
    return found
