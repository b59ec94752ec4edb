"""The parts of an encoded tensor as a folder stores them, and the way back into memory.

In memory each channel has its own range of the escape list, which is what kernels index. Stored,
only each record row has one, and an escape says itself which of the 128 channels it belongs to:
a fourth of a bit per channel instead of 32. Records, windows and patterns are the same in both,
and so is the order of the escapes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from specpilot_kernels.w12 import layout
from specpilot_kernels.w12.encoded import EncodedW12, MalformedW12

Ints = npt.NDArray[np.int32]

Parts = Mapping[str, npt.NDArray[Any]]
"""Name in `layout.PART_SUFFIXES` -> array, in that order:

records: uint8 [record rows, column blocks, 12288].
window: uint8 [channels].
escape_ptr: int32 [record rows + 1]; record row b owns escapes ptr[b] .. ptr[b + 1].
escape_at: int32 [escapes], column | channel in the record row << 24, rising in a record row.
escape_bits: uint16 [escapes].
"""


def part_shapes(shape: tuple[int, ...], escapes: int) -> dict[str, tuple[int, ...]]:
    """Return the shape of every part of a tensor [rows, cols] or [matrices, rows, cols]."""
    matrices = shape[0] if len(shape) == 3 else 1
    row_blocks, col_blocks = layout.grid(*shape[-2:])
    return {
        "records": (matrices * row_blocks, col_blocks, layout.RECORD_BYTES),
        "window": (matrices * shape[-2],),
        "escape_ptr": (matrices * row_blocks + 1,),
        "escape_at": (escapes,),
        "escape_bits": (escapes,),
    }


def encoded_specs(
    name: str, shape: tuple[int, ...], escapes: int
) -> list[tuple[str, str, tuple[int, ...]]]:
    """Return (name, safetensors dtype, shape) of the five entries of tensor `name` [shape], in
    hashing order."""
    shapes = part_shapes(shape, escapes)
    return [
        (name + suffix, layout.PART_DTYPES[part], shapes[part])
        for part, suffix in layout.PART_SUFFIXES.items()
    ]


def stored_parts(encoded: EncodedW12) -> Parts:
    """Return the stored parts of `encoded`, which must be one that an encoder made.

    Arrays that do not change are not copied. ValueError: more inputs than the format holds.
    """
    ptr, at = stored_lists(encoded.shape, encoded.escape_ptr, encoded.escape_col)
    return {
        "records": encoded.records,
        "window": encoded.window,
        "escape_ptr": ptr,
        "escape_at": at,
        "escape_bits": encoded.escape_bits,
    }


def stored_lists(shape: tuple[int, ...], escape_ptr: Ints, escape_col: Ints) -> tuple[Ints, Ints]:
    """Return (escape_ptr, escape_at) as stored, of a tensor [shape]; see `stored_parts`."""
    if shape[-1] > layout.MAX_COLS:
        raise ValueError(f"{shape[-1]} inputs, the format holds {layout.MAX_COLS}")
    first = _first_channels(shape)
    in_row = np.arange(first[-1]) - np.repeat(first[:-1], np.diff(first))
    place = (in_row << layout.ESCAPE_COL_BITS).astype(np.int32)
    return escape_ptr[first], np.repeat(place, np.diff(escape_ptr)) | escape_col


def from_stored(shape: tuple[int, ...], parts: Parts) -> EncodedW12:
    """Return the tensor [shape] that `parts` hold; arrays that do not change are not copied.

    MalformedW12: escapes that do not belong to exactly one weight each, in order. Records and
    windows are passed on as they are: `EncodedW12.check` looks at them.
    """
    by_channel, col = lists_in_memory(shape, parts["escape_ptr"], parts["escape_at"])
    return EncodedW12(
        shape=shape,
        records=parts["records"],
        window=parts["window"],
        escape_ptr=by_channel,
        escape_col=col,
        escape_bits=parts["escape_bits"],
    )


def lists_in_memory(shape: tuple[int, ...], ptr: Ints, at: Ints) -> tuple[Ints, Ints]:
    """Return (escape_ptr, escape_col) of a tensor [shape]; undoes `stored_lists`.

    MalformedW12 as in `from_stored`.
    """
    if len(shape) not in (2, 3) or min(shape) < 0 or shape[-1] > layout.MAX_COLS:
        raise MalformedW12(f"W12 holds no tensor of shape {list(shape)}")
    _check_pointers(ptr, at, part_shapes(shape, at.size))
    first = _first_channels(shape)
    row = np.repeat(np.arange(ptr.size - 1), np.diff(ptr))
    in_row, col = at >> layout.ESCAPE_COL_BITS, at & (layout.MAX_COLS - 1)
    _check_places(row, at, np.diff(first)[row], shape[-1])
    counts = np.bincount(first[row] + in_row, minlength=first[-1])
    by_channel = np.zeros(first[-1] + 1, np.int32)
    np.cumsum(counts, out=by_channel[1:])
    return by_channel, col


def _first_channels(shape: tuple[int, ...]) -> npt.NDArray[np.int64]:
    """Return the first channel of every record row, and the number of channels: [rows + 1]."""
    matrices = shape[0] if len(shape) == 3 else 1
    starts = np.arange(0, shape[-2], layout.RECORD_ROWS)
    every = (np.arange(matrices)[:, np.newaxis] * shape[-2] + starts).ravel()
    return np.append(every, matrices * shape[-2])


def _check_pointers(
    ptr: npt.NDArray[Any], at: npt.NDArray[Any], shapes: dict[str, tuple[int, ...]]
) -> None:
    for part, array in (("escape_ptr", ptr), ("escape_at", at)):
        if array.dtype != np.int32 or array.shape != shapes[part]:
            raise MalformedW12(
                f"{part} is {array.dtype} {list(array.shape)}, expected int32 {list(shapes[part])}"
            )
    _refuse(ptr[1:] < ptr[:-1], lambda row: f"escape_ptr falls after record row {row}")
    if (ptr[0], ptr[-1]) != (0, at.size):
        raise MalformedW12(
            f"escape_ptr runs from {ptr[0]} to {ptr[-1]}, the escape list from 0 to {at.size}"
        )


def _check_places(
    row: npt.NDArray[np.int64],
    at: npt.NDArray[np.int32],
    channels: npt.NDArray[np.int64],
    cols: int,
) -> None:
    """channels: of the record row that owns the escape, [escapes]."""
    in_row, col = at >> layout.ESCAPE_COL_BITS, at & (layout.MAX_COLS - 1)
    _refuse(
        (in_row < 0) | (in_row >= channels),
        lambda i: (
            f"escape {i} is in channel {in_row[i]} of record row {row[i]}, which has {channels[i]}"
        ),
    )
    _refuse(col >= cols, lambda i: f"escape {i} is in column {col[i]} of {cols}")
    _refuse(
        (at[1:] <= at[:-1]) & (row[1:] == row[:-1]),
        lambda i: f"escapes {i} and {i + 1} of record row {row[i]} do not rise",
    )


def _refuse(bad: npt.NDArray[np.bool_], what: Callable[[int], str]) -> None:
    """Raise MalformedW12 for the first place where `bad`."""
    if bad.any():
        raise MalformedW12(what(int(bad.argmax())))
