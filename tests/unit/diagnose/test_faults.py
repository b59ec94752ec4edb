"""Every fault is found by its name, and healthy recordings of many kinds raise no alarm."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from specpilot_cli.diagnose.outcome import Outcome
from specpilot_cli.diagnose.run import Diagnosis, Given, diagnose
from specpilot_cli.replay.run import replay
from specpilot_cli.schema.lattice import LatticeRecording

Recorded = Callable[..., LatticeRecording]


def counted(found: Diagnosis) -> set[str]:
    return {item.code for item in found.outcomes if item.counts}


def outcome(found: Diagnosis, code: str) -> Outcome:
    return next(item for item in found.outcomes if item.code == code)


FAULTS: dict[str, tuple[dict[str, Any], set[str]]] = {
    "one later": ({"shift": 1}, {"position-shift"}),
    "one earlier": ({"shift": -1}, {"position-shift"}),
    "two later": ({"shift": 2}, {"position-shift"}),
    "selector is noise": ({"random_selector": True}, {"collapse", "selector"}),
    "nothing after the first": ({"broken_from": 1}, {"collapse"}),
    "nothing after the trained block": ({"broken_from": 3}, {"collapse"}),
    "often not offered": ({"lost": 0.4}, {"recall", "confidence"}),
    "nothing in common": ({"lost": 0.93}, {"recall", "confidence"}),
    "sure and wrong": ({"mixed": 0.45}, {"confidence"}),
    "long context": (
        {"tokens": 300, "prompt_tokens": 100, "mixed": 0.6, "mixed_from": 192}, {"long-context"},
    ),
    "late output": (
        {"tokens": 300, "prompt_tokens": 300, "mixed": 0.6, "mixed_from_output": 128},
        {"late-output"},
    ),
    "loops": ({"loops": 0.4}, {"repetition"}),
    "short outputs": ({"tokens": 5, "n_requests": 60}, {"short-outputs"}),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_the_fault_is_found_by_its_name_and_nothing_else_is(name: str, recorded: Recorded):
    changes, codes = FAULTS[name]
    found = diagnose(recorded(**changes))
    assert counted(found) == codes
    assert found.verdict == "fail"
    for item in found.found:
        assert item.next_steps, item.code
        assert item.detail


@pytest.mark.parametrize("name", FAULTS)
def test_the_same_recording_without_the_fault_is_clear(name: str, recorded: Recorded):
    changes = dict(FAULTS[name][0])
    size = {key: changes[key] for key in ("tokens", "prompt_tokens") if key in changes}
    if name == "short outputs":
        size = {}
    found = diagnose(recorded(**size))
    assert counted(found) == set()
    assert found.verdict == "ok"


HEALTHY: list[dict[str, Any]] = [
    {"sharpness": sharpness, "n_positions": positions, "n_requests": requests, "tokens": tokens}
    for sharpness, positions in ((1.2, 7), (2.5, 15), (4.0, 7))
    for requests, tokens in ((8, 60), (24, 200))
]


@pytest.mark.parametrize("settings", HEALTHY, ids=str)
def test_healthy_recordings_of_many_kinds_raise_no_alarm(
    settings: dict[str, Any], recorded: Recorded
):
    assert counted(diagnose(recorded(seed=3, **settings))) == set()


def test_a_shift_is_named_with_its_size_and_its_cause(recorded: Recorded):
    later = outcome(diagnose(recorded(shift=1)), "position-shift")
    assert later.numbers["shift_positions"] == 1
    assert "already predicts" in later.next_steps[0]
    earlier = outcome(diagnose(recorded(shift=-1)), "position-shift")
    assert earlier.numbers["shift_positions"] == -1
    assert "predicts nothing" in earlier.next_steps[0]
    silenced = outcome(diagnose(recorded(shift=1)), "recall")
    assert silenced.state == "not checked"


def test_a_collapse_says_whether_choice_or_drafting_is_at_fault(recorded: Recorded):
    chosen = outcome(diagnose(recorded(random_selector=True)), "collapse")
    assert "the choice is at fault" in " ".join(chosen.next_steps)
    drafted = outcome(diagnose(recorded(broken_from=1)), "collapse")
    assert "drafting is at fault" in " ".join(drafted.next_steps)
    assert drafted.numbers["position"] == 1
    later = outcome(diagnose(recorded(broken_from=3)), "collapse")
    assert later.numbers["position"] == 3
    assert "trained block" in later.next_steps[0]


def test_falls_are_located_near_their_place(recorded: Recorded):
    by_context = diagnose(recorded(**FAULTS["long context"][0]))
    assert 128 <= outcome(by_context, "long-context").numbers["limit_tokens"] <= 256
    by_output = diagnose(recorded(**FAULTS["late output"][0]))
    assert 96 <= outcome(by_output, "late-output").numbers["limit_tokens"] <= 192


def test_a_chain_that_is_not_the_walk_is_named(recorded: Recorded):
    healthy = recorded()
    choice = healthy.stock_choice.copy()
    choice[::5, 2] = healthy.candidate_ids[::5, 2, 7]
    found = diagnose(replace(healthy, stock_choice=choice))
    item = outcome(found, "chain-walk")
    assert item.state == "found"
    assert 0.1 < item.numbers["off_walk_ratio"] < 0.21
    assert item.numbers["outside_lattice_ratio"] == 0
    choice[::5, 2] = 4098
    outside = outcome(diagnose(replace(healthy, stock_choice=choice)), "chain-walk")
    assert outside.numbers["outside_lattice_ratio"] == pytest.approx(0.2, abs=0.01)


def test_dspark_chains_that_leave_the_candidates_are_healthy(recorded: Recorded):
    healthy = recorded()
    dspark = healthy.metadata.model_copy(update={"drafter_kind": "dspark"})
    choice = healthy.stock_choice.copy()
    choice[::5, 2] = 4098
    leaving = outcome(
        diagnose(replace(healthy, metadata=dspark, stock_choice=choice)), "chain-walk"
    )
    assert leaving.state == "clear"
    assert leaving.numbers["off_walk_ratio"] == 0
    assert leaving.numbers["outside_lattice_ratio"] == pytest.approx(0.2, abs=0.01)
    choice[1::5, 2] = healthy.candidate_ids[1::5, 2, 7]
    other = outcome(diagnose(replace(healthy, metadata=dspark, stock_choice=choice)), "chain-walk")
    assert other.state == "found"
    choice[:, 0] = 9999  # beyond the vocabulary, so never a candidate
    none = outcome(diagnose(replace(healthy, metadata=dspark, stock_choice=choice)), "chain-walk")
    assert none.state == "not checked"


def test_plain_dflash_is_held_against_its_marginal_tree(plain_dflash: LatticeRecording):
    found = diagnose(plain_dflash)
    assert found.tree.value == replay(plain_dflash, ["marginal"], nodes=[32]).rows[0].tau.value
    assert outcome(found, "chain-walk").state == "clear"
    assert found.chain.value < found.tree.value < found.oracle.value


def test_one_hard_benchmark_is_a_note_and_no_alarm(recorded: Recorded):
    found = diagnose(recorded(n_requests=36, sharpness=3.0, first_benchmark=0.2))
    item = outcome(found, "kinds-of-text")
    assert (item.state, item.kind) == ("found", "note")
    assert list(item.numbers) == ["b0_ratio"]
    assert found.verdict == "ok"
    assert (
        outcome(diagnose(recorded(n_requests=36, sharpness=3.0)), "kinds-of-text").state == "clear"
    )


def test_hard_text_is_a_note(recorded: Recorded):
    found = diagnose(recorded(sharpness=1.2))
    item = outcome(found, "hard-text")
    assert (item.state, item.kind, item.counts) == ("found", "note", False)
    assert found.verdict == "ok"


def test_an_anchored_recording_is_judged_at_its_own_steps(recorded: Recorded):
    dense = recorded()
    kept = np.flatnonzero(dense.step_position % 3 == 0)
    names = ("step_request", "step_position", "candidate_ids", "edge", "unary", "unary_logsumexp",
             "stock_choice")  # fmt: skip
    metadata = dense.metadata.model_copy(update={"mode": "anchored"})
    anchored = replace(
        dense, metadata=metadata, **{name: getattr(dense, name)[kept] for name in names}
    )
    found = diagnose(anchored)
    assert (found.mode, found.n_anchors, found.verdict) == ("anchored", len(kept), "ok")
    wrong = replace(anchored, output_ids=np.roll(anchored.output_ids, -1))
    assert counted(diagnose(wrong)) == {"position-shift"}


def test_three_requests_are_no_verdict(recorded: Recorded):
    found = diagnose(recorded(n_requests=3))
    assert found.verdict == "invalid"
    assert outcome(found, "recall").state == "not checked"


def test_a_better_recording_of_the_same_prompts_shows_what_is_lost(recorded: Recorded):
    good, worse = recorded(), replace(recorded(mixed=0.3), metadata=_other_target(recorded()))
    item = outcome(diagnose(worse, Given(other=good)), "against")
    assert item.state == "found"
    assert "the target's bytes" in item.detail
    assert any("targets are not the same bytes" in step for step in item.next_steps)
    assert outcome(diagnose(good, Given(other=worse)), "against").state == "clear"
    assert outcome(diagnose(good, Given(other=good)), "against").numbers["same_outputs_ratio"] == 1
    strangers = replace(good, metadata=_renamed(good))
    assert outcome(diagnose(good, Given(other=strangers)), "against").state == "not checked"


def _other_target(recording: LatticeRecording) -> Any:
    return recording.metadata.model_copy(update={"target_sha256": "c" * 64})


def _renamed(recording: LatticeRecording) -> Any:
    requests = [
        item.model_copy(update={"request_id": f"x{i}"})
        for i, item in enumerate(recording.metadata.requests)
    ]
    return recording.metadata.model_copy(update={"requests": requests})


def test_a_reported_accept_length_is_held_against_the_interval(recorded: Recorded):
    found = diagnose(recorded())
    reported = Given(expected_tau=2 * found.chain.value)
    assert outcome(diagnose(recorded(), reported), "expected").state == "found"
    near = Given(expected_tau=found.chain.value)
    assert outcome(diagnose(recorded(), near), "expected").state == "clear"


def test_the_numbers_by_position_are_those_of_the_recording(recorded: Recorded):
    recording = recorded()
    rows = diagnose(recording).rows
    first = rows[0]
    last = recording.output_offsets[1:] - 2  # no lattice at an output's last token
    assert (
        first.anchors == recording.n_steps == int((last - recording.output_offsets[:-1] + 1).sum())
    )
    index = recording.output_offsets[recording.step_request] + recording.step_position + 1
    assert first.accepted == (recording.stock_choice[:, 0] == recording.output_ids[index]).mean()
    assert rows[1].anchors < first.anchors
    for row in rows[:4]:
        assert abs(row.own - row.accepted) < 0.06  # calibrated by construction
