"""What the GEMM kernels read says the same as the matrix; the work split leaves nothing out."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from specpilot_kernels.w12 import codec, gemm_reference, layout

Bits = npt.NDArray[np.uint16]


def _as_numbers(bits: Bits) -> npt.NDArray[np.float64]:
    return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def _matrix() -> Bits:
    rng = np.random.default_rng(1)
    bits = rng.integers(0x3C00, 0x4000, (200, 150), dtype=np.uint16)
    bits[:, ::7] = 0
    bits[3], bits[4], bits[5] = 0, 0x8000, rng.integers(0, 0x0100, 150)
    bits[199] = rng.integers(0, 0x7F80, 150)
    return bits


@pytest.mark.parametrize("view_only", [False, True], ids=["full", "view"])
def test_fixed_base_decode_scale_and_escapes_give_every_weight(view_only: bool) -> None:
    bits = _matrix()
    encoded = codec.encode(bits)
    parts = gemm_reference.gemm_parts(encoded)
    tiles, blocks = layout.grid(*bits.shape)
    decoded = np.zeros((tiles * 128, blocks * 64))
    for row, col in np.ndindex(bits.shape):
        record = encoded.records[row // 128, col // 64]
        at, shift = layout.low_offset(row % 128, col % 64)
        view = int(record[layout.view_offset(row % 128, col % 64)])
        low = 8 if view_only else int(record[at]) >> shift & 15
        decoded[row, col] = _as_numbers(np.array(layout.fixed_base_bits(view, low), np.uint16))
    decoded *= parts.scale[:, np.newaxis].astype(np.float64)
    for unit in range(tiles * blocks):
        for escape in parts.escapes[parts.escape_ptr[unit] : parts.escape_ptr[unit + 1]].tolist():
            assert escape >> 21 & 0x7FFFFFF == unit
            row = unit // blocks * 128 + (escape >> 6 & 127)
            col = unit % blocks * 64 + (escape & 63)
            assert escape >> 13 & 255 == encoded.window[row]
            decoded[row, col] = _as_numbers(np.array(escape >> 48, np.uint16))
    wanted = gemm_reference.weights(encoded, view_only=view_only)
    assert np.array_equal(decoded[:200, :150], wanted)
    if not view_only:
        assert np.array_equal(wanted, _as_numbers(bits))


def test_escapes_are_in_the_order_of_units_channels_and_columns() -> None:
    parts = gemm_reference.gemm_parts(codec.encode(_matrix()))
    keys = [(e >> 21 & 0x7FFFFFF, e >> 6 & 127, e & 63) for e in parts.escapes.tolist()]
    assert len(keys) > 1000
    assert keys == sorted(set(keys))
    assert parts.escape_ptr[-1] == len(keys)


def test_a_stack_is_refused() -> None:
    encoded = codec.encode(np.zeros((2, 3, 4), np.uint16))
    with pytest.raises(ValueError, match="one matrix"):
        gemm_reference.gemm_parts(encoded)


@pytest.mark.parametrize("multiprocessors", [1, 28, 108, 132, 188])
def test_work_split_gives_whole_tiles_or_even_shares(multiprocessors: int) -> None:
    split = pytest.importorskip("specpilot_kernels.w12.gemm_mma").split
    for tiles in [1, 2, 8, 27, 40, 112, 128, 131, 133, 256, 1940]:
        for blocks in [1, 2, 64, 80, 96, 272]:
            ctas = split(tiles, blocks, multiprocessors)
            units = tiles * blocks
            assert 1 <= ctas <= min(multiprocessors, units)
            assert ctas <= max(8 * tiles, 1)
            even = -(-units // min(multiprocessors, units, 8 * tiles))
            most = -(-units // ctas)
            # Fewer CTAs only for whole tiles, and only if that takes no longer than a join.
            assert most == even or (most % blocks == 0 and units % ctas == 0 and most <= even + 3)
