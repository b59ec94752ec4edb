"""Files read past the page cache, and file systems that refuse it."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from specpilot_cli.io import page_memory as memory
from specpilot_cli.io.page_cache import cached_share
from specpilot_cli.io.page_memory import Bytes, page_memory
from specpilot_cli.io.source_file import SPARE_BYTES, SourceFile

_NBYTES = (1 << 20) + 5003


@pytest.fixture
def data(tmp_path: Path) -> Bytes:
    """The bytes of the file `x`, which is not cached."""
    data = np.random.default_rng(0).integers(0, 256, _NBYTES, dtype=np.uint8)
    with (tmp_path / "x").open("wb") as handle:
        handle.write(data.tobytes())
        handle.flush()
        os.fsync(handle.fileno())
        os.posix_fadvise(handle.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return data


def opened(path: Path) -> SourceFile:
    file = SourceFile(path)
    file.read_once()
    return file


def direct_reads(monkeypatch: pytest.MonkeyPatch, *, allowed: bool) -> list[int]:
    """Return a list that gets the position of every direct read; refuse them unless `allowed`."""
    plain, positions = os.preadv, list[int]()

    def watched(descriptor: int, buffers: Sequence[memoryview], start: int, flags: int = 0) -> int:
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
            positions.append(start)
            if not allowed:
                raise OSError(errno.EINVAL, "Invalid argument")
        return plain(descriptor, buffers, start, flags)

    monkeypatch.setattr(os, "preadv", watched)
    return positions


@pytest.mark.parametrize("allowed", [True, False])
@pytest.mark.parametrize("origin", [0, 8, 4096, 4104, 4091, 12_345])
def test_pages_hold_what_was_asked_for(
    data: Bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, origin: int, allowed: bool
) -> None:
    """Any start, any length, up to a last byte in the middle of a page; aligned for any dtype."""
    positions = direct_reads(monkeypatch, allowed=allowed)
    file = opened(tmp_path / "x")
    room = page_memory(300_000 + SPARE_BYTES)
    for start in range(origin, _NBYTES, 300_000):
        nbytes = min(300_000, _NBYTES - start)
        found = file.read_pages(start, nbytes, room)
        assert np.array_equal(found, data[start : start + nbytes])
        assert found.ctypes.data % 8 == 0
    file.close()
    if file_system_is_direct(tmp_path):
        assert len(positions) == (len(range(origin, _NBYTES, 300_000)) if allowed else 1)


def file_system_is_direct(folder: Path) -> bool:
    """Whether direct reads work here, and the file was seen not to be cached."""
    with (folder / "x").open("rb") as handle:
        os.posix_fadvise(handle.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        if cached_share(handle.fileno(), _NBYTES) > 0.4:
            return False
    try:
        descriptor = os.open(folder / "x", os.O_RDONLY | os.O_DIRECT)
    except OSError:
        return False
    os.close(descriptor)
    return True


def test_what_is_cached_already_is_read_from_the_cache(
    data: Bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "x").read_bytes()
    positions = direct_reads(monkeypatch, allowed=True)
    file = opened(tmp_path / "x")
    found = file.read_pages(5, 100_000, page_memory(100_000 + SPARE_BYTES))
    file.close()
    assert np.array_equal(found, data[5:100_005])
    assert positions == []


@pytest.mark.parametrize("end", [8192, 8200])
def test_file_that_became_shorter(data: Bytes, tmp_path: Path, end: int) -> None:
    file = opened(tmp_path / "x")
    os.truncate(tmp_path / "x", end)
    room = page_memory(100_000 + SPARE_BYTES)
    assert np.array_equal(file.read_pages(4096, 4096, room), data[4096:8192])
    with pytest.raises(EOFError, match=f"byte {end}"):
        file.read_pages(4096, 100_000, room)
    file.close()


def test_another_file_of_that_name_is_not_read(data: Bytes, tmp_path: Path) -> None:
    file = SourceFile(tmp_path / "x")
    (tmp_path / "y").write_bytes(bytes(_NBYTES))
    (tmp_path / "y").replace(tmp_path / "x")
    file.read_once()
    found = file.read_pages(0, 100_000, page_memory(100_000 + SPARE_BYTES))
    file.close()
    assert np.array_equal(found, data[:100_000])


def test_a_broken_disk_is_not_taken_for_a_refusal(
    data: Bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = opened(tmp_path / "x")

    def broken(*_: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "preadv", broken)
    with pytest.raises(OSError, match="Input/output"):
        file.read_pages(0, 100_000, page_memory(100_000 + SPARE_BYTES))
    file.close()


def test_a_closed_file_is_not_read(data: Bytes, tmp_path: Path) -> None:
    file = opened(tmp_path / "x")
    file.close()
    file.close()
    with pytest.raises(ValueError, match="closed"):
        file.read_pages(0, 100_000, page_memory(100_000 + SPARE_BYTES))
    with pytest.raises(ValueError, match="closed"):
        file.read_into(0, memoryview(bytearray(8)))


@pytest.mark.parametrize("nbytes", [0, 1, 4096, 5000, 2 << 20, (2 << 20) + 1, 8 << 20])
def test_memory_begins_on_a_page(nbytes: int) -> None:
    found = page_memory(nbytes)
    assert (found.size, found.ctypes.data % memory.PAGE) == (nbytes, 0)
    if nbytes >= memory._HUGE:
        assert found.ctypes.data % memory._HUGE == 0
    assert not found.any()
    found[:] = 7
    assert int(found.sum(dtype=np.int64)) == 7 * nbytes
