"""Mismatches, strata and exposures: definitions checked by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from specpilot_cli.engines.base import ForcedScores
from specpilot_cli.schema.outputs import OutputRecord
from specpilot_cli.token_force.config import TokenForceSettings
from specpilot_cli.token_force.power import (
    detectable_event_rate,
    detectable_rate_difference,
    rejecting_count,
)
from specpilot_cli.token_force.rules import (
    Counts,
    EventTally,
    choose_split,
    count,
    event_rule,
    rate_rule,
    rate_summary,
    rate_test,
    share_to_test,
)
from specpilot_cli.token_force.scorer import ScoredOutput


def scored(mismatch: list[bool], name: str = "r") -> ScoredOutput:
    """An answer whose mismatching tokens lie 0.3 nats below the best one."""
    n = len(mismatch)
    best = np.full(n, -0.5)
    own = best - 0.3 * np.array(mismatch, dtype=np.float64)
    record = OutputRecord(
        request_id=name,
        benchmark="b",
        prompt_ids=(1,),
        output_ids=tuple(range(n)),
        finish_reason="length",
    )
    return ScoredOutput(record, ForcedScores(own, np.arange(n), best))


def answers(*per_request: tuple[int, int], n_tokens: int = 100) -> list[ScoredOutput]:
    """(early, late) mismatches of each request, early ones first, late ones last."""
    built = []
    for early, late in per_request:
        flags = [i < early or i >= n_tokens - late for i in range(n_tokens)]
        built.append(scored(flags))
    return built


def test_a_tie_is_no_mismatch_even_when_the_ids_differ():
    scores = ForcedScores(np.array([-1.0, -1.0]), np.array([7, 8]), np.array([-1.0, -0.999]))
    record = scored([False, False]).record
    assert ScoredOutput(record, scores).mismatch.tolist() == [False, True]


def test_counts_follow_positions():
    outputs = answers((3, 2), (0, 5))
    whole, late = count(outputs), count(outputs, 90)
    assert whole.mismatches.tolist() == [5, 5]
    assert late.mismatches.tolist() == [2, 5]
    assert late.tokens.tolist() == [10, 10]


def test_the_interval_of_a_rate_is_clustered_by_request():
    # All mismatches in one request: nearly all of the evidence is one cluster.
    clumped = rate_summary(answers((20, 0), *[(0, 0)] * 9))
    spread = rate_summary(answers(*[(2, 0)] * 10))
    assert clumped.rate == spread.rate == pytest.approx(0.02)
    assert clumped.high - clumped.low > 0.04
    assert spread.high - spread.low == pytest.approx(0.0, abs=1e-12)


def test_equal_systems_differ_by_nothing():
    outputs = answers(*[(i % 3, i % 2) for i in range(12)])
    rule = rate_rule(outputs, outputs, TokenForceSettings())
    assert not rule.rejects
    assert all(test.estimate.rate == 0.0 and test.lower_bound == 0.0 for test in rule.tests)


def test_pairing_by_prompt_removes_what_prompts_share():
    hard = np.array([0, 0, 9, 9, 0, 9, 0, 9], dtype=np.float64)
    tokens = np.full(8, 100.0)
    paired = rate_test(
        "pooled", Counts(hard + 1, tokens), Counts(hard, tokens), alpha=0.05, margin=0.005
    )
    shuffled = rate_test(
        "pooled", Counts(hard + 1, tokens), Counts(9 - hard, tokens), alpha=0.05, margin=0.005
    )
    assert paired.estimate.rate == pytest.approx(0.01)
    assert paired.lower_bound == pytest.approx(0.01)
    assert shuffled.lower_bound < 0


def test_a_late_fault_is_named_by_its_stratum():
    stock = answers(*[(1, i % 2) for i in range(20)])
    system = answers(*[(1, 4 + i % 2) for i in range(20)])
    rule = rate_rule(system, stock, TokenForceSettings(split_position=90))
    assert {test.stratum: test.rejects for test in rule.tests} == {
        "pooled": True,
        "early": False,
        "late": True,
    }
    assert rule.split_position == 90
    assert all(test.alpha == pytest.approx(0.05 / 3) for test in rule.tests)


@pytest.mark.parametrize(
    ("lengths", "setting", "split"),
    [
        ([3000] * 8, None, 2048),
        ([3000] * 7 + [100] * 7, None, None),
        ([3000] * 7 + [1000] * 9, None, 500),
        ([200] * 20, None, 100),
        ([200] * 20, 150, 150),
        ([200] * 20, 200, None),
        ([200] * 7, None, None),
    ],
)
def test_the_split_follows_from_lengths_alone(lengths, setting, split):
    outputs = [scored([False] * n) for n in lengths]
    settings = TokenForceSettings(split_position=setting)
    assert choose_split(outputs, outputs, settings) == split


def test_without_strata_one_test_has_the_whole_error():
    outputs = answers(*[(1, 1)] * 9)
    (only,) = rate_rule(outputs, outputs, TokenForceSettings(strata=False)).tests
    assert only.alpha == 0.05


def tally(requests: int, *, tokens: int = 70_000, share: float = 1.0, large: int = 50):
    return EventTally(
        n_tokens=tokens,
        n_large=large,
        n_audited=large,
        n_unexplained=requests,
        n_tested=round(large * share),
        n_test_requests=requests,
        tested_share=share,
    )


def test_five_requests_against_none_are_the_least_to_reject_at_equal_exposure():
    assert not event_rule(tally(4), tally(0), 0.05).rejects
    assert event_rule(tally(5), tally(0), 0.05).rejects
    assert event_rule(tally(5), tally(0), 0.05).p_value == pytest.approx(2**-5)


def test_three_are_enough_against_twice_the_stock_tokens():
    assert event_rule(tally(3), tally(0, tokens=140_000), 0.05).p_value == pytest.approx(1 / 27)


def test_one_event_each_is_accepted():
    assert event_rule(tally(1), tally(1), 0.05).p_value == pytest.approx(0.75)


def test_the_same_share_of_both_systems_events_is_tested():
    share = share_to_test(1500, 90, 200)
    assert share == pytest.approx(200 / 1500)
    assert share_to_test(10, 20, 200) == 1.0
    assert share_to_test(0, 0, 200) == 1.0
    system, stock = tally(50, share=share), tally(0, share=share)
    assert system.exposure_tokens == stock.exposure_tokens == pytest.approx(70_000 * share)


@pytest.mark.parametrize(
    ("tokens", "rate"), [(35_000, 2.6e-4), (70_000, 1.3e-4), (139_000, 6.6e-5)]
)
def test_detectable_event_rate_is_that_of_a_poisson_count(tokens, rate):
    # Five events reject at equal exposure, and P(Poisson(9.15) >= 5) = 0.95. Many short
    # requests make the count of requests with an event Poisson.
    rule = event_rule(tally(0, tokens=tokens), tally(0, tokens=tokens), 0.05)
    found = detectable_event_rate(rule, [tokens / 2000] * 2000)
    assert found == pytest.approx(9.154 / tokens, rel=0.01)
    assert found == pytest.approx(rate, rel=0.03)


def test_few_requests_can_catch_no_event_rate():
    assert rejecting_count(0, 100.0, 100.0, 0.05, 4) is None
    assert detectable_event_rate(event_rule(tally(0), tally(0), 0.05), [1000] * 4) is None


def test_detectable_rate_allows_for_the_spread_of_a_rate_not_yet_seen():
    tokens = np.full(10, 100.0)
    nothing = Counts(np.zeros(10), tokens)
    test = rate_test("pooled", nothing, nothing, alpha=0.05, margin=0.005)
    found = detectable_rate_difference(test)
    se = math.sqrt(found * (1 - found) / 1000)
    assert found == pytest.approx(0.005 + 2 * 1.833 * se, rel=1e-3)
