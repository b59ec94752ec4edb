"""Writing past the page cache: the same bytes as `open().write()`, wherever it is cut back."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specpilot_cli.io import append_file
from specpilot_cli.io.append_file import AppendFile


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two blocks per chunk, so that a few kilobytes cross many boundaries."""
    monkeypatch.setattr(append_file, "CHUNK_BYTES", 8192)
    monkeypatch.setattr(append_file, "AHEAD_BYTES", 16384)
    monkeypatch.setattr(append_file, "_spare", [])
    monkeypatch.setattr(append_file, "_COMPARED", 1000)


def noise(seed: int, size: int) -> bytes:
    return np.random.default_rng(seed).bytes(size)


def write(path: Path, pieces: list[bytes], head: bytes, *, resume: bool = False) -> bool:
    file = AppendFile(path, len(head), resume=resume)
    try:
        for piece in pieces:
            file.append(memoryview(piece))
        return file.finish(head)
    finally:
        file.close()


@pytest.mark.parametrize("reserved", [0, 1, 4096, 20_000])
@pytest.mark.parametrize("sizes", [[], [1], [8192], [5000] * 9, [40_001, 3], [4096, 4096, 1]])
def test_contents(reserved: int, sizes: list[int], tmp_path: Path) -> None:
    pieces = [noise(i, size) for i, size in enumerate(sizes)]
    head = noise(99, reserved)
    assert not write(tmp_path / "x", pieces, head)
    assert (tmp_path / "x").read_bytes() == head + b"".join(pieces)


@pytest.mark.parametrize("cut", [0, 1, 4095, 4096, 8191, 8192, 20_000, 29_999, 30_000])
def test_rewind(cut: int, tmp_path: Path) -> None:
    first, second = noise(1, 30_000), noise(2, 17_003)
    file = AppendFile(tmp_path / "x", 10)
    file.append(memoryview(first))
    file.rewind(10 + cut)
    assert file.position == 10 + cut
    file.append(memoryview(second))
    file.finish(b"h" * 10)
    assert (tmp_path / "x").read_bytes() == b"h" * 10 + first[:cut] + second


def test_unfinished_file_has_no_head(tmp_path: Path) -> None:
    file = AppendFile(tmp_path / "x", 16)
    file.append(memoryview(noise(1, 50_000)))
    file.close()
    assert (tmp_path / "x").read_bytes()[:16] in (b"", bytes(16))


def test_resume_of_the_same_file_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pieces, head = [noise(1, 30_000), noise(2, 999)], noise(3, 64)
    write(tmp_path / "x", pieces, head)

    def refuse(*_: Any) -> None:
        raise AssertionError("written")

    monkeypatch.setattr(AppendFile, "_write", staticmethod(refuse))
    assert write(tmp_path / "x", pieces, head, resume=True)


@pytest.mark.parametrize("where", [0, 63, 64, 65, 5000, 12_345, 30_062, 31_062])
@pytest.mark.parametrize("kind", ["flip", "cut", "grow"])
def test_resume_repairs_what_differs(where: int, kind: str, tmp_path: Path) -> None:
    pieces, head = [noise(1, 30_000), noise(2, 999)], noise(3, 64)
    whole = head + b"".join(pieces)
    damaged = bytearray(whole)
    if kind == "flip":
        damaged[where] ^= 1
    elif kind == "cut":
        del damaged[where:]
    else:
        damaged += noise(4, where + 1)
    (tmp_path / "x").write_bytes(damaged)
    assert not write(tmp_path / "x", pieces, head, resume=True)
    assert (tmp_path / "x").read_bytes() == whole


def test_file_that_is_being_changed_does_not_look_whole(tmp_path: Path) -> None:
    head = noise(3, 64)
    write(tmp_path / "x", [noise(1, 30_000)], head)
    file = AppendFile(tmp_path / "x", 64, resume=True)
    file.append(memoryview(noise(2, 30_000)))
    file.close()
    assert (tmp_path / "x").read_bytes()[:8] == bytes(8)


def test_rewind_while_comparing(tmp_path: Path) -> None:
    whole = noise(1, 30_000)
    (tmp_path / "x").write_bytes(b"h" * 10 + whole)
    file = AppendFile(tmp_path / "x", 10, resume=True)
    file.append(memoryview(whole[:20_000]))
    file.rewind(10 + 5000)
    file.append(memoryview(whole[5000:]))
    assert file.finish(b"h" * 10)
    assert (tmp_path / "x").read_bytes() == b"h" * 10 + whole


def test_file_system_without_direct_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, refused = AppendFile._write, []

    def picky(descriptor: int, view: Any, start: int) -> None:
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
            refused.append(descriptor)
            raise OSError(errno.EINVAL, "Invalid argument")
        plain(descriptor, view, start)

    monkeypatch.setattr(AppendFile, "_write", staticmethod(picky))
    pieces = [noise(i, 9000) for i in range(6)]
    write(tmp_path / "x", pieces, b"head")
    assert 1 <= len(refused) <= append_file._WRITERS
    assert (tmp_path / "x").read_bytes() == b"head" + b"".join(pieces)


def test_disk_with_room_for_the_file_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    write(tmp_path / "x", [noise(1, 50_000)], b"head")
    assert (tmp_path / "x").read_bytes() == b"head" + noise(1, 50_000)


def test_full_disk_in_the_background_is_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(AppendFile, "_write", staticmethod(full))
    with pytest.raises(OSError, match="No space"):
        write(tmp_path / "x", [noise(1, 9000)], b"head")


def test_link_and_existing_file_are_refused(tmp_path: Path) -> None:
    (tmp_path / "blob").write_bytes(b"precious")
    (tmp_path / "link").symlink_to(tmp_path / "blob")
    for resume in (False, True):
        with pytest.raises(OSError, match="link"):
            AppendFile(tmp_path / "link", 0, resume=resume)
    with pytest.raises(FileExistsError):
        AppendFile(tmp_path / "blob", 0)
    assert (tmp_path / "blob").read_bytes() == b"precious"
