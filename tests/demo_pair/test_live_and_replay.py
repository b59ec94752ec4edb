"""Live decoding on the shipped pair: equal to replay, step by step, and equal at any concurrency.

A live step and a recording compute one lattice in batches of other shapes, so scores differ by
rounding. Every difference is traced to the choice that flipped and how nearly it was tied; on these
prompts rounding stays below 1e-3 nats, and nothing above it passes as a tie.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest

from specpilot_cli.engines.reference.decode import Draft
from specpilot_cli.engines.reference.engine import ReferenceEngine
from specpilot_cli.engines.reference.near_ties import (
    Difference,
    StepTracer,
    edge_rounding,
    trace_differences,
)
from specpilot_cli.engines.reference.record import Recorded, record_dense
from specpilot_cli.engines.reference.spec import EngineResult, SpecConfig
from specpilot_cli.replay.run import replay_accept_lengths
from specpilot_cli.schema.outputs import OutputRecord

pytestmark = pytest.mark.slow

PROMPTS = 16  # the first two unseen prompts of every kind
ONE_BY_ONE = 8  # of these, decoded alone too
ROUNDING_NATS = 1e-3
MOST_TRACED = 2  # differences among the steps of 16 prompts; 0 or 1 were seen
SPECS = [
    SpecConfig("chain", 8),
    *(SpecConfig("tree", 16, nodes) for nodes in (8, 16, 32)),
]
RUNS = [(spec, concurrency) for spec in SPECS for concurrency in (1, 4)]
RUNS.append((SpecConfig("chain", 16), 1))  # the chain of the trees' own lattices


def _name(value: Any) -> str:
    return f"{value.mode}-{value.drafts}" if isinstance(value, SpecConfig) else f"{value}-at-once"


@dataclass(frozen=True)
class Live:
    """One live run and what sets it apart from the recording."""

    results: list[EngineResult]
    tracer: StepTracer
    differences: list[Difference]

    @property
    def steps(self) -> int:
        return sum(result.verify_steps for result in self.results)


Runs = Callable[[SpecConfig, int], Live]


@pytest.fixture(scope="module")
def recordings(engine: ReferenceEngine, demo: Any) -> dict[int, Recorded]:
    """Dense recordings of the same prompts, by draft block."""
    prompts = demo.prompts("unseen", PROMPTS)
    return {block: record_dense(engine, prompts, block) for block in (8, 16)}


@pytest.fixture(scope="module")
def live(engine: ReferenceEngine, demo: Any, requests_for: Any, recordings: Any) -> Runs:
    """Runs the prompts live, each setting once; slow settings take the first of them only."""
    requests = requests_for(demo.prompts("unseen", PROMPTS))

    @cache
    def run(spec: SpecConfig, concurrency: int) -> Live:
        tracer = StepTracer()
        results = engine.generate(
            requests[:ONE_BY_ONE] if concurrency == 1 or spec.mode == "ar" else requests,
            spec=spec,
            observer=tracer,
            concurrency=concurrency,
        )
        recording = recordings[16 if spec.mode == "ar" else spec.block].recording
        differences = trace_differences(
            engine, spec, results, tracer, recording, max_rounding_nats=ROUNDING_NATS
        )
        return Live(results, tracer, differences)

    return run


def _committed(result: EngineResult) -> list[int]:
    """Tokens each step added: accepted drafts and bonus, cut at the end of the output."""
    left, committed = len(result.output_ids) - 1, []
    for accepted in result.accept_lengths:
        committed.append(min(accepted + 1, left))
        left -= committed[-1]
    return committed


@pytest.mark.parametrize(("spec", "concurrency"), RUNS, ids=_name)
def test_every_step_accepts_what_replay_accepts(
    live: Runs, recordings: dict[int, Recorded], spec: SpecConfig, concurrency: int
) -> None:
    run = live(spec, concurrency)
    assert [d for d in run.differences if not d.explained] == []
    assert len(run.differences) <= MOST_TRACED
    differing = {difference.request_id for difference in run.differences}
    policy = "chain" if spec.mode == "chain" else "best-first"
    replayed = replay_accept_lengths(recordings[spec.block].recording, policy, spec.drafts)
    compared = 0
    for result, lengths in zip(run.results, replayed, strict=False):
        if result.request_id not in differing:
            assert _committed(result) == lengths.tolist(), result.request_id
            compared += len(lengths)
    assert len({result.request_id for result in run.results}) == len(run.results)
    assert compared > 12 * (len(run.results) - MOST_TRACED)
    assert (sum(len(r.output_ids) for r in run.results) - len(run.results)) / run.steps > 2.5


@pytest.mark.parametrize("spec", SPECS, ids=_name)
def test_lattices_differ_by_rounding_only(
    live: Runs, recordings: dict[int, Recorded], spec: SpecConfig
) -> None:
    """What the tracing takes for granted: the largest difference of any edge is rounding."""
    run, recording = live(spec, 4), recordings[spec.block].recording
    starts = [int((recording.step_request < index).sum()) for index in range(PROMPTS)]
    largest, compared = 0.0, 0
    for index, result in enumerate(run.results):
        if list(result.output_ids) != recording.output(index).tolist():
            continue
        for step in run.tracer.steps[str(index)]:
            at = starts[index] + step.position
            recorded = Draft(
                recording.candidate_ids[at],
                recording.edge[at],
                recording.unary[at],
                recording.unary_logsumexp[at],
            )
            largest = max(largest, edge_rounding(step.draft, recorded))
            compared += 1
    assert compared > 0.7 * run.steps
    assert 0 < largest < ROUNDING_NATS


@pytest.mark.parametrize("spec", [SpecConfig(), *SPECS], ids=_name)
def test_four_in_flight_give_the_tokens_of_one_by_one(
    engine: ReferenceEngine, live: Runs, spec: SpecConfig
) -> None:
    """A request may part from its lone run only at a near-tie of the target's own argmax."""
    together = live(spec, 4).results[:ONE_BY_ONE]
    parted = [
        (one, four)
        for one, four in zip(live(spec, 1).results, together, strict=True)
        if one.output_ids != four.output_ids
    ]
    assert len(parted) <= 1
    assert all(_gap(engine, one, four) < ROUNDING_NATS for one, four in parted)


@pytest.mark.parametrize("spec", SPECS, ids=_name)
def test_speculation_gives_the_tokens_of_plain_decoding(
    engine: ReferenceEngine, live: Runs, recordings: dict[int, Recorded], spec: SpecConfig
) -> None:
    """The recording's outputs are plain ones, decoded all at once."""
    parted = [
        (result, plain)
        for result, plain in zip(live(spec, 4).results, recordings[16].outputs, strict=True)
        if result.output_ids != plain.output_ids
    ]
    assert len(parted) <= MOST_TRACED
    assert all(_gap(engine, one, other) < ROUNDING_NATS for one, other in parted)


def _gap(engine: ReferenceEngine, one: EngineResult, other: EngineResult | OutputRecord) -> float:
    """Nats between the first two tokens that differ, under the target on their common text."""
    pairs = enumerate(zip(one.output_ids, other.output_ids, strict=False))
    at, tokens = next((i, pair) for i, pair in pairs if pair[0] != pair[1])
    prefix = [*one.prompt_ids, *one.output_ids[:at]]
    first, second = (_logprob(engine, prefix, token) for token in tokens)
    return abs(first - second)


def _logprob(engine: ReferenceEngine, prefix: Sequence[int], token: int) -> float:
    return engine.score([*prefix, token], len(prefix) - 1).logprobs[0]
