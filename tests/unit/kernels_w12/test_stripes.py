"""Stripe by stripe the codec gives the bytes that it gives for the whole tensor."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specpilot_kernels.w12 import codec, layout
from specpilot_kernels.w12.codec import CpuCodec
from specpilot_kernels.w12.encoded import EncodedW12, MalformedW12
from specpilot_kernels.w12.stripes import STRIPE_WEIGHTS, Stripe, stripe_rows, stripes

CODEC = CpuCodec()
SHAPES = st.one_of(
    st.tuples(st.integers(1, 700), st.integers(1, 200)),
    st.tuples(st.integers(1, 3), st.integers(1, 300), st.integers(1, 100)),
)


def patterns(seed: int, shape: tuple[int, ...]) -> npt.NDArray[np.uint16]:
    """Ordinary weights, with a few arbitrary patterns among them."""
    rng = np.random.default_rng(seed)
    bits = (rng.standard_normal(shape, dtype=np.float32).view(np.uint32) >> 16).astype(np.uint16)
    strange = rng.random(shape) < 0.02
    bits[strange] = rng.integers(0, 65536, int(strange.sum()), dtype=np.uint16)
    return bits


def encode(bits: npt.NDArray[np.uint16]) -> EncodedW12:
    records = np.empty((*layout.grid(*bits.shape), layout.RECORD_BYTES), np.uint8)
    encoded = CODEC.encode_stripe(bits, records, max_escapes=bits.size)
    assert encoded is not None
    return encoded


@given(shape=SHAPES, weights=st.integers(1, 1 << 17))
def test_stripes_cover_every_row_block_once(shape: tuple[int, ...], weights: int) -> None:
    matrices, rows, cols = (1, *shape)[-3:]
    channel = block = 0
    for stripe in stripes(shape, weights=weights):
        assert (stripe.channel, stripe.block) == (channel, block)
        assert stripe.blocks == -(-stripe.rows // layout.RECORD_ROWS)
        assert stripe.channel // rows == (stripe.channel + stripe.rows - 1) // rows
        assert stripe.rows * cols <= max(weights, layout.RECORD_ROWS * cols)
        assert (stripe.channel % rows) % layout.RECORD_ROWS == 0
        channel, block = channel + stripe.rows, block + stripe.blocks
    assert channel == matrices * rows
    assert block == matrices * layout.grid(rows, cols)[0]


@pytest.mark.parametrize(("cols", "rows"), [(1, STRIPE_WEIGHTS), (5120, 384), (1 << 20, 128)])
def test_rows_of_a_full_stripe(cols: int, rows: int) -> None:
    assert stripe_rows(cols) == rows


@settings(max_examples=60, deadline=None)
@given(shape=SHAPES, weights=st.integers(1, 1 << 16), seed=st.integers(0, 1 << 30))
def test_stripes_together_are_the_whole_encoding(
    shape: tuple[int, ...], weights: int, seed: int
) -> None:
    bits = patterns(seed, shape)
    whole = codec.encode(bits)
    flat = bits.reshape(-1, shape[-1])
    pieces = [encode(flat[_rows(stripe)]) for stripe in stripes(shape, weights=weights)]
    for part in ("records", "window", "escape_col", "escape_bits"):
        joined = np.concatenate([getattr(piece, part) for piece in pieces])
        assert np.array_equal(joined, getattr(whole, part)), part
    counts = np.concatenate([np.diff(piece.escape_ptr) for piece in pieces])
    assert np.array_equal(np.cumsum(counts), whole.escape_ptr[1:])
    decoded = np.empty_like(flat)
    for stripe, piece in zip(stripes(shape, weights=weights), pieces, strict=True):
        CODEC.decode_stripe(piece, decoded[_rows(stripe)])
        assert CODEC.matches_stripe(flat[_rows(stripe)], piece)
    assert np.array_equal(decoded, flat)


def _rows(stripe: Stripe) -> slice:
    return slice(stripe.channel, stripe.channel + stripe.rows)


def test_match_sees_every_single_bit() -> None:
    bits = patterns(1, (130, 70))
    encoded = encode(bits)
    rng = np.random.default_rng(2)
    for row, col, bit in zip(
        rng.integers(0, 130, 200), rng.integers(0, 70, 200), rng.integers(0, 16, 200), strict=True
    ):
        other = bits.copy()
        other[row, col] ^= np.uint16(1 << bit)
        assert not CODEC.matches_stripe(other, encoded)
    assert CODEC.matches_stripe(bits, encoded)


def test_survey_and_limit_agree_with_the_encoding() -> None:
    bits = patterns(3, (200, 90))
    found, encoded = CODEC.survey_stripe(bits), encode(bits)
    assert found.escapes == encoded.escapes > 0
    assert np.array_equal(found.window, encoded.window)
    records = np.empty_like(encoded.records)
    assert CODEC.encode_stripe(bits, records, max_escapes=found.escapes) is not None
    assert CODEC.encode_stripe(bits, records, max_escapes=found.escapes - 1) is None


def test_malformed_stripe_is_refused() -> None:
    encoded = encode(patterns(4, (128, 64)))
    encoded.escape_col[-1] = 64
    with pytest.raises(MalformedW12):
        CODEC.decode_stripe(encoded, np.empty((128, 64), np.uint16))
