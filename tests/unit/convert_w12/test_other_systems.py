"""Systems without Linux's calls for the page cache, direct writes and processor sets: macOS."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from specpilot_cli.commands.convert_w12 import default_workers
from specpilot_cli.convert_w12.restore import restore_folder
from specpilot_cli.convert_w12.verify import verify_folder
from specpilot_cli.io.append_file import AppendFile
from specpilot_cli.main import main
from specpilot_cli.paired_bench.machine import describe_machine
from specpilot_cli.report.json_out import describe_environment
from tests.unit.convert_w12.conftest import MakeCheckpoint, digests

LINUX_ONLY = (
    "posix_fadvise", "POSIX_FADV_DONTNEED", "POSIX_FADV_SEQUENTIAL", "posix_fallocate",
    "sched_getaffinity", "O_DIRECT", "RWF_NOWAIT",
)  # fmt: skip


@pytest.fixture(autouse=True)
def without_linux(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in LINUX_ONLY:
        monkeypatch.delattr(os, name)


def test_there_and_back(make_checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    source, packed, back = make_checkpoint(shards=2), tmp_path / "w12", tmp_path / "back"
    assert main(["convert-w12", str(source), "-o", str(packed), "--quiet"]) == 0
    assert verify_folder(packed, source).verdict == "identical"
    restore_folder(packed, back)
    assert digests(back) == digests(source)


def test_a_file_of_several_chunks(tmp_path: Path) -> None:
    """Chunks are what would be written directly, into room that would be taken ahead."""
    data = np.random.default_rng(0).integers(0, 256, 40 << 20, dtype=np.uint8)
    file = AppendFile(tmp_path / "x", 8)
    file.append(data.data)
    assert not file.finish(b"8 bytes.")
    assert (tmp_path / "x").read_bytes() == b"8 bytes." + data.tobytes()


def test_processors_are_counted_another_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    assert default_workers() == 3
    assert describe_environment()["cpu_count"] == describe_machine()["cpu_count"] == 3
