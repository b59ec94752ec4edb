"""What the W12 GEMM kernels read besides the records, and which weights they multiply by.

Readable numpy, the judge of the kernels and of whatever prepares weights for them faster.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from specpilot_kernels.w12 import layout, reference
from specpilot_kernels.w12.encoded import EncodedW12


@dataclass(frozen=True, slots=True)
class GemmParts:
    """The form of one matrix [out, in] that the kernels read, beside `EncodedW12.records`.

    With tiles = ceil(out / 128), blocks = ceil(in / 64), units = tiles x blocks:

    scale: float32 [tiles * 128], 2^(lo - 112); 0 where lo is 0 and beyond the matrix.
    escape_ptr: int32 [units + 1]; unit u = tile * blocks + block owns escapes ptr[u] .. ptr[u + 1].
    escapes: uint64 [escapes] by unit, channel, column. From bit 0 up: column in the unit (6 bits),
        channel in the tile (7), lo (8), unit (27), pattern (16).
    """

    scale: npt.NDArray[np.float32]
    escape_ptr: npt.NDArray[np.int32]
    escapes: npt.NDArray[np.uint64]


def gemm_parts(encoded: EncodedW12) -> GemmParts:
    """Derive what the kernels read from one encoded matrix; ValueError for a stack.

    Kernels decode to exponent field 0x70 | offset and scale the sum of a channel by 2^(lo - 112).
    Where lo is 0 the format's offset 0 means zero or denormal, which that cannot express: such a
    channel gets the scale 0, and every weight of it but zeros becomes an escape.
    """
    if encoded.matrices != 1:
        raise ValueError(f"the GEMM takes one matrix, got shape {list(encoded.shape)}")
    tiles, blocks = layout.grid(encoded.rows, encoded.cols)
    window = encoded.window.astype(np.int64)
    scale = np.zeros(tiles * layout.RECORD_ROWS, np.float32)
    scale[: encoded.rows] = np.where(
        window > 0, np.ldexp(1.0, window - layout.FIXED_EXPONENT_BASE), 0
    )
    bits = reference.decode(encoded).reshape(encoded.rows, encoded.cols)
    listed = reference.escape_mask(bits, encoded.window)
    listed |= (window == 0)[:, np.newaxis]
    # Without a placeholder under it a zero adds nothing.
    listed &= (window > 0)[:, np.newaxis] | (bits & 0x7FFF != 0)
    channel, col = np.nonzero(listed)
    unit = channel // layout.RECORD_ROWS * blocks + col // layout.RECORD_COLS
    order = np.lexsort((col, channel, unit))
    channel, col, unit = channel[order], col[order], unit[order]
    fields = (
        (col % layout.RECORD_COLS, 0), (channel % layout.RECORD_ROWS, 6), (window[channel], 13),
        (unit, 21), (bits[channel, col], 48),
    )  # fmt: skip
    escapes = np.zeros(channel.size, np.uint64)
    for values, shift in fields:
        escapes |= values.astype(np.uint64) << np.uint64(shift)
    escape_ptr = np.searchsorted(unit, np.arange(tiles * blocks + 1)).astype(np.int32)
    return GemmParts(scale, escape_ptr, escapes)


def weights(encoded: EncodedW12, *, view_only: bool = False) -> npt.NDArray[np.float64]:
    """Return the weights [shape] as numbers.

    view_only: as read from the 8-bit view: weights in their window have mantissa bits m3..m0 at
    the midpoint 8; escapes, and channels with lo = 0, are exact.
    """
    bits = reference.decode(encoded)
    if view_only:
        rows = bits.reshape(-1, encoded.cols)
        approximate = ~reference.escape_mask(rows, encoded.window)
        approximate &= (encoded.window > 0)[:, np.newaxis]
        bits = np.where(approximate, rows & 0xFFF0 | 8, rows).reshape(bits.shape)
    return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
