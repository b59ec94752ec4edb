"""A paired benchmark on the terminal."""

from __future__ import annotations

from specpilot_cli.paired_bench.types import PairedBenchSummary
from specpilot_cli.report.html import ReportTable
from specpilot_cli.report.paired_bench_tables import (
    basis_rows,
    benchmark_table,
    interval_text,
    latency_table,
    over_ar_table,
    system_table,
)
from specpilot_cli.report.tables import Column, print_line, print_pairs, print_table


def print_summary(summary: PairedBenchSummary) -> None:
    """Benchmarks, systems, what the rule was applied to, then the verdict as the last lines."""
    if summary.gain is not None:
        for make in (benchmark_table, over_ar_table, system_table, latency_table):
            _print(make(summary))
        print_pairs(basis_rows(summary))
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


def _print(table: ReportTable) -> None:
    if table.rows:
        first, *others = table.columns
        heads = [Column(first), *(Column(name, "right") for name in others)]
        print_table(heads, table.rows, title=table.title)
        print_line()
