"""Read a large file, and if it is read only once, past the page cache.

Copying gigabytes out of the cache costs more processor time than encoding them, and throws out
what the user had there. So a file that is not cached already goes straight to the caller's
memory. File systems that refuse that get ordinary reads, and what they cached is dropped.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from pathlib import Path

from specpilot_cli.io.page_cache import cached_share, drop_cached, read_ahead
from specpilot_cli.io.page_memory import PAGE, Bytes

#: Bytes that `SourceFile.read_pages` needs beyond those asked for.
SPARE_BYTES = 2 * PAGE
_STREAMED = 1 << 16
_WIDEST_ELEMENT = 8


def _version(found: os.stat_result) -> tuple[int, int, int]:
    """Return what differs after a write: also the ctime, which no program can set back."""
    return found.st_size, found.st_mtime_ns, found.st_ctime_ns


class SourceFile:
    """An open file of `size_bytes`. Reads take positions, so several threads may share it.

    OSError if it cannot be opened or read, or is no regular file; EOFError if it has become
    shorter.
    """

    def __init__(self, path: Path) -> None:
        # Opening a pipe would wait for somebody to write to it.
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        found = os.fstat(self._fd)
        if not stat.S_ISREG(found.st_mode):
            os.close(self._fd)
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        self._stream: int | None = None
        self._direct: int | None = None
        self._refuses_direct = False
        self._forgets = False
        self.size_bytes = found.st_size
        self._version = _version(found)

    def close(self) -> None:
        """Close the file; harmless when done already. Reading afterwards raises ValueError."""
        for descriptor in (self._fd, self._stream, self._direct):
            if descriptor is not None and descriptor >= 0:
                os.close(descriptor)
        self._fd, self._stream, self._direct = -1, None, None

    def is_unchanged(self) -> bool:
        """Return whether nobody has written to the file since it was opened."""
        return _version(os.fstat(self._opened())) == self._version

    def read_once(self) -> None:
        """Say that large reads will take the file from front to back, once.

        Unless most of the file is cached they then leave nothing in the page cache, so what the
        user had there stays. Small reads, which may lie anywhere, do not disturb the system's
        reading ahead.
        """
        if self._stream is not None:
            return
        self._forgets = cached_share(self._opened(), self.size_bytes) < 0.5
        with contextlib.suppress(OSError):
            self._stream = self._reopened(0)
            read_ahead(self._stream)
            if self._forgets and hasattr(os, "O_DIRECT"):
                self._direct = self._reopened(os.O_DIRECT)

    def read_into(self, start: int, target: memoryview) -> None:
        """Fill `target` with the bytes from `start` on."""
        if self._stream is None or target.nbytes < _STREAMED:
            self._fill(self._opened(), start, target, target.nbytes)
        else:
            self._fill(self._stream, start, target, target.nbytes)
            self._forget(start, target.nbytes)

    def read_pages(self, start: int, nbytes: int, room: Bytes) -> Bytes:
        """Return the bytes from `start` on, uint8 [nbytes], in `room`.

        room: uint8 [nbytes + SPARE_BYTES] or more, beginning on a page. The result is aligned for
        elements of up to 8 bytes.
        """
        skip = start % PAGE
        if self._read_direct(start - skip, skip + nbytes, room):
            self._forget(
                start, nbytes
            )  # a file system may have gone through its cache all the same
        else:
            self.read_into(start, room[skip : skip + nbytes].data)
        found = room[skip : skip + nbytes]
        if skip % _WIDEST_ELEMENT == 0:
            return found
        room[:nbytes] = found
        return room[:nbytes]

    def _read_direct(self, first: int, nbytes: int, room: Bytes) -> bool:
        """Read whole pages from byte `first` on, which begins one, or say that it cannot be."""
        if self._direct is None or self._refuses_direct:
            return False
        whole = room[: nbytes + -nbytes % PAGE]
        try:
            self._fill(self._direct, first, whole.data, nbytes)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self._refuses_direct = True
            return False
        return True

    def _fill(self, descriptor: int, start: int, view: memoryview, nbytes: int) -> None:
        """Read `nbytes` bytes; more, if `view` is longer and the file has them."""
        done = 0
        while done < nbytes:
            count = os.preadv(descriptor, [view[done:]], start + done)
            if count == 0:
                raise EOFError(f"ends at byte {start + done}")
            done += count

    def _forget(self, start: int, nbytes: int) -> None:
        if self._forgets:
            drop_cached(self._fd, start, nbytes)

    def _reopened(self, flags: int) -> int:
        """Open the same file again, whatever its name means by now."""
        return os.open(f"/proc/self/fd/{self._fd}", os.O_RDONLY | os.O_CLOEXEC | flags)

    def _opened(self) -> int:
        if self._fd < 0:
            raise ValueError("the file is closed")
        return self._fd
