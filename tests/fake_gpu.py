"""A GPU for tests of the code around it: the CPU codec behind the device module's functions.

Copies to the host are the real piecewise ones, in small pieces and with unpinned buffers. Copies
to the device are plain ones, since there is none: tests/gpu tests the piecewise ones.
"""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from specpilot_kernels import launch
from specpilot_kernels.w12 import codec
from specpilot_kernels.w12.encoded import EncodedW12

PARTS = ("records", "window", "escape_ptr", "escape_col", "escape_bits")
PIECE_BYTES = 10_000


def install(patch: pytest.MonkeyPatch) -> list[str]:
    """Put the fake in place until `patch` ends; returns the list of kernels that were called."""
    torch = pytest.importorskip("torch")
    from specpilot_kernels.w12 import device, gpu_codec

    calls: list[str] = []

    def encode(bits: Any) -> device.DeviceW12:
        calls.append("encode")
        done = codec.encode(bits.numpy())
        tensors = (torch.from_numpy(getattr(done, name)) for name in PARTS)
        return device.DeviceW12(done.shape, *tensors)

    def on_host(parts: device.DeviceW12) -> EncodedW12:
        return EncodedW12(parts.shape, *(getattr(parts, name).numpy() for name in PARTS))

    def decode(parts: device.DeviceW12) -> Any:
        calls.append("decode")
        return torch.from_numpy(codec.decode(on_host(parts)).view(np.int16)).view(torch.bfloat16)

    def compare(bits: Any, parts: device.DeviceW12) -> Any:
        calls.append("compare")
        return torch.tensor([int(not codec.matches(bits.numpy(), on_host(parts)))])

    class Staging(threading.local):
        def __init__(self) -> None:
            event = SimpleNamespace(synchronize=lambda: None, record=lambda: None)
            self.buffers = [torch.empty(PIECE_BYTES, dtype=torch.uint8) for _ in range(2)]
            self.free = [event, event]

    patch.setattr(gpu_codec, "_PIECE_BYTES", PIECE_BYTES)
    patch.setattr(gpu_codec, "_staging", Staging())
    patch.setattr(gpu_codec, "_to_device", lambda array: torch.from_numpy(array.copy()))
    patch.setattr(launch, "capability", lambda: (9, 0))
    patch.setattr(torch.cuda, "get_device_name", lambda: "fake")
    for function in (encode, decode, compare):
        patch.setattr(device, function.__name__, function)
    patch.setattr(device, "warm", lambda: calls.append("warm"))
    return calls
