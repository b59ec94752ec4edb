"""The norms and the gated activation; on CUDA graphs, on any stream.

    ops.warm()                                   # before a graph is captured
    h, residual = ops.add_rms_norm(h, residual, weight, 1e-6)
    y = ops.act_and_mul(gate_up, "silu")

On a GPU they wait for the kernel ahead of them, then let the one behind start: it must execute
`griddepcontrol.wait` before it reads their output, as every kernel does that is launched in that
way. Kernels launched plainly always wait.
"""

from __future__ import annotations

from functools import cache
from typing import Final

import torch

from specpilot_kernels import build, launch
from specpilot_kernels.chained import reference
from specpilot_kernels.chained.modules import (
    ACT_AND_MUL,
    ACT_THREADS,
    GATED_COLS,
    GATED_NORM,
    GATED_THREADS,
    NORM,
    NORM_ROUNDS,
    NORM_THREADS,
    VECTOR,
    Activation,
    Gate,
    all_modules,
)
from specpilot_kernels.registry import KernelModule
from specpilot_kernels.w12.workspace import refuse_in_capture

_WARP: Final = 32
_FIRST_DEPENDENT: Final = (9, 0)

MAX_COLS: Final = VECTOR * NORM_THREADS * NORM_ROUNDS
"""The longest row of the norm."""


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, *, weight_bias: float = 0.0
) -> torch.Tensor:
    """Return x / rms(x) * (weight + weight_bias), bfloat16 [rows, cols].

    x: bfloat16 [rows, cols], rows contiguous and 16-byte aligned; cols a multiple of 8, at most
    16,384. weight: bfloat16 [cols]. Computed in float32, rounded once. ValueError otherwise.
    """
    _check_norm(x, weight, None)
    if not x.is_cuda:
        return reference.rms_norm(x, weight, eps, None, weight_bias)[0]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch_norm(x, out, weight, None, eps, weight_bias)
    return out


def add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    weight_bias: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add x to the residual and norm the sum, both in place; return x and the residual.

    x, residual: bfloat16 [rows, cols]; otherwise as `rms_norm`. The norm is that of the sum before
    it is rounded to the residual's bfloat16.
    """
    _check_norm(x, weight, residual)
    if x.is_cuda:
        _launch_norm(x, x, weight, residual, eps, weight_bias)
    else:
        normed, added = reference.rms_norm(x, weight, eps, residual, weight_bias)
        assert added is not None
        x.copy_(normed)
        residual.copy_(added)
    return x, residual


def gated_rms_norm(
    x: torch.Tensor, z: torch.Tensor, weight: torch.Tensor, eps: float, gate: Gate = "silu"
) -> torch.Tensor:
    """Return x / rms(x) * weight * gate(z), bfloat16 [rows, 128].

    x, z: bfloat16 [rows, 128], rows contiguous and 16-byte aligned. weight: bfloat16 [128].
    Computed in float32, rounded once. ValueError otherwise.
    """
    if gate not in GATED_NORM:
        raise ValueError(f"unknown gate {gate!r}: {', '.join(GATED_NORM)}")
    if not accepts_gated_norm(x, z, weight):
        raise ValueError(
            f"the gated norm cannot read {_describe(x)} with a gate {_describe(z)} and a weight "
            f"{_describe(weight)}"
        )
    if not x.is_cuda:
        return reference.gated_rms_norm(x, z, weight, eps, gate)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    with torch.cuda.device(x.device):
        blocks = -(-x.shape[0] * _WARP // GATED_THREADS)
        _gated_launcher(x.device.index, gate)(
            (blocks, 1, 1), x.data_ptr(), z.data_ptr(), out.data_ptr(), weight.data_ptr(),
            x.shape[0], x.stride(0), z.stride(0), eps,
        )  # fmt: skip
    return out


def act_and_mul(x: torch.Tensor, activation: Activation) -> torch.Tensor:
    """Return act(x[:, :cols]) * x[:, cols:], bfloat16 [rows, cols].

    x: bfloat16 [rows, 2 * cols], rows contiguous and 16-byte aligned; cols a multiple of 8.
    Computed in float32, rounded once. ValueError otherwise.
    """
    if activation not in ACT_AND_MUL:
        raise ValueError(f"unknown activation {activation!r}: {', '.join(ACT_AND_MUL)}")
    if not accepts_gated(x):
        raise ValueError(f"the gated activation cannot read {_describe(x)}")
    if not x.is_cuda:
        return reference.act_and_mul(x, activation)
    rows, cols = x.shape[0], x.shape[1] // 2
    out = torch.empty((rows, cols), dtype=x.dtype, device=x.device)
    vectors = cols // VECTOR
    with torch.cuda.device(x.device):
        launcher = _act_launcher(x.device.index, activation)
        pieces = -(-vectors // ACT_THREADS)
        launcher((rows, pieces, 1), x.data_ptr(), out.data_ptr(), vectors, x.stride(0))
    return out


def accepts_rows(x: torch.Tensor) -> bool:
    """Whether x is bfloat16 [rows, cols] with contiguous, 16-byte aligned rows."""
    return (
        x.dtype == torch.bfloat16
        and x.dim() == 2
        and x.stride(1) == 1
        and x.stride(0) % VECTOR == 0
        and x.data_ptr() % 16 == 0
    )


def accepts_gated(x: torch.Tensor) -> bool:
    """Whether `act_and_mul` takes rows such as x."""
    return accepts_rows(x) and x.shape[1] % (2 * VECTOR) == 0


def accepts_gated_norm(x: torch.Tensor, z: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether `gated_rms_norm` takes such tensors."""
    return (
        x.shape[-1:] == (GATED_COLS,)
        and accepts_norm(x, weight)
        and z.shape == x.shape
        and z.device == x.device
        and accepts_rows(z)
    )


