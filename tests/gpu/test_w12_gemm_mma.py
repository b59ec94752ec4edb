"""The portable W12 GEMM against float64: every row count, adversarial weights, equal bits always.

compute-sanitizer python -m pytest tests/gpu/test_w12_gemm_mma.py -m gpu -k "adversarial or shape"
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt
import pytest

torch = pytest.importorskip("torch", reason="no CUDA device: torch is not installed")

from specpilot_kernels.w12 import gemm, gemm_mma, reference_gemm  # noqa: E402
from specpilot_kernels.w12.gemm import MAX_ROWS  # noqa: E402
from specpilot_kernels.w12.weight import W12Weight  # noqa: E402

pytestmark = pytest.mark.gpu

Bits = npt.NDArray[np.uint16]
POISON = 0x7FC5  # a NaN
HALF_ULP = 2.0**-8  # the most that rounding to bfloat16 moves a number, relative to it
SUMMATION = 2.0**-14  # of sum |x w|: float32 sums of up to 65536 products in tensor cores
CUBLAS_RATIO = 1.1


@dataclass(frozen=True)
class Weight:
    """One matrix on the GPU, and float64 of what the two passes multiply by."""

    w12: W12Weight
    exact: torch.Tensor
    viewed: torch.Tensor


def make_weight(bits: Bits) -> Weight:
    w12 = W12Weight.from_bits(torch.from_numpy(bits.view(np.int16)).cuda(), max_escape_ratio=1.0)
    exact, viewed = (reference_gemm.weights(w12, view_only=v).double() for v in (False, True))
    return Weight(w12, exact, viewed)


def bf16_bits(values: npt.NDArray[np.float64]) -> Bits:
    return torch.from_numpy(values).bfloat16().view(torch.int16).numpy().view(np.uint16)


def poisoned(rows: int, cols: int) -> torch.Tensor:
    return torch.full((rows, cols), POISON, dtype=torch.int16, device="cuda").view(torch.bfloat16)


def inputs(rows: int, cols: int, *, seed: int = 5) -> torch.Tensor:
    """Normal x [rows, cols] whose rows are aligned; what lies between the rows is NaN."""
    values = torch.randn(rows, cols, generator=torch.Generator().manual_seed(seed)).bfloat16()
    wide = poisoned(rows, -(-cols // 8) * 8 + 8)
    return wide[:, :cols].copy_(values)


def multiply(weight: Weight, x: torch.Tensor, **options: object) -> torch.Tensor:
    """Run the kernel in a poisoned workspace and a poisoned output; check what it must leave."""
    scratch = gemm_mma.workspaces.of_current_stream(torch.cuda.current_device())
    scratch.partials.fill_(float("nan"))
    rows, outputs = x.shape[0], weight.w12.out_features
    guarded = poisoned(rows + 1, outputs + 3)
    y = guarded[:rows, :outputs]
    gemm_mma.gemm(x, weight.w12, options.pop("bias", None), y, **options)
    assert not scratch.arrivals.any()
    around = guarded.view(torch.int16)
    assert (around[rows:] == POISON).all()
    assert (around[:, outputs:] == POISON).all()
    return y


def bits_of(y: torch.Tensor) -> npt.NDArray[np.int16]:
    return y.contiguous().view(torch.int16).cpu().numpy()


def assert_accurate(
    y: torch.Tensor, x: torch.Tensor, exact: torch.Tensor, bias: torch.Tensor | None = None
) -> None:
    """Compare with float64, element by element and, on the whole, with cuBLAS's own error."""
    addend = 0 if bias is None else bias.double()
    expected = x.double() @ exact.T + addend
    magnitude = x.double().abs() @ exact.abs().T + (0 if bias is None else bias.double().abs())
    error = (y.double() - expected).abs()
    least = torch.finfo(torch.bfloat16).smallest_normal * HALF_ULP
    assert (error <= HALF_ULP * expected.abs() + SUMMATION * magnitude + least).all()

    def overall(values: torch.Tensor) -> float:
        relative = (values.double() - expected) / magnitude.clamp_min(least)
        return relative.square().mean().sqrt().item()

    rival = torch.nn.functional.linear(x, exact.bfloat16(), bias)
    bound = CUBLAS_RATIO * max(overall(rival), overall(expected.bfloat16()))
    assert overall(y) <= bound


