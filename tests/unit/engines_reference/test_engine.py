"""Speculative outputs equal plain greedy outputs, and rejected branches leave no trace."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from specpilot_cli.engines.base import GenerateRequest
from specpilot_cli.engines.reference.faults import LogitFault
from specpilot_cli.engines.reference.spec import EngineResult, SpecConfig
from specpilot_cli.errors import InputError

# Random weights amplify float32 rounding over eight layers; a stray row changes states by 0.1.
STATE_TOLERANCE = 1e-3

Requests = Callable[..., list[GenerateRequest]]
SPECS = [
    SpecConfig(mode="chain", block=8),
    SpecConfig(mode="tree", block=16, n_nodes=8),
    SpecConfig(mode="tree", block=16, n_nodes=32),
    SpecConfig(mode="tree", block=8, n_nodes=24, scoring="marginal"),
]


def _name(spec: SpecConfig) -> str:
    return f"{spec.mode}-{spec.block}-{spec.drafts}-{spec.scoring}"


@pytest.fixture(scope="module")
def plain(pair: Any, requests_of: Requests) -> list[EngineResult]:
    """Greedy outputs of four prompts without speculation, one at a time."""
    engine = pair.engine("ar", with_drafter=False)
    return engine.generate(requests_of(4), concurrency=1)


def _knowing(pair: Any, plain: list[EngineResult], knowing_drafter: Any) -> Any:
    """An engine whose drafter proposes the true continuation most of the time."""
    engine = pair.engine("chain")
    engine.drafter = knowing_drafter(
        engine.drafter.config, [(*r.prompt_ids, *r.output_ids) for r in plain]
    )
    return engine


def test_outputs_are_not_constant(plain: list[EngineResult]) -> None:
    assert all(len(set(result.output_ids)) > 20 for result in plain)


@pytest.mark.parametrize("concurrency", [1, 4])
@pytest.mark.parametrize("spec", SPECS, ids=_name)
def test_random_drafter_changes_no_token(
    pair: Any, requests_of: Requests, plain: list[EngineResult], spec: SpecConfig, concurrency: int
) -> None:
    engine = pair.engine("chain")
    results = engine.generate(requests_of(4), spec=spec, concurrency=concurrency)
    assert [r.output_ids for r in results] == [r.output_ids for r in plain]


@pytest.mark.parametrize("concurrency", [1, 3])
@pytest.mark.parametrize("spec", SPECS, ids=_name)
def test_accepted_drafts_change_no_token(
    pair: Any, requests_of: Requests, plain: list[EngineResult], knowing_drafter: Any,
    spec: SpecConfig, concurrency: int,
) -> None:  # fmt: skip
    engine = _knowing(pair, plain, knowing_drafter)
    results = engine.generate(requests_of(4), spec=spec, concurrency=concurrency)
    assert [r.output_ids for r in results] == [r.output_ids for r in plain]
    assert sum(r.verify_steps for r in results) < 0.7 * sum(len(r.output_ids) - 1 for r in results)


def test_wider_trees_accept_more(
    pair: Any, requests_of: Requests, plain: list[EngineResult], knowing_drafter: Any
) -> None:
    engine = _knowing(pair, plain, knowing_drafter)
    steps = [
        sum(
            r.verify_steps
            for r in engine.generate(
                requests_of(4), spec=SpecConfig(mode="tree", block=16, n_nodes=nodes)
            )
        )
        for nodes in (2, 8, 32)
    ]
    assert steps[0] > steps[1] > steps[2]


@pytest.mark.parametrize("spec", SPECS, ids=_name)
def test_accept_lengths_add_up_to_the_output(
    pair: Any, requests_of: Requests, plain: list[EngineResult], knowing_drafter: Any,
    spec: SpecConfig,
) -> None:  # fmt: skip
    engine = _knowing(pair, plain, knowing_drafter)
    for result in engine.generate(requests_of(4), spec=spec):
        left = len(result.output_ids) - 1
        for accepted in result.accept_lengths:
            assert 0 <= accepted <= left
            left -= min(accepted + 1, left)
        assert left == 0


def test_output_stops_at_the_budget_inside_an_accepted_run(
    pair: Any, requests_of: Requests, plain: list[EngineResult], knowing_drafter: Any
) -> None:
    for limit in range(1, 12):
        engine = _knowing(pair, plain, knowing_drafter)
        requests = [replace(r, max_new_tokens=limit) for r in requests_of(4)]
        results = engine.generate(requests, spec=SPECS[2])
        assert [r.output_ids for r in results] == [r.output_ids[:limit] for r in plain]
        assert all(r.finish_reason == {"type": "length", "length": limit} for r in results)


@pytest.mark.parametrize("mode", ["ar", "chain", "tree"])
def test_output_ends_with_the_stop_token(
    pair: Any, requests_of: Requests, plain: list[EngineResult], knowing_drafter: Any, mode: str
) -> None:
    engine = _knowing(pair, plain, knowing_drafter)
    stop = plain[0].output_ids[17]
    at = plain[0].output_ids.index(stop)
    engine.model.config = replace(engine.model.config, eos_token_id=stop)
    request = replace(requests_of(1)[0], ignore_eos=False)
    spec = SpecConfig(mode=mode, block=16, n_nodes=32)  # type: ignore[arg-type]
    [result] = engine.generate([request], spec=spec)
    assert result.output_ids == plain[0].output_ids[: at + 1]
    assert result.finish_reason == {"type": "stop", "matched": stop}


def test_a_new_prompt_joins_running_requests(
    pair: Any, requests_of: Requests, plain: list[EngineResult]
) -> None:
    engine = pair.engine("tree", block=16, nodes=8)
    scheduler = engine.scheduler(prefill_rows=7)  # prompts of up to 26 tokens need several chunks
    jobs = [engine.job(request) for request in requests_of(4)]
    finished: dict[str, tuple[int, ...]] = {}
    for step in range(400):
        if step % 5 == 0 and step // 5 < len(jobs):
            scheduler.submit(jobs[step // 5])
        for slot in scheduler.step():
            if slot.finish_reason is not None:
                finished[slot.job.request_id] = tuple(slot.output_ids)
        if len(finished) == len(jobs):
            break
    assert finished == {f"r{i}": result.output_ids for i, result in enumerate(plain)}


def test_an_aborted_request_leaves_the_others_alone(
    pair: Any, requests_of: Requests, plain: list[EngineResult]
) -> None:
    engine = pair.engine("chain")
    scheduler = engine.scheduler(max_running=3)
    for request in requests_of(4):
        scheduler.submit(engine.job(request))
    for _ in range(6):
        scheduler.step()
    assert scheduler.abort("r1")
    assert not scheduler.abort("r1")
    finished = {}
    while not scheduler.idle:
        for slot in scheduler.step():
            if slot.finish_reason is not None:
                finished[slot.job.request_id] = tuple(slot.output_ids)
    assert finished == {name: plain[i].output_ids for name, i in (("r0", 0), ("r2", 2), ("r3", 3))}


@pytest.mark.parametrize("spec", SPECS, ids=_name)
def test_committed_state_equals_the_plain_state(
    pair: Any, requests_of: Requests, plain: list[EngineResult], knowing_drafter: Any,
    spec: SpecConfig,
) -> None:  # fmt: skip
    """After every step: KV, convolution window and recurrent state as if decoded plainly."""
    engine = _knowing(pair, plain, knowing_drafter)
    scheduler = engine.scheduler(spec=spec)
    scheduler.submit(engine.job(requests_of(3)[2]))
    engine.drafter._next = 2
    checked = 0
    while not scheduler.idle:
        for slot in scheduler.step():
            if slot.finish_reason is None:
                _compare_with_prefill(engine, slot)
                checked += 1
    assert checked > 3


def _compare_with_prefill(engine: Any, slot: Any) -> None:
    tokens = [*slot.job.input_ids, *slot.output_ids[:-1]]
    fresh = engine.model.new_state(len(tokens))
    with torch.inference_mode():
        engine.model.prefill(fresh, torch.tensor(tokens))
    assert slot.state.length == len(tokens)
    assert _distance(slot.state, fresh) <= STATE_TOLERANCE


def _distance(mine: Any, theirs: Any) -> float:
    """Largest difference of two states, relative to the largest value of each part."""
    length = theirs.length
    pairs = (
        (mine.kv[:, :, :length], theirs.kv[:, :, :length]),
        (mine.window, theirs.window),
        (mine.recurrent, theirs.recurrent),
    )
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)


def test_the_state_comparison_would_notice_one_stray_row(pair: Any, requests_of: Requests) -> None:
    from specpilot_cli.engines.reference.rows import Segment

    engine = pair.engine("ar", with_drafter=False)
    ids = requests_of(2)[1].input_ids
    with torch.inference_mode():
        states = [engine.model.new_state(64) for _ in range(2)]
        for state in states:
            engine.model.prefill(state, torch.tensor(ids))
        for state, path in zip(states, ([0, 1, 3], [0, 2, 3]), strict=True):
            segment = Segment(state, [5, 9, 11, 12], [-1, 0, 0, 1])
            engine.model.commit(state, engine.model.forward_rows([segment]), 0, path)
    assert states[0].length == states[1].length
    assert _distance(*states) > 30 * STATE_TOLERANCE


def test_verification_alone_changes_no_state(pair: Any, requests_of: Requests) -> None:
    """A pass over tree rows must not touch the committed state, whatever it finds."""
    from specpilot_cli.engines.reference.rows import Segment

    engine = pair.engine("ar", with_drafter=False)
    request = requests_of(1)[0]
    state = engine.model.new_state(64)
    with torch.inference_mode():
        engine.model.prefill(state, torch.tensor(request.input_ids))
        before = [t.clone() for t in (state.kv[:, :, : state.length], state.window)]
        recurrent = state.recurrent.clone()
        engine.model.forward_rows([Segment(state, [5, 9, 11, 12], [-1, 0, 0, 2])])
    assert torch.equal(state.kv[:, :, : state.length], before[0])
    assert torch.equal(state.window, before[1])
    assert torch.equal(state.recurrent, recurrent)


class TestFault:
    """The injected fault is what it says, and nothing before its position."""

    @pytest.mark.parametrize("mode", ["ar", "chain", "tree"])
    @pytest.mark.parametrize("after", [0, 1, 13])
    def test_changes_tokens_only_after_its_position(
        self, pair: Any, requests_of: Requests, plain: list[EngineResult], mode: str, after: int
    ) -> None:
        engine = pair.engine(mode, fault=LogitFault(after=after))
        results = engine.generate(requests_of(4))
        assert [r.output_ids[:after] for r in results] == [r.output_ids[:after] for r in plain]
        assert any(r.output_ids != p.output_ids for r, p in zip(results, plain, strict=True))

    def test_is_the_same_fault_in_every_mode(self, pair: Any, requests_of: Requests) -> None:
        outputs = [
            [r.output_ids for r in pair.engine(mode, fault=LogitFault(5)).generate(requests_of(3))]
            for mode in ("ar", "chain", "tree")
        ]
        assert outputs[0] == outputs[1] == outputs[2]

    def test_prefers_the_biased_ids(self, pair: Any, requests_of: Requests) -> None:
        engine = pair.engine("ar", fault=LogitFault(after=0, bias=1000.0))
        [result] = engine.generate(requests_of(1))
        assert all(token % 7 == 0 for token in result.output_ids)

    def test_does_not_reach_scoring(self, pair: Any) -> None:
        ids = list(range(1, 30))
        honest = pair.engine("ar", with_drafter=False).score(ids)
        faulty = pair.engine("ar", fault=LogitFault(after=0)).score(ids)
        assert honest == faulty


class TestInputs:
    """What the engine refuses, and how it says so."""

    def test_speculation_needs_a_drafter(self, pair: Any) -> None:
        with pytest.raises(InputError, match="needs a drafter"):
            pair.engine("tree", with_drafter=False)

    @pytest.mark.parametrize(
        ("ids", "limit", "message"),
        [
            ((), 4, "no token"),
            ((1, 320), 4, "token id 320"),
            ((1, -3), 4, "token id -3"),
            (tuple([1] * 512), 1, "longer than the model's context length"),
            (tuple([1] * 500), 13, "maximum context length"),
        ],
    )
    def test_bad_prompts(self, pair: Any, ids: tuple[int, ...], limit: int, message: str) -> None:
        engine = pair.engine("ar", with_drafter=False)
        with pytest.raises(InputError, match=message):
            engine.generate([GenerateRequest("x", ids, max_new_tokens=limit)])

    def test_the_longest_request_that_fits_runs(self, pair: Any) -> None:
        engine = pair.engine("tree", block=16, nodes=8)
        request = GenerateRequest("x", tuple([3] * 505), max_new_tokens=7, ignore_eos=True)
        [result] = engine.generate([request])
        assert len(result.output_ids) == 7

    def test_folder_without_tokenizer(self, pair: Any) -> None:
        engine = pair.engine("ar", with_drafter=False)
        engine.target_path = pair.drafter
        with pytest.raises(InputError, match=r"tokenizer\.json"):
            engine.encode("text")