def accepts_norm(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether `rms_norm` takes rows such as x with such a weight."""
    cols = x.shape[-1]
    return (
        accepts_rows(x)
        and cols % VECTOR == 0
        and 0 < cols <= MAX_COLS
        and weight.dtype == x.dtype
        and weight.device == x.device
        and weight.shape == (cols,)
        and weight.is_contiguous()
        and weight.data_ptr() % 16 == 0
    )


def warm(device: int | torch.device | None = None) -> None:
    """Compile and load all kernels of a device, so that they may be captured."""
    index = device if isinstance(device, int) else device and device.index
    if index is None:
        launch.capability()
        index = torch.cuda.current_device()
    build.build_all(all_modules(), launch.capability(index))
    with torch.cuda.device(index):
        for threads in range(_WARP, NORM_THREADS + 1, _WARP):
            _norm_launcher(index, threads)
        for activation in ACT_AND_MUL:
            _act_launcher(index, activation)
        for gate in GATED_NORM:
            _gated_launcher(index, gate)


def _check_norm(x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None) -> None:
    if not accepts_norm(x, weight):
        raise ValueError(f"the norm cannot read {_describe(x)} with a weight {_describe(weight)}")
    if residual is not None and not (
        residual.shape == x.shape and residual.device == x.device and accepts_rows(residual)
    ):
        raise ValueError(f"a residual {_describe(residual)} does not fit {_describe(x)}")


def _describe(x: torch.Tensor) -> str:
    return f"{x.dtype} {list(x.shape)}, strides {list(x.stride())}, on {x.device}"


def _launch_norm(
    x: torch.Tensor, out: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None,
    eps: float, weight_bias: float,
) -> None:  # fmt: skip
    rows, cols = x.shape
    # As many threads as vectors, as FlashInfer has: the order of the sum depends on it.
    threads = min(NORM_THREADS, -(-cols // VECTOR // _WARP) * _WARP)
    with torch.cuda.device(x.device):
        _norm_launcher(x.device.index, threads)(
            (rows, 1, 1), x.data_ptr(), out.data_ptr(), weight.data_ptr(),
            0 if residual is None else residual.data_ptr(), cols, x.stride(0), out.stride(0),
            0 if residual is None else residual.stride(0), eps, weight_bias,
        )  # fmt: skip


@cache
def _norm_launcher(device: int, threads: int) -> launch.Launcher:
    return _launcher(NORM, "rms_norm", threads, device)


@cache
def _act_launcher(device: int, activation: Activation) -> launch.Launcher:
    return _launcher(ACT_AND_MUL[activation], "act_and_mul", ACT_THREADS, device)


@cache
def _gated_launcher(device: int, gate: Gate) -> launch.Launcher:
    return _launcher(GATED_NORM[gate], "gated_rms_norm", GATED_THREADS, device)


def _launcher(module: KernelModule, entry: str, threads: int, device: int) -> launch.Launcher:
    refuse_in_capture()
    options = launch.Options(
        dependent=launch.capability(device) >= _FIRST_DEPENDENT,
        carveout=100,  # as the products have: a processor that changes it must be empty first
    )
    return launch.prepare(module, entry, block=(threads, 1, 1), device=device, options=options)
