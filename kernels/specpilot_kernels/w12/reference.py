"""The readable definition of W12 in plain numpy; slow, and the judge of the fast codec.

Every rule of the format is one short function here: which window a channel takes, what becomes
an escape, and where each bit goes (through the tables of `layout`).
"""

from __future__ import annotations

from functools import cache

import numpy as np
import numpy.typing as npt

from specpilot_kernels.w12 import layout
from specpilot_kernels.w12.encoded import EncodedW12, matrix_stack

Bits = npt.NDArray[np.uint16]


def choose_windows(bits: Bits) -> npt.NDArray[np.uint8]:
    """Return the window of each row of `bits` uint16 [rows, cols] as its lowest field [rows].

    The window lo .. lo + 15 that covers most weights; among equals the highest. lo runs from 0
    (so that a row of zeros and denormals needs no escape) to 239 (so that Inf and NaN always
    do).
    """
    windows = np.empty(bits.shape[0], dtype=np.uint8)
    for row, exponents in enumerate((bits >> 7) & 0xFF):
        histogram = np.bincount(exponents, minlength=256)
        below = np.concatenate([[0], np.cumsum(histogram)])
        lows = np.arange(layout.MAX_WINDOW_LO + 1)
        covered = below[lows + layout.WINDOW_SPAN] - below[lows]
        windows[row] = np.flatnonzero(covered == covered.max())[-1]
    return windows


def escape_mask(bits: Bits, window: npt.NDArray[np.uint8]) -> npt.NDArray[np.bool_]:
    """Return where `bits` [rows, cols] lie outside their row's window [rows]."""
    offset = ((bits >> 7) & 0xFF).astype(np.int16) - window.astype(np.int16)[:, np.newaxis]
    return (offset < 0) | (offset >= layout.WINDOW_SPAN)


def encode(bits: Bits) -> EncodedW12:
    """Encode BF16 patterns uint16 [rows, cols] or [matrices, rows, cols].

    ValueError for another dtype or rank. Deterministic: equal input gives equal bytes.
    """
    windows, counts, cols, values, records = [], [], [], [], []
    for matrix in matrix_stack(bits):
        window = choose_windows(matrix)
        escapes = escape_mask(matrix, window)
        row, col = np.nonzero(escapes)
        windows.append(window)
        counts.append(escapes.sum(axis=1))
        cols.append(col)
        values.append(matrix[row, col])
        # The pattern whose 12 bits are all zero in this row's window.
        blank = window.astype(np.uint16) << 7
        records.append(_pack(np.where(escapes, blank[:, np.newaxis], matrix), window))
    ptr = np.concatenate([[0], *(np.asarray(count) for count in counts)]).cumsum()
    row_blocks, col_blocks = layout.grid(*bits.shape[-2:])
    grid = (len(records) * row_blocks, col_blocks, layout.RECORD_BYTES)
    return EncodedW12(
        shape=bits.shape,
        records=_join(records, np.uint8).reshape(grid),
        window=_join(windows, np.uint8),
        escape_ptr=ptr.astype(np.int32),
        escape_col=_join(cols, np.int32),
        escape_bits=_join(values, np.uint16),
    )


def decode(encoded: EncodedW12) -> Bits:
    """Return the BF16 patterns uint16 [shape]; MalformedW12 if the parts do not fit together."""
    encoded.check()
    rows, cols = encoded.rows, encoded.cols
    row_blocks, col_blocks = layout.grid(rows, cols)
    at_view, at_low, low_shift = bit_order()
    flat = encoded.records.astype(np.uint16)
    view = flat[..., at_view]
    low = (flat[..., at_low] >> low_shift) & 0xF
    tiles = (encoded.matrices, row_blocks, col_blocks, layout.RECORD_ROWS, layout.RECORD_COLS)
    view, low = (_untile(part.reshape(tiles), rows, cols) for part in (view, low))
    lo = encoded.window.astype(np.uint16).reshape(encoded.matrices, rows, 1)
    offset = (view & 7) << 1 | (view >> 6) & 1
    bits = (view >> 7) << 15 | (lo + offset) << 7 | ((view >> 3) & 7) << 4 | low
    by_channel = bits.reshape(encoded.matrices * rows, cols)
    channel = np.repeat(np.arange(encoded.matrices * rows), np.diff(encoded.escape_ptr))
    by_channel[channel, encoded.escape_col] = encoded.escape_bits
    return by_channel.reshape(encoded.shape)


