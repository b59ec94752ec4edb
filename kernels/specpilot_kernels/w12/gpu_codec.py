"""The GPU codec behind the CPU codec's interface: stripes in host memory, as numpy arrays.

For converting checkpoints with `--device cuda`: arrays go through page-locked buffers to the GPU
and back, on torch's current stream, which is the same one for all threads that set no other.
Several threads may call at once. Besides the CPU codec's errors every method raises `GpuError`,
whose message says what is wrong with the machine: `GpuUnavailable` where torch, a CUDA device or a
package of the `gpu` extra is missing, `GpuMemoryError` where a stripe does not fit. `require_gpu`
asks beforehand.
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

__all__ = ["GpuError", "GpuMemoryError", "GpuStripeCodec", "GpuUnavailable", "require_gpu"]

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


class GpuStripeCodec:
    """The `StripeCodec` on the current GPU. `require_gpu` says if there is one."""

    def survey_stripe(self, bits: Bits) -> Survey:
        """See `StripeCodec`."""
        with _gpu():
            parts = _encode(bits)
            counts = np.diff(_to_host(parts.escape_ptr).astype(np.int64))
            return Survey(bits.shape, _to_host(parts.window), counts)

    def encode_stripe(
        self, bits: Bits, records: npt.NDArray[np.uint8], *, max_escapes: int
    ) -> EncodedW12 | None:
        """See `StripeCodec`."""
        with _gpu():
            parts = _encode(bits)
            if parts.escape_bits.numel() > max_escapes:
                return None
            _to_host(parts.records, records)
            small = (_to_host(getattr(parts, name)) for name in _PARTS[1:])
            return EncodedW12(bits.shape, records, *small)

    def matches_stripe(self, bits: Bits, encoded: EncodedW12) -> bool:
        """See `StripeCodec`. Both are sent to the GPU: what is judged lies in host memory."""
        encoded.check()
        if bits.shape != encoded.shape:
            return False
        matrix_stack(bits)
        with _gpu():
            from specpilot_kernels.w12 import device

            return not int(device.compare(_to_device(bits), _parts_to_device(encoded)).item())

    def decode_stripe(self, encoded: EncodedW12, bits: Bits) -> None:
        """See `StripeCodec`."""
        encoded.check()
        with _gpu():
            import torch

            from specpilot_kernels.w12 import device

            _to_host(device.decode(_parts_to_device(encoded)).view(torch.uint16), bits)


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


def _to_host(tensor: torch.Tensor, out: Array | None = None) -> Array:
    """Copy a tensor to `out` or a new array, piece by piece; waits until it is there.

    out: contiguous, of the tensor's shape and dtype.
    """
    import torch

    dtype = np.dtype(str(tensor.dtype).removeprefix("torch."))
    result = np.empty(tuple(tensor.shape), dtype) if out is None else out
    if (result.shape, result.dtype) != (tuple(tensor.shape), dtype):
        raise ValueError(
            f"{dtype} {list(tensor.shape)} does not fit {result.dtype} {list(result.shape)}"
        )
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
