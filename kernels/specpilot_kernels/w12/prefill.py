"""The W12 product for more rows than the GEMM takes.

Up to a crossover the GEMM runs several times, reading 12 bits per weight each time. Above it, the
matrix is decoded stripe by stripe to a scratch of bounded size, and cuBLAS multiplies each stripe;
a stripe is small enough to be read back from L2.
"""

from __future__ import annotations

import torch

from specpilot_kernels.w12 import device, gemm, layout
from specpilot_kernels.w12.weight import W12Weight

SCRATCH_BYTES = 32 << 20
"""Most bytes of a decoded stripe, unless 128 channels alone are more."""


def in_passes(
    x: torch.Tensor,
    weight: W12Weight,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    *,
    dependent: bool = True,
) -> None:
    """Write x [rows, in_features] times the weight to `out`, 64 rows at a time."""
    for begin in range(0, x.shape[0], gemm.MAX_ROWS):
        rows = slice(begin, begin + gemm.MAX_ROWS)
        gemm.gemm(x[rows], weight, bias, out=out[rows], dependent=dependent)


def by_decoding(
    x: torch.Tensor, weight: W12Weight, bias: torch.Tensor | None, out: torch.Tensor
) -> None:
    """Write x [rows, in_features] times the weight to `out` with cuBLAS, stripe by stripe."""
    out_features, in_features = weight.shape
    height = stripe_channels(in_features)
    scratch = torch.empty((min(height, out_features), in_features), dtype=x.dtype, device=x.device)
    for begin in range(0, out_features, height):
        end = min(begin + height, out_features)
        stripe = device.decode(weight.stripe(begin, end), scratch[: end - begin])
        target = out[:, begin:end]
        if bias is None:
            torch.mm(x, stripe.T, out=target)
        else:
            torch.addmm(bias[begin:end], x, stripe.T, out=target)


def stripe_channels(in_features: int) -> int:
    """Channels per stripe: whole records, at least one row of them."""
    fitting = SCRATCH_BYTES // (2 * in_features)
    return max(1, fitting // layout.RECORD_ROWS) * layout.RECORD_ROWS
