"""Order of service: complete, balanced, and blind to drift."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specpilot_cli.paired_bench.schedule import run_schedule, serving_order, system_order

NAMES = st.lists(st.sampled_from(["chat", "code", "math"]), min_size=1, max_size=30)
SYSTEMS = st.sampled_from([("a", "b"), ("a", "b", "c")])


def test_one_benchmark_is_served_in_abba_order() -> None:
    slots = run_schedule(["math"] * 4, ["a", "b"], run=0, block_requests=1)
    assert "".join(slot.system for slot in slots) == "abbaabba"


def test_the_next_run_swaps_every_request() -> None:
    first = run_schedule(["math"] * 3, ["a", "b"], run=0, block_requests=1)
    second = run_schedule(["math"] * 3, ["a", "b"], run=1, block_requests=1)
    assert [slot.system for slot in second] == ["b", "a", "a", "b", "b", "a"]
    assert {(s.system, s.requests, s.position) for s in first} == {
        (s.system, s.requests, 1 - s.position) for s in second
    }


def test_two_benchmarks_in_turn_do_not_lock_to_one_order_each() -> None:
    slots = run_schedule(["chat", "math"] * 2, ["a", "b"], run=0, block_requests=1)
    first = {slot.requests[0]: slot.system for slot in slots if slot.position == 0}
    assert [first[i] for i in range(4)] == ["a", "b", "b", "a"]


@given(NAMES, SYSTEMS, st.integers(1, 7))
def test_every_system_serves_every_request_once_and_blocks_are_not_interrupted(
    benchmarks: list[str], systems: tuple[str, ...], block_requests: int
) -> None:
    for run in (0, 1):
        slots = run_schedule(benchmarks, systems, run=run, block_requests=block_requests)
        served = Counter((slot.system, i) for slot in slots for i in slot.requests)
        assert set(served.values()) == {1}
        assert len(served) == len(systems) * len(benchmarks)
        assert [s.block for s in slots] == sorted(s.block for s in slots)
        assert all(1 <= len(s.requests) <= block_requests for s in slots)


@given(NAMES, SYSTEMS, st.integers(1, 7))
def test_two_runs_give_each_pair_of_systems_the_same_mean_place(
    benchmarks: list[str], systems: tuple[str, ...], block_requests: int
) -> None:
    place: Counter[tuple[str, int]] = Counter()
    for run in (0, 1):
        for slot in run_schedule(benchmarks, systems, run=run, block_requests=block_requests):
            place.update({(slot.system, i): slot.position for i in slot.requests})
    assert set(place.values()) == {len(systems) - 1}


def test_three_systems_take_all_six_orders() -> None:
    orders = {system_order("abc", turn, swapped=False) for turn in range(6)}
    assert len(orders) == 6


@given(NAMES)
def test_serving_order_spreads_each_benchmark_over_the_run(benchmarks: list[str]) -> None:
    order = serving_order(benchmarks)
    assert sorted(order) == list(range(len(benchmarks)))
    counts: Counter[str] = Counter()
    for index in order:
        counts[benchmarks[index]] += 1
        open_cells = [n for n in set(benchmarks) if counts[n] < benchmarks.count(n)]
        if open_cells:
            assert max(counts.values()) - min(counts[n] for n in open_cells) <= 1


@pytest.mark.parametrize(("n", "size", "sizes"), [(9, 8, {4, 5}), (16, 8, {8}), (3, 8, {3})])
def test_the_last_block_is_not_left_under_filled(n: int, size: int, sizes: set[int]) -> None:
    slots = run_schedule(["x"] * n, ["a", "b"], run=0, block_requests=size)
    assert {len(slot.requests) for slot in slots} == sizes
