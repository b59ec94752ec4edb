"""A paired benchmark on the terminal."""

from __future__ import annotations

from specpilot_cli.paired_bench.types import PairedBenchSummary
from specpilot_cli.report.html import ReportTable
from specpilot_cli.report.paired_bench_tables import (
    basis_rows,
    benchmark_table,
    interval_text,
    latency_table,
    level_tables,
    over_ar_table,
    system_table,
)
from specpilot_cli.report.tables import Column, print_line, print_pairs, print_table
from specpilot_cli.schema.bench_launch import SweepResult


def print_summary(summary: PairedBenchSummary) -> None:
    """Benchmarks, systems, what the rule was applied to, then the verdict as the last lines."""
    if summary.gain is not None:
        _print(benchmark_table(summary))
        for table in level_tables(summary):
            _print(table)
        for make in (over_ar_table, system_table, latency_table):
            _print(make(summary))
    if summary.noise is not None:
        print_pairs(basis_rows(summary))
        print_line()
    if summary.paced:
        print_line(f"paced: {', '.join(summary.paced)} ran at set step times, not real ones")
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


def print_tables(*tables: ReportTable) -> None:
    """Tables one after the other, those without rows left out."""
    for table in tables:
        _print(table)


def sweep_table(sweep: SweepResult) -> ReportTable:
    """Variants of stock, fastest first."""
    best = sweep.fastest.rate_tok_per_s
    rows = []
    for variant in sweep.variants:
        rate = variant.rate_tok_per_s
        each = " | ".join(f"{value:.1f}" for value in variant.pass_rates_tok_per_s)
        rows.append(
            (
                variant.name,
                "–" if rate is None else f"{rate:.1f}",
                "–" if rate is None or best is None else f"{rate / best:.3f}",
                each or "–",
                "–" if variant.tau is None else f"{variant.tau:.2f}",
                variant.failure or "",
            )
        )
    return ReportTable(
        title=f"Stock, {sweep.n_requests} requests, {sweep.batch} in flight",
        columns=("variant", "tok/s", "of the fastest", "each pass", "τ", "failure"),
        rows=tuple(rows),
    )


def _print(table: ReportTable) -> None:
    if table.rows:
        first, *others = table.columns
        heads = [Column(first), *(Column(name, "right") for name in others)]
        print_table(heads, table.rows, title=table.title)
        print_line()
