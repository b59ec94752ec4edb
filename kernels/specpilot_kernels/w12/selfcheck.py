"""Is the W12 product right on this GPU, and how fast is it? For `doctor`, tuning and tests.

Times are medians over replays of CUDA graphs that work through several copies of the weights,
together larger than L2 by far, W12 and cuBLAS in turns.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch

from specpilot_kernels.timing import Work, in_turns
from specpilot_kernels.w12 import gemm
from specpilot_kernels.w12.shapes import Shape
from specpilot_kernels.w12.weight import W12Weight

RELATIVE_TO_CUBLAS = 1.1
"""How much larger than cuBLAS's own the error against FP64 may be, over a whole result."""

# Element by element: half a step of bfloat16, and what float32 sums may lose. The tensor cores
# truncate after every step, which costs some multiple of 2^-24 of the sum of magnitudes.
_PER_BLOCK = 2.0**-24
_LEAST_SUM_ERROR = 2.0**-19
_LEAST_HALF_STEP = 2.0**-134

_COLD_BYTES = 600 << 20
_JUDGED_CHANNELS = 8192


@dataclass(frozen=True, slots=True)
class Speed:
    """Time of one product of a shape, cold L2, chained with dependent launch.

    ratio: cuBLAS's time with BF16 weights / W12's.
    """

    rows: int
    w12_s: float
    cublas_s: float

    @property
    def ratio(self) -> float:
        """How many times faster than cuBLAS."""
        return self.cublas_s / self.w12_s


@dataclass(frozen=True, slots=True)
class Finding:
    """What `examine` found for one shape. errors: what is wrong, in words; empty if nothing."""

    shape: Shape
    errors: tuple[str, ...]
    speeds: tuple[Speed, ...]


def normal_weights(shape: Shape, *, seed: int = 1, std: float = 0.02) -> torch.Tensor:
    """N(0, std) as bfloat16 [out, in] on the current GPU."""
    generator = torch.Generator(device="cuda").manual_seed(seed)
    weights = torch.empty(shape, dtype=torch.bfloat16, device="cuda")
    return weights.normal_(0.0, std, generator=generator)


def examine(shape: Shape, rows: tuple[int, ...] = (1, 8, 32, 64), *, replays: int = 5) -> Finding:
    """Check one shape and time it at each of `rows`; needs `needed_bytes` of device memory.

    Errors are wrong weights after encoding, results that are not as exact as `wrong_elements`
    and cuBLAS ask for, and rows that depend on other rows. Errors as in `gemm.gemm`.
    """
    weights = normal_weights(shape)
    weight = W12Weight.from_bits(weights)
    errors = []
    if not torch.equal(weight.to_bf16().view(torch.int16), weights.view(torch.int16)):
        errors.append("the encoded weights are not the original ones")
    x = torch.empty((max(rows), shape[1]), dtype=torch.bfloat16, device="cuda").normal_()
    singly = gemm.gemm(x[:1], weight)
    for count in rows:
        out = torch.full((count, shape[0]), torch.nan, dtype=torch.bfloat16, device="cuda")
        gemm.gemm(x[:count], weight, out=out)
        wrong = wrong_elements(out, x[:count], weights)
        if wrong:
            errors.append(f"{wrong} results of {out.numel()} are wrong at {count} rows")
        if not torch.equal(out[:1].view(torch.int16), singly.view(torch.int16)):
            errors.append(f"a row's result differs at {count} rows")
    copies = cold_copies(weights.nbytes)
    speeds = speed(weight, weights, x, rows, copies=copies, replays=replays)
    return Finding(shape, tuple(errors), speeds)


def wrong_elements(
    actual: torch.Tensor,
    x: torch.Tensor,
    weights: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    channels: int = _JUDGED_CHANNELS,
) -> int:
    """Count the elements of `actual` [rows, out] that are not x @ weights.T + bias, rounded.

    x [rows, in]; weights [out, in], exact, of any floating dtype. Judged against FP64, element by
    element: one rounding to bfloat16 and what float32 sums may lose. Not finite where FP64 is
    not. Works through `channels` channels at a time.
    """
    wide_x, wrong = x.double(), 0
    for begin in range(0, weights.shape[0], channels):
        part = slice(begin, begin + channels)
        wide = weights[part].double()
        expected, magnitude = wide_x @ wide.T, wide_x.abs() @ wide.abs().T
        if bias is not None:
            expected += bias[part].double()
            magnitude += bias[part].double().abs()
        wrong += int(_wrong(actual[:, part], expected, magnitude, weights.shape[1]).sum().item())
    return wrong


def _wrong(
    actual: torch.Tensor, expected: torch.Tensor, magnitude: torch.Tensor, products: int
) -> torch.Tensor:
    sum_error = max(_LEAST_SUM_ERROR, -(-products // 64) * _PER_BLOCK)
    exponent = torch.frexp(expected.abs() + sum_error * magnitude).exponent
    half_step = torch.exp2((exponent - 9).double()).clamp(min=_LEAST_HALF_STEP)
    allowed = 1.001 * half_step + sum_error * magnitude
    rounded = expected.bfloat16()  # what is too large for bfloat16 becomes infinite
    near = (actual.double() - expected).abs() <= allowed
    same = (actual == rounded) | (actual.isnan() & rounded.isnan())
    return ~torch.where(rounded.isfinite(), near, same)


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """|actual - expected| / |expected| in the Frobenius norm; 0 if both are zero."""
    difference = (actual.double() - expected.double()).norm().item()
    size = expected.double().norm().item()
    return difference / size if size else difference


def needed_bytes(shape: Shape) -> int:
    """Device memory that `examine` takes for a shape, about."""
    out_features, in_features = shape
    weights = 2 * out_features * in_features
    judged = 3 * 8 * min(out_features, _JUDGED_CHANNELS) * in_features
    return (cold_copies(weights) + 1) * weights * 7 // 4 + judged + (512 << 20)


def free_bytes() -> int:
    """Device memory that is free, or kept by torch without use."""
    free, _ = torch.cuda.mem_get_info()
    return free + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()


def cold_copies(n_bytes: int) -> int:
    """How many copies of `n_bytes` L2 cannot hold; at least three."""
    return max(3, -(-_COLD_BYTES // n_bytes))


def speed(
    weight: W12Weight,
    weights: torch.Tensor,
    x: torch.Tensor,
    rows: tuple[int, ...],
    *,
    copies: int,
    replays: int = 9,
) -> tuple[Speed, ...]:
    """Time W12 against cuBLAS at each of `rows`, on `copies` of the weights."""
    several = [copy_of(weight) for _ in range(copies)]
    plain = [weights.clone() for _ in range(copies)]
    gemm.warm(weights.device)
    found = []
    for count in rows:
        some = x[:count]
        works: dict[str, list[Work]] = {
            "w12": [partial(gemm.gemm, some, one) for one in several],
            "cublas": [partial(torch.nn.functional.linear, some, one) for one in plain],
        }
        times = in_turns(works, replays)
        found.append(Speed(count, times["w12"], times["cublas"]))
    return tuple(found)


def copy_of(weight: W12Weight) -> W12Weight:
    """The same weight with records of its own, so that both are read from device memory."""
    stored = weight.encoded
    parts = type(stored)(
        stored.shape, stored.records.clone(), stored.window, stored.escape_ptr,
        stored.escape_col, stored.escape_bits,
    )  # fmt: skip
    return W12Weight(parts, weight.scale, weight.escape_ptr, weight.escapes.clone())
