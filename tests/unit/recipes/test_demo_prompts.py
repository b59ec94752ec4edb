"""The prompt sets of the demo recipe: valid, balanced, disjoint."""

from __future__ import annotations

from collections import Counter
from itertools import combinations
from pathlib import Path

import pytest

from specpilot_cli.io.jsonl import read_jsonl
from specpilot_cli.schema.prompts import Prompt, check_unique_ids

RECIPE = Path(__file__).parents[3] / "recipes" / "demo-cpu"
LEAST_PER_KIND = {"dev": 12, "unseen": 20}
LEAST_IN_ALL = {"dev": 60, "unseen": 100}
KINDS = {
    "code", "dialogue", "functions", "lists", "prose", "records", "reference", "stories",
}  # fmt: skip


def prompts(name: str) -> list[Prompt]:
    return read_jsonl(RECIPE / "prompts" / f"{name}.jsonl", Prompt)


@pytest.mark.parametrize("name", ["dev", "unseen"])
def test_every_kind_has_the_same_number_of_prompts(name: str) -> None:
    counts = Counter(prompt.benchmark for prompt in prompts(name))
    assert set(counts) == KINDS
    assert len(set(counts.values())) == 1
    assert min(counts.values()) >= LEAST_PER_KIND[name]
    assert counts.total() >= LEAST_IN_ALL[name]


@pytest.mark.parametrize("name", ["dev", "unseen"])
def test_ids_are_unique_and_limits_in_range(name: str) -> None:
    rows = prompts(name)
    check_unique_ids(rows, where=name)
    assert all(96 <= prompt.max_new_tokens <= 128 for prompt in rows)


def test_request_ids_differ_between_the_sets() -> None:
    assert not {p.request_id for p in prompts("dev")} & {p.request_id for p in prompts("unseen")}


def test_no_prompt_continues_or_repeats_another() -> None:
    texts = [prompt.text for name in ("dev", "unseen") for prompt in prompts(name)]
    assert len(set(texts)) == len(texts)
    for one, other in combinations(texts, 2):
        assert not one.startswith(other)
        assert not other.startswith(one)


def test_dev_and_unseen_share_no_long_passage() -> None:
    """No 100-character window of an unseen prompt occurs in a dev prompt."""
    windows = {
        prompt.text[i : i + 100] for prompt in prompts("dev") for i in range(len(prompt.text) - 99)
    }
    for prompt in prompts("unseen"):
        shared = [i for i in range(len(prompt.text) - 99) if prompt.text[i : i + 100] in windows]
        assert not shared, prompt.request_id


def test_prompts_have_the_length_of_a_request() -> None:
    """24 to 80 tokens at 2 to 5 bytes a token."""
    for name in ("dev", "unseen"):
        sizes = [len(prompt.text.encode()) for prompt in prompts(name)]
        assert min(sizes) >= 48
        assert max(sizes) <= 400


def test_structured_prompts_state_their_facts() -> None:
    """Where the answer follows from the prompt, the prompt must hold what it follows from."""
    for prompt in prompts("unseen"):
        if prompt.benchmark == "dialogue":
            assert "\n\n" in prompt.text
        elif prompt.benchmark == "records":
            assert any(mark in prompt.text for mark in ("CSV", "JSON", "Cards", "Text"))
            assert prompt.text.count("\n") >= 2
        elif prompt.benchmark == "lists":
            assert "- " in prompt.text or "[" in prompt.text or "You need:" in prompt.text
