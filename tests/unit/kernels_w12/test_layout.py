"""The bit order of layout 1, against independent statements of it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from specpilot_kernels.w12 import layout

CELLS = [(row, col) for row in range(128) for col in range(64)]


def test_record_is_128_by_64_weights_of_12_bits() -> None:
    assert layout.RECORD_ROWS * layout.RECORD_COLS * 12 // 8 == layout.RECORD_BYTES == 12288
    assert layout.VIEW_BYTES + layout.LOW_BYTES == layout.RECORD_BYTES


def test_every_weight_has_its_own_view_byte_and_nibble() -> None:
    assert {layout.view_offset(r, c) for r, c in CELLS} == set(range(8192))
    assert {layout.low_offset(r, c) for r, c in CELLS} == {
        (offset, shift) for offset in range(8192, 12288) for shift in (0, 4)
    }


def test_a_thread_finds_its_mma_fragment_in_sixteen_neighbouring_bytes() -> None:
    """PTX, A fragment of mma.m16n8k16: a0..a7 of lane l, group g = l / 4, t = l % 4."""
    for half, warp, lane, step in [(0, 0, 0, 0), (0, 3, 31, 3), (1, 0, 5, 2), (1, 2, 17, 1)]:
        group, t = divmod(lane, 4)
        rows = [group + (8 if i in (2, 3, 6, 7) else 0) for i in range(8)]
        cols = [2 * t + (i & 1) + (8 if i >= 4 else 0) for i in range(8)]
        cells = [
            (half * 64 + warp * 16 + r, step * 16 + c) for r, c in zip(rows, cols, strict=True)
        ]
        thread = warp * 32 + lane
        first = half * 4096 + (step // 2) * 2048 + thread * 16 + (step % 2) * 8
        assert [layout.view_offset(*cell) for cell in cells] == list(range(first, first + 8))
        first = 8192 + half * 2048 + thread * 16 + step * 4
        assert [layout.low_offset(*cell) for cell in cells] == [
            (first + i, shift) for shift in (0, 4) for i in range(4)
        ]


@pytest.mark.parametrize("lo", [0, 1, 100, 112, 239])
def test_twelve_bits_and_a_window_give_every_pattern_back(lo: int) -> None:
    for offset in range(16):
        for rest in range(256):
            bits = (rest >> 7) << 15 | (lo + offset) << 7 | rest & 0x7F
            view, low = layout.view_byte(bits, lo), layout.low_nibble(bits)
            assert 0 <= view < 256
            assert layout.decode_bits(view, low, lo) == bits


def test_fixed_base_decode_is_the_pattern_moved_to_exponent_field_0x70() -> None:
    lo = 90
    for offset in range(16):
        for rest in range(256):
            bits = (rest >> 7) << 15 | (lo + offset) << 7 | rest & 0x7F
            moved = bits + ((layout.FIXED_EXPONENT_BASE - lo) << 7)
            view, low = layout.view_byte(bits, lo), layout.low_nibble(bits)
            assert layout.fixed_base_bits(view, low) == moved


def test_eight_bit_view_keeps_sign_exponent_and_three_mantissa_bits() -> None:
    bits = 0b1_01110011_101_1011
    midpoint = layout.decode_bits(layout.view_byte(bits, 110), 0b1000, 110)
    assert midpoint == 0b1_01110011_101_1000


def test_encoded_nbytes_counts_all_five_parts() -> None:
    # 130 x 70 needs 2 x 2 records; 130 windows; 2 + 1 pointers; 3 escapes of 6 bytes.
    assert layout.encoded_nbytes(130, 70, 3) == 4 * 12288 + 130 + 3 * 4 + 18
    assert layout.encoded_nbytes(130, 70, 3, matrices=2) == 8 * 12288 + 260 + 5 * 4 + 18


def test_a_stored_place_is_a_positive_int32() -> None:
    assert layout.escape_at(1, 2) == 0x01000002
    assert layout.escape_at(layout.RECORD_ROWS - 1, layout.MAX_COLS - 1) == 2**31 - 1


def test_layout_and_package_load_nothing() -> None:
    code = (
        "import sys, specpilot_kernels, specpilot_kernels.w12.layout\n"
        "sys.exit(any(m in sys.modules for m in ('numpy', 'numba', 'torch')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
