"""The W12 product for up to 64 rows: checks, and the choice of the kernel for the GPU.

    gemm.warm()                       # once per device, before a CUDA graph is captured
    y = gemm.gemm(x, weight)          # x bfloat16 [rows, in_features]

For any number of rows use `linear.w12_linear`.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Protocol

import torch

from specpilot_kernels import build, launch
from specpilot_kernels.registry import KernelModule
from specpilot_kernels.w12 import gemm_mma, gemm_sm90, modules
from specpilot_kernels.w12.weight import W12Weight
from specpilot_kernels.w12.workspace import NotWarmed, Pool

__all__ = ["MAX_ROWS", "Kernel", "NotWarmed", "check", "gemm", "gpu_name", "kernel", "warm"]

MAX_ROWS = max(modules.GEMM_ROWS)


class Kernel(Protocol):
    """What a module with a GEMM offers: `gemm_sm90`, `gemm_mma`."""

    def gemm(
        self, x: torch.Tensor, weight: W12Weight, bias: torch.Tensor | None, out: torch.Tensor,
        *, view_only: bool = False, dependent: bool = True,
    ) -> None: ...  # fmt: skip

    def variant(self, rows: int, *, view_only: bool = False) -> KernelModule: ...

    def launcher(
        self, device: int, rows: int, view_only: bool, dependent: bool
    ) -> launch.Launcher: ...

    @property
    def workspaces(self) -> Pool[Any]: ...


def gemm(
    x: torch.Tensor,
    weight: W12Weight,
    bias: torch.Tensor | None = None,
    *,
    out: torch.Tensor | None = None,
    view_only: bool = False,
    dependent: bool = True,
) -> torch.Tensor:
    """Return x times the weight plus bias, bfloat16 [rows, out_features], summed in float32.

    x: bfloat16 [rows, in_features], at most 64 rows, on the weight's GPU; any strides, but rows
        that are not contiguous or not 16-byte aligned are copied first.
    bias: bfloat16 [out_features], or None. out: where to write, rows contiguous, or None.
    view_only: multiply by the 8-bit view of each weight; see `reference_gemm.weights`.
    dependent: let the kernel fetch weights while the one ahead of it on the stream still runs
        (programmatic dependent launch).

    The result is the same from call to call, and each row's is the same whatever rows come with
    it. Runs on torch's current stream. ValueError for tensors that do not fit, UnsupportedGpu,
    NotWarmed in a graph capture; also what compiling raises, see `launch.prepare`.
    """
    check(x, weight, bias)
    if x.dim() != 2 or x.shape[0] > MAX_ROWS:
        raise ValueError(
            f"the W12 GEMM takes x of at most {MAX_ROWS} rows, got shape {list(x.shape)}; "
            "linear.w12_linear takes any number"
        )
    if out is None:
        out = x.new_empty((x.shape[0], weight.shape[0]))
    else:
        _check_out(out, x, weight)
    if x.shape[0] == 0:
        return out
    with torch.cuda.device(x.device):
        kernel(x.device.index).gemm(x, weight, bias, out, view_only=view_only, dependent=dependent)
    return out


def warm(
    device: int | torch.device | None = None, *, view_only: bool = False, use: Kernel | None = None
) -> None:
    """Compile and load every variant of the GEMM, and make room for captures; see `workspace`.

    The first time on a machine this takes some seconds, later milliseconds. `view_only` prepares
    the kernels of the view pass instead. use: a kernel other than the device's own.
    """
    index = device if isinstance(device, int) else device and device.index
    if index is None:
        launch.capability()  # says what is missing where there is no GPU
        index = torch.cuda.current_device()
    with torch.cuda.device(index):
        chosen = kernel(index) if use is None else use
        variants = [chosen.variant(rows, view_only=view_only) for rows in modules.GEMM_ROWS]
        build.build_all(variants, launch.capability(index))
        for rows in modules.GEMM_ROWS:
            for dependent in (False, True):
                chosen.launcher(index, rows, view_only, dependent)
        chosen.workspaces.warm(index)


def gpu_name() -> str:
    """The name of torch's current GPU, which plans are kept under; NoCudaDevice without one."""
    launch.capability()
    return torch.cuda.get_device_name()


@cache
def kernel(device: int) -> Kernel:
    """The kernel for a device: Hopper's own, else the portable one; UnsupportedGpu before 8.0."""
    capability = launch.capability(device)
    if capability == gemm_sm90.CAPABILITY:
        return gemm_sm90
    build.architecture_for(modules.gemm_mma(MAX_ROWS), capability)
    return gemm_mma


def check(x: torch.Tensor, weight: W12Weight, bias: torch.Tensor | None) -> None:
    """ValueError unless x [..., in_features] and bias [out_features] fit the weight."""
    if not x.is_cuda:
        raise ValueError(f"the W12 GEMM runs on a GPU, x is on {x.device}")
    if x.dtype != torch.bfloat16:
        raise ValueError(f"the W12 GEMM takes bfloat16, x is {x.dtype}")
    if x.device != weight.device:
        raise ValueError(f"x is on {x.device}, the weight on {weight.device}")
    out_features, in_features = weight.shape
    if x.dim() == 0 or x.shape[-1] != in_features:
        raise ValueError(f"x {list(x.shape)} does not fit a weight {[out_features, in_features]}")
    if bias is not None and not (
        bias.dtype == x.dtype
        and bias.device == x.device
        and tuple(bias.shape) == (out_features,)
        and bias.is_contiguous()
    ):
        raise ValueError(
            f"bias must be contiguous bfloat16 [{out_features}] on {x.device}, got {bias.dtype} "
            f"{list(bias.shape)} on {bias.device}"
        )


def _check_out(out: torch.Tensor, x: torch.Tensor, weight: W12Weight) -> None:
    shape = (x.shape[0], weight.shape[0])
    fits = out.dtype == x.dtype and out.device == x.device and tuple(out.shape) == shape
    if not fits or (shape[1] > 1 and out.stride(1) != 1):
        raise ValueError(
            f"out must be bfloat16 {list(shape)} on {x.device} with contiguous rows, got "
            f"{out.dtype} {list(out.shape)} on {out.device}, strides {list(out.stride())}"
        )
