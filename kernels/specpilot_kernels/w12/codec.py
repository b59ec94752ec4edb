"""The fast W12 codec on the CPU: the bytes of `reference`, compiled and on several threads.

Threads take stripes, never parts of a record, so the result does not depend on their number.
`CpuCodec` works on one stripe at a time, for callers that never hold a whole tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from specpilot_kernels.w12 import _cpu, layout
from specpilot_kernels.w12.encoded import EncodedW12, matrix_stack
from specpilot_kernels.w12.stripes import STRIPE_WEIGHTS, Stripe, stripes

Bits = npt.NDArray[np.uint16]
T = TypeVar("T")
R = TypeVar("R")

# Weights per task: enough to hide the cost of a task, few enough to balance the threads.
_TASK_WEIGHTS = STRIPE_WEIGHTS


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
        return layout.encoded_tensor_nbytes(self.shape, self.escapes)


def survey(bits: Bits, *, threads: int = 1) -> Survey:
    """Choose windows and count escapes of `bits` uint16 [rows, cols] or [matrices, rows, cols].

    ValueError for another dtype or rank.
    """
    flat = _channels_of(bits)
    window = np.empty(flat.shape[0], dtype=np.uint8)
    counts = np.empty(flat.shape[0], dtype=np.int64)

    def work(stripe: Stripe) -> None:
        rows = _rows(stripe)
        _cpu.survey_rows(flat[rows], window[rows], counts[rows])

    _run(work, _tasks(bits.shape), threads)
    return Survey(bits.shape, window, counts)


def encode(bits: Bits, *, threads: int = 1, surveyed: Survey | None = None) -> EncodedW12:
    """Encode BF16 patterns uint16 [rows, cols] or [matrices, rows, cols].

    `surveyed` saves choosing the windows again; it must come from the same `bits`. ValueError
    for another dtype or rank, or for more escapes than a 4-byte pointer counts.
    """
    found = surveyed or survey(bits, threads=threads)
    flat = _channels_of(bits)
    matrices = bits.shape[0] if bits.ndim == 3 else 1
    row_blocks, col_blocks = layout.grid(*bits.shape[-2:])
    records = np.empty((matrices * row_blocks, col_blocks, layout.RECORD_BYTES), np.uint8)
    encoded = _container(found, records)

    def work(stripe: Stripe) -> None:
        _pack(flat, encoded, stripe)

    _run(work, _tasks(bits.shape), threads)
    return encoded


def decode(encoded: EncodedW12, *, threads: int = 1) -> Bits:
    """Return the BF16 patterns uint16 [shape]; MalformedW12 if the parts do not fit together."""
    encoded.check()
    flat = np.empty((encoded.matrices * encoded.rows, encoded.cols), dtype=np.uint16)

    def work(stripe: Stripe) -> None:
        _cpu.unpack_rows(*_parts(encoded, stripe), flat[_rows(stripe)])

    _run(work, _tasks(encoded.shape), threads)
    return flat.reshape(encoded.shape)


def matches(bits: Bits, encoded: EncodedW12, *, threads: int = 1) -> bool:
    """Return whether `encoded` decodes to exactly the 16-bit patterns of `bits`.

    Decodes row by row, so no second copy of the tensor is made. MalformedW12 as in `decode`.
    """
    encoded.check()
    if bits.shape != encoded.shape:
        return False
    flat = _channels_of(bits)

    def work(stripe: Stripe) -> bool:
        return bool(_cpu.rows_match(*_parts(encoded, stripe), flat[_rows(stripe)]))

    return all(_run(work, _tasks(encoded.shape), threads))


class CpuCodec:
    """The `StripeCodec` of this module: one thread per call, no state."""

    def survey_stripe(self, bits: Bits) -> Survey:
        """See `StripeCodec`."""
        return survey(bits)

    def encode_stripe(
        self, bits: Bits, records: npt.NDArray[np.uint8], *, max_escapes: int
    ) -> EncodedW12 | None:
        """See `StripeCodec`."""
        found = survey(bits)
        if found.escapes > max_escapes:
            return None
        encoded = _container(found, records)
        _pack(bits, encoded, Stripe(0, bits.shape[0], 0, records.shape[0]))
        return encoded

    def matches_stripe(self, bits: Bits, encoded: EncodedW12) -> bool:
        """See `StripeCodec`."""
        return matches(bits, encoded)

    def decode_stripe(self, encoded: EncodedW12, bits: Bits) -> None:
        """See `StripeCodec`."""
        encoded.check()
        everything = Stripe(0, encoded.rows, 0, encoded.records.shape[0])
        _cpu.unpack_rows(*_parts(encoded, everything), bits)


def _container(found: Survey, records: npt.NDArray[np.uint8]) -> EncodedW12:
    """Return the encoding of what was surveyed, with everything but the windows still to fill."""
    if found.escapes > layout.MAX_ESCAPES:
        raise ValueError(f"{found.escapes} escapes, the format holds {layout.MAX_ESCAPES}")
    ptr = np.zeros(found.window.size + 1, dtype=np.int32)
    np.cumsum(found.escape_counts, out=ptr[1:])
    return EncodedW12(
        shape=found.shape,
        records=records,
        window=found.window,
        escape_ptr=ptr,
        escape_col=np.empty(found.escapes, np.int32),
        escape_bits=np.empty(found.escapes, np.uint16),
    )


def _pack(flat: Bits, encoded: EncodedW12, stripe: Stripe) -> None:
    """Encode one stripe of `flat` [channels, cols]."""
    rows = _rows(stripe)
    _cpu.pack_rows(
        flat[rows],
        encoded.window[rows],
        encoded.escape_ptr[rows],
        encoded.records[stripe.block : stripe.block + stripe.blocks],
        encoded.escape_col,
        encoded.escape_bits,
    )


def _parts(encoded: EncodedW12, stripe: Stripe) -> tuple[npt.NDArray[Any], ...]:
    """Return what decoding one stripe needs, in the order in which `_cpu` takes it."""
    rows = _rows(stripe)
    return (
        encoded.records[stripe.block : stripe.block + stripe.blocks],
        encoded.window[rows],
        encoded.escape_ptr[rows.start : rows.stop + 1],
        encoded.escape_col,
        encoded.escape_bits,
    )


def _channels_of(bits: Bits) -> Bits:
    """Return `bits` as [channels, cols], copied only where it is not contiguous."""
    stack = np.ascontiguousarray(matrix_stack(bits))
    return stack.reshape(stack.shape[0] * stack.shape[1], stack.shape[2])


def _rows(stripe: Stripe) -> slice:
    return slice(stripe.channel, stripe.channel + stripe.rows)


def _tasks(shape: tuple[int, ...]) -> list[Stripe]:
    return list(stripes(shape, weights=_TASK_WEIGHTS))


def _run(work: Callable[[T], R], items: list[T], threads: int) -> list[R]:
    if threads <= 1 or len(items) <= 1:
        return [work(item) for item in items]
    with ThreadPoolExecutor(min(threads, len(items))) as pool:
        return list(pool.map(work, items))
