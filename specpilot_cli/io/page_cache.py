"""What the system's page cache holds of a file, and dropping what a reader brought in."""

from __future__ import annotations

import os
import time

_SAMPLES = 64
_PAGE = 4096


def cached_share(descriptor: int, size: int) -> float:
    """Return about which share of a file of `size` bytes is cached; 1 where nobody can tell."""
    step = max(1, size // _SAMPLES)
    # Looking may bring a page in: the next one to look must not look at the same pages.
    samples = range(time.monotonic_ns() % step, size, step)
    if not samples:
        return 1.0
    return sum(_is_cached(descriptor, position) for position in samples) / len(samples)


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


def _is_cached(descriptor: int, position: int) -> bool:
    try:
        os.preadv(descriptor, [bytearray(1)], position, os.RWF_NOWAIT)
    except BlockingIOError:
        return False
    except (AttributeError, OSError):
        return True
    return True
