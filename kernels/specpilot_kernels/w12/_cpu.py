"""The compiled loops of the W12 codec: numba, serial, without the GIL.

Each function works on whole row blocks, so callers cut a tensor into ranges of them and run the
ranges on threads. Every record goes through a row-major scratch tile: one pass over contiguous
weights that the compiler vectorises, then a permutation of 16-bit pairs. The bit order is the
one of `layout`; tests hold the two together.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
from numba import njit

from specpilot_kernels.w12 import layout

F = TypeVar("F", bound=Callable[..., Any])

_COLS = layout.RECORD_COLS
_WARP_ROWS = 16
_WARPS = layout.RECORD_ROWS // _WARP_ROWS

# Unsigned indices: signed ones cost a test for negative values at every access.
_U = np.uint64
_4, _16, _32 = np.uint64(4), np.uint64(16), np.uint64(32)
_EVEN, _ODD = np.uint64(0x0000FFFF0000FFFF), np.uint64(0xFFFF0000FFFF0000)
_LOW32, _HIGH32 = np.uint64(0x00000000FFFFFFFF), np.uint64(0xFFFFFFFF00000000)
_NIBBLES = np.uint64(0x0F0F0F0F0F0F0F0F)
_SPAN = layout.WINDOW_SPAN
_MAX_LO = layout.MAX_WINDOW_LO
# Weights that are searched for escapes at once.
_SEARCHED = 256


def _compiled(function: F) -> F:
    """Compile without the GIL; keep the machine code on disk where that is possible."""
    try:
        return njit(nogil=True, cache=True)(function)  # type: ignore[no-any-return]
    except RuntimeError:  # numba found no folder it may write its cache to
        return njit(nogil=True)(function)  # type: ignore[no-any-return]


@_compiled
def _best_window(values, histogram):  # type: ignore[no-untyped-def]
    """Return (weights covered, lowest field) of the best window of one row, by counting."""
    histogram[:] = 0
    cols = values.shape[0]
    # Four histograms: equal neighbours would otherwise wait for each other's store.
    for col in range(0, cols - 3, 4):
        histogram[0, (values[col] >> 7) & 0xFF] += 1
        histogram[1, (values[col + 1] >> 7) & 0xFF] += 1
        histogram[2, (values[col + 2] >> 7) & 0xFF] += 1
        histogram[3, (values[col + 3] >> 7) & 0xFF] += 1
    for col in range(cols - cols % 4, cols):
        histogram[0, (values[col] >> 7) & 0xFF] += 1
    covered = 0
    for field in range(_SPAN):
        for part in range(4):
            covered += histogram[part, field]
    best, best_low = covered, 0
    for low in range(1, _MAX_LO + 1):
        for part in range(4):
            covered += histogram[part, low + _SPAN - 1] - histogram[part, low - 1]
        if covered >= best:
            best, best_low = covered, low
    return best, best_low


@_compiled
def _highest_window(values, high):  # type: ignore[no-untyped-def]
    """Return (weights missed, lowest field) of the best window that holds field `high`, the
    greatest, of a row that no window holds whole; (-1, 0) where a lower one may hold more.

    A lower window misses every weight of field `high`. So it holds no more than this one does if
    those are as many as the weights that this one misses.
    """
    cut = np.uint16((high - (_SPAN - 1)) << 7)
    peak = np.uint16(high << 7)
    missed, peaks = np.uint32(0), np.uint32(0)
    least = np.uint16(0x7FFF)
    for col in range(values.shape[0]):
        magnitude = np.uint16(values[col] & np.uint16(0x7FFF))
        outside = magnitude < cut
        missed = np.uint32(missed + np.uint32(outside))
        peaks = np.uint32(peaks + np.uint32(magnitude >= peak))
        least = min(least, np.uint16(0x7FFF) if outside else magnitude)
    if missed > peaks:
        return np.int64(-1), np.int64(0)
    return np.int64(missed), np.int64(least) >> 7


@_compiled
def survey_rows(bits, window, counts):  # type: ignore[no-untyped-def]
    """Choose each row's window and count its escapes.

    bits uint16 [rows, cols]; writes window uint8 [rows] and counts int64 [rows].
    """
    rows, cols = bits.shape
    histogram = np.empty((4, 256), dtype=np.int32)
    for row in range(rows):
        values = bits[row]
        least, most = np.uint16(0x7FFF), np.uint16(0)
        for col in range(cols):
            magnitude = np.uint16(values[col] & np.uint16(0x7FFF))
            least = min(least, magnitude)
            most = max(most, magnitude)
        low, high = np.int64(least) >> 7, np.int64(most) >> 7
        if cols > 0 and high - low < _SPAN and high < 255:
            # Everything fits, and no window above `low` still holds the smallest weight.
            window[row] = min(low, _MAX_LO)
            counts[row] = 0
            continue
        # One scattered small weight is the usual case, and counting all fields is slow.
        missed = np.int64(-1)
        if cols > 0 and high < 255:
            missed, low = _highest_window(values, high)
        if missed < 0:
            best, low = _best_window(values, histogram)
            missed = cols - best
        window[row] = min(low, _MAX_LO)
        counts[row] = missed


@_compiled
def _split(source, lo, view, low):  # type: ignore[no-untyped-def]
    """Split weights uint16 [n] into view and low bytes [n]; return nonzero if any is an escape."""
    base = np.uint16(np.uint16(lo) << np.uint16(7))
    most = np.uint16(0)
    for col in range(source.shape[0]):
        x = source[col]
        # Sign dropped, window base taken off: in the window iff no bit above the 11 is left
        # (a weight below the base wraps round to a large value).
        d = np.uint16(np.uint16(x & np.uint16(0x7FFF)) - base)
        most = max(most, d)
        view[col] = np.uint8(
            np.uint16(np.uint16(x >> np.uint16(8)) & np.uint16(0x80))
            | np.uint16(np.uint16(d >> np.uint16(1)) & np.uint16(0x78))
            | np.uint16(d >> np.uint16(8)) & np.uint16(0x07)
        )
        low[col] = np.uint8(x & np.uint16(0x0F))
    return most >> 11


@_compiled
def _scatter(view, low, pitch, at, quads, words, warp):  # type: ignore[no-untyped-def]
    """Permute 16 rows x 64 columns into one warp's part of a record.

    view and low: uint64, eight neighbouring columns each, row-major from index `at` on, `pitch`
    per row. quads and words: the same record as uint64 [1536] and as uint32 [3072].

    Per row pair and k16 step, thread c of 0..3 gets the column pairs (row, c), (row + 8, c),
    (row, c + 4), (row + 8, c + 4): a 4 x 4 transposition of 16-bit pairs, done in registers.
    """
    for row in range(_U(8)):
        a = _U(at) + row * _U(pitch)
        b = a + _U(8) * _U(pitch)
        to = _U(warp + (warp & 4)) * _U(64) + row * _U(8)
        to_low = _U(2048 + warp * 128) + row * _U(16)
        for step in range(_U(4)):
            a0, a1, b0, b1 = view[a], view[a + _U(1)], view[b], view[b + _U(1)]
            even0 = (a0 & _EVEN) | ((b0 & _EVEN) << _16)
            even1 = (a1 & _EVEN) | ((b1 & _EVEN) << _16)
            odd0 = ((a0 >> _16) & _EVEN) | (b0 & _ODD)
            odd1 = ((a1 >> _16) & _EVEN) | (b1 & _ODD)
            quads[to] = (even0 & _LOW32) | (even1 << _32)
            quads[to + _U(2)] = (odd0 & _LOW32) | (odd1 << _32)
            quads[to + _U(4)] = (even0 >> _32) | (even1 & _HIGH32)
            quads[to + _U(6)] = (odd0 >> _32) | (odd1 & _HIGH32)
            a0 = low[a] | (low[a + _U(1)] << _4)
            b0 = low[b] | (low[b + _U(1)] << _4)
            even0 = (a0 & _EVEN) | ((b0 & _EVEN) << _16)
            odd0 = ((a0 >> _16) & _EVEN) | (b0 & _ODD)
            words[to_low] = np.uint32(even0)
            words[to_low + _U(4)] = np.uint32(odd0)
            words[to_low + _U(8)] = np.uint32(even0 >> _32)
            words[to_low + _U(12)] = np.uint32(odd0 >> _32)
            a += _U(2)
            b += _U(2)
            to += _U(255) if step == _U(1) else _U(1)
            to_low += _U(1)


@_compiled
def _gather(quads, words, warp, view, low, pitch, at):  # type: ignore[no-untyped-def]
    """Undo `_scatter`."""
    for row in range(_U(8)):
        a = _U(at) + row * _U(pitch)
        b = a + _U(8) * _U(pitch)
        to = _U(warp + (warp & 4)) * _U(64) + row * _U(8)
        to_low = _U(2048 + warp * 128) + row * _U(16)
        for step in range(_U(4)):
            t0, t1, t2, t3 = quads[to], quads[to + _U(2)], quads[to + _U(4)], quads[to + _U(6)]
            even0 = (t0 & _LOW32) | (t2 << _32)
            even1 = (t0 >> _32) | (t2 & _HIGH32)
            odd0 = (t1 & _LOW32) | (t3 << _32)
            odd1 = (t1 >> _32) | (t3 & _HIGH32)
            view[a] = (even0 & _EVEN) | ((odd0 & _EVEN) << _16)
            view[a + _U(1)] = (even1 & _EVEN) | ((odd1 & _EVEN) << _16)
            view[b] = ((even0 >> _16) & _EVEN) | (odd0 & _ODD)
            view[b + _U(1)] = ((even1 >> _16) & _EVEN) | (odd1 & _ODD)
            even0 = np.uint64(words[to_low]) | (np.uint64(words[to_low + _U(8)]) << _32)
            odd0 = np.uint64(words[to_low + _U(4)]) | (np.uint64(words[to_low + _U(12)]) << _32)
            a0 = (even0 & _EVEN) | ((odd0 & _EVEN) << _16)
            b0 = ((even0 >> _16) & _EVEN) | (odd0 & _ODD)
            low[a] = a0 & _NIBBLES
            low[a + _U(1)] = (a0 >> _4) & _NIBBLES
            low[b] = b0 & _NIBBLES
            low[b + _U(1)] = (b0 >> _4) & _NIBBLES
            a += _U(2)
            b += _U(2)
            to += _U(255) if step == _U(1) else _U(1)
            to_low += _U(1)


@_compiled
def _join(view, low, lo, target):  # type: ignore[no-untyped-def]
    """Compose weights uint16 [n] from view and low bytes [n] in the window that begins at lo."""
    base = np.uint16(np.uint16(lo) << np.uint16(7))
    for col in range(target.shape[0]):
        v = np.uint16(view[col])
        sign = np.uint16(np.uint16(v & np.uint16(0x80)) << np.uint16(8))
        d = np.uint16(
            np.uint16(np.uint16(v & np.uint16(0x07)) << np.uint16(8))
            | np.uint16(np.uint16(v & np.uint16(0x78)) << np.uint16(1))
            | np.uint16(low[col])
        )
        target[col] = np.uint16(sign | np.uint16(base + d))


@_compiled
def pack_rows(bits, window, ptr, records, escape_col, escape_bits):  # type: ignore[no-untyped-def]
    """Encode whole row blocks of one matrix.

    bits uint16 [rows, cols]; window uint8 [rows]; ptr int32 [rows] = where each row's escapes
    begin; writes records uint8 [row blocks, column blocks, 12288] and the rows' escapes.
    """
    rows, blocks = bits.shape[0], records.shape[1]
    view = np.zeros((_WARP_ROWS, blocks * _COLS), dtype=np.uint8)
    low = np.zeros((_WARP_ROWS, blocks * _COLS), dtype=np.uint8)
    view64, low64 = view.reshape(-1).view(np.uint64), low.reshape(-1).view(np.uint64)
    quads, words = records.view(np.uint64), records.view(np.uint32)
    for group in range(records.shape[0] * _WARPS):
        for r in range(_WARP_ROWS):
            row = group * _WARP_ROWS + r
            if row >= rows:
                view[r, :] = 0
                low[r, :] = 0
            elif _split(bits[row], window[row], view[r], low[r]):
                _take_escapes(
                    bits[row], window[row], ptr[row], view[r], low[r], escape_col, escape_bits
                )
        for block in range(blocks):
            _scatter(
                view64, low64, blocks * 8, block * 8, quads[group // _WARPS, block],
                words[group // _WARPS, block], group % _WARPS,
            )  # fmt: skip


@_compiled
def _take_escapes(source, lo, cursor, view, low, escape_col, escape_bits):  # type: ignore[no-untyped-def]
    """Move one row's escapes to the list, from index `cursor` on, and leave placeholders."""
    base = np.uint16(np.uint16(lo) << np.uint16(7))
    cols = source.shape[0]
    for first in range(0, cols, _SEARCHED):
        piece = source[first : min(first + _SEARCHED, cols)]
        # Most pieces hold none, which takes no branch per weight to see.
        most = np.uint16(0)
        for col in range(piece.shape[0]):
            most = max(most, np.uint16(np.uint16(piece[col] & np.uint16(0x7FFF)) - base))
        if not most >> 11:
            continue
        for col in range(first, first + piece.shape[0]):
            offset = (np.int64(source[col] >> 7) & 0xFF) - np.int64(lo)
            if offset < 0 or offset >= _SPAN:
                escape_col[cursor] = col
                escape_bits[cursor] = source[col]
                view[col] = 0
                low[col] = 0
                cursor += 1


