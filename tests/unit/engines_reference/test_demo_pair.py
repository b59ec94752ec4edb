"""The shipped pair: live decoding and replay of its recording accept the same lengths."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from specpilot_cli.engines.base import GenerateRequest
from specpilot_cli.engines.reference.engine import ReferenceEngine
from specpilot_cli.engines.reference.near_ties import StepTracer, trace_differences
from specpilot_cli.engines.reference.record import Recorded, record_dense
from specpilot_cli.engines.reference.spec import SpecConfig
from specpilot_cli.io.prompts_file import read_prompts
from specpilot_cli.paths import bundled
from specpilot_cli.schema.prompts import Prompt

BLOCK = 16
SPECS = [
    SpecConfig(mode="chain", block=BLOCK),
    *(SpecConfig(mode="tree", block=BLOCK, n_nodes=nodes) for nodes in (8, 16, 32)),
]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (bundled("recipes") / "demo-cpu/target/model.safetensors").is_file(),
        reason="the demo pair is not in this checkout",
    ),
]


@pytest.fixture(scope="module")
def engine() -> ReferenceEngine:
    """The demo pair."""
    folder = Path(bundled("recipes")) / "demo-cpu"
    return ReferenceEngine(folder / "target", folder / "drafter", SpecConfig("chain", BLOCK))


@pytest.fixture(scope="module")
def prompts() -> list[Prompt]:
    """Every eleventh development prompt, so that all kinds are there."""
    return read_prompts(Path(bundled("recipes")) / "demo-cpu/prompts/dev.jsonl")[::11]


@pytest.fixture(scope="module")
def recorded(engine: ReferenceEngine, prompts: list[Prompt]) -> Recorded:
    """A dense recording of those prompts."""
    return record_dense(engine, prompts, BLOCK)


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: f"{spec.mode}-{spec.drafts}")
def test_live_steps_equal_replay(
    engine: ReferenceEngine, prompts: list[Prompt], recorded: Recorded, spec: SpecConfig
) -> None:
    requests: list[Any] = [
        GenerateRequest(p.request_id, engine.encode(p.text), p.max_new_tokens) for p in prompts
    ]
    tracer = StepTracer()
    results = engine.generate(requests, spec=spec, observer=tracer, concurrency=1)
    differences = trace_differences(engine, spec, results, tracer, recorded.recording)
    assert [difference for difference in differences if not difference.explained] == []
    assert len(differences) <= 2
    steps = sum(result.verify_steps for result in results)
    assert (sum(len(r.output_ids) for r in results) - len(results)) / steps > 2
