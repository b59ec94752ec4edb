"""Bytes to be read again soon: in memory while they are few, else in a file without a name."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

_IN_MEMORY_BYTES = 4 << 20
_CHUNK_BYTES = 1 << 20


class Spool:
    """An append-only store that can be cut back; its file, if any, goes away with the process."""

    def __init__(self, folder: Path) -> None:
        # It lives as long as this object.
        self._file = tempfile.SpooledTemporaryFile(  # noqa: SIM115
            _IN_MEMORY_BYTES, dir=str(folder)
        )
        self._size = 0

    @property
    def size_bytes(self) -> int:
        """Bytes stored."""
        return self._size

    def append(self, data: memoryview) -> None:
        """Append bytes."""
        self._file.seek(self._size)
        self._file.write(data)
        self._size += data.nbytes

    def cut(self, size: int) -> None:
        """Forget everything from byte `size` on."""
        self._file.truncate(size)
        self._size = size

    def chunks(self, start: int, end: int | None = None) -> Iterator[bytes]:
        """Yield the bytes from `start` to `end` or all that follow, 1 MiB or less at a time."""
        end = self._size if end is None else end
        while start < end:
            self._file.seek(start)
            chunk = self._file.read(min(_CHUNK_BYTES, end - start))
            start += len(chunk)
            yield chunk

    def close(self) -> None:
        """Free the memory or the file."""
        self._file.close()
