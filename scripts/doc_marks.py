"""Text between marks in a page: `<!-- w12 NAME: begin -->` and `<!-- w12 NAME: end -->`.

Other pages than W12's have another word in its place.
"""

from __future__ import annotations


def between_marks(page: str, name: str, text: str, *, word: str = "w12") -> str:
    """`page` with `text` between the marks of `name`; SystemExit unless they stand there once."""
    begin, end = f"<!-- {word} {name}: begin -->\n", f"<!-- {word} {name}: end -->"
    if page.count(begin) != 1 or page.count(end) != 1:
        raise SystemExit(f"error: no place for `{name}`")
    before, _, rest = page.partition(begin)
    return f"{before}{begin}{text}\n{end}{rest.partition(end)[2]}"
