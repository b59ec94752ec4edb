"""Tables on stdout: ruled on a terminal, tab-separated rows when piped."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from specpilot_cli.ui import printable, stdout_console

Justify = Literal["left", "right", "center"]


@dataclass(frozen=True, slots=True)
class Column:
    """A heading and how its cells align; numbers go right."""

    title: str
    justify: Justify = "left"


def print_table(
    columns: Sequence[Column | str], rows: Sequence[Sequence[object]], *, title: str | None = None
) -> None:
    """Print `rows`; each needs one cell per column. Raises `ValueError` if one does not.

    When stdout is not a terminal nothing is cut, wrapped or coloured: a title line starting
    with `#`, the headings, then the rows, all tab-separated.
    """
    heads = [column if isinstance(column, Column) else Column(column) for column in columns]
    for row in rows:
        if len(row) != len(heads):
            raise ValueError(f"row has {len(row)} cells for {len(heads)} columns: {row!r}")
    if sys.stdout.isatty():
        _print_ruled(heads, rows, title)
    else:
        _print_tabbed(heads, rows, title)


def print_pairs(pairs: Sequence[tuple[str, object]], *, title: str | None = None) -> None:
    """Print labelled values, one a line."""
    if sys.stdout.isatty():
        from rich.markup import escape

        width = max((len(label) for label, _ in pairs), default=0)
        if title:
            stdout_console().print(f"[bold]{escape(printable(title))}[/bold]")
        for label, value in pairs:
            line = printable(f"{label.ljust(width)}  {value}")
            stdout_console().print(escape(line))
        return
    if title:
        _line(f"# {title}")
    for label, value in pairs:
        _line(f"{label}\t{value}")


def print_line(text: str = "") -> None:
    """One plain line of the answer, brackets and all."""
    _line(text)


def _print_ruled(
    heads: Sequence[Column], rows: Sequence[Sequence[object]], title: str | None
) -> None:
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    table = Table(
        title=escape(printable(title)) if title else None,
        title_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
    )
    for head in heads:
        table.add_column(escape(head.title), justify=head.justify, overflow="fold")
    for row in rows:
        table.add_row(*(escape(printable(str(cell))) for cell in row))
    stdout_console().print(table)


def _print_tabbed(
    heads: Sequence[Column], rows: Sequence[Sequence[object]], title: str | None
) -> None:
    if title:
        _line(f"# {title}")
    _line("\t".join(head.title for head in heads))
    for row in rows:
        _line("\t".join(str(cell).replace("\t", " ").replace("\n", " ") for cell in row))


def _line(text: str) -> None:
    sys.stdout.write(printable(text) + "\n")