@_compiled
def unpack_rows(records, window, ptr, escape_col, escape_bits, bits):  # type: ignore[no-untyped-def]
    """Decode whole row blocks of one matrix; ptr int32 [rows + 1]; writes bits [rows, cols]."""
    rows, blocks = bits.shape[0], records.shape[1]
    view = np.empty((_WARP_ROWS, blocks * _COLS), dtype=np.uint8)
    low = np.empty((_WARP_ROWS, blocks * _COLS), dtype=np.uint8)
    view64, low64 = view.reshape(-1).view(np.uint64), low.reshape(-1).view(np.uint64)
    quads, words = records.view(np.uint64), records.view(np.uint32)
    for group in range(-(-rows // _WARP_ROWS)):
        for block in range(blocks):
            _gather(
                quads[group // _WARPS, block], words[group // _WARPS, block], group % _WARPS,
                view64, low64, blocks * 8, block * 8,
            )  # fmt: skip
        for r in range(min(_WARP_ROWS, rows - group * _WARP_ROWS)):
            row = group * _WARP_ROWS + r
            _join(view[r], low[r], window[row], bits[row])
            for index in range(ptr[row], ptr[row + 1]):
                bits[row, escape_col[index]] = escape_bits[index]


@_compiled
def rows_match(records, window, ptr, escape_col, escape_bits, bits):  # type: ignore[no-untyped-def]
    """Decode as `unpack_rows` does, a row at a time, and return whether it equals `bits`."""
    rows, blocks = bits.shape[0], records.shape[1]
    view = np.empty((_WARP_ROWS, blocks * _COLS), dtype=np.uint8)
    low = np.empty((_WARP_ROWS, blocks * _COLS), dtype=np.uint8)
    view64, low64 = view.reshape(-1).view(np.uint64), low.reshape(-1).view(np.uint64)
    quads, words = records.view(np.uint64), records.view(np.uint32)
    decoded = np.empty(bits.shape[1], dtype=np.uint16)
    for group in range(-(-rows // _WARP_ROWS)):
        for block in range(blocks):
            _gather(
                quads[group // _WARPS, block], words[group // _WARPS, block], group % _WARPS,
                view64, low64, blocks * 8, block * 8,
            )  # fmt: skip
        for r in range(min(_WARP_ROWS, rows - group * _WARP_ROWS)):
            row = group * _WARP_ROWS + r
            _join(view[r], low[r], window[row], decoded)
            for index in range(ptr[row], ptr[row + 1]):
                decoded[escape_col[index]] = escape_bits[index]
            if _differ(decoded, bits[row]):
                return False
    return True


@_compiled
def _differ(one, other):  # type: ignore[no-untyped-def]
    """Return the bits in which two uint16 [n] differ anywhere; without a branch per weight."""
    found = np.uint16(0)
    for col in range(one.shape[0]):
        found |= np.uint16(one[col] ^ other[col])
    return found
