"""The benchmark as a whole, on engines in virtual time."""

from __future__ import annotations

import dataclasses
import math
import random
from typing import Any

import pytest
from virtual_engines import FakeClock, FakeEngine, constant, prompts, same_outputs

from specpilot_cli.engines.base import GenerateRequest, Generation
from specpilot_cli.errors import InputError, MachineError, MeasurementInvalid
from specpilot_cli.paired_bench import schedule
from specpilot_cli.paired_bench.run import run_paired_bench
from specpilot_cli.paired_bench.types import PairedBenchResult, PairedBenchSettings

ONE_AA = PairedBenchSettings(aa_sessions=1)


def bench(
    baseline: FakeEngine, candidate: FakeEngine, settings: PairedBenchSettings = ONE_AA,
    **more: Any,
) -> PairedBenchResult:  # fmt: skip
    clock = baseline.clock
    systems = {"baseline": baseline, "candidate": candidate, **more}
    return run_paired_bench(
        systems, prompts(), settings=settings, clock=clock, cpu_clock=lambda: 0.0
    )


def pair(baseline_rate: Any, candidate_rate: Any, **candidate: Any) -> PairedBenchResult:
    clock = FakeClock()
    return bench(FakeEngine(clock, baseline_rate), FakeEngine(clock, candidate_rate, **candidate))


def other_outputs(request: GenerateRequest) -> tuple[int, ...]:
    return (*same_outputs(request)[:-1], 998)


def test_a_true_slowdown_of_5_percent_is_found_and_not_promoted() -> None:
    result = pair(constant(100.0), constant(95.0))
    assert result.verdict == "no"
    assert result.summary.gain is not None
    assert result.summary.gain.high_ratio == pytest.approx(0.95)
    assert result.summary.gain.low_ratio == pytest.approx(0.95)


def test_an_equal_pair_is_not_promoted() -> None:
    result = pair(constant(100.0), constant(100.0))
    assert result.verdict == "no"
    assert result.summary.gain is not None
    assert result.summary.gain.gain_ratio == pytest.approx(1.0)


def test_a_gain_above_the_bound_is_promoted_with_its_numbers() -> None:
    result = pair(constant(100.0), constant(105.0))
    assert result.verdict == "promote"
    decision = result.summary.decision
    assert decision is not None
    assert decision.bound_ratio == pytest.approx(1.01)
    assert decision.lower_bound_ratio == pytest.approx(1.05)
    assert "1.0500× exceeds 1.0100×" in decision.reason


@pytest.mark.parametrize(
    ("outputs", "verdict", "bound"),
    [(same_outputs, "promote", 1.01), (other_outputs, "no", 1.03)],
    ids=["identical", "one-token-differs"],
)
def test_other_output_tokens_raise_the_bound(outputs: Any, verdict: str, bound: float) -> None:
    result = pair(constant(100.0), constant(102.0), outputs=outputs)
    assert result.verdict == verdict
    assert result.summary.decision is not None
    assert result.summary.decision.bound_ratio == pytest.approx(bound)


def test_every_benchmark_weighs_the_same() -> None:
    clock = FakeClock()
    fast_on_code = FakeEngine(
        clock, lambda t, request: 121.0 if request.request_id.startswith("code") else 100.0
    )
    result = bench(FakeEngine(clock, constant(100.0)), fast_on_code)
    gains = {b.name: b.gain.gain_ratio for b in result.summary.benchmarks}
    assert gains == {"chat": pytest.approx(1.0), "code": pytest.approx(1.21)}
    assert result.summary.gain is not None
    assert result.summary.gain.gain_ratio == pytest.approx(1.1)


def slowing_down(t: float, request: GenerateRequest) -> float:
    """A machine that heats up: the log rate falls linearly with time."""
    return 100.0 * math.exp(-0.002 * (t - 100.0))


def test_alternating_order_cancels_a_drift_that_a_fixed_order_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    alternating = pair(slowing_down, slowing_down)
    monkeypatch.setattr(schedule, "system_order", lambda systems, turn, *, swapped: tuple(systems))
    fixed = pair(slowing_down, slowing_down)
    assert alternating.summary.gain is not None
    assert fixed.summary.gain is not None
    # The second place is served about 0.3 s later, at 0.2 % per second.
    assert fixed.summary.gain.log_gain == pytest.approx(-0.002 * 0.31, rel=0.1)
    assert abs(alternating.summary.gain.log_gain) < abs(fixed.summary.gain.log_gain) / 50
    assert fixed.summary.noise is not None
    assert fixed.summary.noise.nu_log > 5e-4


def test_the_order_is_swapped_in_the_second_run() -> None:
    result = pair(constant(100.0), constant(100.0))
    place = {
        (row.run, row.system, row.request_id): row.position
        for row in result.rows
        if row.session == "ab"
    }
    assert len(place) == 2 * 2 * len(result.summary.requests)
    for (run, system, request), position in place.items():
        assert place[1 - run, system, request] == 1 - position


