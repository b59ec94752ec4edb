"""Threads and reused buffers with which stripes flow from one file to another, in order.

One thread reads, a pool encodes or decodes, the calling thread writes; each hash has a thread of
its own, because a hash is a chain. What is under way at any time is bounded, so memory depends
neither on the checkpoint nor on its tensors.
"""

from __future__ import annotations

import hashlib
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar

import numpy as np
import numpy.typing as npt

from specpilot_cli.io.hashing import Crc32
from specpilot_cli.io.page_memory import page_memory
from specpilot_cli.io.safetensors_stream import byte_view
from specpilot_cli.io.source_file import SPARE_BYTES
from specpilot_kernels.w12 import layout
from specpilot_kernels.w12.stripes import STRIPE_WEIGHTS, Stripe, StripeCodec, stripes

T = TypeVar("T")

PIECE_BYTES = 2 * STRIPE_WEIGHTS
_RECORDS_BYTES = PIECE_BYTES * 3 // 4
# Buffers that a very wide row block made larger than this are given back after use.
_KEPT_BYTES = 2 * PIECE_BYTES
_IN_FLIGHT_BYTES = 16 * PIECE_BYTES
# Read ahead of the workers: a disk that stops for some milliseconds stops nobody else.
_SPARE_PIECES = 6


@dataclass(frozen=True, slots=True)
class Piece:
    """A contiguous range of a tensor's bytes: `nbytes` from byte `start` of the tensor on.

    stripe: the rows it holds, where the tensor is a matrix that may be encoded.
    """

    start: int
    nbytes: int
    stripe: Stripe | None = None


def byte_pieces(nbytes: int) -> Iterable[Piece]:
    """Yield the pieces of a tensor that is only carried over."""
    for start in range(0, nbytes, PIECE_BYTES):
        yield Piece(start, min(PIECE_BYTES, nbytes - start))


def stripe_pieces(shape: tuple[int, ...]) -> Iterable[Piece]:
    """Yield the pieces of a BF16 tensor [rows, cols] or [matrices, rows, cols], one per stripe."""
    row_bytes = 2 * shape[-1]
    for stripe in stripes(shape):
        yield Piece(stripe.channel * row_bytes, stripe.rows * row_bytes, stripe)


def stripe_of(piece: Piece) -> Stripe:
    """Return the rows of a piece that `stripe_pieces` gave."""
    if piece.stripe is None:
        raise ValueError("the piece has no rows")
    return piece.stripe


