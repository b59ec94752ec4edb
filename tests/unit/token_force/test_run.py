"""The whole audit in one process, on a language whose truth is known."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest

from specpilot_cli.errors import InputError, MeasurementInvalid
from specpilot_cli.report.json_out import build_envelope, render_json
from specpilot_cli.report.token_force_text import print_result
from specpilot_cli.token_force import TokenForceSettings, run_token_force
from tests.unit.token_force.logit_scorer import LogitScorer

AFTER = 48


@pytest.fixture(scope="module")
def answers(toy, toy_system):
    return {
        "stock": toy.record(toy_system(1)),
        "ar": toy.record(toy_system(2)),
        "lossless": toy.record(toy_system(3)),
        "near ties only": toy.record(toy_system(4, noise=0.006)),
        "faulty": toy.record(toy_system(3, bias=2.0, after=AFTER)),
    }


@pytest.fixture
def judge(toy, answers):
    def run(name, **settings):
        return run_token_force(
            answers[name],
            answers["stock"],
            answers["ar"],
            toy.scorer,
            settings=TokenForceSettings(**settings),
        )

    return run


@pytest.mark.parametrize("name", ["stock", "lossless", "near ties only"])
def test_a_lossless_system_is_accepted(judge, name):
    result = judge(name)
    assert result.verdict == "accept"
    assert result.reasons == ()
    assert result.system.n_tokens == 24 * 96


def test_the_papers_fault_is_rejected_by_both_rules(judge):
    result = judge("faulty", split_position=AFTER)
    assert result.verdict == "reject"
    assert result.events.rejects
    by_stratum = {test.stratum: test for test in result.rate.tests}
    assert by_stratum["late"].rejects
    assert not by_stratum["early"].rejects
    assert min(item.audited.event.position for item in result.worst) >= AFTER
    assert all(item.audited.event.token_id % 7 == 0 for item in result.worst)


def test_at_most_the_limit_is_audited(judge):
    events = judge("faulty", audit_limit=30).events
    assert events.system.n_large > 200
    assert events.system.n_audited == events.system.n_tested == 30
    assert events.rejects


def test_margins_of_the_fault_are_at_most_its_bias(judge):
    worst = judge("faulty").worst
    assert 1.5 < worst[0].audited.event.margin_nats < 2.0 + 0.1


def test_live_stock_is_asked_at_the_events_prefixes_and_does_not_excuse_a_fault(
    toy, toy_system, answers
):
    class Probe:
        def generate_many(self, requests, *, concurrency):
            from specpilot_cli.engines.base import Generation

            stock = toy_system(1)
            replies = []
            for request in requests:
                ids = tuple(stock.continue_(request.input_ids, request.max_new_tokens))
                replies.append(
                    Generation(request.request_id, ids, "length", 1, len(ids), None, 0, 1, 2)
                )
            return replies

    result = run_token_force(
        answers["faulty"], answers["stock"], answers["ar"], toy.scorer, probe=Probe()
    )
    assert result.verdict == "reject"
    assert result.audit_clauses == ("record", "prefill_length", "path", "margin")
    assert result.events.system.n_unexplained == result.events.system.n_audited


def test_a_scorer_of_another_model_gives_no_verdict(toy, answers):
    other = LogitScorer(lambda prefix: -toy.scorer.logits(prefix))
    result = run_token_force(
        answers["lossless"],
        answers["stock"],
        None,
        other,
        settings=TokenForceSettings(delta_nats=0.25),
    )
    assert result.verdict == "invalid"
    assert "disagrees with stock itself" in result.reasons[0]


def test_too_few_requests_give_no_verdict(toy, answers):
    with pytest.raises(MeasurementInvalid, match="7 requests"):
        run_token_force(answers["lossless"][:7], answers["stock"], answers["ar"], toy.scorer)


def test_without_ar_delta_must_be_given(toy, answers):
    with pytest.raises(InputError, match="delta"):
        run_token_force(answers["lossless"], answers["stock"], None, toy.scorer)


def changed(record, **fields):
    return record.model_copy(update=fields)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"request_id": "other"}, "no answer to request"),
        ({"prompt_ids": (1, 2)}, "different prompt ids"),
        ({"max_new_tokens": 5}, "limited to"),
    ],
)
def test_answers_that_do_not_belong_together_are_refused(toy, answers, change, message):
    system = [changed(answers["lossless"][0], **change), *answers["lossless"][1:]]
    with pytest.raises(InputError, match=message):
        run_token_force(system, answers["stock"], answers["ar"], toy.scorer)


def test_a_repeated_request_is_refused(toy, answers):
    twice = [*answers["lossless"], answers["lossless"][0]]
    with pytest.raises(InputError, match="occurs twice"):
        run_token_force(twice, answers["stock"], answers["ar"], toy.scorer)


def test_answers_cut_short_are_pointed_out(toy, answers):
    cut = [
        changed(record, output_ids=record.output_ids[:60], finish_reason="stop")
        for record in answers["lossless"]
    ]
    result = run_token_force(cut, answers["stock"], answers["ar"], toy.scorer)
    assert any("cut short" in warning for warning in result.warnings)


def test_the_order_of_requests_does_not_matter(toy, answers, judge):
    shuffled = [answers["stock"][i] for i in np.random.default_rng(0).permutation(24)]
    result = run_token_force(answers["lossless"], shuffled, answers["ar"], toy.scorer)
    assert result.rate.tests == judge("lossless").rate.tests


def test_the_json_form_is_strict_and_complete(judge):
    for name in ("lossless", "faulty"):
        result = judge(name)
        document = json.loads(
            render_json(build_envelope("token-force", result.to_json(), verdict=result.verdict))
        )
        found = document["results"]
        assert document["verdict"] == result.verdict
        assert found["threshold"]["delta_nats"] == result.threshold.delta_nats
        assert found["system"]["mismatch_rate_pct"] == pytest.approx(100 * result.system.rate)
        assert found["rate_rule"]["rejects"] is result.rate.rejects
        assert found["event_rule"]["p_value"] == pytest.approx(result.events.p_value)
        explained = found["event_rule"]["system"]["explanations"]
        assert sum(explained.values()) == found["event_rule"]["system"]["n_audited"]
        assert found["smallest_fault_caught"]["rate_difference_pct"] > 0.5


def test_a_delta_that_nothing_was_seen_to_need_is_noted_not_warned_of(
    toy, answers, capsys: pytest.CaptureFixture[str]
):
    same = answers["stock"]
    result = run_token_force(answers["lossless"], same, same, toy.scorer)
    assert (result.threshold.delta_nats, result.threshold.departures) == (0.125, ())
    assert not any("delta" in warning for warning in result.warnings)
    note = "stock departed from AR on none of 24 prompts"
    assert result.to_json()["threshold"]["note"].startswith(note)
    print_result(result)
    assert note in capsys.readouterr().out


def test_a_fault_as_small_as_promised_is_caught_about_as_often_as_promised(toy, answers):
    """Plant unexplained events at the detectable rate and count rejections."""
    baseline = run_token_force(answers["lossless"], answers["stock"], answers["ar"], toy.scorer)
    rate = baseline.detectable_event_rate
    assert rate is not None
    rng = np.random.default_rng(0)
    rejected = 0
    n_audits = 60
    for _ in range(n_audits):
        planted = rng.random((24, 96)) < rate
        hits = int(planted.any(axis=1).sum())
        tally = replace(baseline.events.system, n_test_requests=hits)
        rejected += replace(
            baseline.events, system=tally, p_value=_p(tally, baseline.events.stock)
        ).rejects
    assert rejected / n_audits > 0.95 - 3 * math.sqrt(0.95 * 0.05 / n_audits)


def _p(system, stock):
    from specpilot_cli.token_force.rules import event_rule

    return event_rule(system, stock, 0.05).p_value
