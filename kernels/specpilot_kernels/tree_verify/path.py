"""Launch of `csrc/path.cu`: every root path walked with the stock recurrence's bits."""

from __future__ import annotations

from torch import Tensor

from specpilot_kernels import launch
from specpilot_kernels.tree_verify import modules
from specpilot_kernels.tree_verify.conv import Queries
from specpilot_kernels.tree_verify.records import GdnShape, ReplayRecord, Trees
from specpilot_kernels.tree_verify.wy import pack


def path(
    queries: Queries,
    record: ReplayRecord,
    state_pool: Tensor,
    slot: Tensor,
    trees: Trees,
    out: Tensor,
    shape: GdnShape,
    *,
    dependent: bool = False,
) -> None:
    """Write `out` bfloat16 [requests * R, Hv, V]; tensors as `checks` has found them good."""
    requests, rows = trees.parent.shape
    blocks = shape.value_dim // modules.WALK_COLUMNS[shape.value_dim]
    _launcher(shape.key_dim, out.device.index, dependent)(
        (blocks * shape.value_heads, rows, requests),
        pack(queries, record, state_pool, slot, trees, out, shape),
    )


def warm(dim: int, device: int) -> None:
    """Compile and load the kernel for heads of `dim`."""
    for dependent in (False, True):
        _launcher(dim, device, dependent)


def _launcher(dim: int, device: int, dependent: bool) -> launch.Launcher:
    return launch.prepare(
        modules.path(dim), "gdn_path", block=(modules.WALK_THREADS, 1, 1), device=device,
        options=launch.Options(dependent=dependent, carveout=modules.CARVEOUT),
    )  # fmt: skip
