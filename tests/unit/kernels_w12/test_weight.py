"""A `W12Weight` holds the original weights, in the form that the kernel's comments describe."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from w12_cases import CONTENTS, content, exact, normal, same_bits  # noqa: E402

from specpilot_kernels.w12 import codec, layout, reference_gemm  # noqa: E402
from specpilot_kernels.w12.encoded import MalformedW12  # noqa: E402
from specpilot_kernels.w12.weight import (  # noqa: E402
    TooManyEscapes,
    W12Weight,
    from_stack,
    to_device,
)


def patterns(weights: torch.Tensor) -> np.ndarray:
    return weights.contiguous().view(torch.int16).numpy().view(np.uint16)


def small(name: str) -> torch.Tensor:
    """The content of that name, cut to a size that plain Python can walk through."""
    return content(name, "cpu")[:300, :700]


@pytest.mark.parametrize("name", CONTENTS, ids=str)
def test_the_kernels_form_is_worth_the_original_weights(name: str) -> None:
    weights = small(name)
    weight = exact(weights)
    assert same_bits(weight.to_bf16(), weights)
    # -0.0 and 0.0 contribute the same to a product.
    assert torch.equal(reference_gemm.weights(weight), weights.float())


@pytest.mark.parametrize("name", CONTENTS, ids=str)
def test_escapes_are_those_a_plain_walk_finds(name: str) -> None:
    weights = small(name)
    encoded = codec.encode(patterns(weights))
    blocks = layout.grid(*weights.shape)[1]
    expected = []
    bits = patterns(weights)
    for channel, lo in enumerate(encoded.window.tolist()):
        field = (bits[channel].astype(int) >> 7) & 0xFF
        outside = (field < lo) | (field > lo + 15)
        corrected = (bits[channel] & 0x7FFF) != 0 if lo == 0 else outside
        for column in np.flatnonzero(corrected).tolist():
            unit = channel // 128 * blocks + column // 64
            place = (unit, channel % 128, column % 64)
            expected.append((*place, lo, int(bits[channel, column])))
    expected.sort()
    weight = exact(weights)
    words = weight.escapes.numpy().view(np.uint64)[: weight.escape_count].tolist()
    found = [(w >> 21 & 0x7FFFFFF, w >> 6 & 127, w & 63, w >> 13 & 255, w >> 48) for w in words]
    assert found == expected
    counts = np.bincount([unit for unit, *_ in expected], minlength=weight.escape_ptr.numel() - 1)
    assert weight.escape_ptr.tolist() == [0, *np.cumsum(counts).tolist()]


def test_scale_is_the_power_of_two_of_each_window() -> None:
    fields = torch.arange(1, 255).repeat_interleave(2).to(torch.int16)
    weights = (fields << 7).view(torch.bfloat16).view(254, 2)
    weight = exact(weights)
    lo = [min(field, layout.MAX_WINDOW_LO) for field in range(1, 255)]
    assert weight.encoded.window.tolist() == lo
    assert weight.scale[:254].tolist() == [2.0 ** (low - 112) for low in lo]
    assert weight.scale[254:].tolist() == [0.0, 0.0]


def test_the_view_keeps_sign_exponent_and_three_bits() -> None:
    weights = small("normal")
    weights[4] = 0
    view = reference_gemm.weights(exact(weights), view_only=True)
    bits = patterns(weights)
    window = codec.encode(bits).window.astype(int)[:, None]
    field = (bits.astype(int) >> 7) & 0xFF
    inside = (field >= window) & (field <= window + 15) & (window > 0)
    expected = np.where(inside, bits & 0xFFF0 | 8, bits)
    assert torch.equal(view, torch.from_numpy(expected.view(np.int16)).view(torch.bfloat16).float())


def test_linear_multiplies_and_adds_the_bias() -> None:
    weights = small("odd")
    x, bias = torch.randn(3, 517).bfloat16(), torch.randn(129).bfloat16()
    result = reference_gemm.linear(x, exact(weights), bias)
    assert result.dtype == torch.float64
    expected = torch.nn.functional.linear(x.double(), weights.double(), bias.double())
    assert torch.allclose(result, expected, rtol=1e-12, atol=1e-12)


def test_every_matrix_of_a_stack_is_one_weight() -> None:
    weights = torch.stack([small("special channels"), small("special channels").flip(0)])
    weights[1, 5, 7] = 3e5
    parts = to_device(codec.encode(patterns(weights)))
    stack = from_stack(parts, max_escape_ratio=1.0)
    assert len(stack) == 2
    for weight, original in zip(stack, weights, strict=True):
        assert same_bits(weight.to_bf16(), original)
        assert torch.equal(reference_gemm.weights(weight), original.float())
    with pytest.raises(ValueError, match="is a matrix"):
        W12Weight.from_encoded(parts)


def test_stripes_share_the_escape_lists() -> None:
    weights = small("mixed exponents")
    weight = exact(weights)
    part = weight.stripe(128, 300)
    again = W12Weight.from_encoded(
        replace(
            part,
            escape_ptr=part.escape_ptr - part.escape_ptr[0],
            escape_col=part.escape_col[part.escape_ptr[0] : part.escape_ptr[-1]],
            escape_bits=part.escape_bits[part.escape_ptr[0] : part.escape_ptr[-1]],
        ),
        max_escape_ratio=1.0,
    )
    assert same_bits(again.to_bf16(), weights[128:300])
    with pytest.raises(ValueError, match="begins with a record"):
        weight.stripe(64, 128)


def test_ordinary_weights_are_accepted_and_sparse_ones_refused() -> None:
    weights = normal(torch.Generator().manual_seed(0), 512, 1024)
    W12Weight.from_bits(weights)
    sparse = weights.clone()
    sparse[:, ::100] = 0
    with pytest.raises(TooManyEscapes, match=r"1\.\d\d\d% .* Keep this matrix in BF16"):
        W12Weight.from_bits(sparse)
    one_tile = weights.clone()
    one_tile[3:5, 1:] = 1e-39  # denormal, but for one weight: 0.1 % on average
    with pytest.raises(TooManyEscapes, match="in 128 neighbouring channels"):
        W12Weight.from_bits(one_tile, max_escape_ratio=0.014)
    assert W12Weight.from_bits(one_tile, max_escape_ratio=0.015).escape_count > 2000


def test_what_chance_scatters_is_accepted() -> None:
    weights = normal(torch.Generator().manual_seed(0), 512, 1024)
    for scattered, accepted in ((40, True), (160, False)):  # one per record is 64
        some = weights.clone()
        places = torch.randperm(some.numel(), generator=torch.Generator().manual_seed(1))
        some.view(-1)[places[:scattered]] = 0
        if accepted:
            assert W12Weight.from_bits(some).escape_count > 64
        else:
            with pytest.raises(TooManyEscapes):
                W12Weight.from_bits(some)


@pytest.mark.parametrize(
    "damage",
    [
        lambda p: replace(p, window=torch.full_like(p.window, 240)),
        lambda p: replace(p, escape_ptr=p.escape_ptr + 1),
        lambda p: replace(p, escape_ptr=p.escape_ptr.flip(0)),
        lambda p: replace(p, escape_col=p.escape_col + 700),
        lambda p: replace(p, escape_col=p.escape_col - 700),
        lambda p: replace(p, escape_bits=p.escape_bits[1:]),
        lambda p: replace(p, records=p.records[:-1]),
    ],
    ids=["window", "first pointer", "falling pointers", "column", "negative column", "lists",
         "records"],
)  # fmt: skip
def test_damaged_parts_are_refused(damage: object) -> None:
    parts = to_device(codec.encode(patterns(small("zeros 1 %"))))
    with pytest.raises(MalformedW12):
        W12Weight.from_encoded(damage(parts), max_escape_ratio=1.0)


@pytest.mark.parametrize("shape", [(0, 64), (64, 0), (4,)], ids=str)
def test_an_empty_matrix_or_a_vector_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="is a matrix"):
        W12Weight.from_bits(torch.zeros(shape, dtype=torch.bfloat16))


def test_nbytes_counts_both_forms() -> None:
    weight = exact(small("zeros 1 %"))
    escapes, units = weight.escape_count, weight.escape_ptr.numel() - 1
    stored = layout.encoded_nbytes(*weight.shape, escapes)
    # In memory every channel has a pointer, stored only each of three record rows.
    beside = 4 * (300 - 3) + 4 * weight.scale.numel() + 4 * (units + 1) + 8 * escapes
    assert weight.nbytes == stored + beside
