"""Launch of `csrc/gemm_mma.cu`, the W12 product for every GPU since sm_80."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import cache
from typing import Final

import torch

from specpilot_kernels import launch
from specpilot_kernels.w12 import inputs, layout, modules, workspace
from specpilot_kernels.w12.weight import W12Weight

_FIRST_DEPENDENT: Final = (9, 0)
"""Programmatic dependent launch exists since this compute capability."""

_MOST_SEGMENTS: Final = 8
"""CTAs that may share one tile: each leaves partial sums, which one CTA must read again."""

_JOIN_UNITS: Final = 3
"""What leaving and adding up partial sums costs, in units of streaming; an estimate."""

_MOST_TILES: Final = 1 << 16

_pack = struct.Struct(modules.GEMM_MMA_PARAMS).pack
_launchers: dict[tuple[int, int, bool, bool], launch.Launcher] = {}


@dataclass(frozen=True, slots=True)
class Workspace:
    """Where the CTAs that share a tile meet; 9 MB with 132 SMs.

    partials: float32 [2 x SMs x 128 x 64], in any state. arrivals: int32 [65536], one a tile, zero
    between launches.
    """

    partials: torch.Tensor
    arrivals: torch.Tensor


def _allocate(device: int) -> Workspace:
    sums = 2 * workspace.multiprocessors(device) * layout.RECORD_ROWS * max(modules.GEMM_ROWS)
    place = torch.device("cuda", device)
    return Workspace(
        torch.empty(sums, dtype=torch.float32, device=place),
        torch.zeros(_MOST_TILES, dtype=torch.int32, device=place),
    )


workspaces = workspace.Pool(_allocate)
variant = modules.gemm_mma


def gemm(
    x: torch.Tensor,
    weight: W12Weight,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    *,
    view_only: bool = False,
    dependent: bool = True,
) -> None:
    """Write x [rows, in_features] times the weight, plus bias, to `out` [rows, out_features].

    1 to 64 rows. All tensors bfloat16 on the weight's device, which must be current, the last
    dimension contiguous; see `gemm.gemm`, which checks. dependent: without effect before sm_90.
    ValueError for more than 8 million output channels.
    """
    rows, index = x.shape[0], x.device.index
    x = inputs.aligned(x)
    size = next(size for size in modules.GEMM_ROWS if size >= rows)
    start = launcher(index, size, view_only, dependent)
    scratch = workspaces.of_current_stream(index)
    tiles, blocks, _ = weight.records.shape
    if tiles > _MOST_TILES:
        raise ValueError(f"the portable W12 GEMM takes {_MOST_TILES * layout.RECORD_ROWS} channels")
    workers = split(tiles, blocks, workspace.multiprocessors(index))
    start(
        (workers, 1, 1),
        _pack(
            weight.records.data_ptr(), weight.scale.data_ptr(), weight.escape_ptr.data_ptr(),
            weight.escapes.data_ptr(), x.data_ptr(), 0 if bias is None else bias.data_ptr(),
            out.data_ptr(), scratch.partials.data_ptr(), scratch.arrivals.data_ptr(),
            x.stride(0), out.stride(0), rows, x.shape[1], out.shape[1], blocks,
            *divmod(tiles * blocks, workers),
        ),
    )  # fmt: skip


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


def launcher(device: int, rows: int, view_only: bool, dependent: bool) -> launch.Launcher:
    """The loaded variant for `rows`, one of `modules.GEMM_ROWS`; NotWarmed in a capture."""
    key = (device, rows, view_only, dependent)
    found = _launchers.get(key)
    if found is not None:
        return found
    workspace.refuse_in_capture()
    options = launch.Options(
        shared_bytes=modules.gemm_mma_shared_bytes(rows, view_only=view_only),
        dependent=dependent and launch.capability(device) >= _FIRST_DEPENDENT,
    )
    _launchers[key] = launch.prepare(
        modules.gemm_mma(rows, view_only=view_only), "w12_gemm_mma",
        block=(modules.GEMM_MMA_THREADS, 1, 1), device=device, options=options,
    )  # fmt: skip
    return _launchers[key]
