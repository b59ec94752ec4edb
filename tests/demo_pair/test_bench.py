"""`paired-bench` on real servers: a small run whose numbers can be checked another way."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specpilot_cli.engines.reference.engine import ReferenceEngine
from specpilot_cli.engines.reference.spec import SpecConfig
from specpilot_cli.io.jsonl import read_jsonl
from specpilot_cli.schema.outputs import OutputRecord
from specpilot_cli.schema.result import Envelope

EXIT_CODES = {"promote": 0, "no": 1}
KINDS = ("dialogue", "lists")
TIMED = 2  # prompts of each kind


@pytest.fixture(scope="module")
def prompts(demo: Any) -> list[Any]:
    """Unseen prompts of two kinds; one of each is left for the warm-up."""
    every = [prompt for prompt in demo.prompts("unseen", 64) if prompt.benchmark in KINDS]
    return every[: len(KINDS) * (TIMED + 1)]


@pytest.fixture
def bench(
    server: Callable[[str], str], prompts: list[Any], demo: Any, specpilot_json: Any,
    prompt_file: Any, tmp_path: Path,
) -> tuple[int, dict[str, Any], Path]:  # fmt: skip
    """Stock chain against the tree, plain decoding beside them, one A/A session."""
    code, answer = specpilot_json(
        "paired-bench", "--baseline", server("chain"), "--candidate", server("tree"),
        "--ar", server("ar"), "--prompts", prompt_file(prompts), "--limit", TIMED, "--aa", 1,
        "--warmup", 2, "--tokenizer", demo.target, "--save-outputs", tmp_path / "answers",
        "-o", tmp_path / "bench.json",
    )  # fmt: skip
    return code, answer, tmp_path


def test_small_comparison(
    bench: tuple[int, dict[str, Any], Path], engine: ReferenceEngine, requests_for: Any,
    prompts: list[Any], specpilot_json: Any,
) -> None:  # fmt: skip
    code, answer, folder = bench
    envelope = Envelope.model_validate(answer)
    assert envelope.command == "paired-bench"
    assert envelope.verdict in EXIT_CODES
    assert code == EXIT_CODES[envelope.verdict]
    results = envelope.results
    _check_decision(results, envelope.verdict)

    saved = {
        name: read_jsonl(folder / f"answers/{name}.jsonl", OutputRecord)
        for name in ("baseline", "candidate", "ar")
    }
    timed = {record.request_id for record in saved["baseline"]}
    assert len(timed) == TIMED * len(KINDS)
    asked = [prompt for prompt in prompts if prompt.request_id in timed]
    specs = {
        "baseline": SpecConfig("chain", 8),
        "candidate": SpecConfig("tree", 16, 16),
        "ar": SpecConfig(),
    }
    for name, spec in specs.items():
        _check_answers(engine, requests_for(asked), spec, saved[name])

    again, shown = specpilot_json("paired-bench", "--from", folder / "bench.json")
    assert (again, shown["verdict"]) == (code, envelope.verdict)


def _check_decision(results: dict[str, Any], verdict: str) -> None:
    """The rule, recomputed from the numbers shown."""
    decision, gain = results["decision"], results["gain"]
    assert decision["verdict"] == verdict
    promoted = decision["lower_bound_ratio"] > decision["bound_ratio"]
    assert promoted == (verdict == "promote")
    base = 0.01 if decision["identical"] else 0.03
    bound = 1 + base + 2 * results["noise"]["nu_log"]
    assert decision["bound_ratio"] == pytest.approx(bound)
    assert results["noise"]["provisional"]
    assert gain["low_ratio"] < gain["gain_ratio"] < gain["high_ratio"]
    assert gain["n_requests"] == TIMED * len(KINDS)
    rates = [row["gain"]["gain_ratio"] for row in results["benchmarks"]]
    assert gain["gain_ratio"] == pytest.approx(math.exp(sum(map(math.log, rates)) / len(rates)))


def _check_answers(
    engine: ReferenceEngine, requests: list[Any], spec: SpecConfig, saved: list[OutputRecord]
) -> None:
    """The served tokens and verify steps are those of the engine in this process."""
    expected = {result.request_id: result for result in engine.generate(requests, spec=spec)}
    other = [
        record.request_id
        for record in saved
        if record.output_ids != expected[record.request_id].output_ids
    ]
    assert len(other) <= 1  # at most a near-tie: rows in flight differ
    for record in saved:
        result = expected[record.request_id]
        assert record.elapsed_s is not None
        assert 0 < record.elapsed_s < 60
        if record.request_id not in other and spec.mode != "ar":
            assert record.verify_steps == pytest.approx(result.verify_steps, abs=1)
