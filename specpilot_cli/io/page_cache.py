"""What the system's page cache holds of a file, and dropping what a reader brought in."""

from __future__ import annotations

import ctypes
import mmap
import os

import numpy as np

_SAMPLES = 64
_PAGE = mmap.PAGESIZE


def cached_share(descriptor: int, size: int) -> float:
    """Return about which share of a file of `size` bytes is cached; 1 where nobody can tell."""
    samples = range(0, size, max(_PAGE, size // _SAMPLES // _PAGE * _PAGE))
    if not samples:
        return 1.0
    share = _resident_share(descriptor, size, samples)
    if share < 1.0:
        return share
    # Also what the system answers to whoever may not write to the file, so ask once more.
    return sum(_reads_at_once(descriptor, position) for position in samples) / len(samples)


def drop_cached(descriptor: int, start: int, nbytes: int) -> None:
    """Drop the pages of a range that was read, the one included in which it begins."""
    first = start - start % _PAGE
    _advise(descriptor, first, start + nbytes - first, "POSIX_FADV_DONTNEED")


def drop_all_cached(descriptor: int) -> None:
    """Drop the pages of the whole file, as far as they are on the disk."""
    _advise(descriptor, 0, 0, "POSIX_FADV_DONTNEED")


def read_ahead(descriptor: int) -> None:
    """Say that the file will be read from front to back."""
    _advise(descriptor, 0, 0, "POSIX_FADV_SEQUENTIAL")


def _advise(descriptor: int, start: int, nbytes: int, advice: str) -> None:
    """Advise the system, where it takes advice: macOS has no such call."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, start, nbytes, getattr(os, advice))


def _resident_share(descriptor: int, size: int, samples: range) -> float:
    """Ask for the pages themselves, which brings none in; 1 where the system does not say."""
    try:
        mincore = ctypes.CDLL(None).mincore
        view = mmap.mmap(descriptor, size, access=mmap.ACCESS_READ)
    except (AttributeError, OSError, ValueError):
        return 1.0
    with view:
        first = np.frombuffer(view, np.uint8).ctypes.data  # released at once: `view` must close
        state = ctypes.c_ubyte()
        found = 0
        for position in samples:
            address = ctypes.c_void_p(first + position)
            if mincore(address, ctypes.c_size_t(1), ctypes.byref(state)):
                return 1.0
            found += state.value & 1
    return found / len(samples)


def _reads_at_once(descriptor: int, position: int) -> bool:
    """Whether a byte comes without waiting: from the cache, or from a disk that was that fast."""
    try:
        os.preadv(descriptor, [bytearray(1)], position, os.RWF_NOWAIT)
    except BlockingIOError:
        return False
    except (AttributeError, OSError):
        return True
    return True
