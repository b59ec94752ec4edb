"""What model folders and prompts give away: template, thinking, hashes, configurations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from specpilot_cli.diagnose import identity, prompts
from specpilot_cli.diagnose.evidence import gather
from specpilot_cli.diagnose.facts import read_drafter, read_target
from specpilot_cli.diagnose.loops import looping
from specpilot_cli.diagnose.prompts import thoughts
from specpilot_cli.diagnose.rates import Counts, certainly_above, combine
from specpilot_cli.diagnose.run import Given, diagnose
from specpilot_cli.errors import InputError
from specpilot_cli.schema.lattice import LatticeRecording

Recorded = Callable[..., LatticeRecording]
Folder = Callable[..., Path]

START, OPEN, CLOSE = 4001, 4003, 4004


def with_prompts(recording: LatticeRecording, chosen: Callable[[int], list[int]]):
    """The recording with the tokens `chosen(request)` in front of each prompt."""
    parts = [
        np.concatenate([np.array(chosen(r), dtype=np.int32), recording.prompt(r)])
        for r in range(recording.n_requests)
    ]
    offsets = np.concatenate([[0], np.cumsum([len(part) for part in parts])]).astype(np.int64)
    return replace(recording, prompt_ids=np.concatenate(parts), prompt_offsets=offsets)


def plain_of(recording: LatticeRecording) -> LatticeRecording:
    """The recording with no token of the template or of a thought in it."""
    return replace(
        recording,
        prompt_ids=recording.prompt_ids % 3000,
        output_ids=recording.output_ids,
    )


def test_prompts_without_the_template_are_named(recorded: Recorded, target_folder: Folder):
    target = read_target(target_folder())
    bare = plain_of(recorded())
    found = prompts.chat_template(gather(bare), target)
    assert (found.state, found.title) == ("found", "Prompts lack the chat template")
    templated = with_prompts(bare, lambda r: [START])
    assert prompts.chat_template(gather(templated), target).state == "clear"
    some = with_prompts(bare, lambda r: [START] if r % 2 else [])
    mixed = prompts.chat_template(gather(some), target)
    assert (mixed.state, mixed.numbers["templated_ratio"]) == ("found", 0.5)


def test_two_bos_tokens_are_named(recorded: Recorded, target_folder: Folder):
    target = read_target(target_folder(bos="<s>"))
    twice = with_prompts(plain_of(recorded()), lambda r: [4000, 4000, START])
    assert "two BOS" in prompts.chat_template(gather(twice), target).title
    once = with_prompts(plain_of(recorded()), lambda r: [4000, START])
    assert prompts.chat_template(gather(once), target).state == "clear"


def test_a_target_without_template_or_tokenizer(recorded: Recorded, target_folder: Folder):
    evidence = gather(recorded())
    folder = target_folder(template=None)
    assert prompts.chat_template(evidence, read_target(folder)).state == "clear"
    (folder / "chat_template.jinja").write_text("<|im_start|>{{ text }}")
    assert prompts.chat_template(gather(plain_of(recorded())), read_target(folder)).state == "found"
    (folder / "tokenizer.json").unlink()
    assert prompts.chat_template(evidence, read_target(folder)).state == "not checked"
    assert prompts.thinking(evidence, None).state == "not checked"


def test_thinking_in_some_requests_only_is_named(recorded: Recorded, target_folder: Folder):
    target = read_target(target_folder())
    bare = plain_of(recorded())
    none = with_prompts(bare, lambda r: [START])
    assert prompts.thinking(gather(none), target).state == "clear"
    half = with_prompts(bare, lambda r: [START, OPEN] if r % 2 else [START, OPEN, CLOSE])
    found = prompts.thinking(gather(half), target)
    assert (found.state, found.numbers["thinking_requests_ratio"]) == ("found", 0.5)
    everyone = with_prompts(bare, lambda r: [OPEN])
    assert prompts.thinking(gather(everyone), target).state == "clear"


def test_drafts_that_fail_inside_thoughts_are_named(recorded: Recorded, target_folder: Folder):
    target = read_target(target_folder())
    # drafts fail from output position 60 on, where every thought begins
    recording = recorded(tokens=160, mixed=0.7, mixed_from_output=60)
    outputs = recording.output_ids.copy()
    outputs[recording.output_offsets[:-1] + 60] = OPEN
    item = prompts.thinking(gather(replace(recording, output_ids=outputs)), target)
    assert (item.state, item.title) == ("found", "Drafts fail inside thoughts")
    assert item.numbers["inside_ratio"] < 0.5 * item.numbers["outside_ratio"]
    whole = recorded(tokens=160)
    outputs = whole.output_ids.copy()
    outputs[whole.output_offsets[:-1] + 60] = OPEN
    assert prompts.thinking(gather(replace(whole, output_ids=outputs)), target).state == "clear"


def test_thoughts_begin_and_end_with_their_marks():
    def inside(prompt: list[int], output: list[int]) -> list[bool]:
        arrays = (np.array(ids, dtype=np.int32) for ids in (prompt, output))
        return thoughts(*arrays, OPEN, CLOSE).tolist()

    assert inside([1], [1, OPEN, 2, CLOSE, 3]) == [False, True, True, True, False]
    assert inside([OPEN], [1, CLOSE, 3]) == [True, True, False]
    assert inside([OPEN, CLOSE], [1, 2]) == [False, False]
    assert inside([], [CLOSE, 1]) == [False, False]


@pytest.mark.parametrize(
    ("tokens", "looped"),
    [
        ([1, 2, 3] * 2, 0),  # a phrase said twice
        ([7] * 20, 0),  # a rule of a table
        ([7] * 60, 58),
        ([1, 2, 3, 4] * 20, 72),
        (list(range(100)), 0),
        (list(range(70)) * 3, 0),  # a period longer than any loop of a broken model
        (list(range(50)) * 3, 50),
        ([5], 0),
    ],
)
def test_loops_are_long_repeats_of_short_periods(tokens: list[int], looped: int):
    assert int(looping(np.array(tokens, dtype=np.int32)).sum()) == looped


def test_hashes_that_differ_are_named(recorded: Recorded):
    metadata = recorded().metadata
    same = {"target": "a" * 64, "drafter": "b" * 64}
    assert identity.hashes(metadata, same).state == "clear"
    other = identity.hashes(metadata, {**same, "drafter": "c" * 64})
    assert (other.state, other.title) == ("found", "The recording was made with another drafter")
    assert identity.hashes(metadata, {}).state == "not checked"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"mask_token_id": 4099}, "mask token id 4099"),
        ({"target_layer_ids": [1, 8]}, "reach beyond the target's 8 layers"),
        ({"num_target_layers": 64}, "expects a target of 64 layers"),
        ({"hidden_size": 128}, "hidden sizes differ: drafter 128, target 64"),
        ({"vocab_size": 4000}, "vocabularies differ"),
        ({"block_size": 16}, "blocks of 8, the drafter was trained with 16"),
    ],
)
def test_configurations_that_do_not_fit_are_named(
    change: dict[str, object],
    words: str,
    recorded: Recorded,
    target_folder: Folder,
    drafter_folder: Folder,
):
    target = read_target(target_folder())
    good = read_drafter(drafter_folder())
    assert identity.configuration(recorded(), target, good).state == "clear"
    bad = read_drafter(drafter_folder(**change))
    item = identity.configuration(recorded(), target, bad)
    assert item.state == "found"
    assert words in item.detail


def test_a_drafters_configuration_may_say_little(tmp_path: Path, recorded: Recorded):
    (tmp_path / "config.json").write_text('{"block_size": 8}')
    facts = read_drafter(tmp_path)
    assert (facts.block, facts.mask_token_id, facts.target_layer_ids) == (8, None, ())
    assert identity.configuration(recorded(), None, facts).state == "clear"
    (tmp_path / "config.json").write_text('{"target_layer_ids": ["one"]}')
    with pytest.raises(InputError, match="no list of layers"):
        read_drafter(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(InputError, match="not a JSON object"):
        read_target(tmp_path)


def test_a_quantised_target_is_named_only_with_a_symptom(recorded: Recorded, target_folder: Folder):
    fp8 = read_target(target_folder(config={"quantization_config": {"quant_method": "fp8"}}))
    codes = {o.code for o in diagnose(recorded(mixed=0.45), Given(target=fp8)).found}
    assert {"confidence", "quantised-target"} <= codes
    healthy = diagnose(recorded(), Given(target=fp8))
    state = next(o.state for o in healthy.outcomes if o.code == "quantised-target")
    assert state == "clear"
    w12 = read_target(target_folder(config={"quantization_config": {"quant_method": "w12"}}))
    assert w12.quantisation is None


def test_rates_cover_their_truth_with_requests_as_clusters():
    rng = np.random.default_rng(0)
    alarms = misses = 0
    for _ in range(400):
        rates = np.clip(0.6 + 0.15 * rng.standard_normal(20), 0, 1)
        trials = rng.integers(20, 200, 20).astype(float)
        first = Counts(rng.binomial(trials.astype(int), rates).astype(float), trials)
        second = Counts(rng.binomial(trials.astype(int), rates).astype(float), trials)
        lower = Counts(
            rng.binomial(trials.astype(int), np.clip(rates - 0.15, 0, 1)).astype(float), trials
        )
        alarms += certainly_above(combine((1.0, first), (-1.0, second)), 0.0)
        misses += not certainly_above(combine((1.0, first), (-1.0, lower)), 0.0)
    assert alarms <= 3  # 0.1 % by design
    assert misses <= 8
    with pytest.raises(ValueError, match="different requests"):
        combine((1.0, first), (1.0, Counts(np.ones(3), np.ones(3))))


def test_one_request_is_never_certain():
    alone = Counts(np.array([90.0, 0.0]), np.array([100.0, 0.0]))
    assert not alone.enough
    assert not certainly_above(combine((1.0, alone)), 0.0)
