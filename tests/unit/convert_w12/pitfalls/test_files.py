"""Pitfalls 18 to 22: what a checkpoint folder can hold, and conversions that end early."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from specpilot_cli.io.safetensors_stream import write_safetensors
from tests.unit.convert_w12.conftest import MakeCheckpoint, digests, weights
from tests.unit.convert_w12.pitfalls.conftest import Cli, python

SECOND = "model-00002-of-00002.safetensors"
INDEX = "model.safetensors.index.json"


def _edit_index(source: Path, change: Callable[[dict[str, str]], None]) -> None:
    index = json.loads((source / INDEX).read_text(encoding="utf-8"))
    change(index["weight_map"])
    (source / INDEX).write_text(json.dumps(index), encoding="utf-8")


def _missing_shard(source: Path) -> None:
    (source / SECOND).unlink()


def _tensor_nowhere(source: Path) -> None:
    _edit_index(source, lambda names: names.update({"ghost.weight": SECOND}))


def _tensor_unlisted(source: Path) -> None:
    _edit_index(source, lambda names: names.pop("b.weight"))


def _shard_unlisted(source: Path) -> None:
    def forget(names: dict[str, str]) -> None:
        for name in ("b.weight", "d.weight"):
            del names[name]

    _edit_index(source, forget)


def _wrong_shard(source: Path) -> None:
    _edit_index(source, lambda names: names.update({"a.weight": SECOND}))


def _in_two_shards(source: Path) -> None:
    both = {f"{name}.weight": weights(9, 8, 8) for name in "abd"}
    write_safetensors(source / SECOND, both, force=True)


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (_missing_shard, SECOND),
        (_tensor_nowhere, "ghost.weight"),
        (_tensor_unlisted, "b.weight"),
        (_shard_unlisted, SECOND),
        (_wrong_shard, "a.weight"),
        (_in_two_shards, "a.weight"),
    ],
)
@pytest.mark.parametrize("dry", [True, False], ids=["dry run", "conversion"])
def test_pitfall_18_index_and_shards_must_agree_both_ways(
    dry: bool,
    damage: Callable[[Path], None],
    named: str,
    make_checkpoint: MakeCheckpoint,
    cli: Cli,
    tmp_path: Path,
) -> None:
    """A shard was missing from the download; the server started with random weights instead."""
    tensors = {f"{name}.weight": weights(i, 256, 256) for i, name in enumerate("abcd")}
    source = make_checkpoint(tensors, shards=2)
    damage(source)
    words = ("--dry-run",) if dry else ("-o", tmp_path / "w12")
    answer = cli("convert-w12", source, *words)
    assert answer.code == 2
    assert named in answer.err
    assert not (tmp_path / "w12").exists()


def test_pitfall_18_verify_finds_disagreement_in_the_converted_folder(
    make_checkpoint: MakeCheckpoint, cli: Cli, tmp_path: Path
) -> None:
    """The converted folder lost a shard on its way to the server, and nobody noticed."""
    tensors = {"a.weight": weights(0, 256, 256), "b.weight": weights(1, 256, 256)}
    packed = tmp_path / "w12"
    assert cli("convert-w12", make_checkpoint(tensors, shards=2), "-o", packed).code == 0
    (packed / SECOND).rename(tmp_path / "away")
    answer = cli("w12", "verify", packed)
    assert answer.code == 2
    assert SECOND in answer.err


def test_pitfall_19_stray_weights_are_neither_converted_nor_carried(
    make_checkpoint: MakeCheckpoint, cli: Cli, tmp_path: Path
) -> None:
    """Beside the shards lay the same model in one file, and every weight was loaded twice."""
    ours = {"a.weight": weights(0, 256, 256), "b.weight": weights(1, 256, 256)}
    source = make_checkpoint(ours, shards=2)
    stray = {"layers.0.wq.weight": weights(1, 256, 256), "a.qweight": np.zeros((4, 4), np.int32)}
    write_safetensors(source / "consolidated.safetensors", stray)
    (source / "pytorch_model.bin").write_bytes(b"pickle")
    (source / "model.q4.gguf").write_bytes(b"GGUF")
    answer = cli("convert-w12", source, "-o", tmp_path / "w12", "--json")
    assert answer.code == 0
    left_out = ["consolidated.safetensors", "model.q4.gguf", "pytorch_model.bin"]
    assert answer.results["left_out"] == left_out
    assert all(f"`{name}`" in answer.err for name in left_out)
    assert set(answer.tensors) == set(ours)


def test_pitfall_19_the_result_has_the_sources_shards_and_no_other(
    make_checkpoint: MakeCheckpoint, cli: Cli, tmp_path: Path
) -> None:
    """The codes lay in a `.safetensors` file of their own, and an engine loaded that too."""
    source = make_checkpoint(shards=3)
    assert cli("convert-w12", source, "-o", tmp_path / "w12").code == 0
    names = [sorted(f.name for f in p.glob("*.safetensors")) for p in (source, tmp_path / "w12")]
    assert names[0] == names[1]
    index = json.loads((tmp_path / "w12" / INDEX).read_text(encoding="utf-8"))
    assert sorted(set(index["weight_map"].values())) == names[1]
    shutil.copy(tmp_path / "w12" / names[1][0], tmp_path / "w12" / "extra.safetensors")
    answer = cli("w12", "verify", tmp_path / "w12")
    assert answer.code == 2
    assert "extra.safetensors" in answer.err


@pytest.mark.parametrize("keep", [0, 7, 20, 400, -1])
def test_pitfall_20_truncated_shards_are_named_and_left_alone(
    keep: int, make_checkpoint: MakeCheckpoint, cli: Cli, tmp_path: Path
) -> None:
    """One shard was cut short: a cryptic error came, or the whole model was deleted."""
    source = make_checkpoint({"a.weight": weights(0, 256, 256), "b.weight": weights(1, 256, 256)},
                             shards=2)  # fmt: skip
    with (source / SECOND).open("r+b") as handle:
        handle.truncate(keep if keep >= 0 else (source / SECOND).stat().st_size - 1)
    before = digests(source)
    answer = cli("convert-w12", source, "-o", tmp_path / "w12")
    assert answer.code == 2
    assert str(source / SECOND) in answer.err
    assert "hint:" in answer.err
    assert digests(source) == before
    assert not (tmp_path / "w12").exists()


@pytest.mark.parametrize("signal_number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_pitfall_21_a_stopped_conversion_is_not_taken_for_a_finished_one(
    signal_number: int, make_checkpoint: MakeCheckpoint, cli: Cli, tmp_path: Path
) -> None:
    """The machine went down; the folder looked done and lacked two of nine shards."""
    tensors = {f"layers.{i}.up.weight": weights(i, 2048, 1024) for i in range(16)}
    source, target = make_checkpoint(tensors, shards=8), tmp_path / "w12"
    words = ("convert-w12", source, "-o", target, "--resume", "--workers", "1")
    child = subprocess.Popen(
        [sys.executable, "-m", "specpilot_cli", *map(str, words)],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        deadline = time.monotonic() + 60
        while not any(tmp_path.glob(".w12*.partial/*")):
            assert child.poll() is None, "finished before it could be stopped"
            assert time.monotonic() < deadline
            time.sleep(0.001)
        os.kill(child.pid, signal_number)
    finally:
        code = child.wait(60)
    assert code != 0
    assert not target.exists()
    for left in tmp_path.glob(".*partial"):
        assert cli("w12", "verify", left).code == 2
        assert cli("w12", "restore", left, "-o", tmp_path / "back").code == 2
    assert cli(*words).code == 0
    assert cli("w12", "verify", target, "--against", source).code == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "w12"]


def test_pitfall_22_a_small_disk_is_noticed_before_anything_is_written(
    make_checkpoint: MakeCheckpoint, cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After forty minutes the disk was full, and all was lost."""
    source = make_checkpoint()
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    answer = cli("convert-w12", source, "-o", tmp_path / "w12")
    assert answer.code == 3
    assert "not enough room" in answer.err
    assert "needed, 1.00 kB free" in answer.err
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


_LIMITED = """
import resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (2_000_000, 2_000_000))
from specpilot_cli.main import main
sys.exit(main(sys.argv[1:]))
"""


def test_pitfall_22_a_write_that_fails_leaves_the_target_absent(
    make_checkpoint: MakeCheckpoint, cli: Cli, tmp_path: Path
) -> None:
    """A write failed half way, and the half was kept under the final name."""
    source, target = make_checkpoint({"a.weight": weights(0, 2048, 1024)}), tmp_path / "w12"
    done = python(_LIMITED, "convert-w12", source, "-o", target)
    assert done.returncode == 3
    assert "larger than the disk or a limit of this shell" in done.stderr
    assert "ulimit" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert cli("convert-w12", source, "-o", target).code == 0
    assert cli("w12", "verify", target, "--against", source).code == 0