def test_one_system_works_at_a_time_also_with_many_in_flight() -> None:
    clock = FakeClock()
    a, b = FakeEngine(clock, constant(100.0)), FakeEngine(clock, constant(130.0))
    result = bench(a, b, PairedBenchSettings(aa_sessions=1, batches=(3,)))
    assert (a.in_flight, b.in_flight) == (3, 3)
    assert result.verdict == "promote"
    for start, end in a.intervals:
        assert all(end <= s + 1e-9 or e <= start + 1e-9 for s, e in b.intervals)


def test_ar_joins_as_third_system_and_gives_speedups_of_both() -> None:
    clock = FakeClock()
    ar = FakeEngine(clock, constant(25.0), tokens_per_step=None)
    result = bench(FakeEngine(clock, constant(100.0)), FakeEngine(clock, constant(150.0)), ar=ar)
    speedups = {s.system: s.overall.gain_ratio for s in result.summary.over_ar}
    assert speedups == {"baseline": pytest.approx(4.0), "candidate": pytest.approx(6.0)}
    assert len(ar.served) == 2 + 2 * len(result.summary.requests)  # warm-up, then two runs
    assert next(s.tau for s in result.summary.systems if s.name == "ar") is None


def test_rates_latencies_and_tau_come_from_the_answers() -> None:
    result = pair(constant(100.0), constant(100.0), tokens_per_step=5)
    system = next(s for s in result.summary.systems if s.name == "candidate")
    assert system.rate_tok_per_s == pytest.approx(100.0)
    assert system.ttft_p50_s == pytest.approx(0.01)
    assert system.inter_token_p50_s == pytest.approx((0.31 - 0.01) / 30)
    assert system.decode_rate_tok_per_s == pytest.approx(30 / (0.31 - 0.01))
    assert system.tau == pytest.approx(30 / 6)  # the first of 31 tokens comes from prefill
    assert system.verify_steps == 6 * 2 * len(result.summary.requests)


def test_noise_is_measured_on_the_baseline_alone_and_widens_the_bound() -> None:
    clock, rng = FakeClock(), random.Random(3)
    noisy = FakeEngine(clock, lambda t, request: 100.0 * math.exp(rng.gauss(0.0, 0.02)))
    result = bench(noisy, noisy, PairedBenchSettings(aa_sessions=3))
    noise, decision = result.summary.noise, result.summary.decision
    assert noise is not None
    assert decision is not None
    assert [s.name for s in noise.sessions] == ["aa1", "aa2", "aa3"]
    assert noise.nu_log == pytest.approx(
        math.sqrt(sum(math.log(s.gain_ratio) ** 2 for s in noise.sessions) / 3)
    )
    assert decision.bound_ratio == pytest.approx(1.01 + 2 * noise.nu_log)
    assert noise.sigma_log == pytest.approx(0.02, rel=0.3)  # sd over two runs of a ratio of two
    assert not noise.provisional


def test_one_aa_session_is_called_provisional_and_shares_the_launch() -> None:
    result = pair(constant(100.0), constant(105.0))
    assert result.summary.noise is not None
    assert result.summary.noise.provisional
    assert result.summary.noise.same_launch
    assert any("rests on 1 session" in text for text in result.summary.warnings)


def test_a_second_baseline_launch_brings_its_difference_into_the_noise() -> None:
    clock = FakeClock()
    systems = [FakeEngine(clock, constant(rate)) for rate in (100.0, 104.5, 102.0)]
    result = bench(systems[0], systems[1], baseline_again=systems[2])
    assert result.summary.noise is not None
    assert not result.summary.noise.same_launch
    assert result.summary.noise.nu_log == pytest.approx(math.log(1.02))
    assert result.verdict == "no"  # 1.045 does not clear 1 + 1 % + 2 x 1.98 %


def test_a_second_baseline_with_other_settings_is_refused() -> None:
    clock = FakeClock()
    engines = [FakeEngine(clock, constant(100.0)) for _ in range(3)]
    engines[2].info = {"version": "fake", "port": 2, "dtype": "float16"}
    with pytest.raises(InputError, match="other settings: dtype"):
        bench(engines[0], engines[1], baseline_again=engines[2])


def test_warm_up_prompts_are_never_timed_and_no_prompt_meets_a_warm_cache() -> None:
    """The fake refuses a prompt that its cache still holds, so a missing flush is an error."""
    clock = FakeClock()
    a, b = FakeEngine(clock, constant(100.0)), FakeEngine(clock, constant(100.0))
    result = bench(a, b, PairedBenchSettings(aa_sessions=1, warmup=3))
    assert result.verdict == "no"
    timed = {row.request_id for row in result.rows}
    assert not set(a.served[:3]) & timed
    assert b.served[:3] == a.served[:3]
    assert len(timed) == 13


def test_limit_keeps_the_first_prompts_and_warms_up_with_the_rest() -> None:
    clock = FakeClock()
    a = FakeEngine(clock, constant(100.0))
    result = bench(
        a, FakeEngine(clock, constant(100.0)), PairedBenchSettings(aa_sessions=1, limit=3)
    )
    assert {row.request_id for row in result.rows} == {
        f"{name}-{i}" for name in ("chat", "code") for i in range(3)
    }
    assert a.served[:2] == ["chat-3", "code-3"]


