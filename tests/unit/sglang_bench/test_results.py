"""Statistics on hand cases, whole timings against a scripted server, and what is written."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from sglang_bench import logits
from sglang_bench.book import Book, Clock, Timing, measure
from sglang_bench.load import BadAnswer
from sglang_bench.stats import PairedRatio, Spread, orders

if TYPE_CHECKING:
    from conftest import Scripted


def test_spread() -> None:
    found = Spread.of([4.0, 1.0, 3.0, 2.0, 5.0])
    assert (found.low_quartile, found.median, found.high_quartile) == (2.0, 3.0, 4.0)
    assert Spread.of([7.0]).high_quartile == 7.0
    for bad in ([], [1.0, 0.0], [math.nan]):
        with pytest.raises(ValueError, match="positive"):
            Spread.of(bad)


def test_paired_ratio() -> None:
    """Log ratios 0.1 and 0.3: mean 0.2, t(1) at 97.5 % is 12.7062, standard error 0.1."""
    found = PairedRatio.of([math.exp(0.1), math.exp(0.3)], [1.0, 1.0])
    assert found.ratio == pytest.approx(math.exp(0.2))
    assert math.log(found.interval.low) == pytest.approx(0.2 - 1.27062, abs=1e-5)
    assert math.log(found.interval.high) == pytest.approx(0.2 + 1.27062, abs=1e-5)


def test_a_drift_cancels_in_pairs() -> None:
    drift = [1.0, 2.0, 4.0, 8.0]
    found = PairedRatio.of([1.3 * d for d in drift], drift)
    assert (found.ratio, found.interval.high) == (pytest.approx(1.3), pytest.approx(1.3))


@pytest.mark.parametrize(("base", "other"), [([1.0], [1.0]), ([1.0, 2.0], [1.0])])
def test_pairs_are_needed(base: list[float], other: list[float]) -> None:
    with pytest.raises(ValueError, match="two or more pairs"):
        PairedRatio.of(base, other)


def test_orders_swap() -> None:
    assert orders("ab", 3) == [("a", "b"), ("b", "a"), ("a", "b")]


def timing(server: Scripted, **changes: Any) -> Timing:
    given: dict[str, Any] = {
        "name": "t", "servers": {"base": server.url, "other": server.url}, "requests": 2,
        "new_tokens": 33, "rounds": 4, "vocabulary": 50, "prompt_tokens": 6, "every": 4,
    }  # fmt: skip
    return Timing(**{**given, **changes})


def test_servers_take_turns_and_the_file_has_every_block(
    scripted: Scripted, tmp_path: Path
) -> None:
    book = Book(tmp_path / "r.json", Clock(60), {"gpu": "none"})
    measure(book, timing(scripted), reserve_s=0)
    written = json.loads(book.path.read_text())["results"]["timings"]["t"]
    assert [[b["server"] for b in r["blocks"]] for r in written["rounds"]] == [
        ["base", "other"], ["other", "base"], ["base", "other"], ["other", "base"],
    ]  # fmt: skip
    assert len(written["ms"]["other"]["values"]) == 4
    assert written["base_over"]["other"]["pairs"] == 4
    assert written["base_over"]["other"]["ratio"] == pytest.approx(1.0, abs=0.3)
    assert written["rounds"][0]["blocks"][0]["server_tokens_per_s"] == 123.0


def test_both_servers_get_the_same_prompts_and_every_round_others(
    scripted: Scripted, tmp_path: Path
) -> None:
    measure(Book(tmp_path / "r.json", Clock(60), {}), timing(scripted, requests=1), reserve_s=0)
    timed = [tuple(body["input_ids"]) for body in scripted.asked[2:]]  # after the warm-up
    pairs = [set(timed[i : i + 2]) for i in range(0, 8, 2)]
    assert [len(pair) for pair in pairs] == [1, 1, 1, 1]
    assert len(set(timed)) == 4


def test_little_time_means_three_rounds(scripted: Scripted, tmp_path: Path) -> None:
    book = Book(tmp_path / "r.json", Clock(60), {})
    measure(book, timing(scripted, rounds=9), reserve_s=1e9)
    assert len(book.results["timings"]["t"]["rounds"]) == 3


def test_a_block_that_cannot_be_timed_is_taken_once_more(
    scripted: Scripted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    book, tries = Book(tmp_path / "r.json", Clock(60), {}), []

    def block(self: Timing, name: str, seed: int) -> dict[str, Any]:
        tries.append((name, seed))
        if len(tries) == 2 or (seed, name) == (2, "other"):
            raise BadAnswer("burst")
        return {"server": name, "ms": 2.0}

    monkeypatch.setattr(Timing, "block", block)
    with pytest.raises(BadAnswer, match="burst"):
        measure(book, timing(scripted), reserve_s=0)
    assert tries[:4] == [("base", 0), ("other", 0), ("other", 0), ("other", 1)]
    assert tries[-2:] == [("other", 2), ("other", 2)]
    assert len(book.results["timings"]["t"]["rounds"]) == 2  # what was there is kept
    assert [line.split("  ")[-1] for line in book.results["log"]] == [
        "t, other, round 0 again: burst", "t, other, round 2 again: burst",
    ]  # fmt: skip


def test_a_failure_is_kept(tmp_path: Path) -> None:
    book = Book(tmp_path / "r.json", Clock(60), {})
    book.fail("this", ValueError("that"))
    failures = json.loads(book.path.read_text())["results"]["failures"]
    assert failures == [{"what": "this", "error": "ValueError: that"}]


def scores(shift: float = 0.0, best: int = 7) -> dict[str, Any]:
    return {
        "alone": [[-1.0 + shift, -2.0], [-3.0, -4.0]],
        "together": [[-1.0, -2.0], [-3.0, -4.01]],
        "top": [[[[7, -0.1], [8, -0.9]], [[best, -0.1], [9, -0.2]]]],
        "output": [[1, 2], [3, 4]],
    }


def test_logits_are_compared_with_stock_beside_stock() -> None:
    found = logits.compare(scores(), {**scores(0.02), "output": [[1, 2], [3, 5]]})
    assert found["stock_itself_rms_nats"] == pytest.approx(0.005)
    assert found["rms_nats"] == pytest.approx(0.01)
    assert found["largest_nats"] == pytest.approx(0.02)
    assert (found["argmax_differs"], found["equal_outputs"], found["outputs"]) == (0, 1, 2)


@pytest.mark.parametrize(("gap", "parts"), [(0.8, 1), (0.01, 0)])
def test_another_best_token_parts_only_if_stock_was_sure(gap: float, parts: int) -> None:
    """Stock differs from itself by at most 0.01 nats, so a gap of 0.04 may be rounding."""
    stock = scores()
    stock["top"][0][1] = [[5, -0.1], [9, -0.1 - gap]]
    found = logits.compare(stock, scores())
    assert (found["argmax_differs"], found["argmax_parts"]) == (1, parts)


def test_rows_as_text() -> None:
    text = logits.as_text(scores())
    assert text["alone"] == ["-1.0 -2.0", "-3.0 -4.0"]
    assert text["top"] == ["7:-0.1 8:-0.9, 7:-0.1 9:-0.2"]
