"""The fast W12 codec on the CPU: the bytes of `reference`, compiled and on several threads.

Threads take ranges of row blocks, never parts of a record, so the result does not depend on
their number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from specpilot_kernels.w12 import _cpu, layout
from specpilot_kernels.w12.encoded import EncodedW12, matrix_stack

Bits = npt.NDArray[np.uint16]
T = TypeVar("T")
R = TypeVar("R")

# Weights per task: enough to hide the cost of a task, few enough to balance the threads.
_TASK_WEIGHTS = 1 << 21


@dataclass(frozen=True, slots=True)
class Survey:
    """What an encoding would look like: known before any record is made.

    window: uint8 [channels]; escape_counts: int64 [channels].
    """

    shape: tuple[int, ...]
    window: npt.NDArray[np.uint8]
    escape_counts: npt.NDArray[np.int64]

    @property
    def escapes(self) -> int:
        """Weights that would be escapes."""
        return int(self.escape_counts.sum())

    @property
    def nbytes(self) -> int:
        """Bytes the encoded tensor would take."""
        matrices = self.shape[0] if len(self.shape) == 3 else 1
        return layout.encoded_nbytes(*self.shape[-2:], self.escapes, matrices=matrices)

    @property
    def raw_nbytes(self) -> int:
        """Bytes the tensor takes as BF16."""
        return 2 * int(np.prod(self.shape, dtype=object))

    @property
    def shrinks(self) -> bool:
        """Whether W12 takes fewer bytes than BF16."""
        return self.nbytes < self.raw_nbytes


def survey(bits: Bits, *, threads: int = 1) -> Survey:
    """Choose windows and count escapes of `bits` uint16 [rows, cols] or [matrices, rows, cols].

    ValueError for another dtype or rank.
    """
    flat = _rows_of(bits)
    window = np.empty(flat.shape[0], dtype=np.uint8)
    counts = np.empty(flat.shape[0], dtype=np.int64)

    def work(rows: slice) -> None:
        _cpu.survey_rows(flat[rows], window[rows], counts[rows])

    _run(work, list(_row_ranges(*flat.shape)), threads)
    return Survey(bits.shape, window, counts)


def encode(bits: Bits, *, threads: int = 1, surveyed: Survey | None = None) -> EncodedW12:
    """Encode BF16 patterns uint16 [rows, cols] or [matrices, rows, cols].

    `surveyed` saves choosing the windows again; it must come from the same `bits`. ValueError
    for another dtype or rank, or for more escapes than a 4-byte pointer counts.
    """
    found = surveyed or survey(bits, threads=threads)
    stack = np.ascontiguousarray(matrix_stack(bits))
    matrices, rows, cols = stack.shape
    if found.escapes > layout.MAX_ESCAPES:
        raise ValueError(f"{found.escapes} escapes, the format holds {layout.MAX_ESCAPES}")
    ptr = np.zeros(matrices * rows + 1, dtype=np.int32)
    np.cumsum(found.escape_counts, out=ptr[1:])
    row_blocks, col_blocks = layout.grid(rows, cols)
    encoded = EncodedW12(
        shape=bits.shape,
        records=np.empty((matrices * row_blocks, col_blocks, layout.RECORD_BYTES), np.uint8),
        window=found.window,
        escape_ptr=ptr,
        escape_col=np.empty(found.escapes, np.int32),
        escape_bits=np.empty(found.escapes, np.uint16),
    )

    def work(part: _Part) -> None:
        channels = part.channels(rows)
        _cpu.pack_rows(
            stack[part.matrix, part.rows],
            encoded.window[channels],
            ptr[channels],
            encoded.records[part.blocks(row_blocks)],
            encoded.escape_col,
            encoded.escape_bits,
        )

    _run(work, list(_parts(matrices, rows, cols)), threads)
    return encoded


def decode(encoded: EncodedW12, *, threads: int = 1) -> Bits:
    """Return the BF16 patterns uint16 [shape]; MalformedW12 if the parts do not fit together."""
    encoded.check()
    stack = np.empty((encoded.matrices, encoded.rows, encoded.cols), dtype=np.uint16)

    def work(part: _Part) -> None:
        _unpack(encoded, part, stack[part.matrix, part.rows])

    _run(work, list(_parts(*stack.shape)), threads)
    return stack.reshape(encoded.shape)


def matches(bits: Bits, encoded: EncodedW12, *, threads: int = 1) -> bool:
    """Return whether `encoded` decodes to exactly the 16-bit patterns of `bits`.

    Decodes part by part, so no second copy of the tensor is made. MalformedW12 as in `decode`.
    """
    encoded.check()
    if bits.shape != encoded.shape:
        return False
    stack = matrix_stack(bits)

    def work(part: _Part) -> bool:
        expected = stack[part.matrix, part.rows]
        actual = np.empty(expected.shape, dtype=np.uint16)
        _unpack(encoded, part, actual)
        return np.array_equal(actual, expected)

    return all(_run(work, list(_parts(*stack.shape)), threads))


@dataclass(frozen=True, slots=True)
class _Part:
    """A range of rows of one matrix that begins and ends with a record."""

    matrix: int
    rows: slice

    def channels(self, rows_per_matrix: int) -> slice:
        base = self.matrix * rows_per_matrix
        return slice(base + self.rows.start, base + self.rows.stop)

    def blocks(self, blocks_per_matrix: int) -> slice:
        base = self.matrix * blocks_per_matrix
        return slice(
            base + self.rows.start // layout.RECORD_ROWS,
            base + -(-self.rows.stop // layout.RECORD_ROWS),
        )


def _unpack(encoded: EncodedW12, part: _Part, target: Bits) -> None:
    channels = part.channels(encoded.rows)
    _cpu.unpack_rows(
        encoded.records[part.blocks(layout.grid(encoded.rows, encoded.cols)[0])],
        encoded.window[channels],
        encoded.escape_ptr[channels.start : channels.stop + 1],
        encoded.escape_col,
        encoded.escape_bits,
        target,
    )


def _rows_of(bits: Bits) -> Bits:
    stack = np.ascontiguousarray(matrix_stack(bits))
    return stack.reshape(stack.shape[0] * stack.shape[1], stack.shape[2])


def _row_ranges(rows: int, cols: int) -> Iterator[slice]:
    blocks = max(1, _TASK_WEIGHTS // max(1, cols * layout.RECORD_ROWS))
    step = blocks * layout.RECORD_ROWS
    for start in range(0, rows, step):
        yield slice(start, min(rows, start + step))


def _parts(matrices: int, rows: int, cols: int) -> Iterator[_Part]:
    for matrix in range(matrices):
        for rows_range in _row_ranges(rows, cols):
            yield _Part(matrix, rows_range)


def _run(work: Callable[[T], R], items: list[T], threads: int) -> list[R]:
    if threads <= 1 or len(items) <= 1:
        return [work(item) for item in items]
    with ThreadPoolExecutor(min(threads, len(items))) as pool:
        return list(pool.map(work, items))