def abort(answer: Generation) -> Generation:
    return dataclasses.replace(answer, finish_reason="abort")


def lose_prompt_tokens(answer: Generation) -> Generation:
    return dataclasses.replace(answer, prompt_tokens=1)


def go_back_in_time(answer: Generation) -> Generation:
    return dataclasses.replace(answer, first_byte_s=answer.submit_s - 1)


def stop_short(answer: Generation) -> Generation:
    ids = answer.output_ids[:-1]
    return dataclasses.replace(answer, output_ids=ids, completion_tokens=len(ids))


@pytest.mark.parametrize(
    ("alter", "words"),
    [
        (abort, "finish reason `abort`"),
        (lose_prompt_tokens, "read 1 prompt tokens of 3 sent"),
        (go_back_in_time, "not finite and in order"),
        (stop_short, "stopped for length after 30 of 31"),
    ],
)
def test_one_bad_answer_ends_it_without_a_verdict(alter: Any, words: str) -> None:
    clock = FakeClock()
    candidate = FakeEngine(clock, constant(200.0))
    candidate.alter = lambda answer: (
        alter(answer) if answer.request_id == "code-3" and clock.now_s > 105 else answer
    )
    result = bench(FakeEngine(clock, constant(100.0)), candidate)
    assert result.verdict == "invalid"
    assert words in result.summary.reasons[0]
    assert "candidate" in result.summary.reasons[0]
    assert result.summary.gain is None


@pytest.mark.parametrize("error", [MeasurementInvalid("broken stream"), MachineError("gone")])
def test_a_failed_request_is_not_tried_again(error: Exception) -> None:
    clock = FakeClock()
    candidate = FakeEngine(clock, constant(200.0))

    def fail_once(request: GenerateRequest) -> None:
        if request.request_id == "chat-2" and "chat-2" not in asked:
            asked.append(request.request_id)
            raise error

    asked: list[str] = []
    candidate.before = fail_once
    result = bench(FakeEngine(clock, constant(100.0)), candidate)
    assert asked == ["chat-2"]
    assert "chat-2" not in candidate.served
    assert result.verdict == "invalid"
    assert str(error) in result.summary.reasons[0]


def test_a_server_that_is_not_there_is_an_error_not_a_measurement() -> None:
    class Absent(FakeEngine):
        def health(self) -> None:
            raise MachineError("no server answers")

    clock = FakeClock()
    with pytest.raises(MachineError, match="no server answers"):
        bench(FakeEngine(clock, constant(1.0)), Absent(clock, constant(1.0)))


@pytest.mark.parametrize(
    ("systems", "words"),
    [(("baseline",), "missing: candidate"), (("baseline", "candidate", "best"), "unknown: best")],
)
def test_systems_are_named(systems: tuple[str, ...], words: str) -> None:
    engine = FakeEngine(FakeClock(), constant(1.0))
    with pytest.raises(InputError, match=words):
        run_paired_bench(dict.fromkeys(systems, engine), prompts())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"runs": 3}, "runs must be even"),
        ({"runs": 0}, "runs must be even"),
        ({"aa_sessions": -1}, "A/A sessions cannot be -1"),
        ({"batches": (0,)}, "batch must be at least 1"),
        ({"limit": 1}, "limit must be at least 2"),
    ],
)
def test_settings_that_cannot_be_measured_are_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        PairedBenchSettings(**change)


def test_too_few_prompts_for_warm_up_are_refused_before_anything_runs() -> None:
    clock = FakeClock()
    engine = FakeEngine(clock, constant(1.0))
    with pytest.raises(InputError, match="warm-up and two timed ones"):
        run_paired_bench(
            {"baseline": engine, "candidate": engine}, prompts(2), settings=ONE_AA, clock=clock
        )
    assert engine.served == []


def test_a_faulty_or_paced_server_is_named_in_the_result() -> None:
    clock = FakeClock()
    candidate = FakeEngine(clock, constant(120.0))
    candidate.info = {"internal_states": [{"specpilot": {"fault": {"bias": 2.0}, "paced": True}}]}
    summary = bench(FakeEngine(clock, constant(100.0)), candidate).summary
    assert "candidate runs with an injected fault" in summary.warnings
    assert summary.paced == ("candidate",)


def test_secrets_and_non_numbers_of_a_server_are_not_recorded() -> None:
    clock = FakeClock()
    baseline = FakeEngine(clock, constant(100.0))
    baseline.info = {"api_key": "sk-1", "admin_api_key": None, "rate": math.nan, "tp_size": 1}
    result = bench(baseline, FakeEngine(clock, constant(100.0)))
    recorded = result.summary.environment["server_info"]["baseline"]
    assert recorded == {"api_key": "(hidden)", "admin_api_key": None, "rate": None, "tp_size": 1}
