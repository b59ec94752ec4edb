"""`--resume` after a kill: the same folder as an undisturbed run, finished shards not redone."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from specpilot_cli.convert_w12 import convert as convert_module
from specpilot_cli.convert_w12.convert import convert_folder
from specpilot_cli.convert_w12.journal import journal_path
from specpilot_cli.convert_w12.plan import Selection
from specpilot_cli.convert_w12.verify import verify_folder
from specpilot_cli.errors import InputError
from specpilot_cli.io.atomic import partial_path
from specpilot_cli.io.hf_folder import open_hf_folder
from specpilot_cli.io.w12_folder import read_folder_tensors
from specpilot_cli.schema.w12_manifest import MANIFEST_NAME
from tests.unit.convert_w12.conftest import MakeCheckpoint, convert, digests, weights


def resume(source: Path, target: Path, *exclude: str) -> None:
    convert_folder(open_hf_folder(source), target, Selection((), exclude), resume=True)


@pytest.fixture
def source(make_checkpoint: MakeCheckpoint) -> Path:
    tensors = {f"layers.{i}.weight": weights(i, 512, 256) for i in range(8)}
    return make_checkpoint(tensors, shards=4)


def stopped(source: Path, target: Path, monkeypatch: pytest.MonkeyPatch, after: int) -> list[Path]:
    """A resumable run that dies when `after` shards are done; returns the finished shards."""
    plain = convert_module._Job.convert_shard
    done: list[str] = []

    def dying(self: Any, shard: str) -> None:
        if len(done) == after:
            raise KeyboardInterrupt
        done.append(shard)
        plain(self, shard)

    with monkeypatch.context() as patch:
        patch.setattr(convert_module._Job, "convert_shard", dying)
        with pytest.raises(KeyboardInterrupt):
            resume(source, target)
    return [partial_path(target) / shard for shard in done]


def test_finished_shards_are_kept_and_the_result_is_the_same(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    convert(source, tmp_path / "whole")
    target = tmp_path / "w12"
    done = {file.name: file.stat().st_ino for file in stopped(source, target, monkeypatch, 2)}
    assert len(done) == 2
    (partial_path(target) / "model-00003-of-00004.safetensors").write_bytes(b"half")
    (partial_path(target) / "stray.txt").write_text("x", encoding="utf-8")
    resume(source, target)
    assert digests(target) == digests(tmp_path / "whole")
    assert {name: (target / name).stat().st_ino for name in done} == done
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model", "w12", "whole"]


@pytest.mark.parametrize("what", ["ours", "source", "journal", "edited", "choices"])
def test_whatever_changed_is_converted_again(
    what: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "w12"
    first, second = stopped(source, target, monkeypatch, 2)
    inode = second.stat().st_ino
    exclude: tuple[str, ...] = ()
    if what == "choices":
        exclude = ("layers.0.*",)
    elif what == "edited":  # well-formed, and a lie: only its own hash can tell
        entry = journal_path(target) / f"{first.name}.json"
        text = entry.read_text(encoding="utf-8")
        assert '"reason":null' in text
        entry.write_text(text.replace('"reason":null', '"reason":"small"', 1), encoding="utf-8")
    else:
        path = {
            "ours": first,
            "source": source / first.name,
            "journal": journal_path(target) / f"{first.name}.json",
        }[what]
        raw = bytearray(path.read_bytes())
        raw[-100 if what != "journal" else 3] ^= 1
        path.write_bytes(raw)
    resume(source, target, *exclude)
    assert verify_folder(target, source).verdict == "identical"
    convert(source, tmp_path / "whole", exclude=exclude)
    assert digests(target) == digests(tmp_path / "whole")
    kept = (target / second.name).stat().st_ino == inode
    assert kept == (what != "choices")


def test_plain_run_starts_over_and_leaves_no_journal(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "w12"
    stopped(source, target, monkeypatch, 2)
    assert journal_path(target).is_dir()
    convert(source, target)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model", "w12"]


def test_leftover_link_is_not_written_through(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, outside = tmp_path / "w12", tmp_path / "outside"
    first = stopped(source, target, monkeypatch, 1)[0]
    shutil.move(first, outside)
    first.symlink_to(outside)
    before = outside.read_bytes()
    resume(source, target)
    assert outside.read_bytes() == before
    assert not (target / first.name).is_symlink()


@pytest.mark.parametrize("stop_s", [0.0, 0.01, 0.03, 0.06])
def test_killed_anywhere_then_resumed(
    stop_s: float, make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    tensors = {f"layers.{i}.weight": weights(i, 1024, 512) for i in range(16)}
    source, target = make_checkpoint(tensors, shards=8), tmp_path / "w12"
    command = [sys.executable, "-m", "specpilot_cli", "convert-w12", str(source)]
    child = subprocess.Popen(
        [*command, "-o", str(target), "--workers", "1"],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        deadline = time.monotonic() + 60
        while not list(partial_path(target).glob("*.safetensors")):
            assert child.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.0005)
        time.sleep(stop_s)
        os.kill(child.pid, signal.SIGKILL)
    finally:
        child.kill()
        child.wait()
    if not target.exists():  # else it was faster than the kill
        # The manifest comes last: with it the folder is whole and only the rename is missing.
        if not (partial_path(target) / MANIFEST_NAME).exists():
            with pytest.raises(InputError):
                list(read_folder_tensors(partial_path(target)))
        resume(source, target)
    assert verify_folder(target, source).verdict == "identical"
    convert(source, tmp_path / "whole")
    assert digests(target) == digests(tmp_path / "whole")
