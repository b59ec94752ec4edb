"""Launch of `csrc/rows.cu`: convolution, norms and gates of all rows, and the record's contents."""

from __future__ import annotations

import struct
from dataclasses import dataclass

import torch
from torch import Tensor

from specpilot_kernels import launch
from specpilot_kernels.tree_verify import modules
from specpilot_kernels.tree_verify.records import GdnShape, ReplayRecord, Trees

_pack = struct.Struct(modules.ROWS_PARAMS).pack


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """A layer's own parameters.

    conv_weight bfloat16 [C, 4], oldest tap first; conv_bias bfloat16 [C] or None; a_log float32
    [Hv]; dt_bias float32 or bfloat16 [Hv].
    """

    conv_weight: Tensor
    conv_bias: Tensor | None
    a_log: Tensor
    dt_bias: Tensor


@dataclass(frozen=True, slots=True)
class Queries:
    """q bfloat16 [requests * R, keys] after the convolution; scale float32 [.., Hk], 1 / |q|."""

    q: Tensor
    scale: Tensor


def prepare_rows(
    mixed: Tensor,
    a: Tensor,
    b: Tensor,
    weights: LayerWeights,
    conv_pool: Tensor,
    slot: Tensor,
    trees: Trees,
    record: ReplayRecord,
    shape: GdnShape,
    *,
    rows_per_block: int = modules.ROWS_PER_BLOCK,
    dependent: bool = False,
) -> Queries:
    """Fill `record` and return the queries; tensors as `checks` has found them good."""
    requests, rows = trees.parent.shape
    total = requests * rows
    q = mixed.new_empty((total, shape.keys))
    scale = record.k_scale.new_empty((total, shape.key_heads))
    kept = record.mixed.data_ptr()
    bias = weights.conv_bias
    conv_blocks = -(-shape.channels // (4 * modules.ROWS_THREADS))
    grid = (conv_blocks + 1, -(-rows // rows_per_block), requests)
    _launcher(shape.key_dim, rows_per_block, mixed.device.index, dependent)(
        grid,
        _pack(
            mixed.data_ptr(), a.data_ptr(), b.data_ptr(), weights.conv_weight.data_ptr(),
            0 if bias is None else bias.data_ptr(), weights.a_log.data_ptr(),
            weights.dt_bias.data_ptr(), conv_pool.data_ptr(), slot.data_ptr(),
            trees.parent.data_ptr(), trees.tap.data_ptr(), q.data_ptr(), record.kv.data_ptr(),
            0 if kept == mixed.data_ptr() else kept, scale.data_ptr(), record.k_scale.data_ptr(),
            record.g.data_ptr(), record.beta.data_ptr(),
            mixed.stride(0), a.stride(0), b.stride(0), *conv_pool.stride(),
            rows, shape.key_heads, shape.value_heads, shape.channels, conv_pool.shape[0],
            int(weights.dt_bias.dtype == torch.bfloat16), conv_blocks,
        ),
    )  # fmt: skip
    return Queries(q, scale)


def warm(dim: int, device: int) -> None:
    """Compile and load the kernel for heads of `dim`."""
    for dependent in (False, True):
        _launcher(dim, modules.ROWS_PER_BLOCK, device, dependent)


def _launcher(dim: int, rows_per_block: int, device: int, dependent: bool) -> launch.Launcher:
    return launch.prepare(
        modules.rows(dim, rows_per_block), "gdn_rows", block=(modules.ROWS_THREADS, 1, 1),
        device=device,
        options=launch.Options(dependent=dependent, carveout=modules.CARVEOUT),
    )  # fmt: skip
