"""Verify all rows of draft trees in one Gated DeltaNet layer, without a state per row (paper §4.2).

    record = ReplayRecord.allocate(shape, requests, rows, "cuda")     # once per layer
    out = gdn_tree_verify(mixed, a, b, weights, state_pool, conv_pool, slot, trees, record)
    ...                                                               # all layers, then acceptance
    commit(slot, path, n_accepted)                                    # `commit.GdnCommit`

Nothing but the record is written: states and windows stay the committed ones until the commit.
"""

from __future__ import annotations

from functools import partial
from typing import Literal

import torch
from torch import Tensor

from specpilot_kernels.tree_verify import checks, conv, gdn_reference, modules
from specpilot_kernels.tree_verify import path as path_kernel
from specpilot_kernels.tree_verify import wy as wy_kernel
from specpilot_kernels.tree_verify.conv import LayerWeights
from specpilot_kernels.tree_verify.records import (
    UNUSED_PARENT,
    GdnShape,
    ReplayRecord,
    Trees,
)

Method = Literal["auto", "wy", "path"]

MAX_WY_ROWS = max(modules.WY_ROWS)
MAX_ROWS = modules.MAX_ROWS


def gdn_tree_verify(
    mixed: Tensor,
    a: Tensor,
    b: Tensor,
    weights: LayerWeights,
    state_pool: Tensor,
    conv_pool: Tensor,
    slot: Tensor,
    trees: Trees,
    record: ReplayRecord,
    *,
    method: Method = "auto",
    out: Tensor | None = None,
    form: modules.Form = modules.WY_FORM,
    dependent: bool = False,
) -> Tensor:
    """Return bfloat16 [requests * R, Hv, V], the outputs of all rows before norm and gate.

    mixed: bfloat16 [requests * R, C], queries, keys and values before the convolution.
    a, b: bfloat16 [requests * R, Hv], inputs of decay and write strength.
    state_pool: float32 [slots, Hv, V, K]; conv_pool: bfloat16 [slots, C, 3], oldest first.
    slot: int64 [requests]; a request whose slot is outside the pool gets zeros.
    trees: parents and taps of this step; rows that no node has get zeros.
    record: filled for the commit.
    method: "path" walks every root path with the bits the stock recurrence gives a chain; "wy"
        solves all paths at once, at most 72 rows, and differs by rounding alone; "auto" is "wy"
        where it can, else "path".
    form, dependent: of the kernels on a GPU, see `wy.wy`.

    CPU tensors run the reference. ValueError for tensors that do not fit; on a GPU also what
    compiling and loading raise, see `launch.prepare`; call `warm` before a graph is captured.
    """
    shape = checks.shape_of(state_pool, conv_pool)
    small = (weights.conv_bias, weights.a_log, weights.dt_bias)
    checks.check_layer(weights.conv_weight, *small, shape)
    requests, rows = checks.check_rows(mixed, a, b, slot, trees, record, shape)
    chosen = _method(method, rows)
    if out is None:
        out = mixed.new_empty((requests * rows, shape.value_heads, shape.value_dim))
    if requests == 0:
        return out
    inputs = (mixed, a, b, weights, conv_pool, slot, trees, record, shape)
    if not mixed.is_cuda:
        return out.copy_(_on_host(*inputs, state_pool, chosen))
    checks.check_kernel(shape, mixed, state_pool, others=(weights.conv_weight, out))
    kernel = path_kernel.path if chosen == "path" else partial(wy_kernel.wy, form=form)
    with torch.cuda.device(mixed.device):
        queries = conv.prepare_rows(*inputs, dependent=dependent)
        kernel(queries, record, state_pool, slot, trees, out, shape, dependent=dependent)
    return out


def warm(shape: GdnShape, rows: int, device: int, *, form: modules.Form = modules.WY_FORM) -> None:
    """Compile and load what trees of `rows` rows need, so that verify may be captured."""
    conv.warm(shape.key_dim, device)
    path_kernel.warm(shape.key_dim, device)
    if rows <= MAX_WY_ROWS:
        wy_kernel.warm(shape.key_dim, rows, device, form)


def _method(method: Method, rows: int) -> Literal["wy", "path"]:
    if rows > MAX_ROWS or rows < 1:
        raise ValueError(f"trees must have 1 to {MAX_ROWS} rows, not {rows}")
    if method == "wy" and rows > MAX_WY_ROWS:
        raise ValueError(f"WY verify takes at most {MAX_WY_ROWS} rows, not {rows}")
    if method not in ("auto", "wy", "path"):
        raise ValueError(f'method must be "auto", "wy" or "path", not {method!r}')
    if method == "auto":
        return "wy" if rows <= MAX_WY_ROWS else "path"
    return method


def _on_host(
    mixed: Tensor, a: Tensor, b: Tensor, weights: LayerWeights, conv_pool: Tensor, slot: Tensor,
    trees: Trees, record: ReplayRecord, shape: GdnShape, state_pool: Tensor,
    method: Literal["wy", "path"],
) -> Tensor:  # fmt: skip
    """The reference, in float32; fills the record as the kernels do."""
    requests, rows = trees.parent.shape
    served = (slot >= 0) & (slot < state_pool.shape[0])
    parent = torch.where(served[:, None], trees.parent, UNUSED_PARENT)
    used = (parent != UNUSED_PARENT).unsqueeze(-1)
    place = slot.clamp(0, state_pool.shape[0] - 1)
    mixed, a, b = (x.view(requests, rows, -1) for x in (mixed, a, b))
    convolved = gdn_reference.convolve(
        mixed, weights.conv_weight, weights.conv_bias, conv_pool[place], trees.tap
    )
    g, beta = gdn_reference.gates(a, b, weights.a_log, weights.dt_bias)
    convolved, g, beta = (torch.where(used, x, 0) for x in (convolved, g, beta))
    keys = convolved[..., shape.keys : 2 * shape.keys].float()
    own = slice(0, requests)
    record.kv[own], record.mixed[own] = convolved[..., shape.keys :], mixed
    record.g[own], record.beta[own] = g, beta
    record.k_scale[own] = torch.where(used, gdn_reference.inverse_norms(keys, shape), 0)
    x = gdn_reference.prepare(convolved, g, beta, shape, parent)
    form = gdn_reference.wy if method == "wy" else gdn_reference.path
    return form(x, state_pool[place], parent).transpose(1, 2).flatten(0, 1)
