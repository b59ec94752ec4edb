"""Replay against step-by-step simulation with rebuilt trees, and against hand-worked cases."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from specpilot_cli.errors import InputError
from specpilot_cli.replay.anchors import ReplayOptions, prepare
from specpilot_cli.replay.facts import recall_by_position
from specpilot_cli.replay.run import replay, replay_accept_lengths
from specpilot_cli.schema.lattice import LatticeRecording
from specpilot_cli.ui import SilentReporter
from specpilot_kernels.trees import accepted_nodes, best_first, chain, marginal, temper

Make = Callable[..., LatticeRecording]
SEEDS = st.integers(0, 2**32 - 1)


def simulate(recording: LatticeRecording, tree_at: Callable[[int], Any]) -> list[list[int]]:
    """Decode every request step by step, building the tree of each anchor it lands on."""
    lengths: list[list[int]] = []
    for request in range(recording.n_requests):
        output, position, steps = recording.output(request), 0, []
        first = int(np.searchsorted(recording.step_request, request))
        while position < output.size - 1:
            accepted = accepted_nodes(tree_at(first + position), output[position + 1 :]).size
            steps.append(min(accepted + 1, output.size - 1 - position))
            position += steps[-1]
        lengths.append(steps)
    return lengths


def as_lists(arrays: Any) -> list[list[int]]:
    return [array.tolist() for array in arrays]


@settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(seed=SEEDS, n_nodes=st.integers(1, 40))
def test_every_policy_equals_decoding_with_rebuilt_trees(
    random_recording: Make, seed: int, n_nodes: int
) -> None:
    rec = random_recording(seed)
    ids, edge = rec.candidate_ids, rec.edge
    built: dict[str, Callable[[int], Any]] = {
        "chain": lambda s: chain(ids[s], edge[s], length=n_nodes),
        "best-first": lambda s: best_first(ids[s], edge[s], n_nodes),
        "marginal": lambda s: marginal(ids[s], rec.unary[s], rec.unary_logsumexp[s], n_nodes),
    }
    for name, tree_at in built.items():
        assert as_lists(replay_accept_lengths(rec, name, n_nodes)) == simulate(rec, tree_at)


def test_options_equal_decoding_with_a_changed_drafter(random_recording: Make) -> None:
    rec = random_recording(5)

    def tree_at(step: int) -> Any:
        return best_first(rec.candidate_ids[step, :4], temper(rec.edge[step, :4], 1.7), 12)

    for options in (
        ReplayOptions(positions=4, temperature=1.7),
        ReplayOptions(depth=4, temperature=1.7),
        ReplayOptions(positions=6, depth=4, temperature=1.7),
    ):
        found = replay_accept_lengths(rec, "best-first", 12, options=options)
        assert as_lists(found) == simulate(rec, tree_at)


def test_oracle_accepts_the_run_that_stays_in_the_lattice(random_recording: Make) -> None:
    rec = random_recording(6, recall=0.8)
    found = replay_accept_lengths(rec, "oracle")
    position, step = 0, 0
    for committed in found[0].tolist():
        ahead = rec.output(0)[position + 1 : position + 1 + rec.n_positions]
        run = 0
        while run < ahead.size and ahead[run] in rec.candidate_ids[position, run]:
            run += 1
        assert committed == min(run + 1, 29 - position)
        position, step = position + committed, step + 1
    assert (position, step) == (29, found[0].size)


def test_commit_lengths_sum_to_the_output_without_the_prefill_token(
    random_recording: Make,
) -> None:
    rec = random_recording(7)
    for policy, nodes in (("chain", None), ("best-first", 16), ("oracle", None)):
        sums = [int(a.sum()) for a in replay_accept_lengths(rec, policy, nodes)]
        assert sums == [29, 0, 24, 1, 39, 27]


def test_hand_worked_trajectory(scripted_recording: Make) -> None:
    # Six tokens after prefill. Chain right for 2, then (at position 3) 0, then (4) 1 of 2 left.
    outputs = [[10, 11, 12, 13, 14, 15, 16]]
    rec = scripted_recording(outputs, [[2, 4, 4, 0, 1, 0]])
    assert as_lists(replay_accept_lengths(rec, "chain")) == [[3, 1, 2]]
    # Nodes in order of probability, p = 0.731 and q = 0.269: p, p², p³, p⁴ = 0.285, then q = 0.269.
    assert as_lists(replay_accept_lengths(rec, "best-first", 4)) == [[3, 1, 2]]
    # q below the root is node 5, so the miss at position 3 is caught and the tree reaches 15.
    assert as_lists(replay_accept_lengths(rec, "best-first", 5)) == [[3, 2, 1]]
    assert as_lists(replay_accept_lengths(rec, "oracle")) == [[4, 2]]


def test_one_build_gives_the_whole_curve(random_recording: Make) -> None:
    rec = random_recording(8)
    whole = replay(rec, ["best-first", "marginal"], nodes=range(1, 41))
    for nodes in (1, 5, 17, 40):
        for policy in ("best-first", "marginal"):
            alone = replay(rec, [policy], nodes=[nodes]).row(policy, nodes)
            assert whole.row(policy, nodes).tau == alone.tau
            assert whole.row(policy, nodes).expected_tau == alone.expected_tau
    assert list(whole.curve("best-first")) == list(range(1, 41))


def test_tau_is_total_tokens_over_total_steps(random_recording: Make) -> None:
    rec = random_recording(9)
    row = replay(rec, ["best-first"], nodes=[16]).row("best-first", 16)
    lengths = replay_accept_lengths(rec, "best-first", 16)
    assert row.steps.tolist() == [a.size for a in lengths]
    assert row.tau.value == sum(a.sum() for a in lengths) / sum(a.size for a in lengths)
    assert (row.nodes, row.rows, row.tau.n_requests) == (16, 17, 5)
    even = lengths[::2]
    assert row.benchmarks["bench0"].value == sum(map(sum, even)) / sum(map(len, even))
    mean = (row.benchmarks["bench0"].value + row.benchmarks["bench1"].value) / 2
    assert row.benchmark_mean.value == pytest.approx(mean)


def test_order_between_policies(random_recording: Make) -> None:
    """Per anchor the oracle bounds any tree, and the full chain is inside a large enough tree."""
    rec = random_recording(10, lengths=(60, 60, 60, 60))
    result = replay(rec, nodes=[7, 32, 500], mode="dense-mean")
    tau = {(row.policy, row.nodes): row.tau.value for row in result.rows}
    oracle = tau["oracle", None]
    assert tau["chain", 7] <= tau["best-first", 500] <= oracle
    assert tau["best-first", 7] <= tau["best-first", 32] <= tau["best-first", 500]
    assert tau["marginal", 32] <= oracle


def test_drafter_that_is_right_about_its_probabilities_predicts_tau(
    random_recording: Make,
) -> None:
    rec = random_recording(11, lengths=[120] * 40, recall=1.0)
    result = replay(rec, ["chain", "best-first"], nodes=[32])
    for row in (result.row("chain", 7), result.row("best-first", 32)):
        assert row.expected_tau == pytest.approx(row.tau.value, rel=0.05)  # ± 2.5 standard errors


def test_drafter_that_misses_the_truth_expects_too_much(random_recording: Make) -> None:
    rec = random_recording(12, lengths=[120] * 20, recall=0.8)
    row = replay(rec, ["best-first"], nodes=[32]).row("best-first", 32)
    assert row.expected_tau is not None
    assert row.expected_tau > 1.1 * row.tau.value
    recall = recall_by_position(prepare(rec, ReplayOptions()))
    np.testing.assert_allclose(recall, 0.8, atol=0.05)


def test_conditional_scores_beat_marginal_ones_when_pairs_matter(random_recording: Make) -> None:
    rec = random_recording(13, lengths=[80] * 30)
    row = replay(rec, ["marginal", "best-first"], nodes=[16]).row("best-first", 16)
    other = replay(rec, ["marginal"], nodes=[16]).row("marginal", 16)
    assert row.tau.value > other.tau.value


def test_dense_mean_overstates_a_mixture_of_easy_and_hard_passages(
    scripted_recording: Make,
) -> None:
    # 20 easy tokens (all 4 drafts right), then 5 hard ones (none right): the trajectory takes
    # 4 + 5 steps for 25 tokens.
    output = list(range(100, 126))
    right = [[4 if p < 20 else 0 for p in range(25)]]
    rec = scripted_recording([output], right)
    result = {m: replay(rec, ["chain"], mode=m) for m in ("trajectory", "dense-mean")}
    assert result["trajectory"].rows[-1].tau.value == pytest.approx(25 / 9)
    # 20 anchors commit 5 each, 5 anchors commit 1 each.
    assert result["dense-mean"].rows[-1].tau.value == pytest.approx((20 * 5 + 5) / 25)
    assert "biased" in result["dense-mean"].bias
    assert "unbiased" in result["trajectory"].bias


def test_anchored_mode_judges_all_policies_where_the_chain_stood(
    scripted_recording: Make,
) -> None:
    outputs = [[10, 11, 12, 13, 14, 15, 16]]
    rec = scripted_recording(outputs, [[2, 4, 4, 0, 1, 0]])
    # The chain stands at 0, 3 and 4 and commits 3, 1, 2; the oracle there commits 4, 2, 2.
    anchored = replay(rec, ["chain", "oracle"], mode="anchored")
    assert anchored.row("chain", 4).tau.value == pytest.approx(6 / 3)
    assert anchored.row("oracle", None).tau.value == pytest.approx(8 / 3)
    assert replay(rec, ["oracle"]).row("oracle", None).tau.value == pytest.approx(6 / 2)


def test_anchored_recording_is_judged_at_its_anchors_and_nowhere_else(
    scripted_recording: Make,
) -> None:
    dense = scripted_recording([[10, 11, 12, 13, 14, 15, 16]], [[2, 4, 4, 0, 1, 0]])
    keep = np.array([0, 3, 4])
    per_step = ("step_request", "step_position", "candidate_ids", "edge", "unary",
                "unary_logsumexp", "stock_choice")  # fmt: skip
    anchored = dataclasses.replace(
        dense,
        metadata=dense.metadata.model_copy(update={"mode": "anchored"}),
        **{name: getattr(dense, name)[keep] for name in per_step},
    )
    result = replay(anchored, ["chain", "oracle"])
    assert result.mode == "anchored"
    assert result.row("oracle", None).tau.value == pytest.approx(8 / 3)
    for mode in ("trajectory", "dense-mean"):
        with pytest.raises(InputError, match="anchored"):
            replay(anchored, ["chain"], mode=mode)
    with pytest.raises(InputError, match="anchored"):
        replay_accept_lengths(anchored, "chain")


def test_last_step_is_cut_at_the_end_of_the_output(scripted_recording: Make) -> None:
    rec = scripted_recording([[1, 2, 3], [4, 5]], [[4, 4], [4]])
    assert as_lists(replay_accept_lengths(rec, "chain")) == [[2], [1]]
    row = replay(rec, ["chain"]).row("chain", 4)
    assert row.tau.value == pytest.approx(3 / 2)
    # The drafter cannot expect more than is left either: 1 + p, and exactly 1.
    assert row.expected_tau == pytest.approx(1 + 1 / (1 + np.exp(-1)) / 2)


def test_anchor_at_the_last_token_is_ignored(assemble_recording: Make) -> None:
    """A dense recording may hold a lattice after the last token; nothing can be judged there."""
    ids, scores = np.array([[7, 8], [9, 6]]), np.zeros((2, 2, 2))

    def build(anchors: list[tuple[int, int]]) -> LatticeRecording:
        return assemble_recording([[5, 7, 9], [5]], lambda r, p: (ids, scores), anchors=anchors)

    full = build([(0, 0), (0, 1), (0, 2), (1, 0)])
    plain = build([(0, 0), (0, 1)])
    left, right = replay(full, nodes=[3]), replay(plain, nodes=[3])
    assert [row.tau for row in left.rows] == [row.tau for row in right.rows]
    assert left.n_anchors == 2


def test_chain_rows_stop_at_the_block(random_recording: Make) -> None:
    result = replay(random_recording(1), ["chain", "oracle"], nodes=[3, 7, 8, 32])
    assert [(row.policy, row.nodes, row.rows) for row in result.rows] == [
        ("chain", 3, 4), ("chain", 7, 8), ("oracle", None, None),
    ]  # fmt: skip
    assert result.row("chain", 7).gain.value == 1.0
    assert result.row("chain", 7).gain.low == pytest.approx(1.0)


def test_stock_choice_that_does_not_belong_to_the_scores_is_reported(
    random_recording: Make,
) -> None:
    heard: list[str] = []

    class Ear(SilentReporter):
        def warn(self, msg: str) -> None:
            heard.append(msg)

    rec = random_recording(2)
    assert replay(rec, ["chain"], reporter=Ear()).chain_mismatch_ratio == 0.0
    assert heard == []
    shifted = dataclasses.replace(rec, stock_choice=np.roll(rec.stock_choice, 1, axis=0))
    assert replay(shifted, ["chain"], reporter=Ear()).chain_mismatch_ratio > 0.9
    assert "may not belong together" in heard[0]
    # Tokens outside the lattice have no score, so the drafter's own estimate is withheld.
    foreign = dataclasses.replace(rec, stock_choice=rec.stock_choice + 1000)
    assert replay(foreign, ["chain"]).row("chain", 7).expected_tau is None


@pytest.mark.parametrize(
    ("kwargs", "where"),
    [
        ({"policies": ["best"]}, "--policy"),
        ({"nodes": []}, "--nodes"),
        ({"nodes": [0]}, "--nodes"),
        ({"nodes": [5000]}, "--nodes"),
        ({"options": ReplayOptions(positions=8)}, "--positions"),
        ({"options": ReplayOptions(depth=0)}, "--depth"),
        ({"options": ReplayOptions(temperature=0.0)}, "--temperature"),
        ({"options": ReplayOptions(temperature=float("nan"))}, "--temperature"),
    ],
)
def test_bad_requests_name_the_option(
    random_recording: Make, kwargs: dict[str, Any], where: str
) -> None:
    with pytest.raises(InputError) as caught:
        replay(random_recording(3), **kwargs)
    assert caught.value.where == where


def test_unknown_policy_suggests_a_near_name(random_recording: Make) -> None:
    with pytest.raises(InputError) as caught:
        replay(random_recording(3), ["best_first"])
    assert "did you mean `best-first`" in str(caught.value.hint)


def test_tree_policies_need_a_budget(random_recording: Make) -> None:
    with pytest.raises(InputError, match="needs a node budget"):
        replay_accept_lengths(random_recording(3), "best-first")


def test_recording_without_a_step_to_judge_is_refused(assemble_recording: Make) -> None:
    ids, scores = np.array([[7, 8]]), np.zeros((1, 2, 2))
    rec = assemble_recording([[5]], lambda r, p: (ids, scores), anchors=[(0, 0)])
    with pytest.raises(InputError, match="nothing to replay"):
        replay(rec)
