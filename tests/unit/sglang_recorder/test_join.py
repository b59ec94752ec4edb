"""Joining steps with answers: all of a request or nothing of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from specpilot_cli.errors import MeasurementInvalid
from specpilot_cli.record.join import (
    Incomplete,
    check_stock,
    join_request,
    no_steps,
    stock_outside,
)
from specpilot_cli.record.shards import RequestRows
from specpilot_cli.schema.raw_lattice import Mode
from specpilot_kernels.trees import chain

L, K, PROMPT = 3, 4, 5
OUTPUT = [11, 12, 13, 14, 15, 16, 17]


def _rows(positions: list[int], commits: list[int] | None = None, *, seed: int = 0) -> RequestRows:
    """Recorded steps at output `positions`; the seed also marks which recording they are from."""
    rng = np.random.default_rng(seed)
    n = len(positions)
    ids = np.argsort(rng.random((n, L, 40)), axis=-1)[..., :K].astype(np.int32)
    scores = rng.standard_normal((n, L, K, K)).astype(np.float32)
    scores[:, 0] = scores[:, 0, :1]
    stock = [chain(ids[i], scores[i]).token for i in range(n)]
    part: dict[str, Any] = {
        "prefix_len": np.asarray(positions, dtype=np.int32) + PROMPT,
        "commit_len": np.asarray(commits or [1] * n, dtype=np.int32),
        "anchor": np.asarray([(OUTPUT + [99] * 9)[p] for p in positions], dtype=np.int32),
        "stock_choice": np.asarray(stock, dtype=np.int32).reshape(n, L),
        "candidate_ids": ids,
        "scores": scores,
        "unary": rng.standard_normal((n, L, K)).astype(np.float32),
        "unary_logsumexp": rng.standard_normal((n, L)).astype(np.float32) + 5,
    }
    return RequestRows([part])


def _join(rows: RequestRows | None, mode: Mode, output: list[int] = OUTPUT) -> dict[str, Any]:
    return join_request(rows, prompt_len=PROMPT, output_ids=output, mode=mode, empty=no_steps(L, K))


def test_dense_keeps_each_position_that_has_a_successor() -> None:
    steps = _join(_rows([0, 1, 2, 3, 4, 5, 6, 7]), "dense")
    assert steps["step_position"].tolist() == [0, 1, 2, 3, 4, 5]
    assert all(len(array) == 6 for array in steps.values())
    np.testing.assert_allclose(np.exp(steps["edge"]).sum(-1), 1, atol=1e-6)


@pytest.mark.parametrize("missing", range(6))
def test_dense_needs_every_one_of_them(missing: int) -> None:
    rows = _rows([p for p in range(7) if p != missing])
    with pytest.raises(Incomplete, match=f"position {missing} is missing"):
        _join(rows, "dense")


@pytest.mark.parametrize(
    ("positions", "commits"),
    [([0, 2, 5], [2, 3, 1]), ([0, 2, 5], [2, 3, 4]), ([0, 2, 5, 7], [2, 3, 2, 1]), ([0], [9])],
)
def test_anchored_steps_follow_one_another(positions: list[int], commits: list[int]) -> None:
    steps = _join(_rows(positions, commits), "anchored")
    assert steps["step_position"].tolist() == [p for p in positions if p < 6]


@pytest.mark.parametrize(
    ("positions", "commits", "at"),
    [
        ([2, 5], [3, 1], 0),  # the first step is missing
        ([0, 5], [2, 1], 2),  # one in the middle
        ([0, 2], [2, 3], 5),  # the last
        ([0, 2, 3], [6, 1, 3], 6),  # two steps that overlap: a request that was put back
    ],
)
def test_a_gap_between_anchored_steps_drops_the_request(
    positions: list[int], commits: list[int], at: int
) -> None:
    with pytest.raises(Incomplete, match=f"position {at} is missing"):
        _join(_rows(positions, commits), "anchored")


def test_of_a_repeated_step_the_last_one_counts() -> None:
    first, again = _rows([0, 1, 2, 3], seed=1), _rows([2, 3, 4, 5], seed=2)
    steps = _join(RequestRows(first.parts + again.parts), "dense")
    assert steps["step_position"].tolist() == [0, 1, 2, 3, 4, 5]
    assert np.array_equal(steps["unary"][:2], first.parts[0]["unary"][:2])
    assert np.array_equal(steps["unary"][2:], again.parts[0]["unary"])


def test_another_request_under_the_same_name_is_noticed() -> None:
    rows = _rows([0, 1, 2, 3, 4, 5])
    rows.parts[0]["anchor"][3] += 1
    with pytest.raises(Incomplete, match="position 3 has another anchor"):
        _join(rows, "dense")
    with pytest.raises(Incomplete, match="inside the prompt"):
        join_request(
            _rows([0, 1]), prompt_len=PROMPT + 1, output_ids=[1, 2], mode="dense",
            empty=no_steps(L, K),
        )  # fmt: skip


def test_a_request_of_one_token_has_no_step_and_others_need_some() -> None:
    assert _join(None, "dense", [11])["edge"].shape == (0, L, K, K)
    with pytest.raises(Incomplete, match="no step"):
        _join(None, "dense", [11, 12])


def test_chains_that_do_not_follow_their_lattice_void_the_recording() -> None:
    positions = list(range(150))
    part = _rows([p % 6 for p in positions]).parts[0]
    steps = join_request(
        RequestRows([part]), prompt_len=PROMPT, output_ids=OUTPUT, mode="dense", empty={}
    )
    check_stock(steps, "DFLASH")
    assert not stock_outside(steps).any()
    late = {**steps, "stock_choice": np.roll(steps["stock_choice"], 1, axis=0)}
    for algorithm in ("DFLASH", "DSPARK"):
        with pytest.raises(MeasurementInvalid, match="do not belong to the drafts"):
            check_stock(late, algorithm)


def test_only_dspark_may_draft_outside_the_candidates() -> None:
    part = _rows([0, 1, 2, 3, 4, 5]).parts[0]
    part["stock_choice"][2, 1:] = 777
    steps = join_request(
        RequestRows([part]), prompt_len=PROMPT, output_ids=OUTPUT, mode="dense", empty={}
    )
    assert stock_outside(steps).sum() == 2
    check_stock(steps, "DSPARK")
    with pytest.raises(MeasurementInvalid):
        check_stock(steps, "DFLASH")
