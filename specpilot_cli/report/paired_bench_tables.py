"""A paired benchmark as tables of text and as the data of its figures.

Used by the terminal and by HTML pages, so that both show the same numbers.
"""

from __future__ import annotations

from specpilot_cli.paired_bench.types import (
    AR,
    BASELINE,
    CANDIDATE,
    GainEstimate,
    Noise,
    PairedBenchSummary,
    SystemSummary,
)
from specpilot_cli.report.figures.forest import ForestData, GainRow
from specpilot_cli.report.html import ReportTable
from specpilot_cli.stats import geometric_mean
from specpilot_cli.units import format_percent, format_seconds

_NONE = "–"
_ALL = "all, equal weights"


def interval_text(gain: GainEstimate) -> str:
    """`[1.0312, 1.0450]`: two-sided, A/A noise included."""
    return f"[{gain.low_ratio:.4f}, {gain.high_ratio:.4f}]"


def interval_method(summary: PairedBenchSummary) -> str:
    """How the intervals were made, in one phrase."""
    return (
        f"t interval on log-ratios, {summary.settings.runs} runs in swapped order, one cluster per "
        "request, A/A noise added"
    )


def benchmark_table(summary: PairedBenchSummary) -> ReportTable:
    """Candidate over baseline per benchmark, then all with equal weights."""
    if summary.gain is None:
        return ReportTable("Candidate over baseline", ("benchmark",), ())
    pair = (BASELINE, CANDIDATE)
    tau = {system.name: system.tau for system in summary.systems}
    rates = {s: geometric_mean([b.rate_tok_per_s[s] for b in summary.benchmarks]) for s in pair}
    same = sum(b.n_identical for b in summary.benchmarks)
    lines = [(b.name, b.gain, b.n_identical, b.rate_tok_per_s, b.tau) for b in summary.benchmarks]
    lines.append((_ALL, summary.gain, same, rates, tau))
    return ReportTable(
        title="Candidate over baseline, output rate per request",
        columns=("benchmark", "requests", "same tokens", "baseline tok/s", "candidate tok/s",
                 "baseline τ", "candidate τ", "gain ×",
                 f"{summary.settings.confidence:.0%} interval"),
        rows=tuple(
            (
                name, f"{gain.n_requests}", f"{n_same}",
                *(f"{rate[s]:.1f}" for s in pair),
                *(_number(steps[s], 2) for s in pair),
                f"{gain.gain_ratio:.4f}", interval_text(gain),
            )
            for name, gain, n_same, rate, steps in lines
        ),
        note=interval_method(summary),
    )  # fmt: skip


def over_ar_table(summary: PairedBenchSummary) -> ReportTable:
    """Speedups over plain decoding; no rows if it did not take part."""
    names = [benchmark.name for benchmark in summary.benchmarks]
    rows = []
    for speedup in summary.over_ar:
        gains = [speedup.benchmarks[name] for name in names] + [speedup.overall]
        rows.append(
            (
                speedup.system,
                *(f"{gain.gain_ratio:.3f}" for gain in gains),
                interval_text(speedup.overall),
            )
        )
    return ReportTable(
        title=f"Speedup over plain decoding (`{AR}`, served in the same runs)",
        columns=("system", *names, "all ×", "interval of all"),
        rows=tuple(rows),
    )


def system_table(summary: PairedBenchSummary) -> ReportTable:
    """Rates, latencies and τ of each system."""

    def row(s: SystemSummary) -> tuple[str, ...]:
        ttft = (s.ttft_p50_s, s.ttft_p90_s, s.ttft_p99_s)
        gaps = (s.inter_token_p50_s, s.inter_token_p90_s, s.inter_token_p99_s)
        return (
            s.name,
            f"{s.rate_tok_per_s:.1f}",
            _number(s.decode_rate_tok_per_s, 1),
            " / ".join(f"{1000 * value:.1f}" for value in ttft),
            " / ".join(_NONE if value is None else f"{1000 * value:.2f}" for value in gaps),
            _number(s.tau, 3),
            f"{s.completion_tokens}",
            _NONE if s.cached_ratio is None else format_percent(s.cached_ratio),
        )

    return ReportTable(
        title="Systems in the comparison",
        columns=("system", "tok/s", "decode tok/s", "first token ms, p50 / p90 / p99",
                 "ms per token, p50 / p90 / p99", "τ", "tokens", "from cache"),
        rows=tuple(row(system) for system in summary.systems),
    )  # fmt: skip


def basis_rows(summary: PairedBenchSummary) -> list[tuple[str, str]]:
    """What the verdict rests on: noise, client cost, method."""
    pairs = []
    if summary.noise is not None:
        pairs.append(("A/A noise", noise_text(summary.noise)))
        sigma = format_percent(summary.noise.sigma_log, digits=2)
        pairs.append(("request noise in A/A", f"{sigma} per request"))
    if summary.client is not None:
        client = summary.client
        gap = client.refill_gap_p50_s
        text = (
            f"{format_seconds(max(client.call_overhead_p50_s, 0.0))} per block outside the timed "
            f"part, {format_percent(client.cpu_ratio)} of a processor"
        )
        if gap is not None:
            text += f", {format_seconds(max(gap, 0.0))} to send the next request"
        pairs.append(("client", text))
    settings = summary.settings
    pairs.append(
        (
            "method",
            f"{settings.runs} runs in swapped order, {settings.batch} in flight, measured in "
            f"{format_seconds(summary.wall_s)}",
        )
    )
    return pairs


def noise_text(noise: Noise) -> str:
    """The noise, its sessions, and what it leaves out."""
    each = ", ".join(f"{session.gain_ratio:.4f}" for session in noise.sessions)
    nu = format_percent(noise.nu_log, digits=2)
    text = f"{nu} (root mean square of {len(noise.sessions)}: {each})"
    if noise.provisional:
        text += "; provisional, fewer than 3 sessions"
    if noise.same_launch:
        text += "; one launch of the baseline, so launch noise is not in it"
    return text


def forest_data(
    summary: PairedBenchSummary, *, condition: str, system: str = CANDIDATE,
    baseline: str = BASELINE,
) -> ForestData:  # fmt: skip
    """The forest plot's data; `system` and `baseline` are the names shown on it.

    ValueError if the benchmark carries no verdict.
    """
    if summary.gain is None or summary.decision is None:
        raise ValueError("an invalid benchmark has no gains to draw")

    def row(label: str, gain: GainEstimate) -> GainRow:
        return GainRow(label, gain.gain_ratio, gain.low_ratio, gain.high_ratio, gain.n_requests)

    return ForestData(
        rows=tuple(row(b.name, b.gain) for b in summary.benchmarks),
        overall=row(_ALL, summary.gain),
        bound=summary.decision.bound_ratio,
        system=system,
        baseline=baseline,
        interval_method=interval_method(summary),
        condition=condition,
        lower_bound=summary.decision.lower_bound_ratio,
    )


def _number(value: float | None, digits: int) -> str:
    return _NONE if value is None else f"{value:.{digits}f}"
