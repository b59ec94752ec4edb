"""Launch of `csrc/gemm_sm90.cu`, the W12 product for Hopper GPUs."""

from __future__ import annotations

import ctypes
import struct
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, Final

import torch

from specpilot_kernels import launch
from specpilot_kernels.w12 import inputs, layout, modules, workspace
from specpilot_kernels.w12.split import Split, split
from specpilot_kernels.w12.weight import W12Weight

CAPABILITY: Final = (9, 0)
_MOST_MAPS: Final = 4096
_MAP_BYTES: Final = 128
_LINGER_CYCLES: Final = 4000
"""How long a CTA without work keeps its place, so that the next kernel's spread over all SMs."""
_EMPTY: Final = -1
"""The word 0xFFFFFFFF, a NaN that no sum is: nothing has arrived here."""
_SM_IDS: Final = 1024
"""Room for every value of %smid, which need not be dense."""

_pack = struct.Struct(modules.GEMM_SM90_PARAMS).pack
_split = cache(split)
_launchers: dict[tuple[int, int, bool, bool, bool], launch.Launcher] = {}


@dataclass(frozen=True, slots=True)
class Workspace:
    """Where the CTAs that share a tile meet; 13 MB on an H200.

    partials: int32 [SMs x 2 x 128 x 64], every word -1 between launches. overflow: float32 [SMs x
    128 x 64], in any state. issuing: int32 [1024], zero between launches.
    """

    partials: torch.Tensor
    overflow: torch.Tensor
    issuing: torch.Tensor


def _allocate(device: int) -> Workspace:
    words = workspace.multiprocessors(device) * layout.RECORD_ROWS * max(modules.GEMM_ROWS)
    place = torch.device("cuda", device)
    return Workspace(
        torch.full((2 * words,), _EMPTY, dtype=torch.int32, device=place),
        torch.empty(words, dtype=torch.float32, device=place),
        torch.zeros(_SM_IDS, dtype=torch.int32, device=place),
    )


workspaces = workspace.Pool(_allocate, most_streams=2)  # a CTA takes half of a multiprocessor
variant = modules.gemm_sm90


def gemm(
    x: torch.Tensor,
    weight: W12Weight,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    *,
    view_only: bool = False,
    dependent: bool = True,
    stream_only: bool = False,
    workers: int | None = None,
) -> None:
    """Write x [rows, in_features] times the weight, plus bias, to `out` [rows, out_features].

    1 to 64 rows. All tensors bfloat16 on the weight's device, which must be current, the last
    dimension contiguous; see `gemm.gemm`, which checks. stream_only: write nothing of use, move
    the same bytes. workers: so many CTAs instead of the rule's choice.
    """
    rows, cols = x.shape
    index = x.device.index
    x = inputs.aligned(x)
    columns = next(size for size in modules.GEMM_ROWS if size >= rows)
    start = launcher(index, columns, view_only, dependent, stream_only)
    scratch = workspaces.of_current_stream(index)
    tiles, blocks, _ = weight.records.shape
    sms = workspace.multiprocessors(index)
    shares: Split = _split(tiles, blocks, sms, workers=workers)
    grid = sms if dependent else shares.workers
    pitch = x.stride(0) if rows > 1 else inputs.padded(cols)
    start(
        (grid, 1, 1),
        _tensor_map(x.data_ptr(), rows, cols, pitch, columns),
        _pack(
            weight.records.data_ptr(), weight.scale.data_ptr(), weight.escape_ptr.data_ptr(),
            weight.escapes.data_ptr(), 0 if bias is None else bias.data_ptr(), out.data_ptr(),
            scratch.partials.data_ptr(), scratch.overflow.data_ptr(), scratch.issuing.data_ptr(),
            out.stride(0), rows, out.shape[1], blocks, shares.workers,
            _LINGER_CYCLES if shares.workers < grid else 0, shares.split_tiles, shares.share,
            shares.longer, shares.whole_tiles,
        ),
    )  # fmt: skip


def launcher(
    device: int, rows: int, view_only: bool, dependent: bool, stream_only: bool = False
) -> launch.Launcher:
    """The loaded variant for `rows`, one of `modules.GEMM_ROWS`; NotWarmed in a capture."""
    key = (device, rows, view_only, dependent, stream_only)
    found = _launchers.get(key)
    if found is not None:
        return found
    workspace.refuse_in_capture()
    options = launch.Options(
        shared_bytes=modules.gemm_sm90_shared_bytes(rows, view_only=view_only),
        dependent=dependent,
        carveout=100,  # the ring is sized for two CTAs on an SM
    )
    module = modules.gemm_sm90(rows, view_only=view_only, stream_only=stream_only)
    _launchers[key] = launch.prepare(
        module, "w12_gemm",
        block=(modules.GEMM_SM90_THREADS, 1, 1), device=device, options=options,
    )  # fmt: skip
    return _launchers[key]


@lru_cache(maxsize=_MOST_MAPS)
def _tensor_map(pointer: int, rows: int, cols: int, pitch: int, box_rows: int) -> bytes:
    """The CUtensorMap of bfloat16 [rows, cols] at `pointer`, rows `pitch` elements apart.

    Boxes of `box_rows` x 64, 128-byte swizzle, zeros beyond the tensor. A map describes an
    address, not a tensor, so a cached one stays right when memory is used again.
    """
    driver: Any = launch.cuda_driver()
    status, tensor_map = driver.cuTensorMapEncodeTiled(
        driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, pointer,
        [driver.cuuint64_t(cols), driver.cuuint64_t(rows)], [driver.cuuint64_t(2 * pitch)],
        [driver.cuuint32_t(64), driver.cuuint32_t(box_rows)],
        [driver.cuuint32_t(1), driver.cuuint32_t(1)],
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )  # fmt: skip
    if status != driver.CUresult.CUDA_SUCCESS:
        raise launch.CudaError(f"tensor map of [{rows}, {cols}], pitch {pitch}: {status.name}")
    return ctypes.string_at(int(tensor_map.getPtr()), _MAP_BYTES)
