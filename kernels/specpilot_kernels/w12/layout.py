"""W12 layout 1: the one home of the format's constants and of its bit order (paper §4.1).

A record holds 128 output channels x 64 inputs in 12,288 bytes. The first 8,192 bytes are the
8-bit view, one byte per weight (sign, exponent offset, top mantissa bits); the next 4,096 bytes
are the low mantissa plane, one nibble per weight. Reading only the first two thirds of a record
therefore gives every weight to four significant bits.

Inside a record the weights lie in the order in which one warpgroup's threads hold the A operand
of `wgmma m64k16` (per warp: of `mma m16n8k16`), so that a thread reads 16 neighbouring bytes of
view, covering two k16 steps, and 16 neighbouring bytes of low plane, covering four, without a
shuffle. Two halves of 64 channels follow each other inside each plane.

Layouts are numbered. A published number never changes its meaning; another bit order gets
another number. This module imports nothing, so that build scripts and launchers can use it.
"""

from __future__ import annotations

from typing import Final

LAYOUT: Final = 1
FORMAT_VERSION: Final = 2
"""Of the folder and its manifest; 1 had other hashes and was never published."""

RECORD_ROWS: Final = 128
RECORD_COLS: Final = 64
VIEW_BYTES: Final = 8192
LOW_BYTES: Final = 4096
RECORD_BYTES: Final = 12288

HALF_ROWS: Final = 64
"""Channels per warpgroup: the m of wgmma m64k16."""

WINDOW_SPAN: Final = 16
"""Binades in a window: exponent fields lo .. lo + 15."""

MAX_WINDOW_LO: Final = 239
"""The highest window ends at exponent field 254, so Inf and NaN (255) are always escapes."""

PLACEHOLDER: Final = 0
"""The 12 bits stored where a weight is an escape or padding: sign, offset and mantissa zero."""

WINDOW_BYTES_PER_ROW: Final = 1
ESCAPE_PTR_BYTES: Final = 4
ESCAPE_AT_BYTES: Final = 4
ESCAPE_BITS_BYTES: Final = 2
ESCAPE_BYTES: Final = ESCAPE_AT_BYTES + ESCAPE_BITS_BYTES
MAX_ESCAPES: Final = 2**31 - 1

ESCAPE_COL_BITS: Final = 24
"""Of an escape's stored place: the column below, the channel within the record row above.
Seven bits of channel leave the sign bit of an int32 clear."""

MAX_COLS: Final = 1 << ESCAPE_COL_BITS
"""The most inputs an escape's place can name."""

MAX_INPUTS: Final = 1 << 18
"""The most inputs of a tensor in a folder: 128 rows take 64 MiB, which readers hold at once."""

PART_SUFFIXES: Final = {
    "records": "_w12",
    "window": "_w12_window",
    "escape_ptr": "_w12_escape_ptr",
    "escape_at": "_w12_escape_at",
    "escape_bits": "_w12_escape_bits",
}
"""Part of an encoded tensor -> suffix of the checkpoint tensor that holds it, in hashing order."""

PART_DTYPES: Final = {
    "records": "U8",
    "window": "U8",
    "escape_ptr": "I32",
    "escape_at": "I32",
    "escape_bits": "U16",
}
"""Part of an encoded tensor -> its dtype as safetensors names it."""

FIXED_EXPONENT_BASE: Final = 0x70
"""A kernel may decode to exponent field 0x70 | offset and multiply channel n by
2 ** (lo_n - 0x70) after the sum: `fixed_base_bits` is that decode for one weight."""


def view_byte(bits: int, window_lo: int) -> int:
    """Return the view byte of an in-window BF16 pattern: s | e0 m6 m5 m4 | e3 e2 e1.

    Args:
        bits: 16-bit pattern, sign 15, exponent 14..7, mantissa 6..0.
        window_lo: lowest exponent field of the channel's window; `bits` must be in the window.
    """
    offset = ((bits >> 7) & 0xFF) - window_lo
    sign = bits >> 15
    return sign << 7 | (offset & 1) << 6 | ((bits >> 4) & 7) << 3 | offset >> 1


def low_nibble(bits: int) -> int:
    """Return mantissa bits m3..m0 of a BF16 pattern."""
    return bits & 0xF


def decode_bits(view: int, low: int, window_lo: int) -> int:
    """Return the BF16 pattern of one in-window weight from its view byte and low nibble."""
    offset = (view & 7) << 1 | (view >> 6) & 1
    return (view >> 7) << 15 | (window_lo + offset) << 7 | ((view >> 3) & 7) << 4 | low


def fixed_base_bits(view: int, low: int) -> int:
    """Return the pattern with exponent field 0x70 | offset, as the GEMM's inner loop makes it."""
    return ((view & 0x87) | 0x38) << 8 | (view << 1) & 0xF0 | low


def slot(row: int, col: int) -> tuple[int, int, int, int]:
    """Return (half, thread, k16 step, element) of weight [row, col] of a record.

    `thread` is the index in the warpgroup, 0..127. `element` 0..7 numbers the eight A-operand
    values of that thread in one k16 step: bit 0 = odd column, bit 1 = row + 8, bit 2 = column + 8.
    """
    half, row_in_half = divmod(row, HALF_ROWS)
    warp, row_in_warp = divmod(row_in_half, 16)
    step, col_in_step = divmod(col, 16)
    lane = (row_in_warp % 8) * 4 + (col_in_step % 8) // 2
    element = (col_in_step % 2) | (row_in_warp // 8) << 1 | (col_in_step // 8) << 2
    return half, warp * 32 + lane, step, element


def view_offset(row: int, col: int) -> int:
    """Return the byte offset in the record of the view byte of weight [row, col]."""
    half, thread, step, element = slot(row, col)
    return half * 4096 + (step // 2) * 2048 + thread * 16 + (step % 2) * 8 + element


def low_offset(row: int, col: int) -> tuple[int, int]:
    """Return (byte offset in the record, bit shift 0 or 4) of the low nibble of [row, col]."""
    half, thread, step, element = slot(row, col)
    return VIEW_BYTES + half * 2048 + thread * 16 + step * 4 + element % 4, element // 4 * 4


def escape_at(channel: int, col: int) -> int:
    """Return the stored place of an escape: column and channel within the record row, 0..127."""
    return channel << ESCAPE_COL_BITS | col


def grid(rows: int, cols: int) -> tuple[int, int]:
    """Return how many records cover a matrix: (row blocks, column blocks)."""
    return -(-rows // RECORD_ROWS), -(-cols // RECORD_COLS)


def encoded_nbytes(rows: int, cols: int, escapes: int, *, matrices: int = 1) -> int:
    """Return the stored bytes of an encoded stack of `matrices` matrices [rows, cols].

    Records, one window byte per channel, 4-byte escape pointers (record rows + 1) and six bytes
    per escape. File headers are not counted.
    """
    row_blocks, col_blocks = grid(rows, cols)
    record_rows = matrices * row_blocks
    return (
        record_rows * col_blocks * RECORD_BYTES
        + matrices * rows * WINDOW_BYTES_PER_ROW
        + (record_rows + 1) * ESCAPE_PTR_BYTES
        + escapes * ESCAPE_BYTES
    )


def encoded_tensor_nbytes(shape: tuple[int, ...], escapes: int) -> int:
    """Return `encoded_nbytes` of a tensor [rows, cols] or [matrices, rows, cols]."""
    rows, cols = shape[-2:]
    return encoded_nbytes(rows, cols, escapes, matrices=shape[0] if len(shape) == 3 else 1)
