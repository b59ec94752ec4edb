"""The readable definition of the W12 product, in torch operations on any device; slow.

`weights` reads a `W12Weight` the way the kernels do: records to a fixed exponent base, one scale
per channel, then the list of escapes. `linear` multiplies in a precision of choice. Kernels
accumulate in float32 and round once, so they come as close to `linear` as cuBLAS does.
"""

from __future__ import annotations

import torch

from specpilot_kernels.w12 import layout, reference
from specpilot_kernels.w12 import weight as form
from specpilot_kernels.w12.weight import W12Weight

_VIEW_MIDPOINT = 8
"""The view drops mantissa bits m3..m0; the view pass puts their midpoint there."""


def weights(weight: W12Weight, *, view_only: bool = False) -> torch.Tensor:
    """Return what each weight is worth, float32 [out_features, in_features], exact.

    view_only: as the view pass takes them: weights in their window with the last four mantissa
        bits 1000, escapes exact.
    """
    tiles, blocks, _ = weight.records.shape
    at_view, at_low, low_shift = (
        torch.from_numpy(table.astype("int64")).to(weight.device) for table in reference.bit_order()
    )
    view = weight.records[:, :, at_view].to(torch.int32)  # [tiles, blocks, 128 * 64]
    low = weight.records[:, :, at_low].to(torch.int32) >> low_shift.to(torch.int32) & 0xF
    if view_only:
        low = torch.full_like(low, _VIEW_MIDPOINT)
    patterns = ((view & 0x87) | 0x38) << 8 | view << 1 & 0xF0 | low
    values = (patterns << 16).view(torch.float32)
    values = values.view(tiles, blocks, layout.RECORD_ROWS, layout.RECORD_COLS).transpose(1, 2)
    by_channel = values.reshape(tiles * layout.RECORD_ROWS, blocks * layout.RECORD_COLS)
    by_channel = by_channel * weight.scale[:, None]
    _put_escapes(weight, by_channel)
    rows, cols = weight.shape
    return by_channel[:rows, :cols].contiguous()


def linear(
    x: torch.Tensor,
    weight: W12Weight,
    bias: torch.Tensor | None = None,
    *,
    view_only: bool = False,
    dtype: torch.dtype = torch.float64,
) -> torch.Tensor:
    """Return x [..., in_features] times the weights plus bias [out_features], in `dtype`."""
    product = x.to(dtype) @ weights(weight, view_only=view_only).to(dtype).T
    return product if bias is None else product + bias.to(dtype)


def _put_escapes(weight: W12Weight, by_channel: torch.Tensor) -> None:
    """Replace the places of escapes in `by_channel` [tiles x 128, blocks x 64]."""
    blocks = weight.records.shape[1]
    counts = weight.escape_ptr.diff().to(torch.int64)
    units = torch.arange(counts.numel(), device=weight.device)
    unit = torch.repeat_interleave(units, counts)
    words = weight.escapes[: unit.numel()]
    row = unit // blocks * layout.RECORD_ROWS + (words >> form.CHANNEL_SHIFT & 127)
    column = unit % blocks * layout.RECORD_COLS + (words >> form.COLUMN_SHIFT & 63)
    patterns = words >> form.PATTERN_SHIFT & 0xFFFF
    by_channel[row, column] = (patterns.to(torch.int32) << 16).view(torch.float32)
