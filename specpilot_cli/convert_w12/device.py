"""Where stripes are encoded and decoded: the one place that knows every codec."""

from __future__ import annotations

from typing import Literal

from specpilot_cli.errors import MachineError
from specpilot_kernels.w12.codec import CpuCodec
from specpilot_kernels.w12.stripes import StripeCodec

Device = Literal["cpu", "cuda"]


def open_codec(device: Device) -> StripeCodec:
    """Return the codec of `device`; MachineError if this machine or version has none."""
    if device == "cuda":
        raise MachineError(
            "no W12 encoder for the GPU: this version encodes on the CPU only",
            where="--device",
            hint="use `--device cpu`; the format leaves an encoder no choice, so the bytes are "
            "those a GPU would give",
        )
    return CpuCodec()
