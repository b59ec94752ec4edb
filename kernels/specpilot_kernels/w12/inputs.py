"""Activations as the GEMM kernels read them."""

from __future__ import annotations

import torch

_ALIGNMENT = 8
"""Elements in 16 bytes, the least that the kernels copy."""


def readable(x: torch.Tensor) -> bool:
    """Whether the rows of x [rows, cols] are contiguous, 16-byte aligned and do not overlap."""
    rows, cols = x.shape
    pitch = x.stride(0)
    apart = rows == 1 or (pitch % _ALIGNMENT == 0 and pitch >= cols)
    return apart and x.data_ptr() % 16 == 0 and (cols == 1 or x.stride(1) == 1)


def aligned(x: torch.Tensor) -> torch.Tensor:
    """Return x [rows, cols] if it is readable, else a copy that is."""
    if readable(x):
        return x
    rows, cols = x.shape
    room = torch.empty((rows, padded(cols)), dtype=x.dtype, device=x.device)
    return room[:, :cols].copy_(x)


def padded(cols: int) -> int:
    """The least distance of aligned rows of so many columns."""
    return -(-cols // _ALIGNMENT) * _ALIGNMENT
