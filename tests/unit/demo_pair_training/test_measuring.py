"""The measuring scripts on hand cases, on the shipped pair, and against a scripted server."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import measure_demo_pair
import measure_sglang_pair
import pytest
from demo_pair.quality import (
    bytes_per_token,
    chain_steps_along,
    departure,
    equal_weight_mean,
    mean_by_kind,
    repeated_pct,
    tokens_per_step,
)

from specpilot_cli.engines.base import GenerateRequest
from specpilot_cli.engines.reference.engine import ReferenceEngine
from specpilot_cli.engines.reference.spec import SpecConfig
from specpilot_cli.io.prompts_file import read_prompts
from specpilot_cli.schema.prompts import Prompt

CHAIN = SpecConfig("chain", 8)


@pytest.fixture(scope="module")
def engine(repo: Path) -> ReferenceEngine:
    pair = repo / "recipes" / "demo-cpu"
    return ReferenceEngine(pair / "target", pair / "drafter")


@pytest.fixture(scope="module")
def prompts(repo: Path) -> list[Prompt]:
    rows = read_prompts(repo / "recipes" / "demo-cpu" / "prompts" / "unseen.jsonl")
    return [p.model_copy(update={"max_new_tokens": 40}) for p in rows[::48]]


@pytest.fixture(scope="module")
def requests(engine: ReferenceEngine, prompts: list[Prompt]) -> list[GenerateRequest]:
    return [GenerateRequest(p.request_id, engine.encode(p.text), p.max_new_tokens) for p in prompts]


def test_figures_of_outputs_on_hand_cases(engine: ReferenceEngine) -> None:
    assert tokens_per_step([9, 5], [2, 1]) == 4.0  # 8 + 4 tokens after prefill in 3 steps
    assert repeated_pct([1, 2, 3, 1, 2, 3], 3) == 25.0  # one of four
    assert repeated_pct([1, 2], 3) == 0.0
    assert mean_by_kind([1.0, 3.0, 7.0], ["b", "b", "a"]) == {"a": 7.0, "b": 2.0}
    assert equal_weight_mean({"a": 7.0, "b": 2.0}) == 4.5
    ids = engine.encode("A line of text.\n")
    assert bytes_per_token(engine, [*ids, 0]) == 16 / len(ids)


def test_a_departure_is_scored_after_the_common_prefix(engine: ReferenceEngine) -> None:
    prompt = engine.encode("The list has three")
    best = engine.score([*prompt, 0], len(prompt) - 1, top_k=3)
    first, second, third = best.top_ids[0]
    logprobs = best.top_logprobs[0]
    found = departure(engine, "r", prompt, [second, 5, 6], [first, 5, 6])
    assert found is not None
    assert (found.position, found.best) == (0, "right")
    assert found.margin_nats == pytest.approx(logprobs[0] - logprobs[1], abs=1e-5)
    assert found.below_argmax_nats == pytest.approx(found.margin_nats, abs=1e-5)
    worse = departure(engine, "r", prompt, [second], [third])
    assert worse is not None
    assert worse.below_argmax_nats == pytest.approx(logprobs[0] - logprobs[2], abs=1e-5)
    assert worse.margin_nats < worse.below_argmax_nats
    later = departure(engine, "r", prompt, [second, 5, 7], [second, 5, 6])
    assert later is not None
    assert later.position == 2
    assert departure(engine, "r", prompt, [1, 2], [1, 2]) is None
    with pytest.raises(ValueError, match="continues the other"):
        departure(engine, "r", prompt, [1, 2], [1, 2, 3])


def test_steps_along_an_output_are_those_of_live_decoding(
    engine: ReferenceEngine, requests: list[GenerateRequest]
) -> None:
    results = engine.generate(requests, concurrency=1, spec=CHAIN)
    assert sum(r.verify_steps for r in results) > 20
    for result in results:
        along = chain_steps_along(engine, result.prompt_ids, result.output_ids, block=8)
        assert along == list(result.accept_lengths)
    assert chain_steps_along(engine, (5, 6), (7,), block=8) == []


def test_a_configuration_is_measured_by_kind(
    engine: ReferenceEngine, prompts: list[Prompt], requests: list[GenerateRequest]
) -> None:
    kinds = [p.benchmark for p in prompts]
    assert len(set(kinds)) > 2
    plain = engine.generate(requests)
    row = measure_demo_pair.measure_configuration(engine, CHAIN, requests, plain, kinds)
    again = engine.generate(requests, concurrency=1, spec=CHAIN)
    for kind, value in row["tokens_per_step_by_kind"].items():
        chosen = [r for r, k in zip(again, kinds, strict=True) if k == kind]
        tokens = sum(len(r.output_ids) - 1 for r in chosen)
        assert value == pytest.approx(tokens / sum(r.verify_steps for r in chosen), abs=1e-3)
    assert row["same_as_plain"] == row["requests"] == len(prompts)
    table = measure_demo_pair.describe_outputs(engine, plain, kinds)
    lengths = [v["output_tokens"] for k, v in table.items() if k != "mean"]
    assert table["mean"]["output_tokens"] == pytest.approx(sum(lengths) / len(lengths), abs=1e-2)


def test_a_wrong_token_is_no_near_tie(
    engine: ReferenceEngine, requests: list[GenerateRequest]
) -> None:
    from dataclasses import replace

    plain = engine.generate(requests[:1])
    wrong = plain[0].output_ids[3] + 1
    changed = replace(plain[0], output_ids=(*plain[0].output_ids[:3], wrong))
    found = measure_demo_pair.compare(engine, plain, [changed])
    assert found["same_as_plain"] == 0
    assert found["differences"][0]["position"] == 3
    assert not found["all_near_ties"]


def answer(engine: ReferenceEngine, spec: SpecConfig) -> Callable[[Any], None]:
    """A server script that answers `/generate` as `engine` decodes under `spec`."""

    def script(exchange: Any) -> None:
        sampling = exchange.body["sampling_params"]
        assert (sampling["temperature"], sampling["stop_token_ids"]) == (0, [0])
        request = GenerateRequest(
            "r", tuple(exchange.body["input_ids"]), sampling["max_new_tokens"]
        )
        (result,) = engine.generate([request], spec=spec)
        meta = {
            "completion_tokens": len(result.output_ids),
            "finish_reason": dict(result.finish_reason),
            "e2e_latency": 0.5,
        }
        if spec.mode != "ar":
            meta["spec_verify_ct"] = result.verify_steps
        exchange.reply({"output_ids": list(result.output_ids), "meta_info": meta})

    return script


def test_asking_a_server_and_comparing(
    repo: Path,
    tmp_path: Path,
    engine: ReferenceEngine,
    make_server: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A server that answers as the reference engine does agrees with it entirely."""
    monkeypatch.chdir(repo)
    prompts = repo / "recipes" / "demo-cpu" / "prompts" / "unseen.jsonl"
    few = tmp_path / "prompts.jsonl"
    lines = [json.loads(line) for line in prompts.read_text().splitlines()]
    rows = [{**row, "max_new_tokens": 24} for row in (lines[30], lines[31], lines[80])]
    few.write_text("".join(json.dumps(row) + "\n" for row in rows))

    pair = repo / "recipes" / "demo-cpu"
    for name, spec in (("plain", SpecConfig("ar")), ("drafted", CHAIN)):
        args = Namespace(
            url=make_server(answer(engine, spec)).url, prompts=few, per_kind=1, pair=pair,
            output=tmp_path / f"{name}.json",
        )  # fmt: skip
        measure_sglang_pair.ask(args)
    plain, drafted = (
        json.loads((tmp_path / f"{name}.json").read_text())["rows"] for name in ("plain", "drafted")
    )
    assert [row["request_id"] for row in plain] == [rows[0]["request_id"], rows[2]["request_id"]]
    assert plain[0]["verify_steps"] is None
    found = measure_sglang_pair.compare_engines(pair, plain, drafted)
    served, along = found["sglang"], found["reference"]["float32"]["along_sglang_outputs"]
    assert along["tokens_per_step"] == served["tokens_per_step"] > 1
    assert along["requests_with_equal_steps"] == 2
    assert found["outputs"]["sglang chain / float32 chain"]["same"] == 2
    drafted[0]["prompt_ids"] += " 5"
    with pytest.raises(SystemExit, match="same prompts"):
        measure_sglang_pair.compare_engines(pair, plain, drafted)
