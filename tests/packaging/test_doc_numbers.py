"""The measured numbers in the documents are those of docs/measurements, and consistent."""

from __future__ import annotations

import copy
import importlib
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from specpilot_kernels.w12 import layout


@pytest.fixture
def script(repo: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(repo / "scripts"))
    return importlib.import_module("w12_doc_numbers")


def read(repo: Path, name: str) -> dict[str, Any]:
    text = (repo / "docs" / "measurements" / f"{name}.json").read_text(encoding="utf-8")
    found: dict[str, Any] = json.loads(text)
    return found


@pytest.mark.parametrize("name", ["w12_doc_numbers", "bench_doc_numbers", "replay_doc_numbers"])
def test_pages_say_what_was_measured(repo: Path, name: str) -> None:
    done = subprocess.run(
        [sys.executable, f"scripts/{name}.py", "--check"],
        cwd=repo, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_step_profiles_follow_from_the_traces_and_stand_in_the_pages(repo: Path) -> None:
    done = subprocess.run(
        [sys.executable, "scripts/profile_sglang_traces.py", "--check"],
        cwd=repo, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_the_codecs_sizes_are_those_of_the_format(repo: Path) -> None:
    """A measurement of an older form of the parts would give other sizes for the same escapes."""
    rows = read(repo, "w12_codec_cpu")["codec"]
    assert set(rows) == {"normal", "one_percent_zeros", "uniform_patterns"}
    for row in rows.values():
        weights = row["shape"][0] * row["shape"][1]
        assert row["escape_ratio"] == row["escapes"] / weights
        nbytes = layout.encoded_nbytes(*row["shape"], row["escapes"])
        assert row["bits_per_weight"] == nbytes * 8 / weights


def test_a_goal_is_met_or_missed_by_the_numbers(repo: Path, script: ModuleType) -> None:
    convert, codec = read(repo, "w12_convert"), read(repo, "w12_codec_cpu")
    for median, verdict in ((1.5, "The goal is 1.5: met"), (1.51, "1.5: **missed**")):
        changed = copy.deepcopy(convert)
        changed["sharded"]["steps"]["convert"]["copy_time_ratio_median"] = median
        assert verdict in script.convert_text(changed)
    rates = codec["codec"]["one_percent_zeros"]["threads_1"]
    for rate, verdict in ((2.1e9, "met for those with zeros"), (1.9e9, "**missed** for those")):
        rates["encode"]["cpu_bytes_per_s"] = rate
        assert verdict in script.codec_text(codec)


def test_every_slow_shape_of_the_gpu_is_named(repo: Path, script: ModuleType) -> None:
    gpu = read(repo, "w12_gpu_codec_h200")
    text = script.gpu_text(gpu)
    for name, row in gpu["shapes"].items():
        assert (f"{name} (" in text) == (row["encode"]["bf16_bytes_per_s"] < 900e9), name


def test_an_edited_number_is_found(script: ModuleType, repo: Path) -> None:
    page = (repo / "README.md").read_text(encoding="utf-8")
    rows = script.readme_rows()
    assert script.with_rows(page, rows) == page
    with pytest.raises(SystemExit, match="no place"):
        script.with_texts("a page without marks", {"codec": "x"})


@pytest.mark.parametrize(("kept", "enough"), [(5, True), (3, True), (2, False), (0, False)])
def test_bits_need_three_checkpoints(
    kept: int, enough: bool, repo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(repo / "scripts"))
    bench = importlib.import_module("bench_w12_bits")
    document = read(repo, "w12_bits")
    assert len(document["checkpoints"]) == 5
    document["checkpoints"] = document["checkpoints"][:kept]
    tensors = [tensor for c in document["checkpoints"] for tensor in c["tensors"]]
    document["all_checkpoints"] = bench.summary(tensors)
    assert bench.passes(document) == enough
    if enough:
        document["all_checkpoints"]["meet_bar"] -= 1
        assert not bench.passes(document)
