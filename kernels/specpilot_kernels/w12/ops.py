"""The torch operators `specpilot::w12_linear` and `specpilot::w12_linear_view`.

Importing this module registers them. They take the tensors of a `W12Weight` instead of the
object, so that `torch.compile`, fake tensors and CUDA graphs see plain operators. Both are for
inference: no gradient goes through them.
"""

from __future__ import annotations

from functools import cache

import torch

from specpilot_kernels.w12 import gemm, plans, prefill
from specpilot_kernels.w12.device import DeviceW12
from specpilot_kernels.w12.weight import W12Weight

_SCHEMAS = (
    "w12_linear(Tensor x, Tensor[] weight, Tensor? bias, int out_features, Tensor? copy=None, "
    "int copy_above=0, bool dependent=True) -> Tensor",
    "w12_linear_view(Tensor x, Tensor[] weight, Tensor? bias, int out_features, "
    "bool dependent=True) -> Tensor",
)

_library = torch.library.Library("specpilot", "FRAGMENT")
for _schema in _SCHEMAS:
    _library.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))


def tensors_of(weight: W12Weight) -> list[torch.Tensor]:
    """The operators' `weight` argument."""
    stored = weight.encoded
    return [
        weight.scale, weight.escape_ptr, weight.escapes, stored.records, stored.window,
        stored.escape_ptr, stored.escape_col, stored.escape_bits,
    ]  # fmt: skip


def weight_of(tensors: list[torch.Tensor], out_features: int, in_features: int) -> W12Weight:
    """Undo `tensors_of`; ValueError for another number of tensors."""
    scale, escape_ptr, escapes, *stored = tensors
    return W12Weight(DeviceW12((out_features, in_features), *stored), scale, escape_ptr, escapes)


def _w12_linear(
    x: torch.Tensor,
    weight: list[torch.Tensor],
    bias: torch.Tensor | None,
    out_features: int,
    copy: torch.Tensor | None = None,
    copy_above: int = 0,
    dependent: bool = True,
) -> torch.Tensor:
    form = weight_of(weight, out_features, x.shape[-1])
    gemm.check(x, form, bias)
    rows = x.numel() // x.shape[-1]
    if copy is not None and rows > copy_above:
        return torch.nn.functional.linear(x, copy, bias)
    flat = x.reshape(rows, x.shape[-1])
    out = x.new_empty((*x.shape[:-1], out_features))
    target = out.view(rows, out_features)
    if rows <= gemm.MAX_ROWS:
        gemm.gemm(flat, form, bias, out=target, dependent=dependent)
        return out
    plan = plans.plan_for(_gpu_name(x.device.index), out_features, x.shape[-1])
    if rows <= plan.passes_rows:
        prefill.in_passes(flat, form, bias, target, dependent=dependent)
    else:
        prefill.by_decoding(flat, form, bias, target)
    return out


def _w12_linear_view(
    x: torch.Tensor,
    weight: list[torch.Tensor],
    bias: torch.Tensor | None,
    out_features: int,
    dependent: bool = True,
) -> torch.Tensor:
    form = weight_of(weight, out_features, x.shape[-1])
    gemm.check(x, form, bias)
    rows = x.numel() // x.shape[-1]
    flat = x.reshape(rows, x.shape[-1])
    out = x.new_empty((*x.shape[:-1], out_features))
    target = out.view(rows, out_features)
    for begin in range(0, rows, gemm.MAX_ROWS):
        part = slice(begin, begin + gemm.MAX_ROWS)
        gemm.gemm(flat[part], form, bias, out=target[part], view_only=True, dependent=dependent)
    return out


def _fake(
    x: torch.Tensor, weight: list[torch.Tensor], bias: torch.Tensor | None, out_features: int,
    *args: object, **kwargs: object,
) -> torch.Tensor:  # fmt: skip
    """What both operators return, without its values."""
    return x.new_empty((*x.shape[:-1], out_features))


@cache
def _gpu_name(device: int) -> str:
    return torch.cuda.get_device_name(device)


for _name, _function in (("w12_linear", _w12_linear), ("w12_linear_view", _w12_linear_view)):
    # One function for every device: `gemm.check` refuses what is not on a GPU, in plain words.
    _library.impl(_name, _function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"specpilot::{_name}", _fake, lib=_library)