def normal(rng: np.random.Generator, rows: int, cols: int) -> Bits:
    return bf16_bits(rng.standard_normal((rows, cols)) * 0.02)


SHAPES = {
    "one record": (128, 64),
    "less than a record": (5, 24),
    "one weight": (1, 1),
    "odd": (259, 1333),
    "one channel": (1, 6000),
    "one input": (700, 1),
    "a tile per CTA or less": (16384, 128),
    "tiles cut by CTAs": (5120, 6144),
    "few tiles, long": (256, 17408),
    "huge inputs": (40, 65536),
}


@cache
def _of_shape(rows: int, cols: int) -> Weight:
    return make_weight(normal(np.random.default_rng(1), rows, cols))


@pytest.mark.parametrize("rows", [1, 8, 9, 33, 64])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_every_shape_is_as_accurate_as_cublas(shape: tuple[int, int], rows: int) -> None:
    weight = _of_shape(*shape)
    x = inputs(rows, shape[1])
    assert_accurate(multiply(weight, x), x, weight.exact)


def _all_escapes(rng: np.random.Generator) -> Bits:
    """Half of each channel at the very bottom of its window, the other half zeros."""
    bits = np.full((140, 1000), 0x3F80, np.uint16)
    bits[:, ::2] = np.where(rng.random((140, 500)) < 0.5, 0, 0x8000)
    return bits


def _mixed_exponents(rng: np.random.Generator) -> Bits:
    """Any exponent beside any other; below 2^64, so that sums stay finite."""
    magnitudes = rng.integers(0, 191 << 7, (150, 520))
    return (magnitudes | rng.integers(0, 2, magnitudes.shape) << 15).astype(np.uint16)


def _window_ends(rng: np.random.Generator) -> Bits:
    """Channels at the lowest and highest windows, with weights at both ends and just outside."""
    bits = np.empty((160, 700), np.uint16)
    for channel, row in enumerate(bits):
        lo = (0, 1, 2, 60, 112, 160)[channel % 6]
        edge = rng.choice([lo, lo + 15, lo + 16, max(lo - 1, 0)], row.size, p=[0.4, 0.4, 0.1, 0.1])
        row[:] = edge << 7 | rng.integers(0, 128, row.size) | rng.integers(0, 2, row.size) << 15
    return bits


def _zero_and_denormal(rng: np.random.Generator) -> Bits:
    """Zero channels of both signs, denormal ones, denormals beside normals, sparse ones."""
    bits = normal(rng, 300, 777)
    bits[0::7] = 0
    bits[1::7] = 0x8000
    bits[2::7] = rng.integers(1, 128, bits[2::7].shape)
    bits[3::7, ::2] = rng.integers(0, 0x0200, bits[3::7, ::2].shape)
    bits[4::7][rng.random(bits[4::7].shape) < 0.97] = 0
    return bits


ADVERSARIAL: dict[str, Callable[[np.random.Generator], Bits]] = {
    "all escapes": _all_escapes,
    "mixed exponents": _mixed_exponents,
    "window ends": _window_ends,
    "zero and denormal": _zero_and_denormal,
}


@pytest.mark.parametrize("rows", [1, 16, 40, 64])
@pytest.mark.parametrize("content", ADVERSARIAL)
def test_adversarial_weights_are_exact(content: str, rows: int) -> None:
    weight = make_weight(ADVERSARIAL[content](np.random.default_rng(2)))
    assert weight.w12.escape_count > weight.exact.numel() // 50
    x = inputs(rows, weight.w12.in_features)
    assert_accurate(multiply(weight, x), x, weight.exact)


