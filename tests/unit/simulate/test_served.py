"""Steps counted from a server's own numbers, and the components fitted to them."""

from __future__ import annotations

import dataclasses

import pytest

from specpilot_cli.engines.base import Generation
from specpilot_cli.engines.sglang.info import read_facts
from specpilot_cli.errors import InputError, MachineError, MeasurementInvalid
from specpilot_cli.schema.step_profile import DeviceInfo
from specpilot_cli.simulate.costs import StepClock, StepLoad
from specpilot_cli.simulate.fit import StepSample, fit_components
from specpilot_cli.simulate.served import ServedTimes, batch_times, shared_window

GPU = DeviceInfo(name="invented", kind="gpu")


def answer(name: str, tokens: int, steps: int | None) -> Generation:
    return Generation(
        request_id=name, output_ids=tuple(range(tokens)), finish_reason="length", prompt_tokens=10,
        completion_tokens=tokens, verify_steps=steps, submit_s=0, first_byte_s=0, last_byte_s=0,
    )  # fmt: skip


def test_a_lone_plain_request_takes_a_step_per_token() -> None:
    stamps = {"a": [1.0 + 0.01 * step for step in range(41)]}
    found = shared_window([answer("a", 41, None)], stamps)
    assert found.step_s == pytest.approx(0.01)
    assert found.steps == 39  # from the chunk after the first token to the last
    assert found.context_tokens == pytest.approx(10 + 41 * 20.5 / 40)


def test_steps_are_the_servers_count_when_chunks_hold_several() -> None:
    """60 verify passes arrive in 20 chunks: a step takes a third of the time between two."""
    stamps = {"a": [2.0 + 0.03 * chunk for chunk in range(21)]}
    found = shared_window([answer("a", 150, 60)], stamps)
    assert found.step_s == pytest.approx(0.01)


def test_only_the_stretch_in_which_all_decode_counts() -> None:
    """`a` steps alone at 5 ms, waits for the prefill of `b`, then both step at 20 ms; `b` stays."""
    alone = [1.0 + 0.005 * step for step in range(11)]
    both = [1.5 + 0.020 * step for step in range(1, 31)]
    after = [both[-1] + 0.004 * step for step in range(1, 26)]
    stamps = {"a": [*alone, *both], "b": [1.5, *both, *after]}
    found = shared_window([answer("a", 41, 40), answer("b", 90, 55)], stamps)
    assert found.step_s == pytest.approx(0.020)
    assert found.steps == pytest.approx(29)


def test_requests_that_take_turns_are_no_measurement() -> None:
    stamps = {
        "a": [0.01 * step for step in range(30)],
        "b": [1 + 0.01 * step for step in range(30)],
    }
    with pytest.raises(MeasurementInvalid, match="decoded together for 0"):
        shared_window([answer("a", 30, None), answer("b", 30, None)], stamps)


def priced(requests: int, rows: int, block: int, context: float) -> StepSample:
    """1 ms, 0.02 ms a row up to 64 and 0.05 beyond, 0.1 a request, 0.4 + 0.01 a drafted row."""
    total, drafts = requests * rows, requests * block
    ms = 1 + 0.02 * min(total, 64) + 0.05 * max(0, total - 64) + 0.1 * requests
    ms += 0.4 * (drafts > 0) + 0.01 * drafts + 0.0005 * context
    return StepSample(requests, total, drafts, context, ms / 1e3)


SETTINGS = ((1, 0), (8, 8), (16, 16), (32, 16), (32, 8), (4, 8))
SAMPLES = [
    priced(n, rows, block, context)
    for n in (1, 2, 4, 8, 16)
    for rows, block in SETTINGS
    for context in (100.0 * n, 900.0 * n)
]


def test_components_are_found_again() -> None:
    curves, error = fit_components(SAMPLES)
    assert error < 0.005
    slope = {
        c.driver: (c.points[-1].seconds - c.points[0].seconds) / (c.largest - c.points[0].amount)
        for c in curves
        if c.driver != "rows"
    }
    assert slope["context_tokens"] == pytest.approx(5e-7, rel=0.05)
    assert slope["requests"] == pytest.approx(1e-4, rel=0.1)
    assert slope["draft_rows"] == pytest.approx(1e-5, rel=0.1)


@pytest.mark.parametrize("constant_s", [-0.001, 0.0, 0.002])
@pytest.mark.parametrize("rows", [1, 8])
def test_one_setting_alone_makes_a_valid_file(constant_s: float, rows: int) -> None:
    """Steps on a line through the requests, above or below the origin: a step is never free."""
    said = {"model_path": "m", "version": "1", "dtype": "bfloat16"}
    speculative = {"speculative_algorithm": "DFLASH", "speculative_num_draft_tokens": rows}
    facts = read_facts(said | (speculative if rows > 1 else {}))
    block = rows if rows > 1 else 0
    samples = tuple(
        StepSample(n, n * rows, n * block, n * context, constant_s + 0.003 * n)
        for n in (1, 4, 12)
        for context in (64.0, 512.0)
    )
    one = ServedTimes(facts, samples, ((16, 0.002), (64, 0.004)))
    times, error = batch_times([one], name="x", device=GPU, source="a test")
    assert error < 0.01 if constant_s >= 0 else error < 0.2
    assert any(curve.always for curve in times.decode)
    clock = StepClock(times)
    for item in samples:
        load = StepLoad(item.rows, item.requests, item.draft_rows, item.context_tokens)
        assert clock.decode_s(load) == pytest.approx(item.step_s, rel=0.01 + 3 * error)


def test_unmeasured_settings_are_priced_by_the_file() -> None:
    facts = read_facts({"model_path": "/models/big", "version": "0.5.23", "dtype": "bfloat16"})
    one = ServedTimes(facts, tuple(SAMPLES), ((16, 0.002), (64, 0.004)))
    two = ServedTimes(facts, (), ((16, 0.004), (64, 0.006)))
    times, _ = batch_times([one, two], name="x", device=GPU, source="a test")
    assert [p.seconds for p in times.prefill.points] == pytest.approx([0.003, 0.005])
    assert (times.target.name, times.engine.version) == ("big", "0.5.23")
    clock = StepClock(times)
    for load in ((3, 24, 12, 900), (12, 300, 150, 4000), (6, 6, 0, 700)):
        requests, rows, drafts, context = load
        wanted = priced(requests, rows // requests, drafts // requests, context).step_s
        assert clock.decode_s(StepLoad(rows, requests, drafts, context)) == pytest.approx(
            wanted, rel=0.03
        )


def test_servers_of_two_models_are_not_mixed() -> None:
    facts = [read_facts({"model_path": path}) for path in ("/models/a", "/models/b")]
    with pytest.raises(InputError, match="differ in their model"):
        batch_times(
            [ServedTimes(one, tuple(SAMPLES), ((16, 0.002),)) for one in facts],
            name="x", device=GPU, source="a test",
        )  # fmt: skip


def test_a_server_that_hides_its_rows_is_refused() -> None:
    facts = read_facts({"speculative_algorithm": "EAGLE"})
    with pytest.raises(MachineError, match="how many rows"):
        _ = ServedTimes(facts, (), ()).rows
    known = dataclasses.replace(facts, draft_tokens=9)
    assert ServedTimes(known, (), ()).rows == 9
