"""A paired benchmark as tables of text and as the data of its figures.

Used by the terminal and by HTML pages, so that both show the same numbers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from specpilot_cli.paired_bench.types import (
    AR,
    BASELINE,
    CANDIDATE,
    GainEstimate,
    Noise,
    PairedBenchSummary,
    SystemSummary,
)
from specpilot_cli.report.figures.base import sentence
from specpilot_cli.report.figures.forest import ForestData, GainRow
from specpilot_cli.report.html import ReportTable
from specpilot_cli.stats import geometric_mean
from specpilot_cli.units import format_percent, format_seconds

_NONE = "–"
_ALL = "all, equal weights"


@dataclass(frozen=True, slots=True)
class SystemNames:
    """What a reader calls the systems; by default their roles in the benchmark."""

    baseline: str = BASELINE
    candidate: str = CANDIDATE
    ar: str = AR

    def of(self, system: str) -> str:
        """The name of `system`, a role such as `candidate`."""
        return {BASELINE: self.baseline, CANDIDATE: self.candidate, AR: self.ar}.get(system, system)

    def in_words(self, text: str) -> str:
        """A sentence about the roles, about these systems."""
        if self == ROLES:
            return text
        for role in (BASELINE, CANDIDATE):
            text = re.sub(rf"\b(the )?{role}\b", self.of(role), text)
        return text


ROLES = SystemNames()


def interval_text(gain: GainEstimate, *, digits: int = 4) -> str:
    """`[1.0312, 1.0450]`: two-sided, A/A noise included."""
    return f"[{gain.low_ratio:.{digits}f}, {gain.high_ratio:.{digits}f}]"


def interval_method(summary: PairedBenchSummary) -> str:
    """How the intervals were made, in one phrase."""
    return (
        f"t interval on log-ratios, {summary.settings.runs} runs in swapped order, one cluster per "
        "request, A/A noise added"
    )


def benchmark_table(summary: PairedBenchSummary, *, names: SystemNames = ROLES) -> ReportTable:
    """Candidate over baseline per benchmark, then all with equal weights."""
    title = f"{sentence(names.candidate)} over {names.baseline}, output rate per request"
    if summary.gain is None:
        return ReportTable(title, ("benchmark",), ())
    pair = (BASELINE, CANDIDATE)
    tau = {system.name: system.tau for system in summary.systems}
    rates = {s: geometric_mean([b.rate_tok_per_s[s] for b in summary.benchmarks]) for s in pair}
    same = sum(b.n_identical for b in summary.benchmarks)
    lines = [(b.name, b.gain, b.n_identical, b.rate_tok_per_s, b.tau) for b in summary.benchmarks]
    lines.append((_ALL, summary.gain, same, rates, tau))
    both = f"{names.baseline} → {names.candidate}"
    confidence = format_percent(summary.settings.confidence, digits=0)
    return ReportTable(
        title=title,
        columns=("benchmark", "gain ×", f"{confidence} interval",
                 "requests", "same tokens", f"τ, {both}", f"tok/s, {both}"),
        rows=tuple(
            (
                name, f"{gain.gain_ratio:.4f}", interval_text(gain), f"{gain.n_requests}",
                f"{n_same}", " → ".join(_number(steps[s], 2) for s in pair),
                " → ".join(f"{rate[s]:.1f}" for s in pair),
            )
            for name, gain, n_same, rate, steps in lines
        ),
        note=f"Gain and interval: {interval_method(summary)}. Same tokens: requests that both "
        "systems answered token by token alike.",
        sum_row=True,
    )  # fmt: skip


def level_tables(
    summary: PairedBenchSummary, *, names: SystemNames = ROLES
) -> tuple[ReportTable, ...]:
    """The benchmark table of each batch size; empty if there was only one."""
    tables = []
    for level in summary.levels:
        alone = replace(
            summary, gain=level.gain, benchmarks=level.benchmarks, systems=level.systems
        )
        table = benchmark_table(alone, names=names)
        tables.append(replace(table, title=f"{level.batch} in flight: {table.title}", note=""))
    return tuple(tables)


def over_ar_table(summary: PairedBenchSummary, *, names: SystemNames = ROLES) -> ReportTable:
    """Speedups over plain decoding, a row per benchmark; no rows if it did not take part."""
    rows: list[tuple[str, ...]] = []
    if summary.over_ar:
        for benchmark in summary.benchmarks:
            gains = [speedup.benchmarks[benchmark.name] for speedup in summary.over_ar]
            rows.append((benchmark.name, *_gain_cells(gains)))
        rows.append((_ALL, *_gain_cells([speedup.overall for speedup in summary.over_ar])))
    heads = (
        text
        for speedup in summary.over_ar
        for text in (f"{names.of(speedup.system)} ×", f"interval of {names.of(speedup.system)}")
    )
    plain = f"`{AR}`, " if names.ar == AR else ""
    return ReportTable(
        title=f"Speedup over plain decoding ({plain}served in the same runs)",
        columns=("benchmark", *heads),
        rows=tuple(rows),
        sum_row=True,
    )


def _gain_cells(gains: Sequence[GainEstimate]) -> Iterator[str]:
    for gain in gains:
        yield f"{gain.gain_ratio:.3f}"
        yield interval_text(gain, digits=3)


def system_table(summary: PairedBenchSummary, *, names: SystemNames = ROLES) -> ReportTable:
    """Rates, τ and tokens of each system."""
    return ReportTable(
        title="Systems in the comparison",
        columns=("system", "tok/s", "decode tok/s", "τ", "tokens", "prompt from cache"),
        rows=tuple(
            (
                names.of(s.name),
                f"{s.rate_tok_per_s:.1f}",
                _number(s.decode_rate_tok_per_s, 1),
                _number(s.tau, 3),
                f"{s.completion_tokens}",
                _NONE if s.cached_ratio is None else format_percent(s.cached_ratio),
            )
            for s in summary.systems
        ),
    )


def latency_table(summary: PairedBenchSummary, *, names: SystemNames = ROLES) -> ReportTable:
    """Percentiles of the time to the first token and of the time per token after it."""

    def row(s: SystemSummary) -> tuple[str, ...]:
        first = (s.ttft_p50_s, s.ttft_p90_s, s.ttft_p99_s)
        later = (s.inter_token_p50_s, s.inter_token_p90_s, s.inter_token_p99_s)
        return (
            names.of(s.name),
            *(f"{1000 * value:.1f}" for value in first),
            *(_NONE if value is None else f"{1000 * value:.2f}" for value in later),
        )

    return ReportTable(
        title="Latency in milliseconds",
        columns=("system", "first token p50", "p90", "p99", "per token p50", "p90", "p99"),
        rows=tuple(row(system) for system in summary.systems),
    )


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
        if client.loop_lag_p99_s is not None:
            text += f", event loop at most {format_seconds(client.loop_lag_p99_s)} late (p99)"
        pairs.append(("client", text))
    settings = summary.settings
    pairs.append(
        (
            "method",
            f"{settings.runs} runs in swapped order, {levels_text(settings.batches)} in flight, "
            f"measured in "
            f"{format_seconds(summary.wall_s)}",
        )
    )
    return pairs


def levels_text(batches: Sequence[int]) -> str:
    """`1`, or `1, 8 and 32`."""
    *first, last = map(str, batches)
    return f"{', '.join(first)} and {last}" if first else last


def noise_text(noise: Noise, *, names: SystemNames = ROLES) -> str:
    """The noise, its sessions, and what it leaves out."""
    each = ", ".join(f"{session.gain_ratio:.4f}" for session in noise.sessions)
    nu = format_percent(noise.nu_log, digits=2)
    what = (
        f"{names.baseline} against itself"
        if len(noise.sessions) == 1
        else f"root mean square of {len(noise.sessions)}"
    )
    text = f"{nu} ({what}: {each})"
    if noise.provisional:
        text += "; provisional, fewer than 3 sessions"
    if noise.same_launch:
        text += f"; one launch of {names.baseline} on both sides, so launch noise is not in it"
    return text


def forest_data(
    summary: PairedBenchSummary, *, condition: str, names: SystemNames = ROLES, remark: str = ""
) -> ForestData:
    """The forest plot's data; `remark` qualifies its title.

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
        system=names.candidate,
        baseline=names.baseline,
        interval_method=interval_method(summary),
        condition=condition,
        lower_bound=summary.decision.lower_bound_ratio,
        remark=remark,
    )


def _number(value: float | None, digits: int) -> str:
    return _NONE if value is None else f"{value:.{digits}f}"
