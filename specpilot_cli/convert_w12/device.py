"""Where stripes are encoded and decoded: the one place that knows every codec."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from specpilot_cli.errors import MachineError
from specpilot_kernels.build import GpuError
from specpilot_kernels.w12.codec import CpuCodec
from specpilot_kernels.w12.stripes import StripeCodec

Device = Literal["cpu", "cuda"]


def open_codec(device: Device) -> StripeCodec:
    """Return the codec of `device`; MachineError if this machine has no usable one.

    For `cuda` the kernels are compiled here, if they are not in the cache.
    """
    if device == "cpu":
        return CpuCodec()
    from specpilot_kernels.w12 import gpu_codec

    with gpu_errors_said():
        gpu_codec.require_gpu()
    return gpu_codec.GpuStripeCodec()


@contextmanager
def gpu_errors_said() -> Iterator[None]:
    """Turn what the GPU lacks, now or in the middle of the work, into a MachineError."""
    try:
        yield
    except GpuError as error:
        raise MachineError(
            str(error),
            where="--device",
            hint="use `--device cpu`: it gives the same bytes",
        ) from error
