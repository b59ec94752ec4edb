"""EAGLE-2, OPT-Tree, Sequoia and cost-aware trees in replay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from specpilot_cli.errors import InputError
from specpilot_cli.replay.alternatives import rank_counts, true_ranks
from specpilot_cli.replay.anchors import AS_RECORDED, ReplayOptions, StepCost, prepare
from specpilot_cli.replay.policies import POLICIES
from specpilot_cli.replay.run import replay, replay_accept_lengths
from specpilot_cli.replay.split import requests_with_steps, two_folds
from specpilot_cli.schema.lattice import LatticeRecording
from specpilot_cli.ui import SilentReporter
from specpilot_kernels.trees import accepted_nodes, eagle2, sequoia_plan

Make = Callable[..., LatticeRecording]
NODES = (3, 8, 20)


def costs(seconds: list[float]) -> ReplayOptions:
    return ReplayOptions(step_cost=StepCost(tuple(seconds), 1.0, "made up"))


def taus(recording: LatticeRecording, policy: str, options: ReplayOptions = AS_RECORDED) -> Any:
    return replay(recording, [policy], nodes=NODES, options=options).curve(policy)


def test_opt_tree_and_wide_eagle2_replay_as_best_first(random_recording: Make) -> None:
    recording = random_recording(5)
    best = taus(recording, "best-first")
    assert taus(recording, "opt-tree") == best
    assert taus(recording, "eagle-2", ReplayOptions(top_k=20)) == best


def test_eagle2_steps_equal_its_trees_built_one_by_one(random_recording: Make) -> None:
    recording = random_recording(6)
    lengths = replay_accept_lengths(recording, "eagle-2", 8, options=ReplayOptions(top_k=2))
    for request in range(recording.n_requests):
        output, at, found = recording.output(request), 0, []
        first = int(np.searchsorted(recording.step_request, request))
        while at < len(output) - 1:
            ids, edge = recording.candidate_ids[first + at], recording.edge[first + at]
            tree = eagle2(ids, edge, 8, top_k=2)
            n_accepted = len(accepted_nodes(tree, output[at + 1 :]))
            found.append(min(n_accepted + 1, len(output) - 1 - at))
            at += found[-1]
        assert lengths[request].tolist() == found


def test_flat_cost_spends_the_largest_budget(random_recording: Make) -> None:
    recording = random_recording(7)
    flat = costs([0.01] * 21)
    result = replay(recording, ["cost-aware", "best-first"], nodes=NODES, options=flat)
    for n_nodes in NODES:
        row, best = result.row("cost-aware", n_nodes), result.row("best-first", n_nodes)
        assert row.tau.value == best.tau.value
        assert row.mean_nodes == n_nodes
        assert row.expected_tau == pytest.approx(best.expected_tau)
        assert row.speedup == pytest.approx(row.tau.value * 1.0 / 0.01)


def test_each_step_spends_what_its_own_expectation_pays_for(random_recording: Make) -> None:
    recording = random_recording(8)
    rising = costs([1.0 + 0.06 * n for n in range(21)])
    row = replay(recording, ["cost-aware"], nodes=[20], options=rising).row("cost-aware", 20)
    assert row.mean_nodes is not None
    assert 0 < row.mean_nodes < 20
    assert row.step_s == pytest.approx(1.0 + 0.06 * row.mean_nodes)
    # So dear that no node pays: plain decoding at one token a step.
    dear = replay(
        recording, ["cost-aware"], nodes=[20], options=costs([1.0 + 9.0 * n for n in range(21)])
    ).row("cost-aware", 20)
    assert (dear.mean_nodes, dear.tau.value) == (0.0, 1.0)


def test_cost_aware_without_step_times_says_what_is_missing(random_recording: Make) -> None:
    with pytest.raises(InputError, match="what a step costs") as caught:
        taus(random_recording(1), "cost-aware")
    assert "--step-times" in (caught.value.hint or "")
    assert "cost-aware" not in {row.policy for row in replay(random_recording(1)).rows}


def test_sequoia_is_judged_on_requests_it_was_not_fitted_on(random_recording: Make) -> None:
    recording = random_recording(9, lengths=(60, 50, 70, 40))
    anchors = prepare(recording, AS_RECORDED)
    fold = two_folds(recording.metadata, requests_with_steps(recording))
    assert sorted(fold.tolist()) == [0, 0, 1, 1]
    hits, tried = rank_counts(recording, AS_RECORDED)
    trace = POLICIES["sequoia"].trace(anchors, AS_RECORDED, [8])
    assert trace.expected is not None
    for judged in (0, 1):
        mine = fold[anchors.request] == judged
        accept = hits[fold != judged].sum(axis=0) / tried[fold != judged].sum()
        plan = sequoia_plan(accept, 8, max_depth=7).tree(8)
        # Anchors far from their output's end expect the plan's whole value.
        far = mine & (anchors.remaining > 7)
        np.testing.assert_allclose(trace.expected[far, 0], plan.value)


def test_acceptance_vector_by_hand(scripted_recording: Make) -> None:
    # One request of 4 tokens; the drafter is right 3, 1 and 0 times, then its second choice is.
    recording = scripted_recording([[0, 1, 2, 3]], [[3, 1, 0]])
    anchors = prepare(recording, AS_RECORDED)
    ranks = true_ranks(anchors, AS_RECORDED)
    assert ranks.tolist() == [[0, 0, 0, -1], [0, 1, -1, -1], [1, -1, -1, -1]]
    hits, tried = rank_counts(recording, AS_RECORDED)
    assert (hits.tolist(), tried.tolist()) == ([[4, 2]], [6])


def test_one_request_warns_that_sequoia_saw_it(scripted_recording: Make) -> None:
    class Warned(SilentReporter):
        messages: list[str]

        def warn(self, msg: str) -> None:
            self.messages.append(msg)

    reporter = Warned()
    reporter.messages = []
    replay(scripted_recording([[0, 1, 2, 3]], [[3, 1, 0]]), ["sequoia"], reporter=reporter)
    assert any("fitted on" in message for message in reporter.messages)


def test_top_k_below_one_is_refused(random_recording: Make) -> None:
    with pytest.raises(InputError, match="--top-k"):
        taus(random_recording(1), "eagle-2", ReplayOptions(top_k=0))
