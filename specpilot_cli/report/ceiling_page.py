"""The HTML page of `specpilot ceiling`."""

from __future__ import annotations

import shlex
import sys
from datetime import UTC, datetime

from specpilot_cli.ceiling.answer import CeilingAnswer
from specpilot_cli.ceiling.document import step_split
from specpilot_cli.report import adapters
from specpilot_cli.report.figures import ceiling_factors, roofline, speedup_curve, step_waterfall
from specpilot_cli.report.figures.base import ReportFigure
from specpilot_cli.report.html import (
    InputHash,
    KeyFigure,
    MethodNote,
    ReportData,
    ReportTable,
    Verdict,
    environment_rows,
    render_report,
)
from specpilot_cli.report.roofline_data import roofline_data
from specpilot_cli.schema.result import Envelope
from specpilot_cli.units import format_seconds

CEILING_METHOD = MethodNote(
    "Ceiling",
    "The ceiling is the speedup over the profiled system that a step could reach if it drafted "
    "once, verified the best tree in one exact pass and ran every kernel class at its floor. It is "
    "the product of best τ / τ, profiled time / sum of the floors, and step time / profiled time.\n"
    "\n"
    "A floor is the larger of a class's arithmetic at a share of the peak rate and its traffic at "
    "a share of the peak bandwidth; both shares and both peaks are stated with the figures. A "
    "class whose bytes and FLOPs were not counted keeps its measured time.",
)


_SPLIT_COLUMNS = ("part", "time", "of the step")


def render_ceiling_page(answer: CeilingAnswer, envelope: Envelope) -> str:
    """The page for `answer`; `envelope` gives inputs, environment and the embedded data."""
    step = answer.profile
    condition = (
        f"{step.target.name}, {step.device.name}, {step.dtype}, {step.rows} rows; "
        f"{adapters.peaks_text(answer.ceiling, step.dtype)}"
    )
    tables = [*adapters.ceiling_tables(answer.ceiling)]
    split = step_split(answer)
    if split:
        parts = tuple(adapters.split_rows(split, answer.ceiling.t_step_s))
        note = f"Step time: {answer.step_time_source}."
        tables.insert(1, ReportTable("Where the step goes", _SPLIT_COLUMNS, parts, note))
    levers = tuple(adapters.lever_rows(answer.levers))
    about = "Projections from this step's own times; nothing here was run."
    tables.append(ReportTable("What would change it", adapters.LEVER_COLUMNS, levers, about))
    if answer.what_if is not None:
        text = f"{adapters.what_if_text(answer.what_if)}."
        moved = tuple(adapters.what_if_rows(answer.what_if))
        tables.append(ReportTable("The step elsewhere", adapters.WHAT_IF_COLUMNS, moved, text))
    if answer.curve is not None:
        rows = tuple(adapters.speedup_rows(answer.speedups))
        title = adapters.speedup_title(answer)
        why = "; ".join(answer.projected_because)
        about = f"Projected: {why}. {answer.curve.source}" if why else answer.curve.source
        title = title[0].upper() + title[1:]
        tables.append(ReportTable(title, adapters.SPEEDUP_COLUMNS, rows, about))
    return render_report(
        ReportData(
            title=f"Ceiling of {step.target.name}",
            verdict=Verdict(answer.advice.headline, "none", f"Next: {answer.advice.next_step}."),
            command=shlex.join(["specpilot", *sys.argv[1:]]),
            specpilot_version=envelope.specpilot_version,
            machine=step.device.name,
            created=datetime.now(UTC),
            key_figures=_key_figures(answer),
            caveats=_caveats(answer),
            inputs=tuple(InputHash(item.path, item.sha256) for item in envelope.inputs),
            numbers=tuple(tables),
            figures=_figures(answer, condition),
            method=(CEILING_METHOD,),
            environment=environment_rows(envelope.environment),
            data=envelope.model_dump(mode="python"),
        )
    )


def _caveats(answer: CeilingAnswer) -> tuple[str, ...]:
    trace = answer.profile.trace
    return answer.advice.notes if trace is None else (*answer.advice.notes, *trace.notes)


def _figures(answer: CeilingAnswer, condition: str) -> tuple[ReportFigure, ...]:
    figures = [
        ceiling_factors.draw(adapters.factors_data(answer.ceiling, condition)),
        step_waterfall.draw(
            adapters.waterfall_data(answer.ceiling, condition, split=step_split(answer))
        ),
    ]
    roof = roofline_data(answer.profile, answer.ceiling.peaks, answer.ceiling.rule, condition)
    if roof is not None:
        figures.append(roofline.draw(roof))
    curve, now = answer.curve, answer.now
    if curve is not None and now is not None:
        panel = adapters.speedup_panel(
            answer.speedups,
            now,
            heading=curve.device.name,
            projected=bool(answer.projected_because),
        )
        about = f"τ from replay; step times: {curve.source}"
        figures.append(speedup_curve.draw(speedup_curve.SpeedupCurveData((panel,), about)))
    return tuple(figures)


def _key_figures(answer: CeilingAnswer) -> tuple[KeyFigure, ...]:
    factors, step = answer.ceiling.factors, answer.profile
    known = factors.tau is not None
    figures = [
        KeyFigure(
            "ceiling" if known else "step-cost ceiling",
            f"{factors.product:.2f}×",
            adapters.leading_text(answer.ceiling),
        ),
        KeyFigure("tokens factor", "–" if factors.tau is None else f"{factors.tau:.2f}×"),
        KeyFigure("kernel factor", f"{factors.kernel:.2f}×"),
        KeyFigure(
            "overhead factor",
            f"{factors.overhead:.2f}×",
            "below 1: no overhead seen" if factors.overhead < 1 else "",
        ),
        KeyFigure("step", format_seconds(answer.ceiling.t_step_s), f"{step.rows} rows"),
    ]
    over = answer.over_plain
    if over is not None and over.speedup is not None:
        about = f"pays from {over.c:.2f} tokens per step on"
        figures.append(KeyFigure("over plain decoding", f"{over.speedup:.2f}×", about))
    if answer.measured is not None:
        value = f"{answer.measured.factors.product:.2f}×"
        figures.append(KeyFigure("ceiling with measured peaks", value))
    return tuple(figures)
