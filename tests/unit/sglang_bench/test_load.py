"""Streams are read whole, timed where all requests decode, and refused where they say nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from sglang_bench.load import (
    BadAnswer,
    Event,
    Stream,
    generate,
    prompts_of,
    steady_ms,
    stream,
    together,
)

if TYPE_CHECKING:
    from conftest import Scripted


def one(*events: tuple[float, int, int]) -> Stream:
    return Stream(0.0, tuple(Event(*event) for event in events), (), {})


@pytest.mark.parametrize("whole", [False, True])
def test_a_stream_is_joined_whatever_its_events_carry(scripted: Scripted, whole: bool) -> None:
    scripted.whole = whole
    answer = stream(scripted.url, (3, 1), 20, every=8)
    assert answer.output_ids == tuple(range(20))
    assert [event.tokens for event in answer.events] == [1, 9, 17, 20]
    sampling = scripted.asked[0]["sampling_params"]
    assert (sampling["temperature"], sampling["ignore_eos"]) == (0, True)


def test_a_stream_that_ends_early_is_refused(scripted: Scripted) -> None:
    scripted.stop_after = 10
    with pytest.raises(BadAnswer, match="of 20 tokens"):
        stream(scripted.url, (3,), 20, every=4)


def test_a_refusal_and_a_wrong_count_are_errors(scripted: Scripted) -> None:
    with pytest.raises(BadAnswer, match="503"):
        together(scripted.url, [(1,), (2,)], 13, every=4)
    with pytest.raises(BadAnswer, match="1 tokens, not 2"):
        generate(scripted.url, (1,), 2)


def test_the_rate_is_the_server_s(scripted: Scripted) -> None:
    scripted.seconds, scripted.per_step = 0.01, 4
    streams = together(scripted.url, prompts_of(3, 5, 100, seed=1), 41, every=8)
    assert steady_ms(streams, per="tokens") == pytest.approx(10.0, rel=0.2)
    assert steady_ms(streams, per="steps") == pytest.approx(40.0, rel=0.2)


def test_only_the_part_in_which_all_decode_counts() -> None:
    """The second request starts at 2 s; the first is alone, and faster, before that."""
    first = one((0.0, 1, 0), (1.0, 101, 0), (2.0, 201, 0), (3.0, 211, 0), (4.0, 221, 0))
    second = one((2.0, 1, 0), (3.0, 11, 0), (4.0, 21, 0), (9.0, 22, 0))
    assert steady_ms([first, second], per="tokens") == pytest.approx(100.0)


@pytest.mark.parametrize("late", [(4.0, 1, 0), (5.0, 1, 0)])
def test_requests_that_never_decode_together_say_nothing(late: Any) -> None:
    with pytest.raises(BadAnswer, match="all 2 requests decoded in"):
        steady_ms([one((0.0, 1, 0), (4.0, 41, 0)), one(late, (8.0, 41, 0))], per="tokens")


def test_a_burst_of_events_is_no_rate() -> None:
    """The events of a whole answer that was held back on the way."""
    with pytest.raises(BadAnswer, match=r"decoded in 0\.010 of 2\.010 s"):
        steady_ms([one((2.0, 1, 0), (2.005, 9, 0), (2.01, 17, 0))], per="tokens")


def test_two_events_are_needed() -> None:
    with pytest.raises(BadAnswer, match="1 events while all 2 requests decoded"):
        steady_ms([one((0.0, 1, 0), (4.0, 41, 0)), one((1.0, 1, 0), (9.0, 41, 0))], per="tokens")


def test_steps_are_needed_where_steps_are_counted() -> None:
    with pytest.raises(BadAnswer):
        steady_ms([one((0.0, 1, 0), (1.0, 9, 0))], per="steps")


def test_prompts_are_fixed_by_their_seed() -> None:
    assert prompts_of(2, 6, 50, seed=4) == prompts_of(2, 6, 50, seed=4)
    assert prompts_of(2, 6, 50, seed=4) != prompts_of(2, 6, 50, seed=5)
    assert all(0 <= token < 50 for ids in prompts_of(9, 9, 50, seed=4) for token in ids)