def stored_escapes(encoded: EncodedW12) -> tuple[list[int], list[int]]:
    """Return what a folder stores as escape_ptr and escape_at, see `stored`."""
    ptr, at = [0], []
    for matrix in range(encoded.matrices):
        for start in range(0, encoded.rows, layout.RECORD_ROWS):
            for row in range(start, min(start + layout.RECORD_ROWS, encoded.rows)):
                channel = matrix * encoded.rows + row
                for escape in range(encoded.escape_ptr[channel], encoded.escape_ptr[channel + 1]):
                    at.append(layout.escape_at(row - start, int(encoded.escape_col[escape])))
            ptr.append(len(at))
    return ptr, at


def _pack(bits: Bits, window: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Return records [row blocks, column blocks, 12288] of in-window `bits` [rows, cols]."""
    offset = ((bits >> 7) & 0xFF) - window.astype(np.uint16)[:, np.newaxis]
    view = (bits >> 15) << 7 | (offset & 1) << 6 | ((bits >> 4) & 7) << 3 | offset >> 1
    low = bits & 0xF
    at_view, at_low, low_shift = bit_order()
    view_tiles, low_tiles = _tile(view), _tile(low)
    records = np.zeros((*view_tiles.shape[:2], layout.RECORD_BYTES), dtype=np.uint8)
    records[..., at_view] = view_tiles
    for shift in (0, 4):
        chosen = low_shift == shift
        records[..., at_low[chosen]] |= (low_tiles[..., chosen] << shift).astype(np.uint8)
    return records


@cache
def bit_order() -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp], npt.NDArray[np.uint16]]:
    """Return view offset, low offset and low shift, each [8192] in row-major weight order."""
    cells = [(r, c) for r in range(layout.RECORD_ROWS) for c in range(layout.RECORD_COLS)]
    low = [layout.low_offset(r, c) for r, c in cells]
    return (
        np.array([layout.view_offset(r, c) for r, c in cells], dtype=np.intp),
        np.array([offset for offset, _ in low], dtype=np.intp),
        np.array([shift for _, shift in low], dtype=np.uint16),
    )


def _tile(values: Bits) -> Bits:
    """Pad [rows, cols] with zeros and cut it: [row blocks, column blocks, 8192]."""
    row_blocks, col_blocks = layout.grid(*values.shape)
    padded = np.zeros(
        (row_blocks * layout.RECORD_ROWS, col_blocks * layout.RECORD_COLS), dtype=np.uint16
    )
    padded[: values.shape[0], : values.shape[1]] = values
    cut = padded.reshape(row_blocks, layout.RECORD_ROWS, col_blocks, layout.RECORD_COLS)
    return cut.swapaxes(1, 2).reshape(row_blocks, col_blocks, layout.VIEW_BYTES)


def _untile(tiles: Bits, rows: int, cols: int) -> Bits:
    """Undo `_tile` for a stack of record grids; returns [matrices, rows, cols]."""
    matrices, row_blocks, col_blocks, height, width = tiles.shape
    whole = tiles.swapaxes(2, 3).reshape(matrices, row_blocks * height, col_blocks * width)
    return np.ascontiguousarray(whole[:, :rows, :cols])


def _join(parts: list[npt.NDArray[np.generic]], dtype: type) -> npt.NDArray[np.generic]:
    """Concatenate flattened parts; an empty list gives an empty array."""
    return np.concatenate([np.empty(0, dtype), *(part.astype(dtype).ravel() for part in parts)])
