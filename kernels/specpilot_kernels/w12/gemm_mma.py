"""Launch the portable W12 GEMM (`csrc/gemm_mma.cu`): y = x @ weight.T (+ bias), 1 to 64 rows.

    workspace = allocate_workspace(device, weight)        # once; serves one stream at a time
    launch_mma(weight, x, y, workspace=workspace)

The launch never synchronises and may be captured in a CUDA graph once `warm_mma` has run. The
result is the same bits from run to run, and a row's result does not depend on the other rows.
Weights are exact, escapes included; sums are float32 in the tensor cores' order.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Final, Protocol

import torch

from specpilot_kernels import launch
from specpilot_kernels.w12 import layout, modules

MAX_ROWS: Final = max(modules.GEMM_MMA_COLS)

_MOST_SEGMENTS: Final = 8
"""CTAs that may share one tile: each leaves partial sums, which one CTA must read again."""

_JOIN_UNITS: Final = 3
"""What leaving and adding up partial sums costs, in units of streaming; an estimate."""


class GemmWeight(Protocol):
    """What the GEMM kernels read of one weight matrix [out_features, in_features], on one GPU.

    With tiles = ceil(out / 128), blocks = ceil(in / 64) and units = tiles x blocks, unit t * blocks
    + b being record [t, b]:

    records: uint8 [tiles, blocks, 12288], layout 1, 16-byte aligned.
    scale: float32 [tiles * 128], 2^(lo - 112) for a channel with window lo; 0 where lo is 0 and
        beyond out_features.
    escape_ptr: int32 [units + 1]; unit u owns escapes ptr[u] .. ptr[u + 1].
    escapes: int64, by unit, channel, column; fields as in `Escape` of `csrc/gemm.cuh`. Channels
        with lo = 0 have all their weights but zeros here.
    """

    @property
    def records(self) -> torch.Tensor: ...
    @property
    def scale(self) -> torch.Tensor: ...
    @property
    def escape_ptr(self) -> torch.Tensor: ...
    @property
    def escapes(self) -> torch.Tensor: ...
    @property
    def out_features(self) -> int: ...
    @property
    def in_features(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Workspace:
    """Scratch memory of launches that follow each other on a stream.

    partials: float32 [CTAs * 2 * 128 * MAX_ROWS], in any state.
    arrivals: int32 [tiles], zero; every launch leaves it zero.
    """

    partials: torch.Tensor
    arrivals: torch.Tensor


def allocate_workspace(device: torch.device | int, *weights: GemmWeight) -> Workspace:
    """Make a workspace that is large enough for any of `weights`."""
    tiles = max((weight.records.shape[0] for weight in weights), default=0)
    partials = 2 * _multiprocessors(torch.device(device).index or 0) * _partial_floats(MAX_ROWS)
    return Workspace(
        torch.empty(partials, dtype=torch.float32, device=device),
        torch.zeros(tiles, dtype=torch.int32, device=device),
    )


def warm_mma(device: int, *, view_only: bool = False) -> None:
    """Compile and load the kernels for every number of rows; errors as in `launch.prepare`."""
    for cols in modules.GEMM_MMA_COLS:
        for dependent in (False, True):
            _launcher(device, cols, view_only, dependent)


def launch_mma(
    weight: GemmWeight,
    x: torch.Tensor,
    y: torch.Tensor,
    *,
    workspace: Workspace,
    bias: torch.Tensor | None = None,
    view_only: bool = False,
    dependent: bool = False,
) -> None:
    """Write x @ weight.T + bias to `y` on torch's current stream of x's device.

    x: bfloat16 [rows, in_features], 1 <= rows <= MAX_ROWS, columns adjacent, every row 16-byte
        aligned (`aligned_rows` copies one that is not).
    y: bfloat16 [rows, out_features], columns adjacent; nothing beyond it is written.
    bias: bfloat16 [out_features], contiguous, or None.
    view_only: use only the 8-bit view of each record, dropped mantissa bits at their midpoint;
        escapes stay exact.
    dependent: programmatic dependent launch (see `launch.Options`), the first weights travel
        while the kernel ahead still runs; without effect on GPUs before sm_90.

    ValueError for tensors that do not fit each other, the kernel or the workspace.
    """
    rows = x.shape[0]
    _check(weight, x, y, bias)
    tiles, blocks = weight.records.shape[:2]
    device = x.device.index
    workers = split(tiles, blocks, _multiprocessors(device))
    cols = next(cols for cols in modules.GEMM_MMA_COLS if rows <= cols)
    _check_workspace(workspace, tiles, 2 * workers * _partial_floats(cols))
    params = modules.GEMM_MMA_PARAMS.pack(
        weight.records.data_ptr(), weight.scale.data_ptr(), weight.escape_ptr.data_ptr(),
        weight.escapes.data_ptr(), x.data_ptr(), 0 if bias is None else bias.data_ptr(),
        y.data_ptr(), workspace.partials.data_ptr(), workspace.arrivals.data_ptr(),
        x.stride(0), y.stride(0), rows, weight.in_features, weight.out_features, blocks,
        *divmod(tiles * blocks, workers),
    )  # fmt: skip
    _launcher(device, cols, view_only, dependent)((workers, 1, 1), params)


def aligned_rows(x: torch.Tensor) -> torch.Tensor:
    """Return `x` bfloat16 [rows, in] if the kernel can read it, else a copy with longer rows."""
    if _readable(x):
        return x
    rows, cols = x.shape
    padded = torch.empty((rows, -(-cols // 8) * 8), dtype=x.dtype, device=x.device)
    return padded[:, :cols].copy_(x)


@cache
def split(tiles: int, blocks: int, multiprocessors: int) -> int:
    """Return how many CTAs, one per multiprocessor, share tiles x blocks units.

    As many as there are, unless whole tiles for each of fewer CTAs cost no more than adding up
    partial sums would, or a tile would fall into too many parts. Depends on nothing else: a
    different split is a different order of summation.
    """
    units = tiles * blocks
    most = min(multiprocessors, units, tiles * _MOST_SEGMENTS)
    tiles_each = -(-tiles // most)
    cost = -(-units // most) + (_JOIN_UNITS if units % (most * blocks) else 0)
    if tiles % tiles_each == 0 and tiles_each * blocks <= cost:
        return tiles // tiles_each
    return most


def _readable(x: torch.Tensor) -> bool:
    """Whether columns are adjacent and every row begins at a multiple of 16 bytes."""
    return (
        x.stride(1) == 1
        and x.data_ptr() % 16 == 0
        and (x.shape[0] == 1 or (x.stride(0) % 8 == 0 and x.stride(0) > 0))
    )


def _check(weight: GemmWeight, x: torch.Tensor, y: torch.Tensor, bias: torch.Tensor | None) -> None:
    inputs, outputs = weight.in_features, weight.out_features
    if not inputs or not outputs:
        raise ValueError(f"the weight is empty: {[outputs, inputs]}")
    if x.dim() != 2 or x.shape[1] != inputs or not 1 <= x.shape[0] <= MAX_ROWS:
        raise ValueError(f"x is {list(x.shape)}, expected [1 to {MAX_ROWS}, {inputs}]")
    if y.shape != (x.shape[0], outputs) or y.stride(1) != 1:
        raise ValueError(f"y is {list(y.shape)}, expected {[x.shape[0], outputs]}, rows whole")
    if bias is not None and (bias.shape != (outputs,) or bias.stride(0) != 1):
        raise ValueError(f"bias is {list(bias.shape)}, expected {[outputs]}, contiguous")
    for name, tensor in (("x", x), ("y", y), ("bias", bias)):
        if tensor is None:
            continue
        if tensor.dtype != torch.bfloat16:
            raise ValueError(f"{name} is {tensor.dtype}, expected torch.bfloat16")
        if tensor.device != weight.records.device or not tensor.is_cuda:
            raise ValueError(f"{name} is on {tensor.device}, weight on {weight.records.device}")
    if not _readable(x):
        raise ValueError("x has rows that are not 16-byte aligned; see aligned_rows")


def _check_workspace(workspace: Workspace, tiles: int, floats: int) -> None:
    if workspace.arrivals.numel() < tiles or workspace.partials.numel() < floats:
        raise ValueError(
            f"the workspace has {workspace.arrivals.numel()} arrivals and "
            f"{workspace.partials.numel()} partial sums, this launch needs {tiles} and {floats}"
        )


def _partial_floats(cols: int) -> int:
    """Partial sums of one segment."""
    return layout.RECORD_ROWS * cols


@cache
def _launcher(device: int, cols: int, view_only: bool, dependent: bool) -> launch.Launcher:
    options = launch.Options(
        shared_bytes=modules.gemm_mma_shared_bytes(cols, view_only=view_only),
        dependent=dependent and launch.capability(device) >= (9, 0),
    )
    return launch.prepare(
        modules.gemm_mma(cols, view_only=view_only), "w12_gemm_mma",
        block=(modules.GEMM_MMA_THREADS, 1, 1), device=device, options=options,
    )  # fmt: skip


@cache
def _multiprocessors(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
