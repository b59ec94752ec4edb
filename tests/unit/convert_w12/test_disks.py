"""The disk that a conversion writes to: which one it is, and what it does not take."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from specpilot_cli.convert_w12.target import free_disk_bytes
from specpilot_cli.errors import InputError, MachineError
from specpilot_cli.io.shard_writer import ShardWriter
from tests.unit.convert_w12.conftest import MakeCheckpoint, convert


def test_a_mount_point_is_refused_before_the_work(make_checkpoint: MakeCheckpoint) -> None:
    """A whole conversion would go to the disk beside it, and then could not be renamed."""
    mounted = Path("/dev/shm") if Path("/dev/shm").is_mount() else Path("/")
    with pytest.raises(InputError, match="mount point") as caught:
        convert(make_checkpoint(), mounted)
    assert caught.value.hint == "give a folder inside it"


def test_room_is_asked_for_where_the_partial_lies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Path] = []
    monkeypatch.setattr(
        shutil, "disk_usage", lambda path: asked.append(path) or SimpleNamespace(free=7)
    )
    (tmp_path / "w12").mkdir()
    assert free_disk_bytes(tmp_path / "w12") == 7
    assert asked == [tmp_path]


def test_a_limit_on_file_sizes_is_the_machines(
    make_checkpoint: MakeCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def too_large(*_: Any) -> None:
        raise OSError(errno.EFBIG, "File too large")

    monkeypatch.setattr(ShardWriter, "write", too_large)
    with pytest.raises(MachineError, match="nothing was kept") as caught:
        convert(make_checkpoint(), tmp_path / "w12")
    assert "--shard-size" in (caught.value.hint or "")
