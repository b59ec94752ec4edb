"""The background thread that turns filled ring slots into shards on disk.

Nothing here may hold up or stop the server: `submit` never waits, memory is one shard and the
ring, and the first failure is kept as a problem that ends the recording.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from specpilot_cli.engines.sglang.plugin.recorder_layout import RowLayout
from specpilot_cli.io.lattice_digest import shard_digest
from specpilot_cli.io.safetensors_stream import array_data, encode_header
from specpilot_cli.schema.raw_lattice import (
    INDEX_NAME,
    SHARD_KEY,
    RecorderIndex,
    ShardInfo,
    shard_name,
)

SHARD_BYTES = 32 << 20
# A finished request must not wait long for its last rows: the client is waiting for them.
IDLE_FLUSH_S = 0.2
# And not either where other clients keep the server busy.
OLDEST_ROW_S = 2.0


class Slot(Protocol):
    """Rows on their way from the device; see `recorder_ring.py`."""

    def rows(self, count: int) -> npt.NDArray[np.int32]:
        """Wait until the copy is complete and return the first `count` rows."""
        ...

    def release(self) -> None:
        """Give the slot back to the ring."""
        ...


class ShardWriter:
    """Writes rows into numbered shards of one folder; one thread, started by `start`.

    problem: why it ended, or None. bytes_written, lattices, busy_s (CPU seconds of the thread) are
    for the facts and may be read at any time.
    """

    def __init__(
        self,
        folder: Path,
        layout: RowLayout,
        index: RecorderIndex,
        *,
        shard_bytes: int = SHARD_BYTES,
    ) -> None:
        self.folder = folder
        self.problem: str | None = None
        self.bytes_written = 0
        self.busy_s = 0.0
        self._layout = layout
        self._index = index
        self._filled: queue.SimpleQueue[tuple[Slot, Sequence[str]] | None] = queue.SimpleQueue()
        room = max(1, shard_bytes // (4 * layout.words))
        self._rows = np.empty((room, layout.words), dtype=np.int32)
        self._request = np.empty(room, dtype=np.int32)
        self._used = 0
        self._first_row_s = 0.0
        self._requests: dict[str, int] = {}
        self._thread = threading.Thread(target=self._run, name="specpilot-recorder", daemon=True)

    @property
    def lattices(self) -> int:
        """Rows in complete shards."""
        return self._index.lattices

    @property
    def shards(self) -> int:
        """Complete shards."""
        return self._index.shards

    @property
    def alive(self) -> bool:
        """Whether rows that are submitted will be written."""
        return self.problem is None and self._thread.is_alive()

    def start(self) -> None:
        """Write the empty index and start the thread; raises OSError if the folder is bad."""
        self.folder.mkdir(parents=True)
        self._write_index()
        self._thread.start()

    def submit(self, slot: Slot, requests: Sequence[str]) -> None:
        """Hand over one step: row i of `slot` belongs to request id `requests[i]`."""
        self._filled.put((slot, requests))

    def close(self, timeout_s: float = 5.0) -> None:
        """Write what was submitted and end the thread."""
        self._filled.put(None)
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            while self._step():
                self.busy_s = time.thread_time()
        except Exception as error:  # noqa: BLE001 - a server must outlive whatever happens here
            self.problem = f"the recorder's writer ended: {_reason(error)}"
            self._drain()

    def _step(self) -> bool:
        """Take one item, or flush when nothing came; False at the end."""
        try:
            item = self._filled.get(timeout=IDLE_FLUSH_S)
        except queue.Empty:
            self._flush()
            return True
        if item is None:
            self._flush()
            return False
        slot, requests = item
        try:
            self._append(slot.rows(len(requests)), requests)
        finally:
            slot.release()
        if self._used and time.monotonic() - self._first_row_s > OLDEST_ROW_S:
            self._flush()
        return True

    def _append(self, rows: npt.NDArray[np.int32], requests: Sequence[str]) -> None:
        start = 0
        if self._used == 0:
            self._first_row_s = time.monotonic()
        while start < len(rows):
            count = min(len(rows) - start, len(self._rows) - self._used)
            place = slice(self._used, self._used + count)
            self._rows[place] = rows[start : start + count]
            self._request[place] = [
                self._requests.setdefault(name, len(self._requests))
                for name in requests[start : start + count]
            ]
            self._used += count
            start += count
            if self._used == len(self._rows):
                self._flush()

    def _flush(self) -> None:
        if self._used == 0:
            return
        number = self._index.shards
        requests = list(self._requests)
        tensors = {
            "request": self._request[: self._used],
            **self._layout.unpack(self._rows[: self._used]),
        }
        info = ShardInfo(
            session=self._index.session,
            shard=number,
            requests=requests,
            sha256=shard_digest(tensors, requests),
        )
        self.bytes_written += _write(self.folder / shard_name(number), tensors, info)
        self._index = self._index.model_copy(
            update={"shards": number + 1, "lattices": self._index.lattices + self._used}
        )
        self._used = 0
        self._requests = {}
        self._write_index()

    def _write_index(self) -> None:
        text = self._index.model_dump_json(indent=1).encode()
        _replace(self.folder / INDEX_NAME, [text])

    def _drain(self) -> None:
        """Give all slots back, so that the ring shows no trace of the failure."""
        while True:
            try:
                item = self._filled.get_nowait()
            except queue.Empty:
                return
            if item is not None:
                item[0].release()


def _write(path: Path, tensors: dict[str, npt.NDArray[Any]], info: ShardInfo) -> int:
    data = {name: array_data(array) for name, array in tensors.items()}
    header = encode_header(
        ((name, part.dtype, part.shape) for name, part in data.items()),
        {SHARD_KEY: info.model_dump_json()},
    )
    return _replace(path, [header, *(part.memory() for part in data.values())])


def _replace(path: Path, parts: Sequence[bytes | memoryview]) -> int:
    """Write the parts to `path` through a rename, so that a reader sees all or nothing.

    Not flushed to the disk itself: shards are read by the client that is waiting for them, and
    what a power failure leaves is not a recording anyway.
    """
    temporary = path.with_name(f".{path.name}.partial")
    size = 0
    try:
        with temporary.open("wb") as stream:
            for part in parts:
                size += stream.write(part)
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        error.filename = str(path)  # a failed write does not say of what
        raise
    return size


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        where = f" ({error.filename})" if error.filename else ""
        return f"{error.strerror}{where}"
    return repr(error)
