"""Dense recordings hold what a live engine would have drafted, and replay to what it accepts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specpilot_cli.engines.base import GenerateRequest
from specpilot_cli.engines.reference.decode import Draft
from specpilot_cli.engines.reference.near_ties import (
    StepTracer,
    edge_rounding,
    marginal_rounding,
    trace_differences,
)
from specpilot_cli.engines.reference.record import Recorded, record_dense
from specpilot_cli.engines.reference.spec import SpecConfig
from specpilot_cli.errors import InputError
from specpilot_cli.io.lattice_file import read_lattice, write_lattice
from specpilot_cli.schema.prompts import Prompt
from specpilot_kernels.trees import accepted_nodes, best_first, chain

BLOCK = 16
LATTICE_TOLERANCE = 5e-3
TEXTS = ["def f(x):", "Once upon a time", "1. apples\n2. pears", "Q: why?"]
PROMPTS = [
    Prompt(request_id=f"p{i}", benchmark="code" if i % 2 else "prose", text=t, max_new_tokens=36)
    for i, t in enumerate(TEXTS)
]
SPECS = [
    SpecConfig(mode="chain", block=BLOCK),
    SpecConfig(mode="tree", block=BLOCK, n_nodes=8),
    SpecConfig(mode="tree", block=BLOCK, n_nodes=16),
    SpecConfig(mode="tree", block=BLOCK, n_nodes=32),
    SpecConfig(mode="tree", block=BLOCK, n_nodes=16, scoring="marginal"),
]


def _name(spec: SpecConfig) -> str:
    return f"{spec.mode}-{spec.drafts}-{spec.scoring}"


@pytest.fixture(scope="module")
def engine(pair: Any) -> Any:
    """An engine with the random drafter."""
    engine = pair.engine("chain", block=BLOCK)
    # the end token would cut some outputs short by chance
    engine.model.config = replace(engine.model.config, eos_token_id=319)
    return engine


@pytest.fixture(scope="module")
def recorded(engine: Any) -> Recorded:
    """A dense recording of the random pair."""
    return record_dense(engine, PROMPTS, BLOCK, concurrency=2)


@pytest.fixture
def knowing(pair: Any, knowing_drafter: Any) -> Any:
    """An engine whose drafter often proposes the truth, with lattices free of rounding."""
    engine = pair.engine("chain", block=BLOCK)
    engine.model.config = replace(engine.model.config, eos_token_id=319)
    outputs = engine.generate(_requests(engine), spec=SpecConfig())
    sequences = [(*r.prompt_ids, *r.output_ids) for r in outputs]
    engine.drafter = knowing_drafter(engine.drafter.config, sequences)
    return engine


def _requests(engine: Any) -> list[GenerateRequest]:
    return [GenerateRequest(p.request_id, engine.encode(p.text), p.max_new_tokens) for p in PROMPTS]


def _trace(
    engine: Any, spec: SpecConfig, recorded: Recorded, concurrency: int = 1, **limits: float
) -> Any:
    tracer = StepTracer()
    results = engine.generate(
        _requests(engine), spec=spec, observer=tracer, concurrency=concurrency
    )
    differences = trace_differences(engine, spec, results, tracer, recorded.recording, **limits)
    return results, tracer, differences


def test_outputs_are_the_greedy_ones(engine: Any, recorded: Recorded) -> None:
    results = engine.generate(_requests(engine), spec=SpecConfig(), concurrency=1)
    assert [record.output_ids for record in recorded.outputs] == [r.output_ids for r in results]
    assert [record.benchmark for record in recorded.outputs] == ["prose", "code"] * 2


def test_has_a_lattice_at_every_output_position(recorded: Recorded) -> None:
    recording = recorded.recording
    assert recording.n_steps == sum(len(record.output_ids) - 1 for record in recorded.outputs)
    assert recording.n_positions == BLOCK - 1
    for step in (0, 17, recording.n_steps - 1):
        path = chain(recording.candidate_ids[step], recording.edge[step])
        assert recording.stock_choice[step].tolist() == path.token.tolist()


def test_file_round_trip(recorded: Recorded, tmp_path: Path) -> None:
    write_lattice(tmp_path / "lattice.safetensors", recorded.recording)
    again = read_lattice(tmp_path / "lattice.safetensors")
    assert again.metadata == recorded.recording.metadata
    for name, array in recorded.recording.tensors().items():
        assert np.array_equal(again.tensors()[name], array), name


def test_lattices_equal_the_live_ones(engine: Any, recorded: Recorded) -> None:
    """Same candidates and scores as drafted step by step, up to rounding."""
    _, tracer, _ = _trace(engine, SPECS[2], recorded)
    recording = recorded.recording
    compared = 0
    for index in range(recording.n_requests):
        first = int(np.searchsorted(recording.step_request, index))
        for step in tracer.steps[str(index)]:
            at = first + step.position
            dense = Draft(
                recording.candidate_ids[at],
                recording.edge[at],
                recording.unary[at],
                recording.unary_logsumexp[at],
            )
            shared = [
                len(set(mine) & set(theirs))
                for mine, theirs in zip(
                    step.draft.candidate_ids.tolist(), dense.candidate_ids.tolist(), strict=True
                )
            ]
            assert min(shared) >= 15  # the last of 16 may be a near-tie
            assert edge_rounding(step.draft, dense) < LATTICE_TOLERANCE
            assert marginal_rounding(step.draft, dense) < LATTICE_TOLERANCE
            compared += 1
    assert compared > 80


@pytest.mark.parametrize("concurrency", [1, 4])
@pytest.mark.parametrize("spec", SPECS, ids=_name)
def test_live_acceptance_equals_replay_of_the_random_pair(
    engine: Any, recorded: Recorded, spec: SpecConfig, concurrency: int
) -> None:
    _, tracer, differences = _trace(engine, spec, recorded, concurrency)
    assert sum(len(steps) for steps in tracer.steps.values()) > 100
    assert all(difference.explained for difference in differences)
    assert len(differences) <= 2


@pytest.mark.parametrize("spec", SPECS, ids=_name)
def test_live_acceptance_equals_replay_step_by_step(knowing: Any, spec: SpecConfig) -> None:
    """The whole trajectory: same anchors, same accepted lengths, no tolerance needed."""
    recorded = record_dense(knowing, PROMPTS, BLOCK)
    results, _, differences = _trace(knowing, spec, recorded)
    assert differences == []
    recording = recorded.recording
    for index, result in enumerate(results):
        assert list(result.accept_lengths) == _replay(recording, index, spec)
    steps = sum(result.verify_steps for result in results)
    assert (sum(len(r.output_ids) for r in results) - len(results)) / steps > 1.5


def _replay(recording: Any, index: int, spec: SpecConfig) -> list[int]:
    """Trajectory replay, written independently of the package's own."""
    output = recording.output(index)
    first = int(np.searchsorted(recording.step_request, index))
    position, lengths = 0, []
    while position < len(output) - 1:
        step = first + position
        ids, edge = recording.candidate_ids[step], recording.edge[step]
        if spec.mode == "chain":
            tree = chain(ids, edge)
        else:
            if spec.scoring == "marginal":
                norm = recording.unary_logsumexp[step][:, None]
                edge = (recording.unary[step] - norm)[:, None, :]
            tree = best_first(ids, edge, spec.n_nodes)
        accepted = len(accepted_nodes(tree, output[position + 1 :]))
        lengths.append(accepted)
        position += min(accepted + 1, len(output) - 1 - position)
    return lengths


