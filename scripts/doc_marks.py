"""Text between marks in a page: `<!-- w12 NAME: begin -->` and `<!-- w12 NAME: end -->`."""

from __future__ import annotations


def between_marks(page: str, name: str, text: str) -> str:
    """`page` with `text` between the marks of `name`; SystemExit unless they stand there once."""
    begin, end = f"<!-- w12 {name}: begin -->\n", f"<!-- w12 {name}: end -->"
    if page.count(begin) != 1 or page.count(end) != 1:
        raise SystemExit(f"error: no place for `{name}`")
    before, _, rest = page.partition(begin)
    return f"{before}{begin}{text}\n{end}{rest.partition(end)[2]}"
