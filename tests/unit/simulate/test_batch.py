"""Batch simulation: equal to replay where replay answers, exact sums, and the rules of §4.4."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from specpilot_cli.errors import InputError
from specpilot_cli.replay.run import replay
from specpilot_cli.schema.batch_times import BatchStepTimes
from specpilot_cli.schema.lattice import LatticeRecording
from specpilot_cli.simulate.batch import PREFILL_ROWS, simulate_batches
from specpilot_cli.simulate.blocks import Acceptance, choose_blocks, share_nodes
from specpilot_cli.simulate.costs import StepClock, StepLoad
from specpilot_cli.simulate.policy import parse_policy

Recorded = Callable[..., LatticeRecording]
MakeTimes = Callable[..., BatchStepTimes]


def run(recording: LatticeRecording, times: BatchStepTimes, text: str, count: int = 1, **more: int):
    return simulate_batches(recording, times, [parse_policy(text)], [count], **more)[0]


@pytest.mark.parametrize("nodes", [8, 32])
@pytest.mark.parametrize("count", [1, 5])
def test_tokens_per_step_are_those_of_replay(
    nodes: int, count: int, recorded: Recorded, times: BatchStepTimes
):
    """Batching changes when a request is decoded, never what a step of it accepts."""
    recording = recorded()
    wanted = replay(recording, ["chain", "best-first"], nodes=[nodes])
    tree = run(recording, times, f"tree:nodes={nodes},block=16", count)
    assert tree.tau == pytest.approx(wanted.row("best-first", nodes).tau.value, abs=1e-12)
    chain = run(recording, times, "chain:block=16", count)
    assert chain.tau == pytest.approx(wanted.row("chain", 15).tau.value, abs=1e-12)
    assert run(recording, times, "ar", count).tau == 1.0


def test_one_request_at_a_time_adds_up_exactly(recorded: Recorded, times: BatchStepTimes):
    recording = recorded()
    found = run(recording, times, "tree:nodes=8,block=16")
    prompts = np.diff(recording.prompt_offsets).sum()
    step = 0.010 + 9 * 0.0001 + 16 * 0.00005
    assert found.steps == replay(recording, ["best-first"], nodes=[8]).rows[0].steps.sum()
    assert found.seconds == pytest.approx(prompts * 0.001 + found.steps * step)
    assert found.tokens == recording.output_ids.size
    assert (found.mean_rows, found.mean_draft_rows, found.mean_requests) == (9, 16, 1)


def test_plain_decoding_in_a_batch_is_one_step_per_token(recorded: Recorded, times: BatchStepTimes):
    recording = recorded()
    alone, together = (run(recording, times, "ar", n) for n in (1, 12))
    lengths = np.diff(recording.output_offsets)
    assert alone.steps == (lengths - 1).sum()
    # all prompts fit in one pass, so the longest output decides
    assert together.steps == lengths.max() - 1
    assert together.tokens == alone.tokens
    assert together.tokens_per_s > 3 * alone.tokens_per_s


def test_a_place_is_taken_by_the_next_request(recorded: Recorded, times: BatchStepTimes):
    found = run(recorded(), times, "ar", 4, repeat=3)
    assert 3.0 < found.mean_requests <= 4
    assert found.tokens == 3 * recorded().output_ids.size


def test_a_shared_budget_beats_equal_trees_of_the_same_rows(
    recorded: Recorded, times: BatchStepTimes
):
    """Requests differ in difficulty, so equal shares waste rows on the easy ones (§4.4)."""
    recording = recorded(
        seed=2, n_requests=24, sharpness=5.0, first_benchmark=0.2, recall=0.99, recall_loss=0.0
    )
    equal = run(recording, times, "tree:nodes=4,block=16", 8, repeat=2)
    shared = run(recording, times, "shared:rows=35,block=16", 8, repeat=2)
    assert shared.mean_rows <= equal.mean_rows
    assert shared.tau > 1.02 * equal.tau


def test_automatic_blocks_stay_within_the_drafters_rows(recorded: Recorded, times: BatchStepTimes):
    recording = recorded(n_requests=24)
    found = run(recording, times, "shared:rows=96,block=auto,draft-rows=88", 8, repeat=2)
    assert 60 < found.mean_draft_rows <= 88
    wide = run(recording, times, "shared:rows=96,block=16", 8, repeat=2)
    assert wide.mean_draft_rows > found.mean_draft_rows
    assert found.tau > 0.9 * wide.tau


_FLAT = ("rows", "rows", (1, 0.02), (128, 0.02), (129, 0.04), (256, 0.04))


def test_prompts_join_only_where_that_is_cheaper(recorded: Recorded, make_times: MakeTimes):
    recording, flat = recorded(), make_times(_FLAT)
    joint = run(recording, flat, "tree:nodes=4,block=16,prefill-every=9,admission=joint", 4)
    apart = run(recording, flat, "tree:nodes=4,block=16,prefill-every=9", 4)
    assert joint.joined_prompts >= 4
    assert apart.joined_prompts == 0
    assert joint.seconds < apart.seconds
    assert joint.tau == apart.tau
    steep = make_times(("rows", "rows", (1, 0.01), (2, 0.02), (500, 5.0)))
    found = run(recording, steep, "ar:admission=joint,prefill-every=9", 4)
    assert found.joined_prompts == 0
    every = run(recording, steep, "ar:admission=every,prefill-every=9", 4)
    assert every.joined_prompts > 4
    assert every.seconds > found.seconds


def test_a_prompt_joins_only_if_the_scheduler_would_hold_it(
    recorded: Recorded, make_times: MakeTimes
):
    """§4.4: all 12 prompts fit in the pass of their step, so none of them is held back."""
    recording, flat = recorded(), make_times(_FLAT)
    assert np.diff(recording.prompt_offsets).sum() <= PREFILL_ROWS
    joint = run(recording, flat, "tree:nodes=4,block=16,admission=joint", 4)
    apart = run(recording, flat, "tree:nodes=4,block=16", 4)
    assert (joint.joined_prompts, joint.seconds) == (0, apart.seconds)
    every = run(recording, flat, "tree:nodes=4,block=16,admission=every", 4)
    assert every.joined_prompts == 12 - 4  # the first four find nobody decoding


def test_what_a_full_prefill_pass_leaves_over_is_held(recorded: Recorded, make_times: MakeTimes):
    """Prompts of 300 rows: a pass holds one and a part of the next."""
    recording = recorded()
    prompts = np.arange(13, dtype=np.int64) * 300
    long = replace(
        recording, prompt_ids=np.zeros(prompts[-1], dtype=np.int32), prompt_offsets=prompts
    )
    flat = make_times(("rows", "rows", (1, 0.02), (4096, 0.02)))
    joint = run(long, flat, "ar:admission=joint", 6)
    assert joint.joined_prompts > 0
    assert joint.seconds < run(long, flat, "ar", 6).seconds
    # A prompt that a pass has begun, and one above 384 rows, stay with the passes.
    assert run(long, flat, "ar:admission=joint", 2).joined_prompts == 0
    over = replace(
        long, prompt_ids=np.zeros(13 * 400, dtype=np.int32),
        prompt_offsets=np.arange(13, dtype=np.int64) * 400,
    )  # fmt: skip
    assert run(over, flat, "ar:admission=joint", 6).joined_prompts == 0


def test_prefill_passes_lie_apart_while_requests_decode(recorded: Recorded, make_times: MakeTimes):
    """Nobody waits for ever: all tokens come out, later and in fewer passes."""
    recording, flat = recorded(), make_times(_FLAT)
    often, seldom = (run(recording, flat, f"ar:prefill-every={n}", 4) for n in (1, 40))
    assert seldom.tokens == often.tokens
    assert seldom.first_token_s > 2 * often.first_token_s
    assert seldom.mean_requests < often.mean_requests


def test_times_beyond_what_was_measured_are_named(recorded: Recorded, make_times: MakeTimes):
    narrow = make_times(("target", "rows", (1, 0.01), (16, 0.01), (20, 0.014)))
    assert run(recorded(), narrow, "tree:nodes=8,block=16", 1).extrapolated == ()
    assert run(recorded(), narrow, "tree:nodes=8,block=16", 4).extrapolated == ("target",)
    clock = StepClock(narrow)
    assert clock.decode_s(StepLoad(30, 1, 0)) == pytest.approx(0.024)
    assert clock.decode_s(StepLoad(18, 1, 0)) == pytest.approx(0.012)
    assert clock.decode_s(StepLoad(0, 0, 0)) == 0
    assert StepClock(make_times(("r", "rows", (4, 0.2)))).decode_s(
        StepLoad(1, 1, 0)
    ) == pytest.approx(0.2)


def test_contexts_cost_what_they_hold(recorded: Recorded, make_times: MakeTimes):
    """One request: Σ over steps of prompt and output so far."""
    recording = recorded()
    per_token = make_times(
        ("rows", "rows", (1, 1e-12), (64, 1e-12)), ("kv", "context_tokens", (1, 1e-6), (1e6, 1.0))
    )
    found = run(recording, per_token, "ar")
    prompts = np.diff(recording.prompt_offsets)
    lengths = np.diff(recording.output_offsets)
    contexts = sum(
        prompt + position
        for prompt, length in zip(prompts, lengths, strict=True)
        for position in range(1, length)
    )
    assert found.seconds == pytest.approx(prompts.sum() * 0.001 + contexts * 1e-6)


def test_the_shared_budget_is_the_best_set_that_is_a_forest():
    """Against every choice of prefixes, on small cases."""
    rng = np.random.default_rng(0)
    for _ in range(60):
        score = -np.sort(rng.exponential(size=(3, 4)), axis=1)
        score[0, 3] = -np.inf
        for budget in (0, 1, 5, 11, 20):
            shares = share_nodes(score, budget)
            assert shares.sum() == min(budget, 11)
            best = max(
                sum(np.exp(score[r, :n]).sum() for r, n in enumerate(choice))
                for choice in product(range(5), repeat=3)
                if sum(choice) <= budget and choice[0] <= 3
            )
            mine = sum(np.exp(score[r, :n]).sum() for r, n in enumerate(shares))
            assert mine == pytest.approx(best)


def test_ties_are_shared_level_by_level():
    assert share_nodes(np.zeros((3, 4)), 7).tolist() == [3, 2, 2]


def test_blocks_are_the_best_that_fit():
    """Against every choice, on small cases."""
    rng = np.random.default_rng(1)
    for _ in range(40):
        share = rng.uniform(0.3, 0.98, size=4)
        for rows in (20, 32, 40, 52, 64, 99):
            blocks = choose_blocks(share, rows)
            if rows < 32:
                assert blocks.tolist() == [8] * 4
                continue
            assert blocks.sum() <= rows

            def value(choice: tuple[int, ...], share: np.ndarray = share) -> float:
                return sum(
                    float((p ** np.arange(b)).sum()) for p, b in zip(share, choice, strict=True)
                )

            best = max(
                value(choice) for choice in product((8, 12, 16), repeat=4) if sum(choice) <= rows
            )
            assert value(tuple(blocks.tolist())) == pytest.approx(best)


def test_running_acceptance_follows_recent_steps():
    seen = Acceptance(2)
    everyone = np.arange(2)
    for _ in range(30):
        seen.saw(everyone, np.array([15, 0]), np.array([15, 15]))
    assert seen.of(everyone) == pytest.approx([1.0, 0.0], abs=0.01)
    for _ in range(30):
        seen.saw(everyone, np.array([3, 3]), np.array([15, 15]))
    assert seen.of(everyone) == pytest.approx([0.75, 0.75], abs=0.01)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("trees:nodes=4,block=8", "unknown batch policy"),
        ("tree:nodes=4", "lacks block"),
        ("tree:nodes=4,block=8,rows=3", "cannot read `rows=3`"),
        ("tree:nodes=0,block=8", "no number"),
        ("tree:nodes=4,block=1", "a block holds"),
        ("tree:nodes=4,block=auto", "belongs to `shared`"),
        ("shared:rows=64,block=auto", "needs draft-rows"),
        ("chain:block=8,block=9", "cannot read"),
        ("ar:admission=maybe", "admission `maybe`"),
        ("ar:prefill-every=0", "no number"),
        ("chain:block=²", "no number"),
    ],
)
def test_policies_that_make_no_sense_are_refused(text: str, words: str):
    with pytest.raises(InputError, match=words):
        parse_policy(text)


@pytest.mark.parametrize("text", ["chain", "tree", "tree:nodes=4", "shared:rows=8"])
def test_the_example_of_a_hint_is_a_policy(text: str):
    with pytest.raises(InputError) as caught:
        parse_policy(text)
    example = (caught.value.hint or "").split("`")[1]
    assert parse_policy(example).mode == text.partition(":")[0]


def test_recordings_that_cannot_answer_are_refused(recorded: Recorded, times: BatchStepTimes):
    recording = recorded(n_positions=7)
    with pytest.raises(InputError, match="drafts 15 positions, the recording has 7"):
        run(recording, times, "chain:block=16")
    metadata = recording.metadata.model_copy(update={"mode": "anchored"})
    with pytest.raises(InputError, match="this recording is anchored"):
        run(replace(recording, metadata=metadata), times, "ar")
