"""A paired benchmark on the terminal."""

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
from specpilot_cli.report.tables import Column, print_line, print_pairs, print_table
from specpilot_cli.units import format_seconds

_NONE = "–"


def print_summary(summary: PairedBenchSummary) -> None:
    """Benchmarks, systems, what the rule was applied to, then the verdict as the last lines."""
    if summary.gain is not None:
        _print_benchmarks(summary, summary.gain)
        print_line()
        if summary.over_ar:
            _print_over_ar(summary)
            print_line()
        _print_systems(summary.systems)
        print_line()
        print_pairs(_basis(summary))
        print_line()
    if summary.paced:
        print_line(f"paced: {', '.join(summary.paced)} ran at recorded step times, not real ones")
    print_line(verdict_line(summary))
    for reason in summary.reasons:
        print_line(f"  {reason}")


def verdict_line(summary: PairedBenchSummary) -> str:
    """The verdict and the gain in one line."""
    if summary.gain is None:
        return f"verdict: {summary.verdict}"
    gain = summary.gain
    return (
        f"verdict: {summary.verdict} · candidate is {gain.gain_ratio:.4f}× the baseline, "
        f"{summary.settings.confidence:.0%} interval {interval_text(gain)}"
    )


def interval_text(gain: GainEstimate) -> str:
    """`[1.0312, 1.0450]`: two-sided, A/A noise included."""
    return f"[{gain.low_ratio:.4f}, {gain.high_ratio:.4f}]"


def _print_benchmarks(summary: PairedBenchSummary, overall: GainEstimate) -> None:
    systems = {system.name: system for system in summary.systems}

    def row(
        name: str, gain: GainEstimate, same: int, rates: dict[str, float],
        tau: dict[str, float | None],
    ) -> tuple[str, ...]:  # fmt: skip
        return (
            name,
            f"{gain.n_requests}",
            f"{same}",
            *(f"{rates[system]:.1f}" for system in (BASELINE, CANDIDATE)),
            *(_number(tau[system], 2) for system in (BASELINE, CANDIDATE)),
            f"{gain.gain_ratio:.4f}",
            interval_text(gain),
        )

    rows = [row(b.name, b.gain, b.n_identical, b.rate_tok_per_s, b.tau) for b in summary.benchmarks]
    rows.append(
        row(
            "all, equal weights",
            overall,
            sum(b.n_identical for b in summary.benchmarks),
            {name: system.rate_tok_per_s for name, system in systems.items()},
            {name: system.tau for name, system in systems.items()},
        )
    )
    print_table(
        [
            "benchmark",
            Column("requests", "right"),
            Column("same tokens", "right"),
            Column("baseline tok/s", "right"),
            Column("candidate tok/s", "right"),
            Column("baseline τ", "right"),
            Column("candidate τ", "right"),
            Column("gain ×", "right"),
            Column(f"{summary.settings.confidence:.0%} interval", "right"),
        ],
        rows,
        title="Candidate over baseline, output rate per request",
    )


def _print_over_ar(summary: PairedBenchSummary) -> None:
    rows = []
    names = [benchmark.name for benchmark in summary.benchmarks]
    for speedup in summary.over_ar:
        gains = [speedup.benchmarks[name] for name in names] + [speedup.overall]
        rows.append(
            (
                speedup.system,
                *(f"{gain.gain_ratio:.3f}" for gain in gains),
                interval_text(speedup.overall),
            )
        )
    print_table(
        [
            "system",
            *(Column(name, "right") for name in names),
            Column("all ×", "right"),
            Column("interval of all", "right"),
        ],
        rows,
        title=f"Speedup over plain decoding (`{AR}`, served in the same runs)",
    )


def _print_systems(systems: tuple[SystemSummary, ...]) -> None:
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
            _NONE if s.cached_ratio is None else f"{s.cached_ratio:.1%}",
        )

    print_table(
        [
            "system",
            Column("tok/s", "right"),
            Column("decode tok/s", "right"),
            Column("first token ms, p50 / p90 / p99", "right"),
            Column("ms per token, p50 / p90 / p99", "right"),
            Column("τ", "right"),
            Column("tokens", "right"),
            Column("from cache", "right"),
        ],
        [row(system) for system in systems],
        title="Systems in the comparison",
    )


def _basis(summary: PairedBenchSummary) -> list[tuple[str, object]]:
    pairs: list[tuple[str, object]] = []
    if summary.noise is not None:
        pairs.append(("A/A noise", noise_text(summary.noise)))
        pairs.append(("request noise in A/A", f"{summary.noise.sigma_log:.2%} per request"))
    if summary.client is not None:
        client = summary.client
        gap = client.refill_gap_p50_s
        pairs.append(
            (
                "client",
                f"{format_seconds(max(client.call_overhead_p50_s, 0.0))} per block outside the "
                f"timed part, {client.cpu_ratio:.0%} of a processor"
                + ("" if gap is None else f", {format_seconds(gap)} to send the next request"),
            )
        )
    settings = summary.settings
    pairs.append(
        ("method", f"{settings.runs} runs in swapped order, {settings.batch} in flight, "
         f"measured in {format_seconds(summary.wall_s)}")
    )  # fmt: skip
    return pairs


def noise_text(noise: Noise) -> str:
    """The noise, its sessions, and what it leaves out."""
    each = ", ".join(f"{session.gain_ratio:.4f}" for session in noise.sessions)
    text = f"{noise.nu_log:.2%} (root mean square of {len(noise.sessions)}: {each})"
    if noise.provisional:
        text += "; provisional, fewer than 3 sessions"
    if noise.same_launch:
        text += "; one launch of the baseline, so launch noise is not in it"
    return text


def _number(value: float | None, digits: int) -> str:
    return _NONE if value is None else f"{value:.{digits}f}"
