"""Escapes as a folder stores them: there and back, and every way in which they can be wrong."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from specpilot_kernels.w12 import codec, layout, reference
from specpilot_kernels.w12.encoded import EncodedW12, MalformedW12
from specpilot_kernels.w12.stored import Parts, from_stored, part_shapes, stored_parts
from specpilot_kernels.w12.stripes import stripes

FIELDS = ("records", "window", "escape_ptr", "escape_col", "escape_bits")
SHAPES = st.one_of(
    st.tuples(st.integers(1, 400), st.integers(1, 90)),
    st.tuples(st.integers(1, 3), st.integers(1, 300), st.integers(1, 70)),
)
# Escapes of 300 channels: record rows of 128, 128 and 44 channels.
SHAPE = (300, 70)
ESCAPES = ((0, 3), (0, 69), (127, 0), (128, 5), (255, 69), (256, 0), (299, 69))


def patterns(seed: int, shape: tuple[int, ...], share: float) -> npt.NDArray[np.uint16]:
    """Ordinary weights with zeros, infinities and NaN payloads among them."""
    rng = np.random.default_rng(seed)
    bits = (rng.standard_normal(shape, dtype=np.float32).view(np.uint32) >> 16).astype(np.uint16)
    strange = rng.random(shape) < share
    bits[strange] = rng.choice(np.array([0, 0x8000, 0x7F80, 0xFFC1], np.uint16), strange.sum())
    return bits


def encoded() -> EncodedW12:
    """A matrix [300, 70] with exactly ESCAPES: zeros among ones."""
    bits = np.full(SHAPE, 0x3F80, np.uint16)
    for row, col in ESCAPES:
        bits[row, col] = 0
    return codec.encode(bits)


@settings(max_examples=150, deadline=None)
@given(shape=SHAPES, seed=st.integers(0, 1 << 30), share=st.sampled_from([0, 0.001, 0.05, 1]))
def test_there_and_back(shape: tuple[int, ...], seed: int, share: float) -> None:
    bits = patterns(seed, shape, share)
    whole = codec.encode(bits)
    parts = stored_parts(whole)
    ptr, at = reference.stored_escapes(whole)
    assert parts["escape_ptr"].tolist() == ptr
    assert parts["escape_at"].tolist() == at
    assert {part: array.shape for part, array in parts.items()} == part_shapes(shape, len(at))
    assert list(parts) == list(layout.PART_SUFFIXES)
    assert sum(array.nbytes for array in parts.values()) == whole.nbytes
    back = from_stored(shape, parts)
    for field in FIELDS:
        before, after = getattr(whole, field), getattr(back, field)
        assert (after.dtype, after.shape) == (before.dtype, before.shape), field
        assert np.array_equal(after, before), field
    assert np.array_equal(codec.decode(back), bits)


@settings(max_examples=60, deadline=None)
@given(shape=SHAPES, weights=st.integers(1, 1 << 15), seed=st.integers(0, 1 << 30))
def test_stripes_together_are_the_whole(shape: tuple[int, ...], weights: int, seed: int) -> None:
    bits = patterns(seed, shape, 0.02)
    whole = stored_parts(codec.encode(bits))
    flat = bits.reshape(-1, shape[-1])
    pieces = [
        stored_parts(codec.encode(flat[s.channel : s.channel + s.rows]))
        for s in stripes(shape, weights=weights)
    ]
    for part in ("records", "window", "escape_at", "escape_bits"):
        assert np.array_equal(np.concatenate([piece[part] for piece in pieces]), whole[part]), part
    counts = np.concatenate([np.diff(piece["escape_ptr"]) for piece in pieces])
    assert np.array_equal(np.cumsum(counts), whole["escape_ptr"][1:])


@pytest.mark.parametrize("shape", [(0, 5), (3, 0), (0, 4, 4), (2, 0, 3)])
def test_no_weights(shape: tuple[int, ...]) -> None:
    bits = np.empty(shape, np.uint16)
    assert from_stored(shape, stored_parts(codec.encode(bits))).escapes == 0


def test_an_escape_costs_48_bits_and_a_channel_eight_and_a_quarter() -> None:
    with_escapes, without = encoded(), codec.encode(np.full(SHAPE, 0x3F80, np.uint16))
    assert with_escapes.nbytes - without.nbytes == 6 * len(ESCAPES)
    assert without.nbytes - without.records.nbytes == 300 + 4 * (3 + 1)


def changed(part: str, index: int, value: int) -> Parts:
    parts = dict(stored_parts(encoded()))
    parts[part] = parts[part].copy()
    parts[part][index] = value
    return parts


def place(channel: int, col: int) -> int:
    return layout.escape_at(channel, col)


@pytest.mark.parametrize(
    ("part", "index", "value", "message"),
    [
        ("escape_ptr", 0, 1, "escape_ptr runs from 1 to 7, the escape list from 0 to 7"),
        ("escape_ptr", -1, 6, "escape_ptr runs from 0 to 6, the escape list from 0 to 7"),
        ("escape_ptr", -1, 8, "escape_ptr runs from 0 to 8, the escape list from 0 to 7"),
        ("escape_ptr", 1, 6, "escape_ptr falls after record row 1"),
        ("escape_ptr", 2, -(2**31), "escape_ptr falls after record row 1"),
        ("escape_ptr", 1, 2**31 - 1, "escape_ptr falls after record row 1"),
        ("escape_at", 1, place(0, 70), "escape 1 is in column 70 of 70"),
        ("escape_at", 4, place(127, 2**24 - 1), "escape 4 is in column 16777215 of 70"),
        ("escape_at", 6, place(44, 69), "escape 6 is in channel 44 of record row 2, which has 44"),
        ("escape_at", 3, -(2**31), "escape 3 is in channel -128 of record row 1, which has 128"),
        ("escape_at", 1, place(0, 3), "escapes 0 and 1 of record row 0 do not rise"),
        ("escape_at", 2, place(0, 68), "escapes 1 and 2 of record row 0 do not rise"),
        ("escape_at", 5, place(43, 69), "escapes 5 and 6 of record row 2 do not rise"),
    ],
)
def test_contradictions_are_refused_with_their_place(
    part: str, index: int, value: int, message: str
) -> None:
    with pytest.raises(MalformedW12) as caught:
        from_stored(SHAPE, changed(part, index, value))
    assert str(caught.value) == message


def test_escapes_may_fall_from_one_record_row_to_the_next() -> None:
    at = stored_parts(encoded())["escape_at"]
    assert at[3] < at[2]
    assert at[5] < at[4]


@pytest.mark.parametrize("shape", [(0x80,), (1, 2, 3, 4), (-1, 70), (1, layout.MAX_COLS + 1)])
def test_shapes_that_no_tensor_has(shape: tuple[int, ...]) -> None:
    with pytest.raises(MalformedW12, match="no tensor of shape"):
        from_stored(shape, stored_parts(encoded()))


@pytest.mark.parametrize("shape", [(257, 70), (256, 70), (3, 128, 70), (3, 100, 70)])
def test_parts_of_another_tensor_are_refused(shape: tuple[int, ...]) -> None:
    """Three record rows as well, or two; the channels of some are fewer."""
    with pytest.raises(MalformedW12):
        codec.decode(from_stored(shape, stored_parts(encoded())))


@pytest.mark.parametrize(
    ("part", "change"),
    [
        ("escape_ptr", lambda array: array[:-1]),
        ("escape_ptr", lambda array: array[np.newaxis]),
        ("escape_ptr", lambda array: array.astype(np.int64)),
        ("escape_at", lambda array: array.astype(np.uint32)),
        ("escape_at", lambda array: array[:, np.newaxis]),
        ("escape_at", lambda array: array[:-1]),
        ("escape_bits", lambda array: array[:-1]),
        ("escape_bits", lambda array: array.astype(np.int32)),
        ("window", lambda array: array[:-1]),
        ("records", lambda array: array[:, :, :-1]),
    ],
)
def test_parts_of_another_form_are_refused(part: str, change: Any) -> None:
    parts = dict(stored_parts(encoded()))
    parts[part] = change(parts[part])
    with pytest.raises(MalformedW12):
        codec.decode(from_stored(SHAPE, parts))


def test_more_inputs_than_a_place_can_name_are_not_stored() -> None:
    wide = EncodedW12(
        shape=(0, layout.MAX_COLS + 1),
        records=np.empty(
            (0, layout.grid(0, layout.MAX_COLS + 1)[1], layout.RECORD_BYTES), np.uint8
        ),
        window=np.empty(0, np.uint8),
        escape_ptr=np.zeros(1, np.int32),
        escape_col=np.empty(0, np.int32),
        escape_bits=np.empty(0, np.uint16),
    )
    with pytest.raises(ValueError, match="16777217 inputs, the format holds 16777216"):
        stored_parts(wide)


@st.composite
def escape_lists(draw: st.DrawFn) -> tuple[tuple[int, ...], list[int], list[int]]:
    """Shape, pointers and places, sound but for at most two changed numbers."""
    shape = draw(st.sampled_from([(130, 3), (2, 130, 3), (128, 1), (1, 5)]))
    channel, col = st.integers(0, min(shape[-2], 128) - 1), st.integers(0, shape[-1] - 1)
    place = st.builds(layout.escape_at, channel, col)
    ptr, at = [0], list[int]()
    for _ in range(part_shapes(shape, 0)["escape_ptr"][0] - 1):
        at += sorted(draw(st.sets(place, max_size=3)))
        ptr.append(len(at))
    anything = st.integers(-1, 12) | place | st.integers(-(2**31), 2**31 - 1)
    for _ in range(draw(st.integers(0, 2))):
        numbers = draw(st.sampled_from([ptr, at])) or ptr
        numbers[draw(st.integers(0, len(numbers) - 1))] = draw(anything)
    return shape, ptr, at


@settings(max_examples=500, deadline=None)
@given(escape_lists())
def test_anything_is_refused_or_the_one_form_of_its_escapes(
    lists: tuple[tuple[int, ...], list[int], list[int]],
) -> None:
    """What is read is written again as the same bytes: no two forms mean one tensor."""
    shape, ptr, at = lists
    parts = {
        **stored_parts(codec.encode(np.full(shape, 0x3F80, np.uint16))),
        "escape_ptr": np.array(ptr, np.int32),
        "escape_at": np.array(at, np.int32),
        "escape_bits": np.zeros(len(at), np.uint16),
    }
    try:
        back = from_stored(shape, parts)
    except MalformedW12:
        event("refused")
        return
    event(f"{back.escapes} escapes")
    back.check()
    again = stored_parts(back)
    assert again["escape_ptr"].tolist() == ptr
    assert again["escape_at"].tolist() == at


def test_the_last_column_and_channel_that_a_place_can_name() -> None:
    bits = np.full((128, 1), 0x3F80, np.uint16)
    bits[127] = 0
    parts = dict(stored_parts(codec.encode(bits)))
    parts["escape_ptr"], parts["escape_bits"] = np.array([0, 1], np.int32), np.zeros(1, np.uint16)
    parts["escape_at"] = np.array([2**31 - 1], np.int32)
    back = from_stored((128, layout.MAX_COLS), parts)
    assert back.escape_col.tolist() == [layout.MAX_COLS - 1]
    assert np.flatnonzero(np.diff(back.escape_ptr)).tolist() == [127]
