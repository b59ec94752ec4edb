"""The page and the figure of `w12 inspect`: what they say about a folder."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from specpilot_cli.convert_w12.inspect import WindowSpread, spread_of
from specpilot_cli.convert_w12.plan import Outcome
from specpilot_cli.report.figures import base, w12_tensors
from specpilot_cli.report.figures.w12_tensors import W12Point, W12TensorsData
from specpilot_cli.report.json_out import build_envelope
from specpilot_cli.report.w12 import kept_rows, tensor_objects
from specpilot_cli.report.w12_page import render_w12_page

FIVE = (100, 105, 107, 108, 112)


def point(name: str, bits: float = 12.1, escapes: int = 10, weights: int = 65536) -> W12Point:
    return W12Point(name, (256, weights // 256), bits, 12.0, escapes, weights, FIVE)


def kept(name: str, reason: str) -> Outcome:
    return Outcome(name, "BF16", (4, 4), "model.safetensors", 32, 32, reason=reason)


def converted(name: str, escapes: int = 10) -> Outcome:
    return Outcome(
        name, "BF16", (256, 100), "model.safetensors", 51200, 49152 + 256 + 1028 + 6 * escapes,
        escapes=escapes, window_low=0, window_high=112,
    )  # fmt: skip


def test_spread_of_windows_leaves_out_channels_of_zeros() -> None:
    def spread(*windows: int) -> WindowSpread:
        return spread_of(np.bincount(windows, minlength=256))

    assert spread(0, 107, 100, 0, 112, 105, 108) == WindowSpread(7, 2, 100, 105, 107, 108, 112)
    assert spread(0, 0, 0) == WindowSpread(3, 3)
    assert spread(239) == WindowSpread(1, 0, *[239] * 5)


def test_layers_of_one_projection_are_one_role_and_the_heaviest_comes_first() -> None:
    found = w12_tensors.roles(
        [
            point("model.layers.0.self_attn.q_proj.weight"),
            point("model.layers.0.mlp.up_proj.weight", weights=131072),
            point("model.layers.10.mlp.up_proj.weight", weights=131072),
            point("lm_head.weight"),
        ]
    )
    assert [(role.label, len(role.points)) for role in found] == [
        ("mlp.up_proj", 2), ("self_attn.q_proj", 1), ("lm_head", 1),
    ]  # fmt: skip


def test_roles_that_end_alike_keep_what_tells_them_apart() -> None:
    names = ["encoder.layers.0.fc.w1.weight", "decoder.layers.0.fc.w1.weight"]
    assert [role.label for role in w12_tensors.roles([point(name) for name in names])] == [
        "encoder.layers.fc.w1", "decoder.layers.fc.w1",
    ]  # fmt: skip


def test_title_weighs_tensors_by_their_weights() -> None:
    points = (point("a", 12.0, 0, 65536), point("b", 13.0, 32, 3 * 65536))
    assert w12_tensors.finding(W12TensorsData(points, "x")) == (
        "2 tensors in 12.750 bits per weight, 20.3 % below BF16; one weight in 8,192 is an escape"
    )
    assert "1 tensor in 12.000" in w12_tensors.finding(W12TensorsData(points[:1], "x"))
    assert w12_tensors.finding(W12TensorsData(points[:1], "x")).endswith("no escapes")


def test_tensor_without_escapes_or_windows_is_said_so_in_the_drawing() -> None:
    odd = W12Point("zeros.weight", (128, 128), 12.3, 12.0, 0, 16384, None, 128)
    svg = w12_tensors.draw(W12TensorsData((odd, point("a.weight")), "x")).svg
    texts = re.findall(r">([^<>]+)</text>", svg)
    assert "none" in texts
    assert "zeros only" in texts
    assert "12-bit floor" in texts


@pytest.mark.parametrize("escapes", [3, 900])
def test_how_many_have_no_escapes_is_said_beside_the_bar(escapes: int) -> None:
    """On the bar itself it could not be read."""
    group = tuple(point(f"layers.{i}.up.weight", 12.1, escapes * i, 65536) for i in range(4))
    rare = point("layers.0.rare.weight", 12.1, 1, 65536)
    with base.style():
        figure = w12_tensors.build(W12TensorsData((*group, rare), "x"))
        figure.canvas.draw()
    axes = figure.axes[1]
    (said,) = [text for text in axes.texts if text.get_text() == "1 of 4 none"]
    box, (bar, *_) = said.get_window_extent(), [x for x in axes.lines if len(x.get_xdata()) == 2]
    ends = sorted(axes.transData.transform([(x, 0) for x in bar.get_xdata()])[:, 0])
    assert box.x1 < ends[0] or box.x0 > ends[1]
    assert axes.get_window_extent().x0 <= box.x0 < box.x1 <= axes.get_window_extent().x1 + 15


def test_many_roles_are_cut_and_the_table_has_all_of_them() -> None:
    points = tuple(point(f"part{chr(97 + i // 26)}{chr(97 + i % 26)}.weight") for i in range(40))
    figure = w12_tensors.draw(W12TensorsData(points, "x"))
    assert "The 8 smallest roles are in the table only." in figure.caption
    assert len(figure.rows) == 40


@pytest.mark.parametrize("name", ["a" * 90, f"{'b' * 40}.{'c' * 40}", "short.name"])
def test_long_names_take_two_lines_at_most(name: str) -> None:
    with base.style():
        figure = w12_tensors.build(W12TensorsData((point(f"{name}.weight"),), "x"))
    (label,) = [tick.get_text() for tick in figure.axes[0].get_yticklabels()]
    lines = label.split("\n")
    assert len(lines) <= 2
    assert max(map(len, lines)) <= 26
    assert lines[-1].endswith(name[-5:])


def test_reasons_that_differ_in_a_decimal_number_are_one_row() -> None:
    outcomes = [
        kept("a", "W12 would take 96.08 bits per weight: 16 × 512 pads"),
        kept("b", "W12 would take 96.1 bits per weight: 16 × 512 pads"),
        kept("c", "W12 would take 96.08 bits per weight: 8 × 512 pads"),
        kept("d", "norm"),
    ]
    assert kept_rows(outcomes) == (
        ("W12 would take 96.08 to 96.1 bits per weight: 16 × 512 pads", "2", "64 B", "a"),
        ("W12 would take 96.08 bits per weight: 8 × 512 pads", "1", "32 B", "c"),
        ("norm", "1", "32 B", "d"),
    )


def test_padding_is_what_records_hold_beyond_the_weights() -> None:
    assert converted("a").padding_ratio == 128 / 100
    assert kept("a", "norm").padding_ratio == 8192 / 16
    assert Outcome("v", "BF16", (7,), "s", 14, 14, reason="1-D").padding_ratio is None


def test_json_has_the_spread_of_converted_tensors_alone() -> None:
    rows = tensor_objects([converted("a"), kept("b", "norm")], {"a": WindowSpread(256, 1, *FIVE)})
    assert rows[0]["windows"]["upper_quartile"] == 108
    assert rows[0]["escape_ratio"] == 10 / 25600
    assert rows[0]["padding_ratio"] == 1.28
    assert "windows" not in rows[1]
    assert rows[1]["padding_ratio"] is None


def test_page_gives_totals_roles_and_what_was_kept(tmp_path: Path) -> None:
    outcomes = [converted(f"m.{i}.up.weight") for i in range(3)] + [kept("e.weight", "norm")]
    spread = {o.name: WindowSpread(256, 2, *FIVE) for o in outcomes if o.converted}
    page = render_w12_page(tmp_path / "Model-W12", outcomes, spread, build_envelope("x", {}))
    assert "W12 folder Model-W12" in page
    bits = (49152 + 256 + 1028 + 60) * 8 / 25600
    assert f"{bits:.3f} bits per weight" in page
    assert "3 of 4 tensors are stored as W12" in page
    assert "1 in 2,560" in page
    assert "6 of zeros alone" in page
    assert "m.up" in page
    assert "<td" in page
    assert page.count("<figure") == 1


def test_page_of_a_folder_without_w12_tensors_has_no_figure(tmp_path: Path) -> None:
    page = render_w12_page(tmp_path / "M", [kept("e", "norm")], {}, build_envelope("x", {}))
    assert "nothing converted" in page
    assert "<figure" not in page
