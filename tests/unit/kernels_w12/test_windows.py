"""The compiled choice of windows and search for escapes, where they take shorter ways."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from specpilot_kernels.w12 import _cpu, codec, reference

Bits = npt.NDArray[np.uint16]


def some_fields(rng: np.random.Generator, kind: str, cols: int) -> npt.NDArray[np.int64]:
    """Exponent fields of one row, most of them near the greatest."""
    high = int(rng.integers(16, 256))
    if kind == "scattered":
        fields = high - rng.integers(0, 14, cols)
        return np.where(rng.random(cols) < 0.02, rng.integers(0, high + 1, cols), fields)
    if kind == "falling":
        return np.clip(high - rng.geometric(0.4, cols), 0, 255)
    if kind == "two heaps":
        return np.where(
            rng.random(cols) < 0.5, high, np.clip(high - rng.integers(13, 19, cols), 0, 255)
        )
    if kind == "edges":
        return rng.choice([0, high, high - 15, high - 16, 254], cols)
    return rng.choice([239, 240, 254, 255, 238, 223], cols)


@pytest.mark.parametrize("kind", ["scattered", "falling", "two heaps", "edges", "greatest"])
def test_rows_just_too_wide_for_a_window(kind: str) -> None:
    rng = np.random.default_rng(0)
    for cols in (1, 2, 3, 17, 64, 300, 513):
        fields = np.stack([some_fields(rng, kind, cols) for _ in range(60)])
        bits = (fields << 7 | rng.integers(0, 128, fields.shape)).astype(np.uint16)
        bits |= rng.integers(0, 2, bits.shape, dtype=np.uint16) << np.uint16(15)
        expected, found = reference.encode(bits), codec.encode(bits)
        for part in ("window", "escape_ptr", "escape_col", "escape_bits", "records"):
            assert np.array_equal(getattr(found, part), getattr(expected, part)), (part, cols)


@pytest.mark.parametrize(
    ("low", "high", "short_way"), [(4, 4, True), (5, 4, False), (4, 70_000, True)]
)
def test_the_highest_window_only_where_no_other_holds_more(
    low: int, high: int, short_way: bool
) -> None:
    """`low` weights of field 80, `high` ones of 100; more than 65,536 are counted right as well."""
    bits: Bits = np.concatenate(
        [np.full(low, 80 << 7, np.uint16), np.full(high, 100 << 7, np.uint16)]
    )[np.newaxis]
    assert (_cpu._highest_window(bits[0], np.int64(100))[0] >= 0) is short_way
    assert np.array_equal(codec.survey(bits).window, reference.choose_windows(bits))
    assert codec.survey(bits).escapes == min(low, high)


@pytest.mark.parametrize("place", [0, 255, 256, 257, 511, 512, 999])
def test_a_lone_escape_is_found_wherever_it_is(place: int) -> None:
    bits: Bits = np.full((1, 1000), 0x3F80, np.uint16)
    bits[0, place] = 0x0001
    found = codec.encode(bits)
    assert found.escape_col.tolist() == [place]
    assert found.escape_bits.tolist() == [1]
    assert np.array_equal(codec.decode(found), bits)
