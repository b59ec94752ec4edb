"""The GPU codec behind the CPU codec's signatures: numpy arrays in and out.

For converting checkpoints with `--device cuda`: arrays go through page-locked buffers to the GPU
and back, on the calling thread's CUDA stream. Several threads may call at once. Besides the CPU
codec's errors every function raises `GpuError`, whose message says what is wrong with the
machine: `GpuUnavailable` where torch, a CUDA device or a package of the `gpu` extra is missing,
`GpuMemoryError` where a tensor does not fit. `require_gpu` asks beforehand.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from specpilot_kernels import launch
from specpilot_kernels.build import GpuError, GpuUnavailable
from specpilot_kernels.w12.codec import Survey
from specpilot_kernels.w12.encoded import EncodedW12, matrix_stack

if TYPE_CHECKING:
    import torch

    from specpilot_kernels.w12.device import DeviceW12

__all__ = [
    "GpuError", "GpuMemoryError", "GpuUnavailable",
    "decode", "encode", "matches", "require_gpu", "survey",
]  # fmt: skip

Bits = npt.NDArray[np.uint16]
Array = npt.NDArray[Any]

_PIECE_BYTES = 16 << 20
_PARTS = ("records", "window", "escape_ptr", "escape_col", "escape_bits")


class GpuMemoryError(GpuError):
    """The GPU has too little free memory; about 4 bytes per weight of a tensor are needed."""


@contextmanager
def _gpu() -> Iterator[None]:
    """Run a block that needs the GPU and its memory; see the errors of this module."""
    launch.capability()
    import torch

    try:
        yield
    except torch.OutOfMemoryError as error:
        reason = str(error).partition("If reserved")[0].strip()
        raise GpuMemoryError(f"a tensor does not fit into the GPU's memory: {reason}") from error


def require_gpu() -> str:
    """Return the name of the GPU that would be used; GpuError without a usable one.

    Compiles the kernels if they are not in the cache.
    """
    with _gpu():
        import torch

        from specpilot_kernels.w12 import device

        device.warm()
        return torch.cuda.get_device_name()


def survey(bits: Bits, *, threads: int = 1) -> Survey:
    """Choose windows and count escapes of `bits` uint16 [rows, cols] or [matrices, rows, cols].

    ValueError for another dtype or rank. `threads` has no effect.
    """
    with _gpu():
        parts = _encode(bits)
        counts = np.diff(_to_host(parts.escape_ptr).astype(np.int64))
        return Survey(bits.shape, _to_host(parts.window), counts)


def encode(bits: Bits, *, threads: int = 1, surveyed: Survey | None = None) -> EncodedW12:
    """Encode BF16 patterns uint16 [rows, cols] or [matrices, rows, cols]; errors as on the CPU.

    `threads` and `surveyed` have no effect: the GPU chooses the windows again sooner than it
    would take to send them there.
    """
    with _gpu():
        parts = _encode(bits)
        return EncodedW12(bits.shape, *(_to_host(getattr(parts, name)) for name in _PARTS))


def decode(encoded: EncodedW12, *, threads: int = 1) -> Bits:
    """Return the BF16 patterns uint16 [shape]; MalformedW12 if the parts do not fit together."""
    encoded.check()
    with _gpu():
        import torch

        from specpilot_kernels.w12 import device

        return _to_host(device.decode(_parts_to_device(encoded)).view(torch.uint16))


def matches(bits: Bits, encoded: EncodedW12, *, threads: int = 1) -> bool:
    """Return whether `encoded` decodes to exactly the patterns of `bits`; errors as in `decode`."""
    encoded.check()
    if bits.shape != encoded.shape:
        return False
    matrix_stack(bits)
    with _gpu():
        from specpilot_kernels.w12 import device

        return not int(device.compare(_to_device(bits), _parts_to_device(encoded)).item())


def _encode(bits: Bits) -> DeviceW12:
    matrix_stack(bits)
    from specpilot_kernels.w12 import device

    return device.encode(_to_device(bits))


def _parts_to_device(encoded: EncodedW12) -> DeviceW12:
    from specpilot_kernels.w12 import device

    return device.DeviceW12(encoded.shape, *(_to_device(getattr(encoded, name)) for name in _PARTS))


class _Staging(threading.local):
    """Two page-locked buffers per thread: one is filled or emptied while the other travels."""

    def __init__(self) -> None:
        import torch

        self.buffers = [
            torch.empty(_PIECE_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)
        ]
        self.free = [torch.cuda.Event() for _ in range(2)]


_staging: _Staging | None = None
_staging_lock = threading.Lock()


def _buffers() -> _Staging:
    global _staging
    with _staging_lock:
        if _staging is None:
            _staging = _Staging()
        return _staging


def _to_device(array: Array) -> torch.Tensor:
    """Copy an array to the current GPU, piece by piece."""
    import torch

    dtype = getattr(torch, array.dtype.name)
    target = torch.empty(array.shape, dtype=dtype, device="cuda")
    source = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    flat = target.view(torch.uint8).reshape(-1) if array.size else target
    stage = _buffers()
    for number, begin in enumerate(range(0, source.size, _PIECE_BYTES)):
        piece = source[begin : begin + _PIECE_BYTES]
        slot = number % 2
        stage.free[slot].synchronize()
        stage.buffers[slot].numpy()[: piece.size] = piece
        flat[begin : begin + piece.size].copy_(stage.buffers[slot][: piece.size], non_blocking=True)
        stage.free[slot].record()
    return target


def _to_host(tensor: torch.Tensor) -> Array:
    """Copy a tensor to a new array, piece by piece; waits until it is there."""
    import torch

    result = np.empty(tuple(tensor.shape), dtype=str(tensor.dtype).removeprefix("torch."))
    if not result.size:
        return result
    target = result.reshape(-1).view(np.uint8)
    flat = tensor.view(torch.uint8).reshape(-1)
    stage = _buffers()
    pieces = list(range(0, target.size, _PIECE_BYTES))

    def collect(number: int) -> None:
        begin = pieces[number]
        piece = target[begin : begin + _PIECE_BYTES]
        stage.free[number % 2].synchronize()
        piece[:] = stage.buffers[number % 2].numpy()[: piece.size]

    for number, begin in enumerate(pieces):
        slot = number % 2
        if number >= 2:
            collect(number - 2)
        else:
            stage.free[slot].synchronize()
        size = min(_PIECE_BYTES, target.size - begin)
        stage.buffers[slot][:size].copy_(flat[begin : begin + size], non_blocking=True)
        stage.free[slot].record()
    for number in range(max(0, len(pieces) - 2), len(pieces)):
        collect(number)
    return result
