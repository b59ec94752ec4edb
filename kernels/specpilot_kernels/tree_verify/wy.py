"""Launch of `csrc/wy.cu` or `csrc/wy_direct.cu`: all root paths at once on tensor cores."""

from __future__ import annotations

import struct

from torch import Tensor

from specpilot_kernels import launch
from specpilot_kernels.tree_verify import modules
from specpilot_kernels.tree_verify.conv import Queries
from specpilot_kernels.tree_verify.records import GdnShape, ReplayRecord, Trees

_pack = struct.Struct(modules.VERIFY_PARAMS).pack


def wy(
    queries: Queries,
    record: ReplayRecord,
    state_pool: Tensor,
    slot: Tensor,
    trees: Trees,
    out: Tensor,
    shape: GdnShape,
    *,
    form: modules.Form = modules.WY_FORM,
    dependent: bool = False,
) -> None:
    """Write `out` bfloat16 [requests * R, Hv, V], at most 72 rows; tensors as `checks` has them.

    form: "solve" (csrc/wy.cu) or "direct" (csrc/wy_direct.cu), which their sources explain.
    dependent: start before `conv.prepare_rows`, the kernel ahead on the stream, ends. No other
        kernel may stand between, as "direct" reads states, slots and parents while that one runs.
    """
    requests, rows = trees.parent.shape
    slices = shape.value_dim // modules.WY_SLICE
    _launcher(shape.key_dim, variant(rows), form, out.device.index, dependent)(
        (slices * shape.value_heads, requests, 1),
        pack(queries, record, state_pool, slot, trees, out, shape),
    )


def variant(rows: int) -> int:
    """The least variant that takes `rows` rows."""
    return next(size for size in modules.WY_ROWS if size >= rows)


def pack(
    queries: Queries, record: ReplayRecord, state_pool: Tensor, slot: Tensor, trees: Trees,
    out: Tensor, shape: GdnShape,
) -> bytes:  # fmt: skip
    """`struct Params` of WY and path verify, which read the same."""
    return _pack(
        queries.q.data_ptr(), queries.scale.data_ptr(), record.kv.data_ptr(),
        record.k_scale.data_ptr(), record.g.data_ptr(), record.beta.data_ptr(),
        state_pool.data_ptr(), slot.data_ptr(), trees.parent.data_ptr(), out.data_ptr(),
        state_pool.stride(0), shape.key_dim**-0.5, trees.parent.shape[1], shape.key_heads,
        shape.value_heads, state_pool.shape[0],
    )  # fmt: skip


def warm(dim: int, rows: int, device: int, form: modules.Form = modules.WY_FORM) -> None:
    """Compile and load the kernel for heads of `dim` and trees of `rows` rows."""
    for dependent in (False, True):
        _launcher(dim, variant(rows), form, device, dependent)


def _launcher(
    dim: int, rows: int, form: modules.Form, device: int, dependent: bool
) -> launch.Launcher:
    options = launch.Options(
        shared_bytes=modules.wy_shared_bytes(rows, dim, form),
        dependent=dependent,
        carveout=modules.CARVEOUT,
    )
    return launch.prepare(
        modules.wy(dim, rows, form), "gdn_wy", block=(modules.wy_threads(rows, form), 1, 1),
        device=device, options=options,
    )  # fmt: skip
