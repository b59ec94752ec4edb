"""`specpilot simulate measure` against two servers of one pair, whose steps have a set length."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specpilot_cli.main import main
from specpilot_cli.simulate.inputs import load_batch_times

PACE_S = 0.012
_SIZES = (
    "--prompt-tokens", "8", "--prefill-tokens", "8,40", "--new-tokens", "40", "--rounds", "1",
    "--concurrency", "1,3",
)  # fmt: skip


@pytest.fixture(scope="module")
def urls(pair: Any, serve: Callable[..., Any]) -> tuple[str, str]:
    """A server that decodes plainly and one with trees of 16 nodes on a block of 8."""
    engines = pair.engine("ar", with_drafter=False), pair.engine("tree", block=8, nodes=16)
    plain, tree = (str(serve(engine, pace_s=PACE_S).base_url) for engine in engines)
    return plain, tree


def test_steps_are_timed_and_written_for_the_simulation(
    urls: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "served-times.json"
    command = ["simulate", "measure", "--url", urls[0], "--url", urls[1], "-o", str(path)]
    assert main([*command, *_SIZES, "--json", "-q"]) == 0
    results = json.loads(capsys.readouterr().out)["results"]
    found = [(s["requests"], s["rows"], s["draft_rows"]) for s in results["steps"]]
    assert found == [(1, 1, 0), (3, 3, 0), (1, 17, 8), (3, 51, 24)]
    for step in results["steps"]:
        assert step["step_s"] > 0.97 * PACE_S  # a busy machine makes them longer, never shorter
        # half of the 40 output tokens behind a prompt of 8
        assert step["context_tokens"] / step["requests"] == pytest.approx(28, abs=8)
    times = load_batch_times(str(path))
    assert (times.name, times.engine.name) == ("served-times", "specpilot-reference")
    assert (times.target.name, times.drafter.name) == ("target", "drafter")
    assert (times.dtype, times.device.kind, times.device.threads) == ("float32", "cpu", 1)
    assert [point.amount for point in times.prefill.points] == [8, 40]
    assert "plain decoding, 17 rows on a block of 8" in times.notes[0]
    assert len(times.notes) == 1


def test_one_setting_says_what_it_cannot_tell(
    urls: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["simulate", "measure", "--url", urls[1], *_SIZES, "-q"]
    assert main([*command, "--concurrency", "2"]) == 0
    out = capsys.readouterr().out
    assert "2\t34\t16\t" in out
    assert "note: one setting alone" in out


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--url", "{plain}", "--new-tokens", "200", "--concurrency", "x"], 2, "`x` is no list"),
        (["--url", "{plain}", "-o", "times.txt"], 2, "must end in `.json`"),
        (["--url", "http://127.0.0.1:9"], 3, "does not answer"),
        (["--url", "{plain}", "--gpu", "h2000"], 2, "h200"),
    ],
)
def test_bad_usage(
    arguments: list[str],
    code: int,
    words: str,
    urls: tuple[str, str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    words_given = [item.format(plain=urls[0]) for item in arguments]
    assert main(["simulate", "measure", *words_given, "-q"]) == code
    assert words in capsys.readouterr().err
