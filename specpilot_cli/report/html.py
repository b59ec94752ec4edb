"""One self-contained HTML page: opens offline, needs no script, follows light and dark themes.

`render_report` fills `templates/report.html.j2`. The page holds everything: style, drawings, the
tables of their numbers, and the result as JSON. It refers to nothing outside itself.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Literal

from specpilot_cli.report.figures.base import Basis, ReportFigure
from specpilot_cli.report.json_out import plain

if TYPE_CHECKING:
    from markupsafe import Markup

Outcome = Literal["yes", "no", "invalid", "none"]
_ONE = r"(–|[-+−]?\d[\d.,  ]*(e[-+]?\d+)?( ?(%|×|s|ms|µs|ns|nats|points|[kMGT]?B(/s)?))?)"
# One number, or several that belong together: an interval, before and after, a range.
_NUMBER = re.compile(rf"^\[?{_ONE}(( → |, | – ){_ONE})*\]?$")
_NO_VALUE = ("", "–")
# A text longer than this may wrap; shorter ones keep their row one line high.
_LONG_CHARS = 36
# More columns than these, and a phone or a narrow window has to scroll sideways.
_MIDDLE_COLUMNS, _WIDE_COLUMNS = 4, 6

ColumnKind = Literal["num", "text", "long"]


@dataclass(frozen=True, slots=True)
class Verdict:
    """The answer: one word, its kind (which picks the mark and colour), one sentence, and why."""

    word: str
    outcome: Outcome
    sentence: str
    reasons: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class KeyFigure:
    """One number of the head: what it is, its text with unit, and a note of short lines."""

    label: str
    value: str
    note: str = ""
    basis: Basis = "measured"


@dataclass(frozen=True, slots=True)
class ReportTable:
    """A titled table of text cells; columns of numbers are aligned right by themselves.

    Backticks mark code. `sum_row` sets the last row apart, which sums up the others.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""
    sum_row: bool = False


@dataclass(frozen=True, slots=True)
class MethodNote:
    """How one thing was measured. Blank lines part paragraphs, backticks mark code."""

    title: str
    text: str


@dataclass(frozen=True, slots=True)
class InputHash:
    """A file or folder that went into the result."""

    path: str
    sha256: str


@dataclass(frozen=True, slots=True)
class ReportData:
    """Everything on the page, in reading order.

    `created` is timezone-aware. `alerts` stand above everything: the run is not what it seems to
    be, such as one with a deliberate fault. `caveats` are what weakens the answer (paced,
    projected, one A/A comparison) and are shown under the verdict. `data` is embedded as JSON; it
    may hold what `json_out.plain` accepts.
    """

    title: str
    verdict: Verdict
    command: str
    specpilot_version: str
    machine: str
    created: datetime
    alerts: tuple[str, ...] = ()
    key_figures: tuple[KeyFigure, ...] = ()
    caveats: tuple[str, ...] = ()
    inputs: tuple[InputHash, ...] = ()
    numbers: tuple[ReportTable, ...] = ()
    figures: tuple[ReportFigure, ...] = ()
    method: tuple[MethodNote, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()
    data: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _TableView:
    """A table with the kind of each column."""

    columns: tuple[tuple[str, ColumnKind], ...]
    rows: tuple[tuple[tuple[str, ColumnKind], ...], ...]
    width: Literal["", "middle", "wide"]
    sum_row: bool


def render_report(data: ReportData) -> str:
    """The page as text.

    Raises `ValueError` for a time without zone, a table row of the wrong length, two figures with
    one id, or a drawing that is not a plain inline SVG.
    """
    from jinja2 import Environment, PackageLoader, StrictUndefined

    _check(data)
    environment = Environment(
        loader=PackageLoader("specpilot_cli.report", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["prose"] = _prose
    environment.filters["marked"] = _marked
    environment.filters["table_view"] = _table_view
    environment.filters["inline_svg"] = _inline_svg
    page = environment.get_template("report.html.j2").render(
        report=data,
        created=data.created.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S UTC"),
        page_title=_page_title(data),
        embedded=_embedded_json(data.data),
    )
    return re.sub(r"\n\s*\n+", "\n", page).strip() + "\n"


def environment_rows(environment: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """An envelope's environment as label and text; what is absent reads `not installed`."""
    return tuple(
        (name.replace("_", " "), "not installed" if value is None else str(value))
        for name, value in environment.items()
    )


def _check(data: ReportData) -> None:
    if data.created.tzinfo is None:
        raise ValueError("the report's time has no time zone")
    ids = [figure.figure_id for figure in data.figures]
    if len(set(ids)) != len(ids):
        raise ValueError(f"two figures share an id: {', '.join(sorted(ids))}")
    tables: Sequence[ReportTable | ReportFigure] = (*data.numbers, *data.figures)
    for table in tables:
        for row in table.rows:
            if len(row) != len(table.columns):
                raise ValueError(f"{table.title!r}: row of {len(row)} for {len(table.columns)}")


def _page_title(data: ReportData) -> str:
    """The verdict comes first, so that a tab or a bookmark of a rejected run says so."""
    word = "" if data.verdict.outcome == "none" else f"{data.verdict.word}: "
    return f"{word}{data.title}"


def _table_view(table: ReportTable | ReportFigure) -> _TableView:
    kinds = [_kind([row[i] for row in table.rows]) for i in range(len(table.columns))]
    return _TableView(
        columns=tuple(zip(table.columns, kinds, strict=True)),
        rows=tuple(tuple(zip(row, kinds, strict=True)) for row in table.rows),
        width=_width(len(table.columns)),
        sum_row=isinstance(table, ReportTable) and table.sum_row,
    )


def _kind(cells: Sequence[str]) -> ColumnKind:
    if all(cell in _NO_VALUE or _NUMBER.match(cell) for cell in cells):
        return "num"
    return "long" if any(len(cell) > _LONG_CHARS for cell in cells) else "text"


def _width(n_columns: int) -> Literal["", "middle", "wide"]:
    if n_columns > _WIDE_COLUMNS:
        return "wide"
    return "middle" if n_columns > _MIDDLE_COLUMNS else ""


def _marked(text: str) -> Markup:
    """`text` escaped, with backticks as code: for headings and cells."""
    from markupsafe import Markup, escape

    # Escaped first; only the tags added here are markup.
    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(text))))


def _prose(text: str) -> Markup:
    from markupsafe import Markup

    paragraphs = [part.strip() for part in re.split(r"\n\s*\n", text) if part.strip()]
    return Markup("\n").join(Markup("<p>{}</p>").format(_marked(part)) for part in paragraphs)


def _inline_svg(svg: str) -> Markup:
    from markupsafe import Markup

    if not svg.startswith("<svg") or re.search(r"<script|<foreignObject|\son\w+=", svg):
        raise ValueError("a figure must be a plain inline SVG")
    return Markup(svg)


def _embedded_json(data: Mapping[str, Any]) -> Markup:
    """JSON that cannot end its script element: `<`, `>` and `&` only as escapes."""
    from markupsafe import Markup

    text = json.dumps(plain(dict(data)), indent=1, ensure_ascii=True, allow_nan=False)
    for sign in "<>&":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return Markup(text)
