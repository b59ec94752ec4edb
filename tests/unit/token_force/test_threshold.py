"""The near-tie threshold, from stock's first departures from AR."""

from __future__ import annotations

import numpy as np
import pytest

from specpilot_cli.errors import InputError
from specpilot_cli.schema.outputs import OutputRecord
from specpilot_cli.token_force.threshold import (
    Departure,
    Threshold,
    calibrate,
    first_departure,
    round_up,
    threshold_from_gaps,
)
from tests.unit.token_force.logit_scorer import LogitScorer


def departures(*gaps: float) -> list[Departure]:
    return [Departure(f"r{i}", 0, 1, 2, gap) for i, gap in enumerate(gaps)]


def record(name: str, output: tuple[int, ...], prompt: tuple[int, ...] = (9,)) -> OutputRecord:
    return OutputRecord(
        request_id=name,
        benchmark="b",
        prompt_ids=prompt,
        output_ids=output,
        finish_reason="length",
    )


@pytest.mark.parametrize(
    ("gap", "rounded"),
    [(0.0, 0.125), (0.01, 0.125), (0.125, 0.125), (0.1251, 0.25), (0.232, 0.25), (0.3751, 0.5)],
)
def test_delta_rounds_up_to_a_multiple_of_an_eighth(gap, rounded):
    # 0.232 nats gives the paper's 0.25.
    assert round_up(gap) == rounded


def test_the_largest_gap_counts_and_the_evidence_is_stored():
    threshold = threshold_from_gaps(departures(0.02, 0.232, 0.1), 40)
    assert threshold.delta_nats == 0.25
    assert threshold.event_margin_nats == 0.5
    assert threshold.n_prompts == 40
    assert len(threshold.departures) == 3
    assert threshold.max_gap_nats == 0.232


def test_without_departures_delta_is_the_floor():
    threshold = threshold_from_gaps([], 12)
    assert threshold.delta_nats == 0.125
    assert threshold.warnings == ()
    assert threshold.note == (
        "stock departed from AR on none of 12 prompts, so delta is its least value, 0.125 nats"
    )


def test_only_a_calibration_that_rests_on_little_has_a_note():
    assert "rests on 12 prompts" in (threshold_from_gaps(departures(0.02), 12).note or "")
    assert threshold_from_gaps(departures(0.02), 100).note is None
    assert Threshold(0.125).note is None


def test_a_gap_beyond_rounding_is_capped_and_reported():
    threshold = threshold_from_gaps(departures(*[0.6] * 5), 20)
    assert threshold.delta_nats == 0.5
    assert "capped" in threshold.warnings[0]


def test_a_lone_outlier_is_reported():
    quiet = threshold_from_gaps(departures(*[0.2] * 30, 0.35), 99)
    loud = threshold_from_gaps(departures(*[0.1] * 30, 0.35), 99)
    assert quiet.warnings == ()
    assert "outlier" in loud.warnings[0]


@pytest.mark.parametrize(
    ("ar", "stock", "position"),
    [((1, 2, 3), (1, 5, 3), 1), ((1, 2), (1, 2), None), ((1, 2), (1, 2, 3), None), ((4,), (5,), 0)],
)
def test_first_departure(ar, stock, position):
    assert first_departure(ar, stock) == position


def test_the_gap_is_measured_at_the_first_departure_only():
    # After prefix (9, 1) tokens 2 and 3 are 0.2 nats apart; later differences do not matter.
    table = {(9,): {1: 5.0}, (9, 1): {2: 3.2, 3: 3.0}}

    def logits(prefix):
        row = np.zeros(8)
        for token, value in table.get(tuple(prefix), {0: 9.0}).items():
            row[token] = value
        return row

    threshold = calibrate(
        [record("a", (1, 2, 0, 0)), record("b", (1, 2))],
        [record("a", (1, 3, 7, 7)), record("b", (1, 2))],
        LogitScorer(logits),
    )
    (only,) = threshold.departures
    assert (only.request_id, only.position, only.ar_token, only.stock_token) == ("a", 1, 2, 3)
    assert only.gap_nats == pytest.approx(0.2)
    assert threshold.delta_nats == 0.25
    assert threshold.n_prompts == 2


def test_calibration_needs_common_prompts():
    scorer = LogitScorer(lambda prefix: np.zeros(4))
    with pytest.raises(InputError, match="no request in common"):
        calibrate([record("a", (1,))], [record("b", (1,))], scorer)
    with pytest.raises(InputError, match="different prompt ids"):
        calibrate([record("a", (1,))], [record("a", (1,), prompt=(8,))], scorer)
