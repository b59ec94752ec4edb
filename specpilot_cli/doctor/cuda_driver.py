"""Ask the NVIDIA driver which devices exist, without torch and without creating a context."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

# CUdevice_attribute values of cuda.h.
_MAJOR, _MINOR = 75, 76


@dataclass(frozen=True, slots=True)
class CudaDevice:
    """One device: `capability` is (major, minor), memory is the total."""

    name: str
    capability: tuple[int, int]
    memory_bytes: int


def cuda_devices() -> list[CudaDevice]:
    """Devices the driver shows to this process; empty without a driver or a device."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return []
    count = ctypes.c_int()
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return []
    return [device for i in range(count.value) if (device := _describe(driver, i)) is not None]


def _describe(driver: ctypes.CDLL, index: int) -> CudaDevice | None:
    handle, memory = ctypes.c_int(), ctypes.c_size_t()
    major, minor = ctypes.c_int(), ctypes.c_int()
    name = ctypes.create_string_buffer(128)
    statuses = (
        driver.cuDeviceGet(ctypes.byref(handle), index),
        driver.cuDeviceGetName(name, len(name), handle),
        driver.cuDeviceTotalMem_v2(ctypes.byref(memory), handle),
        driver.cuDeviceGetAttribute(ctypes.byref(major), _MAJOR, handle),
        driver.cuDeviceGetAttribute(ctypes.byref(minor), _MINOR, handle),
    )
    if any(statuses):
        return None
    return CudaDevice(name.value.decode(), (major.value, minor.value), memory.value)