@pytest.mark.parametrize("rows", [1, 16, 40, 64])
@pytest.mark.parametrize("content", ["normal", *ADVERSARIAL])
def test_view_uses_midpoints_and_exact_escapes(content: str, rows: int) -> None:
    rng = np.random.default_rng(3)
    weight = make_weight(ADVERSARIAL.get(content, lambda r: normal(r, 390, 2000))(rng))
    x = inputs(rows, weight.w12.in_features)
    assert_accurate(multiply(weight, x, view_only=True), x, weight.viewed)


def test_an_infinite_or_nan_weight_reaches_its_channel_alone() -> None:
    bits = normal(np.random.default_rng(4), 130, 200)
    bits[7, 3], bits[9, 66], bits[129, 199] = 0x7F80, 0x7FC1, 0xFF80
    weight = make_weight(bits)
    x = inputs(20, 200)
    y = multiply(weight, x).float()
    assert torch.equal(y[:, 7], x[:, 3].float() * float("inf"))
    assert torch.equal(y[:, 129], x[:, 199].float() * float("-inf"))
    assert y[:, 9].isnan().all()
    rest = [c for c in range(130) if c not in (7, 9, 129)]
    assert_accurate(y[:, rest], x, weight.exact[rest])


def test_bias_is_added_before_rounding() -> None:
    weight = make_weight(normal(np.random.default_rng(5), 300, 640))
    x = inputs(11, 640)
    bias = torch.randn(300, generator=torch.Generator().manual_seed(1)).bfloat16().cuda()
    assert_accurate(multiply(weight, x, bias=bias), x, weight.exact, bias)


@pytest.mark.parametrize("shape", [(5120, 1024), (259, 1333)], ids=str)
@pytest.mark.parametrize("view_only", [False, True], ids=["full", "view"])
def test_a_row_has_the_same_bits_in_every_batch(shape: tuple[int, int], view_only: bool) -> None:
    bits = normal(np.random.default_rng(6), *shape)
    bits[:, 5] = 0
    weight = make_weight(bits)
    x = inputs(MAX_ROWS, shape[1])
    whole = bits_of(multiply(weight, x, view_only=view_only))
    for rows in range(1, MAX_ROWS):
        part = bits_of(multiply(weight, x[:rows], view_only=view_only))
        assert np.array_equal(part, whole[:rows]), rows
    last = bits_of(multiply(weight, x[-3:], view_only=view_only))
    assert np.array_equal(last, whole[-3:])


@pytest.mark.parametrize("dependent", [False, True], ids=["plain", "dependent"])
def test_many_launches_in_one_workspace_give_equal_bits(dependent: bool) -> None:
    """A chain of layers, each reading what the one before has just written."""
    rng = np.random.default_rng(7)
    up, down = make_weight(normal(rng, 3000, 512)), make_weight(normal(rng, 512, 3000))
    x = inputs(24, 512)
    expected = [bits_of(multiply(up, x))]
    hidden = torch.from_numpy(expected[0]).cuda().view(torch.bfloat16)
    expected.append(bits_of(multiply(down, hidden)))
    for _ in range(50):
        hidden, out = poisoned(24, 3000), poisoned(24, 512)
        gemm_mma.gemm(x, up.w12, None, hidden, dependent=dependent)
        gemm_mma.gemm(hidden, down.w12, None, out, dependent=dependent)
        assert np.array_equal(bits_of(hidden), expected[0])
        assert np.array_equal(bits_of(out), expected[1])


def test_a_captured_graph_reads_new_inputs() -> None:
    weight = make_weight(normal(np.random.default_rng(8), 640, 2048))
    gemm.warm(use=gemm_mma)
    x, y = inputs(8, 2048), poisoned(8, 640)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        gemm_mma.gemm(x, weight.w12, None, y)
    for seed in (1, 2, 3):
        x.copy_(inputs(8, 2048, seed=seed))
        y.fill_(float("nan"))
        graph.replay()
        assert np.array_equal(bits_of(y), bits_of(multiply(weight, x)))


def test_rows_that_are_not_aligned_are_copied() -> None:
    weight = make_weight(normal(np.random.default_rng(9), 100, 333))
    x = torch.randn(6, 333, device="cuda").bfloat16()
    assert_accurate(multiply(weight, x), x, weight.exact)
