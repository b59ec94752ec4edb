"""Saved paired benchmarks beside each other, and how far their gains are apart."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from specpilot_cli.paired_bench.ratios import estimate_gain
from specpilot_cli.paired_bench.types import GainEstimate, PairedBenchSummary
from specpilot_cli.report.html import ReportTable
from specpilot_cli.report.paired_bench_tables import interval_text, levels_text
from specpilot_cli.units import format_percent

_NONE = "–"


@dataclass(frozen=True, slots=True)
class Saved:
    """A saved result and where it lies."""

    path: Path
    summary: PairedBenchSummary


def difference(first: PairedBenchSummary, other: PairedBenchSummary) -> GainEstimate | None:
    """Gain of `other` over that of `first`, paired by request; None where they do not pair.

    They pair if both served the very same prompts at the same batch sizes. Both noises count.
    """
    if first.gain is None or other.gain is None or first.noise is None or other.noise is None:
        return None
    same = first.prompts_sha256 == other.prompts_sha256
    if not same or first.settings.batches != other.settings.batches:
        return None
    mine = {request.request_id: request.gain_ratio for request in first.requests}
    cells: dict[str, list[float]] = {}
    for request in other.requests:
        if request.request_id not in mine:
            return None
        apart = math.log(request.gain_ratio / mine[request.request_id])
        cells.setdefault(request.benchmark, []).append(apart)
    return estimate_gain(
        cells,
        nu=math.hypot(first.noise.nu_log, other.noise.nu_log),
        n_sessions=min(len(first.noise.sessions), len(other.noise.sessions)),
        confidence=first.settings.confidence,
    )


def compare_table(saved: Sequence[Saved]) -> ReportTable:
    """One row per result; the last column holds its gain over the first one's."""
    first = saved[0].summary
    rows = []
    for one in saved:
        summary = one.summary
        gain, noise = summary.gain, summary.noise
        apart = None if one is saved[0] else difference(first, summary)
        rows.append(
            (
                one.path.name,
                summary.verdict,
                _NONE if gain is None else f"{gain.gain_ratio:.4f}",
                _NONE if gain is None else interval_text(gain),
                _NONE if noise is None else format_percent(noise.nu_log, digits=2),
                levels_text(summary.settings.batches),
                _NONE if apart is None else f"{apart.gain_ratio:.4f} {interval_text(apart)}",
            )
        )
    return ReportTable(
        title="Saved results",
        columns=("result", "verdict", "gain ×", "interval", "A/A noise", "in flight",
                 "over the first"),
        rows=tuple(rows),
        note="Over the first: gain divided by the first result's, paired by request; only where "
        "both served the same prompts at the same batch sizes.",
    )  # fmt: skip
