"""Write a large file from front to back, past the page cache, or find that it is there already.

Writing gigabytes through the page cache costs more processor time than encoding them, throws out
what the user had cached, and leaves the disk idle until the final flush. Here full chunks go to
the disk directly from background threads while the caller fills the next one. File systems that
refuse direct writes get ordinary ones.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np

from specpilot_cli.io.page_cache import drop_all_cached
from specpilot_cli.io.page_memory import PAGE, Bytes, page_memory

CHUNK_BYTES = 8 << 20
_BUFFERS = 4
# Writes under way at once: beside busy processors one alone leaves the disk idle between two.
_WRITERS = 3
# Room is taken this far ahead, because writes that lengthen a file wait for each other.
AHEAD_BYTES = 256 << 20
_COMPARED = 1 << 20

# Buffers of files that were closed: first use of new memory costs as much as copying to it.
_spare: list[Bytes] = []


def only_name(found: os.stat_result) -> bool:
    """Return whether it is a regular file that no other name leads to."""
    return stat.S_ISREG(found.st_mode) and found.st_nlink == 1


def _take_buffer() -> Bytes:
    """Return a chunk's buffer."""
    with contextlib.suppress(IndexError):
        return _spare.pop()
    return page_memory(CHUNK_BYTES)


class AppendFile:
    """A file that grows at its end; `finish` makes it durable, `close` alone leaves it unusable.

    reserved: bytes at the front that are zero until `finish` writes them, so that a file cut off
    by a kill is never taken for a whole one. resume: an existing file is read and compared with
    what is appended; from the first difference on it is written anew. At `path` a link, a file
    that has another name too or a pipe is an OSError: nothing is written through links.
    """

    def __init__(self, path: Path, reserved: int, *, resume: bool = False) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        self._fd = os.open(path, flags | (0 if resume else os.O_EXCL), 0o666)
        if not only_name(os.fstat(self._fd)):
            os.close(self._fd)
            raise OSError(errno.EMLINK, "not a regular file with one name", str(path))
        self._direct: int | None = None
        with contextlib.suppress(OSError):
            self._direct = os.open(
                path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW | getattr(os, "O_DIRECT", 0)
            )
        self._refuses_direct = self._direct is None
        self._allocated = 0
        self._writers = ThreadPoolExecutor(_WRITERS, "disk")
        self._pending: deque[tuple[Future[None], Bytes]] = deque()
        self._free = [_take_buffer() for _ in range(_BUFFERS)]
        self._buffer = self._free.pop()
        self._base, self._fill = 0, 0
        self._comparing = resume
        self._position = reserved
        if not resume:
            self._restart(reserved)

    @property
    def position(self) -> int:
        """Bytes of the file so far, the reserved ones included."""
        return self._position

    def append(self, data: memoryview) -> None:
        """Append bytes; `data` may be reused afterwards. OSError may be of an earlier write."""
        view = np.frombuffer(data, np.uint8)
        if self._comparing:
            same = self._same_bytes(view)
            view = view[same:]
            if not view.size:
                return
            self._restart(self._position)
        while view.size:
            taken = min(view.size, CHUNK_BYTES - self._fill)
            self._buffer[self._fill : self._fill + taken] = view[:taken]
            self._fill += taken
            self._position += taken
            view = view[taken:]
            if self._fill == CHUNK_BYTES:
                self._send()

    def rewind(self, position: int) -> None:
        """Forget everything from `position` on."""
        if not self._comparing:
            self._restart(position)
        self._position = position

    def finish(self, head: bytes) -> bool:
        """Write the reserved front, flush to the disk; return whether the file was there already.

        Closes the file.
        """
        self._drain()
        end = max(self._position, len(head))
        found = self._comparing and os.fstat(self._fd).st_size == end
        found = found and os.pread(self._fd, len(head), 0) == head
        if not found:
            if not self._comparing:
                self._write(self._fd, self._buffer[: self._fill], self._base)
            os.ftruncate(self._fd, end)
            self._write(self._fd, np.frombuffer(head, np.uint8), 0)
        os.fsync(self._fd)
        drop_all_cached(self._fd)
        self.close()
        return found

    def close(self) -> None:
        """Stop writing and close; harmless when done already."""
        if self._fd < 0:
            return
        self._writers.shutdown(cancel_futures=True)
        _spare.extend([self._buffer, *self._free, *(buffer for _, buffer in self._pending)])
        self._pending.clear()
        for descriptor in (self._fd, self._direct):
            if descriptor is not None:
                os.close(descriptor)
        self._fd, self._direct = -1, None

    def _same_bytes(self, view: Bytes) -> int:
        """Return how many bytes of `view`, in whole pieces, the file holds at the position."""
        done = 0
        while done < view.size:
            piece = view[done : done + _COMPARED]
            there = np.frombuffer(os.pread(self._fd, piece.size, self._position), np.uint8)
            if not np.array_equal(there, piece):
                break
            done += piece.size
            self._position += piece.size
        return done

    def _restart(self, position: int) -> None:
        """Write from `position` on; what lies before it in its block is read back."""
        self._drain()
        if self._comparing:
            # It may be a whole file that is about to change: it must not look like one.
            self._write(self._fd, np.zeros(8, np.uint8), 0)
            self._comparing = False
        elif self._base <= position <= self._base + self._fill:
            self._fill = position - self._base
            return
        self._base = position - position % PAGE
        self._fill = position - self._base
        before = os.pread(self._fd, self._fill, self._base)
        self._buffer[: self._fill] = 0
        self._buffer[: len(before)] = np.frombuffer(before, np.uint8)

    def _send(self) -> None:
        """Hand the full buffer to the background; wait for one if all are under way."""
        if not self._refuses_direct and self._base + CHUNK_BYTES > self._allocated:
            # A disk too full for this may still hold what is left to write; macOS cannot do it.
            if hasattr(os, "posix_fallocate"):
                with contextlib.suppress(OSError):
                    os.posix_fallocate(self._fd, self._base, AHEAD_BYTES)
            self._allocated = self._base + AHEAD_BYTES
        task = self._writers.submit(self._write_chunk, self._buffer, self._base)
        self._pending.append((task, self._buffer))
        self._base, self._fill = self._base + CHUNK_BYTES, 0
        if not self._free:
            self._collect()
        self._buffer = self._free.pop()

    def _collect(self) -> None:
        task, buffer = self._pending.popleft()
        task.result()
        self._free.append(buffer)

    def _drain(self) -> None:
        while self._pending:
            self._collect()

    def _write_chunk(self, buffer: Bytes, start: int) -> None:
        if self._direct is not None and not self._refuses_direct:
            try:
                self._write(self._direct, buffer, start)
                return
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
            self._refuses_direct = True
        self._write(self._fd, buffer, start)

    @staticmethod
    def _write(descriptor: int, view: Bytes, start: int) -> None:
        done = 0
        while done < view.size:
            done += os.pwrite(descriptor, view[done:].data, start + done)
