"""The HTML page of `specpilot diagnose`."""

from __future__ import annotations

import shlex
import sys
from datetime import UTC, datetime

from specpilot_cli.diagnose.run import TREE_NODES, Diagnosis
from specpilot_cli.report.diagnose_text import (
    CHECK_COLUMNS,
    POSITION_COLUMNS,
    check_rows,
    headline,
    position_rows,
    tau_line,
)
from specpilot_cli.report.figures import acceptance_by_position
from specpilot_cli.report.figures.acceptance_by_position import PositionData, PositionMark
from specpilot_cli.report.figures.base import sentence
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
from specpilot_cli.schema.result import Envelope

_METHOD = MethodNote(
    "Findings",
    "Every check compares rates over the recorded steps, with requests as clusters. A finding "
    "needs the one-sided 99.9 % bound of its effect beyond a limit that healthy pairs keep away "
    "from; a check that the recording does not allow says so and counts for nothing.",
)

_VERDICT: dict[str, tuple[Outcome, str]] = {
    "ok": ("yes", "nothing wrong found"),
    "fail": ("no", "something is wrong"),
    "invalid": ("invalid", "too few requests"),
}


def render_diagnose_page(found: Diagnosis, envelope: Envelope, recording: str) -> str:
    """The page for `found`; `recording` names the file, `envelope` gives inputs and data."""
    findings = tuple(
        (item.kind, item.title, item.detail, "; ".join(item.next_steps)) for item in found.found
    )
    tables = [
        ReportTable("Findings", ("kind", "finding", "evidence", "next"), findings)
    ] if findings else []  # fmt: skip
    tables += [
        ReportTable("By drafted position", POSITION_COLUMNS, tuple(position_rows(found))),
        ReportTable("Checks", CHECK_COLUMNS, tuple(check_rows(found))),
    ]
    outcome, word = _VERDICT[found.verdict]
    return render_report(
        ReportData(
            title=f"Diagnosis of {recording}",
            verdict=Verdict(word, outcome, f"{sentence(headline(found))}.", (tau_line(found),)),
            command=shlex.join(["specpilot", *sys.argv[1:]]),
            specpilot_version=envelope.specpilot_version,
            machine=str(envelope.environment["cpu"]),
            created=datetime.now(UTC),
            key_figures=_key_figures(found),
            caveats=(),
            inputs=tuple(InputHash(item.path, item.sha256) for item in envelope.inputs),
            numbers=tuple(tables),
            figures=(acceptance_by_position.draw(_figure(found)),) if found.rows else (),
            method=(_METHOD,),
            environment=environment_rows(envelope.environment),
            data=envelope.model_dump(mode="python"),
        )
    )


def _key_figures(found: Diagnosis) -> tuple[KeyFigure, ...]:
    return (
        KeyFigure("τ of the chain", f"{found.chain.value:.2f}", f"{found.mode} replay"),
        KeyFigure(f"τ of a tree of {TREE_NODES}", f"{found.tree.value:.2f}"),
        KeyFigure("τ of all candidates", f"{found.oracle.value:.2f}"),
        KeyFigure("findings", str(sum(item.counts for item in found.outcomes))),
        KeyFigure("requests", str(found.n_requests), f"{found.n_anchors} steps"),
    )


def _figure(found: Diagnosis) -> PositionData:
    marks = tuple(
        PositionMark(row.position, row.anchors, row.accepted, row.in_lattice, row.own)
        for row in found.rows
    )
    lost = max(found.rows, key=lambda row: row.in_lattice - row.accepted)
    finding = (
        f"position {lost.position} loses most to the choice: "
        f"{100 * (lost.in_lattice - lost.accepted):.0f} % of its steps offer the true token and "
        "do not draft it"
    )
    return PositionData(marks, finding, f"{found.n_requests} requests, {found.n_anchors} steps")
