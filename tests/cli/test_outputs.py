"""Outputs never cost an input: each command refuses before it works, and changes nothing."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

Run = Callable[..., subprocess.CompletedProcess[str]]

_URL = "http://127.0.0.1:9"
_PAIR = ["--target", "model", "--drafter", "drafter", "--prompts", "p.jsonl"]
_BENCH = ["paired-bench", "--baseline", _URL, "--candidate", _URL]
_FORCE = ["token-force", "--scorer", _URL, "--ar", "ar.json", "--system", "system.json"]

# Each output option of each command, with the inputs that it could destroy.
_CASES = [
    (["record", *_PAIR, "-o", "model/x.safetensors"], "model"),
    (["record", *_PAIR, "-o", "drafter/x.safetensors"], "drafter"),
    (["record", *_PAIR, "-o", "x.safetensors", "--outputs", "p.jsonl"], "p.jsonl"),
    (["profile", "--target", "model", "-o", "model/config.json"], "model"),
    (["profile", *_PAIR, "--step-times", "drafter/config.json"], "drafter"),
    (["convert-w12", "model", "-o", "model"], "model"),
    (["convert-w12", "model", "-o", "model/w12"], "model"),
    (["convert-w12", "model", "-o", "w12", "--report", "model/config.json"], "model"),
    (["convert-w12", "model", "-o", "w12", "--report", "w12/r.json"], "w12"),
    (["w12", "verify", "model", "-o", "model/config.json"], "model"),
    (["w12", "verify", "w12", "--against", "model", "-o", "model/r.json"], "model"),
    (["w12", "inspect", "model", "-o", "model/config.json"], "model"),
    (["replay", "l.json", "-o", "l.json"], "l.json"),
    (["ceiling", "step.json", "--tau-best", "3", "-o", "step.json"], "step.json"),
    (["ceiling", "step.json", "--lattices", "l.json", "-o", "l.json"], "l.json"),
    (["ceiling", "step.json", "--step-times", "p.json", "-o", "p.json"], "p.json"),
    (["replay", "l.json", "--step-times", "p.json", "-o", "p.json"], "p.json"),
    ([*_FORCE, "--stock", "stock.json", "-o", "stock.json"], "stock.json"),
    ([*_FORCE, "--stock", _URL, "-o", "system.json"], "system.json"),
    ([*_FORCE, "--stock", _URL, "-o", "ar.json"], "ar.json"),
    ([*_FORCE, "--stock", _URL, "--prompts", "p.json", "-o", "p.json"], "p.json"),
    ([*_FORCE, "--stock", _URL, "--tokenizer", "model", "-o", "model/config.json"], "model"),
    ([*_BENCH, "--prompts", "p.json", "-o", "p.json"], "p.json"),
    ([*_BENCH, "--prompts", "p.json", "--tokenizer", "model", "-o", "model/r.json"], "model"),
    (["paired-bench", "--from", "bench.json", "-o", "bench.json"], "bench.json"),
]


@pytest.fixture
def inputs(tmp_path: Path) -> dict[Path, bytes]:
    """Everything the cases read, and its bytes."""
    names = [
        "p.jsonl", "p.json", "l.json", "step.json", "ar.json", "stock.json", "system.json",
        "bench.json", "model/config.json", "drafter/config.json", "w12/config.json",
    ]  # fmt: skip
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"precious {name}", encoding="utf-8")
    return _all(tmp_path)


def _all(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(("words", "source"), _CASES, ids=lambda value: " ".join(value)[-60:])
def test_outputs_never_touch_inputs(
    specpilot: Run, tmp_path: Path, inputs: dict[Path, bytes], words: list[str], source: str
) -> None:
    done = specpilot(*words, "--force")
    assert done.returncode == 2, done.stderr
    assert "would overwrite or lie inside an input" in done.stderr
    assert str(tmp_path / source) in done.stderr
    assert "\n\nhint: " in done.stderr
    assert _all(tmp_path) == inputs


_LIVE = ["token-force", "--scorer", _URL, "--ar", _URL, "--system", _URL, "--stock", _URL]
_WRITERS = [
    ["record", *_PAIR, "-o", "{}.safetensors"],
    ["record", *_PAIR, "-o", "x.safetensors", "--outputs", "{}.jsonl"],
    ["profile", "--target", "model", "-o", "{}.json"],
    ["profile", *_PAIR, "--step-times", "{}.json"],
    ["convert-w12", "model", "-o", "w", "--report", "{}.json"],
    ["w12", "verify", "w12", "-o", "{}.json"],
    ["w12", "inspect", "w12", "-o", "{}.json"],
    ["replay", "l.json", "-o", "{}.json"],
    ["ceiling", "step.json", "-o", "{}.html"],
    [*_LIVE, "-o", "{}.json"],
    [*_LIVE, "--save-outputs", "{}"],
    [*_BENCH, "-o", "{}.json"],
    [*_BENCH, "--save-outputs", "{}"],
    ["paired-bench", "--from", "bench.json", "-o", "{}.json"],
]


@pytest.mark.parametrize("words", _WRITERS, ids=lambda words: " ".join(words)[-50:])
def test_a_place_that_cannot_be_written_is_refused_before_the_work(
    specpilot: Run, tmp_path: Path, inputs: dict[Path, bytes], words: list[str]
) -> None:
    done = specpilot(*(word.replace("{}", "p.json/new/r") for word in words), "--force")
    assert done.returncode == 2, done.stderr
    assert f"`{tmp_path / 'p.json'}` is not a folder" in done.stderr
    assert "\n\nhint: " in done.stderr
    assert _all(tmp_path) == inputs


def test_the_journal_and_the_answers_are_outputs_too(
    specpilot: Run, tmp_path: Path, inputs: dict[Path, bytes]
) -> None:
    (tmp_path / "b.journal.jsonl").write_text("prompts", encoding="utf-8")
    for words in (
        [*_BENCH, "--prompts", "b.journal.jsonl", "-o", "b.json"],
        [*_BENCH, "--prompts", "p.json", "--tokenizer", "model", "--save-outputs", "model/new"],
        [*_FORCE, "--stock", _URL, "--prompts", "p.json", "--tokenizer", "model",
         "--save-outputs", "model"],
    ):  # fmt: skip
        done = specpilot(*words, "--force")
        assert done.returncode == 2, done.stderr
        assert "would overwrite or lie inside an input" in done.stderr
    assert (tmp_path / "b.journal.jsonl").read_text(encoding="utf-8") == "prompts"


def test_apply_refuses_its_models_folders(specpilot: Run, make_recipe: Callable[..., Path]) -> None:
    folder = make_recipe()
    before = _all(folder)
    for out in ("target", "drafter/run"):
        done = specpilot("apply", "recipe", str(folder / "recipe.yaml"), "--out", str(folder / out))
        assert done.returncode == 2, done.stderr
        assert "would overwrite or lie inside an input" in done.stderr
    assert _all(folder) == before


@pytest.mark.parametrize(
    "words",
    [
        ["serve", "--target", "model", "--threads"],
        ["record", *_PAIR, "-o", "x.safetensors", "--threads"],
        ["profile", "--target", "model", "--threads"],
        ["convert-w12", "model", "-o", "x", "--workers"],
        ["w12", "verify", "w12", "--workers"],
        ["w12", "restore", "w12", "-o", "x", "--workers"],
    ],
    ids=lambda words: " ".join(words[:2]),
)
@pytest.mark.parametrize(("count", "limit"), [("0", "equal to 1 "), ("1025", "equal to 1024 ")])
def test_counts_of_threads_have_bounds(
    specpilot: Run, words: list[str], count: str, limit: str
) -> None:
    done = specpilot(*words, count)
    assert done.returncode == 2
    assert words[-1] in done.stderr
    assert limit in " ".join(done.stderr.replace("│", " ").split())
