"""The HTML page of `specpilot paired-bench`."""

from __future__ import annotations

import shlex
import sys
from datetime import datetime

from specpilot_cli.paired_bench.types import PairedBenchSummary
from specpilot_cli.report.figures import forest
from specpilot_cli.report.figures.base import ReportFigure
from specpilot_cli.report.html import (
    InputHash,
    KeyFigure,
    MethodNote,
    Outcome,
    ReportData,
    ReportTable,
    Verdict,
    environment_rows,
    render_report,
)
from specpilot_cli.report.paired_bench_tables import (
    basis_rows,
    benchmark_table,
    forest_data,
    interval_text,
    latency_table,
    level_tables,
    levels_text,
    over_ar_table,
    system_table,
)
from specpilot_cli.schema.result import Envelope
from specpilot_cli.units import format_percent

_OUTCOME: dict[str, Outcome] = {"promote": "yes", "no": "no", "invalid": "invalid", "ok": "none"}
_METHOD = MethodNote(
    "Paired timing",
    "Both systems serve the same requests in the same order. A request's rate is its output tokens "
    "over the time from its submission to its last byte, on the client's clock; nothing is "
    "retried, and one failed request voids the measurement.\n"
    "\n"
    "The gain is the geometric mean of the rate ratios, first within a benchmark, then over "
    "benchmarks with equal weights. Its standard error comes from the spread between requests, "
    "runs of one request averaged first. Noise that all requests of a session share is measured by "
    "timing the baseline against itself; it widens the interval, and twice of it is added to the "
    "bound that the one-sided lower bound has to exceed.",
)


def render_bench_page(summary: PairedBenchSummary, envelope: Envelope) -> str:
    """The page of one result."""
    tables = [benchmark_table(summary), *level_tables(summary), over_ar_table(summary)]
    tables += [system_table(summary), latency_table(summary)]
    basis = ReportTable("What it rests on", ("what", "value"), tuple(basis_rows(summary)))
    return render_report(
        ReportData(
            title="Paired benchmark",
            verdict=Verdict(
                summary.verdict, _OUTCOME[summary.verdict], _sentence(summary), summary.reasons
            ),
            command=shlex.join(["specpilot", *sys.argv[1:]]),
            specpilot_version=envelope.specpilot_version,
            machine=_machine(summary, envelope),
            created=datetime.fromisoformat(summary.started_utc),
            alerts=_alerts(summary),
            key_figures=_key_figures(summary),
            caveats=summary.warnings,
            inputs=tuple(InputHash(item.path, item.sha256) for item in envelope.inputs),
            numbers=(*(table for table in tables if table.rows), basis),
            figures=_figures(summary),
            method=(_METHOD,),
            environment=environment_rows(envelope.environment),
            data=envelope.model_dump(mode="python"),
        )
    )


def _figures(summary: PairedBenchSummary) -> tuple[ReportFigure, ...]:
    if summary.gain is None:
        return ()
    condition = f"{levels_text(summary.settings.batches)} in flight"
    return (forest.draw(forest_data(summary, condition=condition)),)


def _sentence(summary: PairedBenchSummary) -> str:
    gain = summary.gain
    if gain is not None:
        return (
            f"The candidate is {gain.gain_ratio:.4f}× as fast as the baseline, "
            f"{format_percent(summary.settings.confidence, digits=0)} interval "
            f"{interval_text(gain)}."
        )
    if summary.verdict == "ok":
        return "The baseline was timed against itself."
    return "The measurement carries no verdict."


def _alerts(summary: PairedBenchSummary) -> tuple[str, ...]:
    if not summary.paced:
        return ()
    return (f"Paced: {', '.join(summary.paced)} ran at set step times, not real ones.",)


def _key_figures(summary: PairedBenchSummary) -> tuple[KeyFigure, ...]:
    found = []
    if summary.gain is not None:
        note = f"interval {interval_text(summary.gain)}"
        found.append(KeyFigure("gain", f"{summary.gain.gain_ratio:.4f}×", note))
    if summary.decision is not None:
        note = f"bound {summary.decision.bound_ratio:.4f}×"
        lower = f"{summary.decision.lower_bound_ratio:.4f}×"
        found.append(KeyFigure("lower bound", lower, note))
    if summary.noise is not None:
        note = f"{len(summary.noise.sessions)} sessions"
        found.append(KeyFigure("A/A noise", format_percent(summary.noise.nu_log, digits=2), note))
    return tuple(found)


def _machine(summary: PairedBenchSummary, envelope: Envelope) -> str:
    gpus = summary.environment.get("gpus") or []
    names = sorted({str(gpu.get("name")) for gpu in gpus})
    return ", ".join(names) or str(envelope.environment.get("cpu"))
