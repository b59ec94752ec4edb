"""What the figures of regimes say: positions, batches, the roofline."""

from __future__ import annotations

import dataclasses

import pytest

from specpilot_cli.report.figures import acceptance_by_position, base, batch_speedup, roofline


def test_the_roof_is_memory_left_of_the_ridge_and_arithmetic_right_of_it(cases):
    data = cases["roofline"][1]
    gemm, attention, _ = data.marks
    assert data.ridge == pytest.approx(9.9e14 / 3.35e12)
    assert data.roof(gemm.intensity) == pytest.approx(gemm.intensity * 3.35e12)
    assert data.roof(attention.intensity) == data.peak_flops
    # 24 GB in 16 ms of 3.35 TB/s
    assert data.reached(gemm) == pytest.approx(2.4e10 / 0.016 / 3.35e12)
    assert data.reached(attention) == pytest.approx(9e11 / 0.004 / 9.9e14)


def test_the_roofline_names_the_longest_class_and_its_limit(cases):
    data = cases["roofline"][1]
    assert roofline.finding(data) == "Memory binds the longest class, target_gemm: 45 % of its roof"
    slow = dataclasses.replace(data.marks[1], seconds=1.0)
    other = dataclasses.replace(data, marks=(data.marks[0], slow))
    assert roofline.finding(other).startswith("Arithmetic binds the longest class, attention")
    with pytest.raises(ValueError, match="no kernel class"):
        roofline.draw(dataclasses.replace(data, marks=()))


def test_one_class_alone_is_drawn(cases):
    data = cases["roofline"][1]
    figure = roofline.draw(dataclasses.replace(data, marks=data.marks[:1]))
    assert figure.rows[0][0] == "target_gemm"


def test_batches_name_the_leader_at_both_ends(cases, drawn):
    data = cases["batch_speedup"][1]
    title = batch_speedup.finding(data)
    assert title.startswith("At 1 request tree:nodes=32,block=16 leads with 2.60×")
    assert title.endswith("at 24 requests shared:rows=192,block=16 leads with 1.20×")
    assert drawn["batch_speedup"].basis == "projected"
    alone = dataclasses.replace(
        data, concurrencies=(8,), lines=(batch_speedup.BatchLine("ar", (1.0,)),)
    )
    assert batch_speedup.finding(alone) == "At 8 requests ar leads with 1.00×"
    assert batch_speedup.draw(alone).columns == ("policy", "8 in flight")
    with pytest.raises(ValueError, match="1 to 8 lines"):
        batch_speedup.draw(dataclasses.replace(data, lines=data.lines * 3))


def test_batch_values_below_one_stay_in_view(cases):
    with base.style():
        (axes,) = batch_speedup.build(cases["batch_speedup"][1]).axes
    assert axes.get_ylim()[0] == 0
    assert axes.get_ylim()[1] > 2.6


def test_positions_are_drawn_as_given(cases, drawn):
    data = cases["acceptance_by_position"][1]
    assert drawn["acceptance_by_position"].rows[1] == ("1", "700", "0.4000", "0.9400", "0.8300")
    with pytest.raises(ValueError, match="no position"):
        acceptance_by_position.draw(dataclasses.replace(data, marks=()))
