"""The codec: bit-exact on every pattern and shape, and byte-equal to the reference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specpilot_kernels.w12 import codec, layout, reference
from specpilot_kernels.w12.encoded import EncodedW12, MalformedW12
from specpilot_kernels.w12.stored import stored_parts

Bits = npt.NDArray[np.uint16]

PARTS = ("records", "window", "escape_ptr", "escape_col", "escape_bits")
RARE = [0x0000, 0x8000, 0x0001, 0x807F, 0x7F80, 0xFF80, 0x7FC0, 0xFFC1, 0x7F81, 0x7F7F, 0x0080]


def normal_bits(rng: np.random.Generator, *shape: int) -> Bits:
    """BF16 patterns of N(0, 0.02), truncated."""
    values = (rng.standard_normal(shape) * 0.02).astype(np.float32)
    return (values.view(np.uint32) >> 16).astype(np.uint16)


def assert_same_bytes(left: EncodedW12, right: EncodedW12) -> None:
    for part in PARTS:
        a, b = getattr(left, part), getattr(right, part)
        assert (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes()), part


def check(bits: Bits) -> EncodedW12:
    """Encode both ways, compare every byte, decode both ways, compare every bit."""
    expected = reference.encode(bits)
    actual = codec.encode(bits)
    assert_same_bytes(actual, expected)
    for decoded in (codec.decode(actual), reference.decode(expected)):
        assert decoded.dtype == np.uint16
        assert decoded.shape == bits.shape
        assert np.array_equal(decoded, bits)
    assert codec.matches(bits, actual)
    assert actual.nbytes == sum(array.nbytes for array in stored_parts(actual).values())
    return actual


@st.composite
def bit_tensors(draw: st.DrawFn) -> Bits:
    shape = draw(
        st.one_of(
            st.tuples(st.integers(0, 270), st.integers(0, 150)),
            st.tuples(st.integers(0, 3), st.integers(0, 140), st.integers(0, 70)),
        )
    )
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    kind = draw(st.sampled_from(["normal", "uniform", "narrow", "constant", "rows"]))
    if kind == "uniform":
        bits = rng.integers(0, 65536, shape, dtype=np.uint16)
    elif kind == "narrow":
        low = draw(st.integers(0, 255 - 18))
        fields = rng.integers(low, low + 18, shape, dtype=np.uint16)
        bits = (fields << 7) | rng.integers(0, 128, shape, dtype=np.uint16)
        bits |= rng.integers(0, 2, shape, dtype=np.uint16) << 15
    elif kind == "constant":
        bits = np.full(shape, draw(st.integers(0, 65535)), dtype=np.uint16)
    else:
        bits = normal_bits(rng, *shape)
    if kind == "rows" and bits.size:
        flat = bits.reshape(-1, shape[-1])
        flat[:: draw(st.integers(1, 5))] = draw(st.sampled_from(RARE))
    rare = draw(st.lists(st.sampled_from(RARE), max_size=6))
    if bits.size:
        for pattern in rare:
            bits.reshape(-1)[rng.integers(0, bits.size)] = pattern
    return bits


@settings(max_examples=150, deadline=None)
@given(bit_tensors())
def test_codec_equals_reference_and_round_trips(bits: Bits) -> None:
    check(bits)


@pytest.mark.parametrize("shape", [(256, 256), (1, 65536), (65536, 1), (4, 128, 128)])
def test_all_patterns_in_one_tensor(shape: tuple[int, ...]) -> None:
    check(np.arange(65536, dtype=np.uint16).reshape(shape))


def test_all_patterns_shuffled() -> None:
    bits = np.random.default_rng(5).permutation(65536).astype(np.uint16)
    check(bits.reshape(128, 512))


@pytest.mark.parametrize("pattern", RARE, ids=hex)
@pytest.mark.parametrize("shape", [(1, 1), (3, 100), (128, 64)])
def test_one_pattern_everywhere(pattern: int, shape: tuple[int, int]) -> None:
    encoded = check(np.full(shape, pattern, dtype=np.uint16))
    is_inf_or_nan = (pattern & 0x7F80) == 0x7F80
    assert encoded.escapes == (shape[0] * shape[1] if is_inf_or_nan else 0)


def test_all_zero_rows_cost_no_escapes() -> None:
    bits = normal_bits(np.random.default_rng(0), 130, 200)
    bits[7] = 0
    bits[129] = 0x8000
    encoded = check(bits)
    assert encoded.window[[7, 129]].tolist() == [0, 0]
    assert np.diff(encoded.escape_ptr)[[7, 129]].tolist() == [0, 0]


def test_inf_and_nan_are_escapes_even_where_all_other_weights_are_huge() -> None:
    bits = np.array([[0x7F00, 0x7F7F, 0xFF00, 0x7F80, 0xFFC1]], dtype=np.uint16)
    encoded = check(bits)
    assert encoded.window.tolist() == [layout.MAX_WINDOW_LO]
    assert encoded.escape_bits.tolist() == [0x7F80, 0xFFC1]


@pytest.mark.parametrize(
    ("fields", "low"),
    [
        ([100], 100),  # any of 85..100 covers it: the highest
        ([100, 115], 100),  # both fit in exactly one window
        ([100, 116], 116),  # one or the other: the higher
        ([100, 100, 116], 100),  # most weights first, height second
        ([254], 239),
        ([255], 239),
        ([0, 0, 16], 0),
        ([0, 15], 0),
        ([], 239),
    ],
)
def test_window_rule(fields: list[int], low: int) -> None:
    bits = np.array([fields], dtype=np.uint16) << 7
    assert reference.choose_windows(bits).tolist() == [low]
    assert codec.survey(bits).window.tolist() == [low]


def test_negative_zero_stays_negative() -> None:
    bits = normal_bits(np.random.default_rng(1), 4, 64)
    bits[2, 3] = 0x8000
    decoded = codec.decode(codec.encode(bits))
    assert decoded[2, 3] == 0x8000


def test_padding_and_escapes_are_zero_bits() -> None:
    bits = np.full((1, 1), 0x7FC1, dtype=np.uint16)
    assert not codec.encode(bits).records.any()


@pytest.mark.parametrize("threads", [2, 3])
def test_bytes_do_not_depend_on_threads(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "_TASK_WEIGHTS", 1)
    bits = np.random.default_rng(2).integers(0, 65536, (2, 700, 130), dtype=np.uint16)
    encoded = codec.encode(bits, threads=threads)
    assert_same_bytes(encoded, reference.encode(bits))
    assert np.array_equal(codec.decode(encoded, threads=threads), bits)
    assert codec.matches(bits, encoded, threads=threads)


@pytest.mark.parametrize(
    "view",
    [lambda a: a.T, lambda a: a[::2], lambda a: a[:, ::3], lambda a: a[::-1]],
    ids=["transposed", "every second row", "every third column", "reversed"],
)
def test_strided_views_encode_what_they_show(view: Callable[[Bits], Bits]) -> None:
    bits = view(np.random.default_rng(3).integers(0, 65536, (150, 140), dtype=np.uint16))
    encoded = codec.encode(bits)
    assert_same_bytes(encoded, reference.encode(np.ascontiguousarray(bits)))
    assert codec.matches(bits, encoded)


def test_input_is_not_changed_and_may_be_read_only() -> None:
    bits = normal_bits(np.random.default_rng(4), 128, 64)
    before = bits.copy()
    bits.flags.writeable = False
    codec.encode(bits)
    assert np.array_equal(bits, before)


def test_matches_sees_one_flipped_bit() -> None:
    bits = normal_bits(np.random.default_rng(6), 300, 100)
    encoded = codec.encode(bits)
    for row, col, bit in [(0, 0, 0), (299, 99, 15), (128, 64, 7)]:
        other = bits.copy()
        other[row, col] ^= 1 << bit
        assert not codec.matches(other, encoded)


def test_survey_foretells_the_encoding() -> None:
    bits = np.random.default_rng(7).integers(0, 65536, (3, 50, 70), dtype=np.uint16)
    found, encoded = codec.survey(bits), codec.encode(bits)
    assert (found.nbytes, found.escapes) == (encoded.nbytes, encoded.escapes)


def test_typical_weights_take_close_to_twelve_bits() -> None:
    encoded = codec.encode(normal_bits(np.random.default_rng(8), 1024, 4096))
    # A window per channel and a pointer per 128 of them, and 48 bits per escape.
    overhead = (8 + 32 / 128) / 4096
    share = encoded.escapes / (1024 * 4096)
    assert share < 2e-4
    assert encoded.bits_per_weight == pytest.approx(12 + overhead + 48 * share, abs=1e-4)


@pytest.mark.parametrize(
    "bits",
    [np.zeros((2, 2), np.int16), np.zeros((2, 2), np.float32), np.zeros(4, np.uint16)],
    ids=["int16", "float32", "vector"],
)
def test_other_inputs_are_refused(bits: npt.NDArray[np.generic]) -> None:
    with pytest.raises(ValueError, match="W12 encodes"):
        codec.encode(bits)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="W12 encodes"):
        reference.encode(bits)  # type: ignore[arg-type]


def _broken(encoded: EncodedW12, part: str, index: int, value: int) -> EncodedW12:
    array = getattr(encoded, part).copy()
    array[index] = value
    return replace(encoded, **{part: array})


@pytest.mark.parametrize(
    ("part", "index", "value"),
    [
        ("window", 3, 240),
        ("escape_ptr", 0, 1),
        ("escape_ptr", 2, 1 << 30),
        ("escape_ptr", 2, -1),
        ("escape_ptr", -1, 0),
        ("escape_col", 0, 64),
        ("escape_col", 0, -1),
        ("escape_col", 1, 5),
    ],
)
def test_contradicting_parts_are_refused(part: str, index: int, value: int) -> None:
    bits = normal_bits(np.random.default_rng(9), 8, 64)
    bits[1, [5, 9]] = 0x7FC0
    bits[4, 2] = 0
    encoded = _broken(codec.encode(bits), part, index, value)
    with pytest.raises(MalformedW12):
        codec.decode(encoded)
    with pytest.raises(MalformedW12):
        reference.decode(encoded)


@pytest.mark.parametrize("part", PARTS)
def test_parts_of_another_size_are_refused(part: str) -> None:
    bits = normal_bits(np.random.default_rng(10), 8, 64)
    bits[0, 0] = 0
    encoded = codec.encode(bits)
    shorter = replace(encoded, **{part: getattr(encoded, part)[:-1]})
    with pytest.raises(MalformedW12):
        codec.decode(shorter)
