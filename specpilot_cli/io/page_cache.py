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
    os.posix_fadvise(descriptor, first, start + nbytes - first, os.POSIX_FADV_DONTNEED)


def _is_cached(descriptor: int, position: int) -> bool:
    try:
        os.preadv(descriptor, [bytearray(1)], position, os.RWF_NOWAIT)
    except BlockingIOError:
        return False
    except (AttributeError, OSError):
        return True
    return True
