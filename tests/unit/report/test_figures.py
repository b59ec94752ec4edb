"""What holds for every figure, and what each one says about its data."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from specpilot_cli.report.figures import (
    base,
    ceiling_factors,
    forest,
    mismatch_bars,
    speedup_curve,
    step_waterfall,
    tau_curve,
)

NAMES = [
    "acceptance_by_position", "accepted_lengths", "batch_speedup", "ceiling_factors", "forest",
    "mismatch_bars", "roofline", "speedup_curve", "step_waterfall", "tau_curve", "w12_tensors",
]  # fmt: skip


def _texts(svg: str) -> list[str]:
    root = ET.fromstring(svg)
    return ["".join(node.itertext()) for node in root.iter() if node.tag.endswith("text")]


def test_the_cases_cover_every_figure_file(cases, repo: Path):
    files = {path.stem for path in (repo / "specpilot_cli/report/figures").glob("*.py")}
    assert files - {"__init__", "base"} == set(cases) == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_svg_is_well_formed_and_states_finding_and_condition(cases, drawn, name):
    figure, data = drawn[name], cases[name][1]
    text = " ".join(_texts(figure.svg))
    assert all(word in text for word in figure.title.split())
    assert all(word in text for word in data.condition.split())


@pytest.mark.parametrize("name", NAMES)
def test_every_colour_follows_the_theme(drawn, name):
    bare = re.sub(r"var\(--sp-[a-z]+, #[0-9a-f]{6}\)", "", drawn[name].svg)
    assert re.findall(r"#[0-9a-fA-F]{3,6}\b(?![-\w])", bare) == []
    # Anything without a colour would be drawn black on the dark page.
    assert "fill: black" not in bare


@pytest.mark.parametrize("name", NAMES)
def test_text_without_colour_of_its_own_does_not_exist(drawn, name):
    root = ET.fromstring(drawn[name].svg)
    for node in root.iter():
        if node.tag.endswith("text"):
            assert "fill: var(--sp-" in node.get("style", ""), "".join(node.itertext())


@pytest.mark.parametrize("name", NAMES)
def test_ids_carry_the_figure_and_references_resolve(cases, name):
    module, data = cases[name]
    svg = module.draw(data, figure_id="here").svg
    ids = re.findall(r'\bid="([^"]+)"', svg)
    assert ids
    assert len(ids) == len(set(ids))
    assert all(item.startswith("here-") for item in ids)
    used = re.findall(r'href="#([^"]+)"', svg) + re.findall(r"url\(#([^)]+)\)", svg)
    assert set(used) <= set(ids)


@pytest.mark.parametrize("name", NAMES)
def test_nothing_outside_the_file_and_no_date(drawn, name):
    svg = drawn[name].svg
    assert re.findall(r'(?:src|href)="(?!#)', svg) == []
    assert "<metadata" not in svg
    assert not re.search(r"\b20\d\d-\d\d-\d\d|Matplotlib v", svg)


@pytest.mark.parametrize("name", NAMES)
def test_table_of_numbers_fits_its_columns(drawn, name):
    figure = drawn[name]
    assert len(figure.rows) >= 3
    assert {len(row) for row in figure.rows} == {len(figure.columns)}
    assert not any("nan" in cell for row in figure.rows for cell in row)


def test_drawing_is_the_same_in_another_process(drawn, repo: Path):
    code = (
        "import importlib.util, hashlib, sys\n"
        "spec = importlib.util.spec_from_file_location('c', sys.argv[1])\n"
        "c = importlib.util.module_from_spec(spec); spec.loader.exec_module(c)\n"
        "for name, (module, data) in sorted(c.figure_cases().items()):\n"
        "    print(hashlib.sha256(module.draw(data).svg.encode()).hexdigest())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(repo / "tests/unit/report/conftest.py")],
        capture_output=True, text=True, check=True, cwd=repo,
    )  # fmt: skip
    import hashlib

    here = [hashlib.sha256(drawn[name].svg.encode()).hexdigest() for name in NAMES]
    assert done.stdout.split() == here


def test_text_stays_inside_the_drawing(cases):
    # Measured with matplotlib's own, wide font: a browser's fonts take less room.
    for name, (module, data) in cases.items():
        with base.style():
            figure = module.build(data)
            figure.draw_without_rendering()
            box = figure.bbox
            for text in figure.findobj(lambda item: hasattr(item, "get_text")):
                if text.get_text().strip() and text.get_visible():
                    extent = text.get_window_extent()
                    assert extent.x0 >= box.x0 - 1, (name, text.get_text())
                    assert extent.x1 <= box.x1 + 1, (name, text.get_text())


def test_tau_title_compares_the_chosen_budget_with_stock(cases):
    data = cases["tau_curve"][1]
    title = tau_curve.finding(data)
    assert "of 16 nodes accepts 1.29× the tokens of the stock chain (3.60 against 2.80" in title
    last = tau_curve.finding(dataclasses.replace(data, chosen_nodes=None))
    assert "of 32 nodes accepts 1.39×" in last


def test_tau_table_has_every_point_and_both_references(drawn):
    rows = drawn["tau_curve"].rows
    assert ("best-first", "16", "17", "3.600", "3.500 – 3.700") in rows
    assert ("stock chain", "7", "8", "2.800", "–") in rows
    assert ("oracle", "–", "–", "5.100", "–") in rows


def test_tau_curve_without_oracle_or_intervals_is_drawn(cases):
    data = cases["tau_curve"][1]
    plain = dataclasses.replace(data, series=data.series[1:], oracle_tau=None)
    figure = tau_curve.draw(plain)
    assert not any("oracle" in text for text in _texts(figure.svg))


def test_waterfall_pieces_add_up_to_the_step(cases):
    data = cases["step_waterfall"][1]
    bars = step_waterfall._bars(data)
    losses = sum(bar.length_s for bar in bars[1:-1])
    assert bars[0].length_s - losses == pytest.approx(bars[-1].length_s)
    assert bars[-1].length_s == pytest.approx(0.005)


def test_waterfall_names_a_class_that_beats_its_floor(drawn):
    texts = _texts(drawn["step_waterfall"].svg)
    assert "head below its floor" in texts
    assert "+0.200" in texts or "+0.20" in texts


def test_waterfall_does_not_take_noise_for_a_part_of_the_step(cases):
    data = dataclasses.replace(cases["step_waterfall"][1], t_step_s=0.0095)
    bars = step_waterfall._bars(data)
    assert bars[1].label == "slower while profiled"
    assert bars[1].length_s == pytest.approx(-0.0005)
    assert bars[0].length_s - sum(bar.length_s for bar in bars[1:-1]) == pytest.approx(0.005)
    figure = step_waterfall.draw(data)
    assert "outside the profile" not in {row[0] for row in figure.rows}
    assert not any(row[1].startswith("-") for row in figure.rows)
    assert "ran 5.3 % slower than the plain ones" in figure.caption


def test_waterfall_parts_the_step_by_passes(cases):
    data = cases["step_waterfall"][1]
    split = (("DRAFT", 0.001), ("VERIFY", 0.009), ("outside the profile", 0.002))
    figure = step_waterfall.draw(dataclasses.replace(data, split=split))
    assert {"DRAFT", "VERIFY"} <= set(_texts(figure.svg))
    assert "parted by the engine's passes" in figure.caption
    assert "parted" not in step_waterfall.draw(data).caption


def test_waterfall_title_gives_both_times(cases):
    assert step_waterfall.finding(cases["step_waterfall"][1]) == (
        "A step takes 12.0 ms; at its floors it would take 5.00 ms (a factor of 2.40)"
    )


def test_factors_title_names_the_leader(cases):
    data = cases["ceiling_factors"][1]
    assert ceiling_factors.finding(data) == (
        "The ceiling is 2.57× the measured system; tokens lead with 1.83×"
    )
    without = dataclasses.replace(data, tau=None)
    assert "step-cost ceiling is 1.40×" in ceiling_factors.finding(without)
    assert len(ceiling_factors.draw(without).rows) == 3


def test_factors_say_whose_ceiling_and_why_overhead_can_fall_below_one(cases):
    data = dataclasses.replace(
        cases["ceiling_factors"][1], tau=1.1, kernel=1.1, overhead=1.5, system="stock"
    )
    assert ceiling_factors.finding(data).endswith("× stock; overhead leads with 1.50×")
    assert "below 1" not in ceiling_factors.draw(data).caption
    noisy = ceiling_factors.draw(dataclasses.replace(data, overhead=0.98))
    assert "no overhead to win" in noisy.caption


def test_factors_below_one_are_drawn(cases):
    data = dataclasses.replace(cases["ceiling_factors"][1], kernel=0.8)
    assert "0.80×" in " ".join(_texts(ceiling_factors.draw(data).svg))


@pytest.mark.parametrize(
    ("low", "bound", "ending"),
    [(1.21, 1.012, "lower bound 1.210 is above the promotion bound of 1.012"),
     (1.005, 1.012, "not above the promotion bound of 1.012"),
     (1.21, None, "[1.210, 1.290]")],
    ids=["above", "not above", "no bound"],
)  # fmt: skip
def test_forest_title_follows_the_lower_bound(cases, low, bound, ending):
    data = cases["forest"][1]
    overall = dataclasses.replace(data.overall, low=low)
    changed = dataclasses.replace(data, overall=overall, bound=bound, lower_bound=None)
    title = forest.finding(changed)
    assert title.endswith(ending)
    assert title.startswith("Tuned is 1.250× as fast as stock")


def test_forest_title_uses_the_rules_own_bound_where_given(cases):
    # The interval includes the noise and may straddle the bound that the rule's own one clears.
    data = cases["forest"][1]
    overall = dataclasses.replace(data.overall, low=1.005)
    title = forest.finding(dataclasses.replace(data, overall=overall, lower_bound=1.02))
    assert "[1.005, 1.290]; lower bound 1.020 is above" in title
    assert "stroke" in forest.draw(data).caption
    assert "stroke" not in forest.draw(dataclasses.replace(data, lower_bound=None)).caption


def test_forest_title_ends_with_what_else_decides(cases):
    data = dataclasses.replace(cases["forest"][1], remark="token forcing rejects it")
    assert forest.finding(data).endswith("promotion bound of 1.012; token forcing rejects it")


def test_forest_axis_is_not_set_by_one_wild_interval(cases):
    data = cases["forest"][1]
    wild = forest.GainRow("few", 1.2, 0.02, 80.0, 2)
    changed = dataclasses.replace(data, rows=(*data.rows, wild))
    low, high = forest._view(changed)
    assert low < 1.0
    assert 1.30 < high < 2.0
    assert all(low < v < high for v in (data.overall.low, data.overall.high, data.bound))
    figure = forest.draw(changed)
    assert "An arrow marks" in figure.caption
    assert any("[0.020, 80.000]" in text for text in _texts(figure.svg))
    assert "An arrow marks" not in forest.draw(data).caption


@pytest.mark.parametrize("view", [(0.98, 1.05), (0.7, 1.9), (0.27, 3.1), (0.05, 20.0)])
def test_forest_ticks_hold_one_and_have_room(view):
    ticks = forest._ticks(*view)
    assert 1.0 in ticks
    assert len(ticks) >= 3
    gaps = [math.log(b / a) / math.log(view[1] / view[0]) for a, b in itertools.pairwise(ticks)]
    assert min(gaps) >= 0.11 - 1e-9


def test_forest_marks_a_missing_interval(drawn):
    assert ("code", "1.3000", "–", "–", "1") in drawn["forest"].rows


def test_mismatch_titles_for_one_and_for_many(cases, drawn):
    data = cases["mismatch_bars"][1]
    assert drawn["mismatch_bars"].title == "Token forcing of 2 systems: 1 accept, 1 reject"
    one = dataclasses.replace(data, bars=data.bars[:2])
    assert mismatch_bars.finding(one) == (
        "Tuned: accept, with mismatches on 0.73 % of tokens (limit 1.22 %) and 1 unexplained event"
    )


def test_mismatch_title_of_a_reject_names_the_rules(cases):
    data = cases["mismatch_bars"][1]
    faulty = dataclasses.replace(data.bars[2], rejected_by="rate rule and the event rule")
    assert mismatch_bars.finding(dataclasses.replace(data, bars=(data.bars[0], faulty))) == (
        "Faulty: reject by the rate rule and the event rule, with mismatches on 2.00 % of tokens "
        "(limit 1.22 %) and 192 unexplained events"
    )


def test_mismatch_shows_verdict_and_events_above_each_bar(drawn):
    texts = " ".join(_texts(drawn["mismatch_bars"].svg))
    for words in ("reference", "accept", "reject", "192 events", "1 event", "limit 1.22 %"):
        assert words in texts


def test_mismatch_of_zero_everywhere_is_drawn(cases):
    bar = mismatch_bars.MismatchBar("tuned", 0.0, 0.0, 0.0, 500, 0, "accept")
    data = dataclasses.replace(cases["mismatch_bars"][1], bars=(bar,), limit_rate=0.0)
    assert "0.00 %" in " ".join(_texts(mismatch_bars.draw(data).svg))


def test_speedup_labels_what_is_projected_and_extrapolated(drawn):
    figure = drawn["speedup_curve"]
    assert figure.title == (
        "On this machine 16 nodes are best, 1.80× plain decoding against stock's 1.40×; "
        "on H200 16 nodes would be best, 1.80× plain decoding against stock's 1.40× "
        "(projected, extrapolated step time)"
    )
    assert figure.basis == "measured and projected"
    texts = _texts(figure.svg)
    assert "this machine: measured" in texts
    assert "H200: projected" in texts
    assert {row[-1] for row in figure.rows} == {"recorded", "extrapolated"}
    assert "recorded step time" in texts
    assert "extrapolated step time" in texts
    assert "interpolated step time" not in texts


def test_speedup_says_when_no_tree_beats_stock(cases):
    data = cases["speedup_curve"][1]
    stock = dataclasses.replace(data.panels[0].stock, speedup=1.9)
    panel = dataclasses.replace(data.panels[0], stock=stock)
    assert speedup_curve.finding(dataclasses.replace(data, panels=(panel,))) == (
        "On this machine no tree beats stock's 1.90× plain decoding: 1.80× at 16 nodes"
    )


def test_speedup_with_one_panel_states_its_basis(cases):
    data = cases["speedup_curve"][1]
    for panel, basis in zip(data.panels, ("measured", "projected"), strict=True):
        figure = speedup_curve.draw(dataclasses.replace(data, panels=(panel,)))
        assert figure.basis == basis


@pytest.mark.parametrize(
    ("positions", "expected"),
    [
        ([5.0, 5.0, 5.0], [5.0, 6.0, 7.0]),
        ([1.0, 4.0, 9.0], [1.0, 4.0, 9.0]),
        ([9.8, 9.9], [9.0, 10.0]),
        ([4.1, 4.0], [5.0, 4.0]),
    ],
)
def test_labels_are_spread_in_order_and_inside(positions, expected):
    assert base.spread(positions, 1.0, low=0.0, high=10.0) == pytest.approx(expected)


@pytest.mark.parametrize(("largest", "digits"), [(123.4, 1), (12.3, 2), (1.2, 3), (0.01, 4)])
def test_decimals_keep_four_digits_of_the_largest(largest, digits):
    assert base.decimals(largest) == digits


def test_labels_that_fit_keep_their_precedence():
    assert base.apart([2.0, 3.0, 3.4, 4.0], 0.5, first=[3.4]) == [2.0, 3.4, 4.0]


def test_long_row_labels_are_wrapped_and_cut():
    label = base.row_label("a benchmark with a name of more words than fit a row of the plot (8)")
    assert [len(line) <= 26 for line in label.split("\n")] == [True, True]
    assert label.endswith("…")
    assert base.label_room([label]) < 2.6
