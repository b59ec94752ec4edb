"""What the shipped pair promises on unseen prompts: gains to win, and text that is no loop."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from specpilot_cli.engines.reference.engine import ReferenceEngine
from specpilot_cli.engines.reference.spec import EngineResult, SpecConfig

pytestmark = pytest.mark.slow

PER_KIND = 6  # of 24 unseen prompts of each kind
PROMPTS = 8 * PER_KIND
GRAM = 8


@pytest.fixture(scope="module")
def runs(engine: ReferenceEngine, demo: Any, requests_for: Any) -> dict[str, list[EngineResult]]:
    """The prompts decoded plainly, by the stock chain, and by a tree on the long block."""
    requests = requests_for(demo.prompts("unseen", PROMPTS))
    specs = {
        "ar": SpecConfig(),
        "chain": SpecConfig("chain", 8),
        "tree": SpecConfig("tree", 16, 32),
    }
    return {
        name: engine.generate(requests, spec=spec, concurrency=16) for name, spec in specs.items()
    }


def _tau(results: Sequence[EngineResult]) -> float:
    """Tokens per verify step; the first token of an output comes from prefill."""
    tokens = sum(len(result.output_ids) - 1 for result in results)
    return tokens / sum(result.verify_steps for result in results)


def _repeated(ids: Sequence[int]) -> float:
    """Share of an output's 8-grams that occurred in it before."""
    grams = [tuple(ids[i : i + GRAM]) for i in range(len(ids) - GRAM + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def test_prompts_weigh_every_kind_alike(demo: Any) -> None:
    kinds = [prompt.benchmark for prompt in demo.prompts("unseen", PROMPTS)]
    assert {kinds.count(kind) for kind in kinds} == {PER_KIND}
    assert len(set(kinds)) == 8


def test_stock_chain(runs: dict[str, list[EngineResult]]) -> None:
    assert _tau(runs["chain"]) >= 2.5


def test_tree_gains_thirty_percent(runs: dict[str, list[EngineResult]]) -> None:
    assert _tau(runs["tree"]) >= 1.30 * _tau(runs["chain"])


def test_tree_gains_on_every_kind(runs: dict[str, list[EngineResult]], demo: Any) -> None:
    kinds = [prompt.benchmark for prompt in demo.prompts("unseen", PROMPTS)]
    for kind in set(kinds):
        chain, tree = (
            [result for result, of in zip(runs[name], kinds, strict=True) if of == kind]
            for name in ("chain", "tree")
        )
        assert _tau(tree) > 1.1 * _tau(chain) > 1.1, kind


@pytest.mark.parametrize("mode", ["ar", "tree"])
def test_outputs_are_no_loops(runs: dict[str, list[EngineResult]], mode: str) -> None:
    shares = [_repeated(result.output_ids) for result in runs[mode]]
    assert sum(shares) / len(shares) <= 0.10
    assert len({result.output_ids for result in runs[mode]}) == PROMPTS


def test_tokens_are_long_enough(
    engine: ReferenceEngine, runs: dict[str, list[EngineResult]]
) -> None:
    decoded = [engine.tokenizer.decode(result.output_ids) for result in runs["ar"]]
    n_bytes = sum(len(text.encode()) for text in decoded)
    assert n_bytes >= 3 * sum(len(result.output_ids) for result in runs["ar"])
    # bytes that are no UTF-8 would decode to U+FFFD, three bytes each, and flatter the number
    assert sum(text.count("\ufffd") for text in decoded) <= 2


def test_outputs_are_long_enough_to_judge(runs: dict[str, list[EngineResult]]) -> None:
    """An end token after a few words would leave nothing to speculate on."""
    lengths = [len(result.output_ids) for result in runs["ar"]]
    assert sum(lengths) / PROMPTS > 80