class Slot:
    """The buffers of one piece under way; free again when every `hold` was dropped."""

    def __init__(self, free: queue.LifoQueue[Slot]) -> None:
        self._free = free
        self._lock = threading.Lock()
        self._holds = 0
        self._raw = np.empty(0, np.uint8)
        self._records = np.empty(0, np.uint8)

    def raw(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """Return room for `nbytes` bytes of BF16, uint8 [nbytes], beginning on a page."""
        if self._raw.size < nbytes:
            self._raw = page_memory(max(nbytes, PIECE_BYTES + SPARE_BYTES))
        return self._raw[:nbytes]

    def room(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """Return room for `SafetensorsFile.read_pages` to find `nbytes` bytes of BF16 in."""
        return self.raw(nbytes + SPARE_BYTES)

    def records(self, blocks: int, cols: int) -> npt.NDArray[np.uint8]:
        """Return room for records, uint8 [blocks, column blocks, 12288]."""
        shape = (blocks, layout.grid(1, cols)[1], layout.RECORD_BYTES)
        nbytes = shape[0] * shape[1] * shape[2]
        if self._records.size < nbytes:
            self._records = page_memory(max(nbytes, _RECORDS_BYTES))
        return self._records[:nbytes].reshape(shape)

    def hold(self) -> None:
        """Keep the buffers in use until one more `drop`."""
        with self._lock:
            self._holds += 1

    def drop(self) -> None:
        """Undo one `hold`."""
        with self._lock:
            self._holds -= 1
            last = self._holds == 0
        if last:
            if self._raw.size > _KEPT_BYTES:
                self._raw = self._records = np.empty(0, np.uint8)
            self._free.put(self)


class _Digest(Protocol):
    def update(self, data: memoryview, /) -> None: ...

    def hexdigest(self) -> str: ...


class HashChain:
    """A hash over pieces in the order in which they are given, on its own thread."""

    def __init__(self, thread: ThreadPoolExecutor, digest: _Digest) -> None:
        self._thread = thread
        self._digest = digest
        self.nbytes = 0

    def update(self, data: npt.NDArray[Any] | bytes, slot: Slot | None = None) -> None:
        """Hash `data` soon; it must not change until then: `slot` is held, if it lies in one."""
        if slot is not None:
            slot.hold()
        view = memoryview(data) if isinstance(data, bytes) else byte_view(data)
        self.nbytes += view.nbytes
        self._thread.submit(self._work, view, slot)

    def hexdigest(self) -> Future[str]:
        """Return the hash of everything given so far, once it is known; more may follow."""
        return self._thread.submit(self._digest.hexdigest)

    def _work(self, view: memoryview, slot: Slot | None) -> None:
        try:
            self._digest.update(view)
        finally:
            if slot is not None:
                slot.drop()


class Crew:
    """A context manager: the threads and buffers that one conversion, check or restore shares."""

    def __init__(self, codec: StripeCodec, workers: int) -> None:
        self.codec = codec
        self._depth = max(1, workers) + _SPARE_PIECES
        self._free: queue.LifoQueue[Slot] = queue.LifoQueue()
        # Two more than are in line: they may wait for a hash while the next ones are read.
        for _ in range(self._depth + 2):
            self._free.put(Slot(self._free))
        self._stack = ExitStack()
        # Closed in the reverse order: what is being read still goes to the others.
        self._pool, self._source, self._stored, self._reader = (
            self._stack.enter_context(ThreadPoolExecutor(count, name))
            for count, name in (
                (max(1, workers), "w12"), (1, "source hash"), (1, "stored hash"), (1, "reader"),
            )
        )  # fmt: skip

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stack.close()

    def source_chain(self) -> HashChain:
        """Return a new sha256 of a source file."""
        return HashChain(self._source, hashlib.sha256())

    def stored_chain(self) -> HashChain:
        """Return a new CRC-32 of what is stored for one tensor."""
        return HashChain(self._stored, Crc32())

    def submit(self, slot: Slot, work: Callable[..., T], *args: object) -> Future[T]:
        """Run `work` in the pool; it may use the buffers of `slot` until it returns."""
        slot.hold()

        def run() -> T:
            try:
                return work(*args)
            finally:
                slot.drop()

        return self._pool.submit(run)

    def flow(
        self,
        pieces: Iterable[Piece],
        load: Callable[[Piece, Slot], T],
        finish: Callable[[Piece, Slot, Future[T]], bool],
    ) -> bool:
        """Load every piece in order and finish them in order, several of them under way at once.

        `load` runs on the reading thread, `finish` on the caller's. Once a `finish` returns
        False nothing more is loaded or finished; what is still at work has its own hold on its
        buffers. Returns whether all returned True.
        """
        line: deque[tuple[Piece, Slot, Future[T]]] = deque()
        good = True

        def advance() -> None:
            nonlocal good
            piece, slot, loaded = line.popleft()
            if good:
                good = finish(piece, slot, loaded)
            else:
                wait([loaded])
            slot.drop()

        for piece in pieces:
            slot = self._slot()
            line.append((piece, slot, self._reader.submit(load, piece, slot)))
            if len(line) >= min(self._depth, max(1, _IN_FLIGHT_BYTES // piece.nbytes)):
                advance()
            if not good:
                break
        while line:
            advance()
        return good

    def _slot(self) -> Slot:
        """Return free buffers, held once; waits for them if all are in use."""
        slot = self._free.get()
        slot.hold()
        return slot