class TestTracing:
    """Differences are found, and only near-ties are called explained."""

    SPEC = SpecConfig(mode="tree", block=BLOCK, n_nodes=8)

    def _with(self, recorded: Recorded, **arrays: Any) -> Recorded:
        return replace(recorded, recording=replace(recorded.recording, **arrays))

    def test_rounding_sized_noise_is_explained(self, knowing: Any) -> None:
        recorded = record_dense(knowing, PROMPTS, BLOCK)
        rng = np.random.default_rng(0)
        edge = recorded.recording.edge
        found = []
        for _ in range(20):
            noise = rng.uniform(-0.05, 0.05, edge.shape).astype(np.float32)
            noise[:, 0] = noise[:, 0, :1]
            noisy = self._with(recorded, edge=edge + noise)
            _, _, differences = _trace(knowing, self.SPEC, noisy, max_rounding_nats=0.05)
            found += differences
        assert found
        assert all(d.choice == "tree membership" and d.explained for d in found)

    def test_another_request_s_lattices_are_not_explained(self, knowing: Any) -> None:
        recorded = record_dense(knowing, PROMPTS, BLOCK)
        shifted = {
            name: np.roll(getattr(recorded.recording, name), 5, axis=0)
            for name in ("candidate_ids", "edge", "unary", "unary_logsumexp")
        }
        _, _, differences = _trace(knowing, self.SPEC, self._with(recorded, **shifted))
        assert len(differences) > 10
        assert not any(d.explained for d in differences)

    def test_a_wrong_output_token_is_not_explained(self, knowing: Any) -> None:
        recorded = record_dense(knowing, PROMPTS, BLOCK)
        output_ids = recorded.recording.output_ids.copy()
        output_ids[11] = (output_ids[11] + 7) % 300
        _, _, differences = _trace(knowing, self.SPEC, self._with(recorded, output_ids=output_ids))
        [difference] = [d for d in differences if d.choice == "target argmax"]
        assert difference.position == 11
        assert not difference.explained


class TestRefusals:
    """What cannot be recorded."""

    def test_no_drafter(self, pair: Any) -> None:
        with pytest.raises(InputError, match="needs a drafter"):
            record_dense(pair.engine("ar", with_drafter=False), PROMPTS, BLOCK)

    def test_no_prompt(self, engine: Any) -> None:
        with pytest.raises(InputError, match="no prompt"):
            record_dense(engine, [], BLOCK)

    def test_block_of_one(self, engine: Any) -> None:
        with pytest.raises(InputError, match="block"):
            record_dense(engine, PROMPTS, 1)

    def test_an_output_of_one_token_has_no_lattice(self, engine: Any) -> None:
        short = [PROMPTS[0].model_copy(update={"max_new_tokens": 1}), PROMPTS[1]]
        recording = record_dense(engine, short, BLOCK).recording
        assert recording.n_steps == 35
        assert set(recording.step_request.tolist()) == {1}
