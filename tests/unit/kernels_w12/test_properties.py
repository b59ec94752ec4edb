"""Properties of the codec over shapes and bit patterns, judged by definitions written out here."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from hypothesis import event, given, settings
from hypothesis import strategies as st

from specpilot_kernels.w12 import codec, layout, reference
from specpilot_kernels.w12.encoded import EncodedW12, MalformedW12
from specpilot_kernels.w12.stored import Parts, from_stored, stored_parts

Bits = npt.NDArray[np.uint16]
PARTS = ("records", "window", "escape_ptr", "escape_col", "escape_bits")
# One of each kind: quiet and signalling NaNs of both signs, least and greatest payloads,
# infinities, zeros, denormals at both ends, the least and the greatest normal number.
SPECIAL = [
    0x7FC0, 0xFFC0, 0x7FFF, 0xFFFF, 0x7F81, 0xFF81, 0x7FBF, 0x7FC1,
    0x7F80, 0xFF80, 0x0000, 0x8000, 0x0001, 0x807F, 0x0080, 0xFF7F,
]  # fmt: skip

SHAPES = st.one_of(
    st.tuples(st.integers(1, 260), st.integers(1, 140)),
    st.tuples(st.sampled_from([1, 2, 3]), st.integers(1, 135), st.integers(1, 70)),
    # A record, its half, one more and one less: where an index goes wrong first.
    st.tuples(st.sampled_from([127, 128, 129, 64, 16, 1]), st.sampled_from([63, 64, 65, 16, 1])),
)


def with_fields(fields: npt.NDArray[np.int64], rng: np.random.Generator) -> Bits:
    """Weights with these exponent fields, any sign and mantissa."""
    rest = rng.integers(0, 256, fields.shape)
    return ((rest >> 7) << 15 | fields << 7 | rest & 0x7F).astype(np.uint16)


@st.composite
def weight_tensors(draw: st.DrawFn) -> Bits:
    """Tensors whose windows are contested: edges, ties, special patterns, rows of each kind."""
    shape = draw(SHAPES)
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    kind = draw(st.sampled_from(["edges", "two windows", "special", "zeros", "any", "rows"]))
    low = draw(st.integers(0, 239))
    if kind == "edges":
        # Just outside, just inside, at both ends of one window.
        fields = rng.choice(np.clip([low - 1, low, low + 7, low + 15, low + 16], 0, 255), shape)
        bits = with_fields(fields, rng)
    elif kind == "two windows":
        fields = rng.choice([low, min(low + draw(st.integers(1, 40)), 254)], shape)
        bits = with_fields(fields, rng)
    elif kind == "special":
        bits = rng.choice(np.array(SPECIAL, dtype=np.uint16), shape)
    elif kind == "zeros":
        bits = with_fields(rng.integers(100, 115, shape), rng)
        bits[rng.random(shape) < draw(st.floats(0, 1))] = draw(st.sampled_from([0, 0x8000, 1]))
    else:
        bits = rng.integers(0, 65536, shape, dtype=np.uint16)
    if kind == "rows":
        flat = bits.reshape(-1, shape[-1])
        for row in range(0, flat.shape[0], draw(st.integers(1, 7))):
            flat[row] = rng.choice(SPECIAL)
    return bits


def channels(bits: Bits) -> Bits:
    """All channels of a matrix or a stack, [channels, inputs]."""
    return bits.reshape(-1, bits.shape[-1])


@settings(max_examples=300, deadline=None)
@given(weight_tensors())
def test_fast_codec_is_the_reference_and_gives_every_bit_back(bits: Bits) -> None:
    encoded, expected = codec.encode(bits), reference.encode(bits)
    for part in PARTS:
        assert getattr(encoded, part).tobytes() == getattr(expected, part).tobytes(), part
    assert np.array_equal(codec.decode(encoded), bits)
    assert np.array_equal(reference.decode(encoded), bits)


@settings(max_examples=100, deadline=None)
@given(weight_tensors())
def test_no_window_holds_more_and_no_higher_one_as_many(bits: Bits) -> None:
    encoded = codec.encode(bits)
    fields = (channels(bits) >> 7) & 0xFF
    held = np.stack(
        [((fields >= low) & (fields < low + 16)).sum(axis=1) for low in range(240)], axis=1
    )
    chosen = encoded.window.astype(np.int64)
    ours = np.take_along_axis(held, chosen[:, np.newaxis], axis=1)
    assert (held <= ours).all()
    higher = np.arange(240) > chosen[:, np.newaxis]
    assert not ((held == ours) & higher).any()


@settings(max_examples=100, deadline=None)
@given(weight_tensors())
def test_escapes_are_exactly_the_weights_outside_the_window(bits: Bits) -> None:
    encoded = codec.encode(bits)
    rows = channels(bits)
    offset = ((rows >> 7) & 0xFF).astype(int) - encoded.window.astype(int)[:, np.newaxis]
    row, col = np.nonzero((offset < 0) | (offset > 15))
    assert np.array_equal(encoded.escape_col, col)
    assert np.array_equal(encoded.escape_bits, rows[row, col])
    assert np.array_equal(np.diff(encoded.escape_ptr), np.bincount(row, minlength=len(rows)))


@settings(max_examples=60, deadline=None)
@given(weight_tensors(), st.integers(0, 2**32 - 1))
def test_channels_do_not_influence_each_other(bits: Bits, seed: int) -> None:
    rows = channels(bits)
    order = np.random.default_rng(seed).permutation(len(rows))
    plain, shuffled = codec.survey(rows), codec.survey(rows[order])
    assert np.array_equal(shuffled.window, plain.window[order])
    assert np.array_equal(shuffled.escape_counts, plain.escape_counts[order])


@settings(max_examples=60, deadline=None)
@given(weight_tensors(), st.integers(1, 4))
def test_a_stack_is_its_matrices_one_after_another(bits: Bits, copies: int) -> None:
    matrix = bits if bits.ndim == 2 else bits[0]
    stack = np.stack([np.roll(matrix, i, axis=0) for i in range(copies)])
    whole, alone = codec.encode(stack), [codec.encode(one) for one in stack]
    for part in ("records", "window", "escape_col", "escape_bits"):
        assert np.array_equal(
            getattr(whole, part), np.concatenate([getattr(one, part) for one in alone])
        ), part


@settings(max_examples=150, deadline=None)
@given(weight_tensors(), st.data())
def test_one_changed_bit_of_a_weight_is_another_encoding(bits: Bits, data: st.DataObject) -> None:
    encoded = codec.encode(bits)
    other = bits.copy()
    at = data.draw(st.integers(0, bits.size - 1))
    other.reshape(-1)[at] ^= 1 << data.draw(st.integers(0, 15))
    assert not codec.matches(other, encoded)
    again = codec.encode(other)
    assert any(getattr(again, p).tobytes() != getattr(encoded, p).tobytes() for p in PARTS)


def _flipped(parts: Parts, part: str, bit: int) -> Parts:
    array = parts[part].copy()
    array.reshape(-1).view(np.uint8)[bit // 8] ^= 1 << bit % 8
    return {**parts, part: array}


@settings(max_examples=300, deadline=None)
@given(weight_tensors(), st.sampled_from(list(layout.PART_SUFFIXES)), st.data())
def test_one_changed_bit_of_what_is_stored_is_refused_or_changes_a_weight(
    bits: Bits, part: str, data: st.DataObject
) -> None:
    """Unless it is a bit that nothing reads: padding, or the 12 bits in an escape's place."""
    encoded = codec.encode(bits)
    parts = stored_parts(encoded)
    nbits = parts[part].nbytes * 8
    if nbits == 0:
        return
    bit = data.draw(st.integers(0, nbits - 1))
    try:
        changed = from_stored(bits.shape, _flipped(parts, part, bit))
        decoded = codec.decode(changed)
    except MalformedW12:
        return
    assert np.array_equal(reference.decode(changed), decoded)
    differing = np.flatnonzero(channels(decoded) != channels(bits))
    if part == "records" and bit // 8 % layout.RECORD_BYTES < layout.VIEW_BYTES:
        assert differing.size <= 1
    event(f"{part}: {'weights changed' if differing.size else 'unread bit'}")
    if differing.size == 0:
        assert part in ("records", "window")
        if part == "records":
            assert _is_unread(encoded, bits, bit)
        else:
            lost = np.diff(encoded.escape_ptr)[bit // 8]
            assert lost == bits.shape[-1]  # a channel of escapes alone does not use its window


def _is_unread(encoded: EncodedW12, bits: Bits, bit: int) -> bool:
    """Whether a bit of the records belongs to padding or to an escape."""
    byte, shift = divmod(bit, 8)
    record, offset = divmod(byte, layout.RECORD_BYTES)
    row_blocks, col_blocks = layout.grid(*bits.shape[-2:])
    matrix, block = divmod(record, row_blocks * col_blocks)
    for row in range(layout.RECORD_ROWS):
        for col in range(layout.RECORD_COLS):
            at_low, low_shift = layout.low_offset(row, col)
            in_view = layout.view_offset(row, col) == offset
            in_low = at_low == offset and shift // 4 * 4 == low_shift
            if in_view or in_low:
                row += block // col_blocks * layout.RECORD_ROWS
                col += block % col_blocks * layout.RECORD_COLS
                if row >= bits.shape[-2] or col >= bits.shape[-1]:
                    return True
                channel = matrix * bits.shape[-2] + row
                first, last = encoded.escape_ptr[channel : channel + 2]
                return bool((encoded.escape_col[first:last] == col).any())
    raise AssertionError("every bit of a record belongs to a weight's place")
