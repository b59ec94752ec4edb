"""The page: complete, self-contained, safe against its own data."""

from __future__ import annotations

import dataclasses
import json
import re
from datetime import datetime
from html.parser import HTMLParser

import pytest

from specpilot_cli.report.html import ReportTable, Verdict, environment_rows, render_report

_VOID = {"meta", "link", "br", "hr", "img", "input", "path", "use", "rect"}


class _Page(HTMLParser):
    """Checks nesting and collects ids, references and the embedded data."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.stack: list[str] = []
        self.ids: list[str] = []
        self.references: list[str] = []
        self.tags: list[str] = []
        self.sections: list[str] = []
        self.scripts: list[dict[str, str | None]] = []
        self.data = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.tags.append(tag)
        self.ids += [found["id"]] if found.get("id") else []
        self.references += [v or "" for k, v in attrs if k in ("src", "href", "xlink:href")]
        if tag == "section" and found.get("id"):
            self.sections.append(found["id"] or "")
        if tag == "script":
            self.scripts.append(found)
        if tag not in _VOID:
            self.stack.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in _VOID:
            assert self.stack.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.stack and self.stack[-1] == "script":
            self.data += data


def test_page_is_nested_properly_and_ids_are_unique(make_report):
    page = _Page(render_report(make_report()))
    assert page.stack == []
    assert len(page.ids) == len(set(page.ids))


def test_sections_come_in_reading_order(make_report):
    page = _Page(render_report(make_report()))
    assert page.sections == ["verdict", "numbers", "figures", "method", "environment"]


def test_page_refers_to_nothing_outside_itself(make_report):
    text = render_report(make_report())
    page = _Page(text)
    assert page.references
    assert all(reference.startswith("#") for reference in page.references)
    assert {reference[1:] for reference in page.references} <= set(page.ids)
    assert not re.search(r"url\((?!#)|@import", text)
    assert "img" not in page.tags


def test_page_needs_no_script(make_report):
    page = _Page(render_report(make_report()))
    assert page.scripts == [{"type": "application/json", "id": "specpilot-data"}]


def test_embedded_data_cannot_end_its_element_and_parses(make_report):
    text = render_report(make_report())
    raw = text.split('id="specpilot-data">')[1].split("</script>")[0]
    assert "<" not in raw
    assert json.loads(raw) == {"text": "</script><!--", "nan": None, "tau": 3.25}


def test_text_is_escaped_and_backticks_become_code(make_report):
    text = render_report(make_report())
    assert "Recipe &lt;demo-cpu&gt;" in text
    assert "<demo-cpu>" not in text
    assert "<p>Second &lt;part&gt;.</p>" in text
    assert "<code>1.25x</code> &amp; lossless" in text


def test_every_figure_has_the_table_of_its_numbers(cases, make_report):
    page = _Page(render_report(make_report()))
    assert page.tags.count("figure") == len(cases)
    assert page.tags.count("details") == len(cases) + 1
    assert page.tags.count("table") == len(cases) + 1


def test_head_names_what_was_run_where_when_and_on_what(make_report):
    text = render_report(make_report())
    head = text.split("<header>")[1].split("</header>")[0]
    for words in (
        "specpilot apply recipe demo-cpu", "specpilot 0.1.0", "test machine",
        "2026-01-02 03:04:05 UTC", "sha256 " + "ab" * 32, "accept", "one A/A comparison",
    ):  # fmt: skip
        assert words in head


def test_projected_numbers_are_marked(make_report):
    text = render_report(make_report())
    assert '<dd class="basis">projected</dd>' in text
    assert '<span class="basis">measured and projected</span>' in text


@pytest.mark.parametrize(
    ("outcome", "mark"), [("yes", "✓"), ("no", "✗"), ("invalid", "!"), ("none", "•")]
)
def test_verdict_is_told_by_word_and_mark_too(make_report, outcome, mark):
    text = render_report(make_report(verdict=Verdict("word", outcome, "sentence")))
    block = text.split('id="verdict"')[1].split("</section>")[0]
    assert f'class="verdict {outcome}"' in text
    assert mark in block
    assert "word" in block


def test_every_theme_defines_every_colour(make_report, drawn):
    text = render_report(make_report())
    used = set(re.findall(r"var\((--[a-z-]+)", text))
    light, dark, printed = (
        set(re.findall(r"(--[a-z-]+):", block))
        for block in re.findall(r":root \{(.*?)\}", text, flags=re.DOTALL)
    )
    assert used <= light
    assert light == dark == printed
    assert "@media (prefers-color-scheme: dark)" in text
    assert "@media print" in text


def test_columns_of_numbers_are_aligned_right(make_report):
    table = ReportTable(
        "t", ("name", "ratio", "time", "word"),
        (("a", "1.2", "3.40 ms", "x"), ("b", "–", "0 ns", "7")),
    )  # fmt: skip
    text = render_report(make_report(numbers=(table,), figures=()))
    headings = re.findall(r'<th scope="col" class="(\w+)">(\w+)</th>', text)
    assert headings == [("text", "name"), ("num", "ratio"), ("num", "time"), ("text", "word")]


@pytest.mark.parametrize(
    ("cells", "kind"),
    [
        (("[1.026, 1.343]", "[0.194, 9.176]"), "num"),
        (("1.53 → 1.82", "– → 2.00"), "num"),
        (("0.000 % – 0.190 %", "–"), "num"),
        (("lower +2.13 points", "p = 0.5"), "text"),
        (("+2.13 points", "−0.50 points"), "num"),
        (("a short text", "7"), "text"),
        (("a text so long that it may take a second line of its row", "7"), "long"),
    ],
)
def test_intervals_and_pairs_count_as_numbers_and_only_long_texts_wrap(make_report, cells, kind):
    table = ReportTable("t", ("name", "it"), tuple(("row", cell) for cell in cells))
    text = render_report(make_report(numbers=(table,), figures=()))
    assert f'<th scope="col" class="{kind}">it</th>' in text


def test_backticks_are_code_in_titles_headings_and_cells(make_report):
    table = ReportTable("over `ar` <b>", ("the `x`", "it"), (("`recurrent`", "plain"),))
    text = render_report(make_report(numbers=(table,), figures=()))
    body = text.split("<header>")[1].split("<script")[0]
    assert "<h3>over <code>ar</code> &lt;b&gt;</h3>" in body
    assert "the <code>x</code></th>" in body
    assert "<code>recurrent</code></th>" in body
    assert "`" not in body.replace('aria-label="over `ar` &lt;b&gt;"', "")


def test_wide_tables_scroll_with_a_hint_and_others_have_none(make_report):
    def page(n_columns: int) -> str:
        cells = tuple(f"c{i}" for i in range(n_columns))
        return render_report(make_report(numbers=(ReportTable("t", cells, (cells,)),), figures=()))

    assert '<p class="hint' not in page(4)
    assert '<p class="hint middle"' in page(6)
    assert '<p class="hint wide"' in page(7)
    assert 'class="scroll" tabindex="0"' in page(7)


def test_alerts_stand_above_the_title_and_reasons_under_the_verdict(make_report):
    verdict = Verdict("reject", "no", "Not lossless.", ("rate rule: `x`", "event rule"))
    text = render_report(make_report(alerts=("deliberate fault",), verdict=verdict))
    alert, title = text.index('<div class="alert"'), text.index("<h1>")
    assert alert < title < text.index('id="verdict"')
    block = text.split('id="verdict"')[1].split("</section>")[0]
    assert "<li>rate rule: <code>x</code></li><li>event rule</li>" in re.sub(r"\s*\n\s*", "", block)
    assert "<title>reject: Recipe &lt;demo-cpu&gt;</title>" in text


def test_a_page_without_verdict_keeps_its_plain_title(make_report):
    text = render_report(make_report(verdict=Verdict("kernels lead", "none", "Next.")))
    assert "<title>Recipe &lt;demo-cpu&gt;</title>" in text
    assert 'class="alert"' not in text


def test_parts_without_content_leave_no_heading(make_report):
    bare = make_report(
        numbers=(), figures=(), method=(), environment=(), inputs=(), caveats=(), key_figures=()
    )
    page = _Page(render_report(bare))
    assert page.sections == ["verdict"]
    assert page.references == []


def test_rendering_is_deterministic_and_small(make_report):
    text = render_report(make_report())
    assert text == render_report(make_report())
    assert len(text.encode()) < 1_000_000


def test_time_is_shown_in_utc(make_report):
    from datetime import timedelta, timezone

    east = datetime(2026, 1, 2, 5, 4, 5, tzinfo=timezone(timedelta(hours=2)))
    assert "2026-01-02 03:04:05 UTC" in render_report(make_report(created=east))


@pytest.mark.parametrize(
    ("fault", "message"),
    [("zone", "no time zone"), ("twin", "share an id"), ("row", "row of 1 for 2"),
     ("svg", "plain inline SVG")],
)  # fmt: skip
def test_faulty_reports_are_refused(make_report, drawn, fault, message):
    figure = drawn["forest"]
    changes = {
        "zone": {"created": datetime(2026, 1, 2)},
        "twin": {"figures": (figure, figure)},
        "row": {"numbers": (ReportTable("t", ("a", "b"), (("1",),)),)},
        "svg": {"figures": (dataclasses.replace(figure, svg="<svg onload=x></svg>"),)},
    }[fault]
    with pytest.raises(ValueError, match=message):
        render_report(make_report(**changes))


def test_absent_packages_are_named_as_such():
    assert environment_rows({"cpu_count": 2, "sglang": None}) == (
        ("cpu count", "2"), ("sglang", "not installed"),
    )  # fmt: skip
