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
from specpilot_cli.convert_w12.output import OutputShard
from specpilot_cli.convert_w12.plan import Selection
from specpilot_cli.convert_w12.shards import PlannedShard
from specpilot_cli.convert_w12.verify import verify_folder
from specpilot_cli.errors import InputError
from specpilot_cli.io.append_file import AppendFile
from specpilot_cli.io.atomic import partial_path
from specpilot_cli.io.hf_folder import open_hf_folder
from specpilot_cli.io.w12_folder import read_folder_tensors
from specpilot_cli.ui import SilentReporter
from specpilot_kernels.w12.manifest import MANIFEST_NAME
from tests.unit.convert_w12.conftest import MakeCheckpoint, convert, digests, weights


class Notes(SilentReporter):
    """Keeps what was said."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.warnings: list[str] = []

    def note(self, msg: str) -> None:
        self.notes.append(msg)

    def warn(self, msg: str) -> None:
        self.warnings.append(msg)


def resume(source: Path, target: Path, *exclude: str) -> None:
    convert_folder(open_hf_folder(source), target, Selection((), exclude), resume=True)


@pytest.fixture
def source(make_checkpoint: MakeCheckpoint) -> Path:
    tensors = {f"layers.{i}.weight": weights(i, 512, 256) for i in range(8)}
    return make_checkpoint(tensors, shards=4)


def stopped(source: Path, target: Path, monkeypatch: pytest.MonkeyPatch, after: int) -> list[Path]:
    """A resumable run that dies when `after` shards are done; returns the finished shards."""
    plain = convert_module._Job._open_shard
    begun: list[str] = []

    def dying(self: Any, shard: PlannedShard) -> OutputShard:
        if len(begun) == after:
            raise KeyboardInterrupt
        begun.append(shard.name)
        return plain(self, shard)

    with monkeypatch.context() as patch:
        patch.setattr(convert_module._Job, "_open_shard", dying)
        with pytest.raises(KeyboardInterrupt):
            resume(source, target)
    return [partial_path(target) / shard for shard in begun]


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


@pytest.mark.parametrize("what", ["ours", "header", "longer", "source", "choices"])
def test_whatever_changed_is_converted_again(
    what: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "w12"
    first, second = stopped(source, target, monkeypatch, 2)
    written = second.stat().st_mtime_ns
    exclude: tuple[str, ...] = ()
    if what == "choices":
        exclude = ("layers.1.*",)
    elif what == "longer":
        first.write_bytes(first.read_bytes() + b"x")
    else:
        path = source / first.name if what == "source" else first
        raw = bytearray(path.read_bytes())
        raw[12 if what == "header" else -100] ^= 1
        path.write_bytes(raw)
    resume(source, target, *exclude)
    assert verify_folder(target, source).verdict == "identical"
    convert(source, tmp_path / "whole", exclude=exclude)
    assert digests(target) == digests(tmp_path / "whole")
    kept = (target / second.name).stat().st_mtime_ns == written
    assert kept == (what != "choices")


def test_half_a_shard_is_continued(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a killed run wrote of a shard is compared, not written again."""
    convert(source, tmp_path / "whole")
    target, said = tmp_path / "w12", Notes()
    first = stopped(source, target, monkeypatch, 1)[0]
    whole = first.read_bytes()
    first.write_bytes(bytes(8) + whole[8 : len(whole) * 3 // 4])  # one of two tensors is whole
    written: list[int] = []
    plain = AppendFile._write

    def counting(descriptor: int, view: Any, start: int) -> None:
        written.append(view.size if descriptor >= 0 and first.exists() else 0)
        plain(descriptor, view, start)

    monkeypatch.setattr(AppendFile, "_write", staticmethod(counting))
    convert_folder(open_hf_folder(source), target, Selection(), resume=True, reporter=said)
    assert digests(target) == digests(tmp_path / "whole")
    assert "continuing from" in said.notes[0]
    assert sum(written) < sum(f.stat().st_size for f in target.glob("*.safetensors"))


def test_plain_run_starts_over_and_says_what_it_removed(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, said = tmp_path / "w12", Notes()
    stopped(source, target, monkeypatch, 2)
    convert_folder(open_hf_folder(source), target, Selection(), reporter=said)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model", "w12"]
    assert "left by an interrupted conversion" in said.warnings[0]
    assert "--resume" in said.warnings[0]


def test_unfinished_folder_says_what_it_is(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped(source, tmp_path / "w12", monkeypatch, 2)
    with pytest.raises(InputError, match="interrupted conversion") as caught:
        verify_folder(partial_path(tmp_path / "w12"))
    assert "--resume" in (caught.value.hint or "")


def test_resume_of_a_finished_folder_checks_it_and_writes_nothing(
    source: Path, tmp_path: Path
) -> None:
    target = tmp_path / "w12"
    done = convert(source, target)
    before = {file: file.stat().st_mtime_ns for file in target.rglob("*")}
    again = convert_folder(open_hf_folder(source), target, Selection(), resume=True)
    assert again.found_finished
    assert (again.outcomes, again.manifest) == (done.outcomes, done.manifest)
    assert {file: file.stat().st_mtime_ns for file in target.rglob("*")} == before


def test_resume_of_another_finished_folder_is_refused(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "w12"
    convert(source, target)
    with pytest.raises(InputError, match=r"made without `--exclude 'layers\.0\.\*'`"):
        resume(source, target, "layers.0.*")
    with pytest.raises(InputError, match="another conversion"):
        convert_folder(
            open_hf_folder(source), target, Selection(), resume=True, shard_bytes=300_000
        )
    shard = source / "model-00002-of-00004.safetensors"
    raw = bytearray(shard.read_bytes())
    raw[-1] ^= 1
    shard.write_bytes(raw)
    with pytest.raises(InputError, match=r"not a conversion of this source: tensor `layers\.5"):
        resume(source, target)


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


def test_a_partial_made_of_links_to_the_source_costs_nothing(source: Path, tmp_path: Path) -> None:
    """`cp -al SRC .DST.partial`: the leftover shards are the source's own files."""
    target, before = tmp_path / "w12", digests(source)
    partial_path(target).mkdir()
    for file in source.glob("*.safetensors"):
        os.link(file, partial_path(target) / file.name)
    resume(source, target)
    assert digests(source) == before
    assert verify_folder(target, source).verdict == "identical"


def test_a_pipe_in_the_partial_is_removed(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "w12"
    partial_path(target).mkdir()
    os.mkfifo(partial_path(target) / "model-00001-of-00004.safetensors")
    resume(source, target)
    assert verify_folder(target, source).verdict == "identical"


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
