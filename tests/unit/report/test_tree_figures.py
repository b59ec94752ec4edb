"""Figures of replay: the histogram of accepted lengths, and τ(N) with many points or policies."""

from __future__ import annotations

import dataclasses

import pytest

from specpilot_cli.report.figures import accepted_lengths, base, tau_curve


def test_accepted_lengths_say_how_often_no_draft_is_right(cases, drawn):
    data = cases["accepted_lengths"][1]
    title = accepted_lengths.finding(data)
    assert "24 % with a best-first tree of 32 nodes, 40 % with the stock chain" in title
    rows = drawn["accepted_lengths"].rows
    assert rows[0] == ("1", "40", "40.0 %", "24", "24.0 %")
    assert [row[0] for row in rows] == ["1", "2", "3", "4", "5"]
    assert data.tree.tau == pytest.approx((24 + 46 + 30 + 32 + 175) / 100)


def test_many_policies_have_no_bands_that_would_cover_each_other(cases):
    data = cases["tau_curve"][1]
    with base.style():
        two = tau_curve.build(data).axes[0]
        many = tau_curve.build(
            dataclasses.replace(data, series=(*data.series, data.series[0]))
        ).axes[0]
        assert (len(two.collections), len(many.collections)) == (1, 0)


def test_a_long_curve_is_labelled_at_powers_of_two(cases):
    data = cases["tau_curve"][1]
    nodes = tuple(range(1, 65))
    series = dataclasses.replace(
        data.series[0], nodes=nodes, tau=tuple(1 + n / 20 for n in nodes), low=(), high=()
    )
    with base.style():
        axes = tau_curve.build(dataclasses.replace(data, series=(series,))).axes[0]
        assert [t.get_text() for t in axes.get_xticklabels()] == [
            "1",
            "2",
            "4",
            "8",
            "16",
            "32",
            "64",
        ]
        assert axes.lines[0].get_marker() == "None"
        assert axes.get_xscale() == "log"
        assert [line.get_linestyle() for line in axes.lines].count("--") == 1  # the oracle
