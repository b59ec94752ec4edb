"""Load compiled kernels and launch them on torch's current stream.

    launcher = launch.prepare(MODULE, "decode", block=(256, 1, 1))
    launcher((blocks, 1, 1), out.data_ptr(), weight.data_ptr(), n)

`prepare` compiles (or reads the cache), loads the module into the device's primary context, which
is the one torch uses, and sets the kernel's attributes. It must not run while a CUDA graph is
captured; calling a launcher may, so prepare every launcher (a "warm" call of the operation does
it) before the capture. Launchers are cached: asking again costs a dictionary look-up.

A call packs its arguments into one reused buffer and takes a few microseconds. Arguments are
plain numbers and `tensor.data_ptr()`; the caller keeps the tensors alive and on the launcher's
device. Launchers are thread-safe.
"""

from __future__ import annotations

import ctypes
import re
import struct
import threading
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

from specpilot_kernels.build import (
    GpuError,
    GpuUnavailable,
    MissingGpuPackage,
    architecture_for,
    build,
)
from specpilot_kernels.registry import KernelModule

Dim3 = tuple[int, int, int]

_INSTALL: Final = "pip install 'specpilot[gpu]'"
_DEFAULT_SHARED_BYTES: Final = 48 * 1024  # more must be asked for, per kernel
_PORTABLE_CLUSTER: Final = 8

_lock = threading.RLock()
_launchers: dict[tuple[object, ...], Launcher] = {}


class CudaError(GpuError):
    """A call of the CUDA driver failed; the message names the call and the driver's reason."""


class NoCudaDevice(GpuUnavailable):
    """torch is not installed or shows no CUDA device."""


@dataclass(frozen=True, slots=True)
class Options:
    """How a kernel is launched.

    shared_bytes: dynamic shared memory per block.
    dependent: programmatic dependent launch: the kernel may start before the one ahead of it on
        the stream ends, and must execute `griddepcontrol.wait` before it reads that one's output.
    cluster: blocks per thread block cluster, or None.
    cooperative: all blocks must be resident at once.
    carveout: percent of an SM's memory that should be shared memory rather than L1, or None.
    """

    shared_bytes: int = 0
    dependent: bool = False
    cluster: Dim3 | None = None
    cooperative: bool = False
    carveout: int | None = None


_PLAIN: Final = Options()


class Launcher:
    """One kernel on one device with a fixed block size, ready to be launched; see `prepare`."""

    __slots__ = (
        "_buffer", "_config", "_context", "_device", "_driver", "_function", "_lock", "_name",
        "_offsets", "_pack", "_stream", "_success",
    )  # fmt: skip

    def __init__(self, name: str, function: int, signature: str, device: int, config: Any) -> None:
        self._driver = _driver()
        self._success = self._driver.CUresult.CUDA_SUCCESS
        self._name, self._device, self._config = name, device, config
        self._function = self._driver.CUfunction(function)
        self._context = _primary_context(device)
        packer = struct.Struct("@" + signature)
        self._pack = packer.pack_into
        self._buffer = ctypes.create_string_buffer(max(1, packer.size))
        offsets = parameter_offsets(signature)
        base = ctypes.addressof(self._buffer)
        self._offsets = (ctypes.c_void_p * max(1, len(offsets)))(*(base + o for o in offsets))
        self._stream = _raw_stream()
        self._lock = threading.Lock()

    def __call__(self, grid: Dim3, *args: int | float | bytes) -> None:
        """Launch `grid` blocks on torch's current stream of the launcher's device.

        args: the kernel's parameters, as many and of the kinds that its signature states;
        struct.error otherwise. CudaError if the driver refuses the launch; errors inside the
        kernel appear at a later synchronisation, as always. An empty grid launches nothing.
        """
        if 0 in grid:
            return
        config = self._config
        with self._lock:
            self._pack(self._buffer, 0, *args)
            config.gridDimX, config.gridDimY, config.gridDimZ = grid
            config.hStream = self._stream(self._device)
            status = self._launch()
            if status != self._success:
                # The thread's context is another device's, or none yet: lend it ours.
                with _Current(self._context):
                    status = self._launch()
        if status != self._success:
            raise CudaError(f"launch of {self._name}: {_reason(status)}")

    def _launch(self) -> Any:
        pointers = ctypes.addressof(self._offsets)
        return self._driver.cuLaunchKernelEx(self._config, self._function, pointers, 0)[0]


def prepare(
    module: KernelModule,
    entry: str,
    *,
    block: Dim3,
    device: int | None = None,
    options: Options = _PLAIN,
) -> Launcher:
    """Return the launcher of a kernel, compiled, loaded and configured.

    device: CUDA device index as torch counts; None is torch's current one. NoCudaDevice without
    torch or a device, UnsupportedGpu if no architecture of the module runs on it, CudaError if
    the driver refuses (more shared memory than the GPU has, parameters that do not match the
    registry's signature). Not during graph capture, except where the launcher exists already.
    """
    index = _torch().cuda.current_device() if device is None else device
    key = (module.name, module.macros, entry, block, index, options)
    found = _launchers.get(key)
    if found is not None:
        return found
    with _lock:
        if key not in _launchers:
            _launchers[key] = _make(module, entry, block, index, options)
        return _launchers[key]


def capability(device: int | None = None) -> tuple[int, int]:
    """Return (major, minor) of a device's compute capability; NoCudaDevice without one."""
    return _torch().cuda.get_device_capability(device)


def current_stream(device: int) -> int:
    """Return the handle of torch's current stream of a device."""
    return _raw_stream()(device)


def cuda_driver() -> Any:
    """Return the bindings of the CUDA driver; MissingGpuPackage if they are not installed."""
    return _driver()


def parameter_offsets(signature: str) -> list[int]:
    """Return the byte offset of each parameter in a buffer packed by `struct`."""
    codes = _codes(signature)
    # A zero-length field pads up to its alignment.
    return [struct.calcsize(f"@{''.join(codes[:i])}0{code[-1]}") for i, code in enumerate(codes)]


def parameter_sizes(signature: str) -> list[int]:
    """Return the size in bytes of each parameter of a `struct` signature."""
    return [struct.calcsize(f"@{code}") for code in _codes(signature)]


def _codes(signature: str) -> list[str]:
    return re.findall(r"\d*\D", signature)


def _make(module: KernelModule, entry: str, block: Dim3, device: int, options: Options) -> Launcher:
    driver, stated = _driver(), module.entry(entry)
    name = f"{module.name}.{entry}"
    with _Current(_primary_context(device)):
        function = _load(module, device)[entry]
        _check_signature(function, stated.signature, name)
        wanted = []
        if options.shared_bytes > _DEFAULT_SHARED_BYTES:
            wanted.append(("MAX_DYNAMIC_SHARED_SIZE_BYTES", options.shared_bytes))
        if options.cluster and _volume(options.cluster) > _PORTABLE_CLUSTER:
            wanted.append(("NON_PORTABLE_CLUSTER_SIZE_ALLOWED", 1))
        if options.carveout is not None:
            wanted.append(("PREFERRED_SHARED_MEMORY_CARVEOUT", options.carveout))
        for attribute, value in wanted:
            attribute_id = getattr(driver.CUfunction_attribute, f"CU_FUNC_ATTRIBUTE_{attribute}")
            _require(f"{name}: {attribute} = {value}",
                     driver.cuFuncSetAttribute(function, attribute_id, value))  # fmt: skip
    config = _config(driver, block, options)
    return Launcher(name, int(function), stated.signature, device, config)


def _config(driver: Any, block: Dim3, options: Options) -> Any:
    """The part of a launch that does not change from call to call."""
    config = driver.CUlaunchConfig()
    config.blockDimX, config.blockDimY, config.blockDimZ = block
    config.sharedMemBytes = options.shared_bytes
    attributes = []

    def add(name: str, fill: Any) -> None:
        value = driver.CUlaunchAttributeValue()
        fill(value)
        attribute = driver.CUlaunchAttribute()
        attribute.id = getattr(driver.CUlaunchAttributeID, f"CU_LAUNCH_ATTRIBUTE_{name}")
        attribute.value = value
        attributes.append(attribute)

    if options.dependent:
        add("PROGRAMMATIC_STREAM_SERIALIZATION",
            lambda v: setattr(v, "programmaticStreamSerializationAllowed", 1))  # fmt: skip
    if options.cooperative:
        add("COOPERATIVE", lambda v: setattr(v, "cooperative", 1))
    if options.cluster:
        x, y, z = options.cluster

        def cluster(value: Any) -> None:
            value.clusterDim.x, value.clusterDim.y, value.clusterDim.z = x, y, z

        add("CLUSTER_DIMENSION", cluster)
    config.attrs = attributes
    config.numAttrs = len(attributes)
    return config


@cache
def _load(module: KernelModule, device: int) -> dict[str, Any]:
    """Load a module into the current context, which must be the device's; entry -> CUfunction.

    The library stays loaded as long as the process lives, since graphs may hold its kernels.
    """
    driver = _driver()
    binary = build(module, architecture_for(module, capability(device)))
    what = f"loading {module.name} ({binary.architecture})"
    (library,) = _require(what, driver.cuLibraryLoadData(binary.cubin, [], [], 0, [], [], 0))
    functions = {}
    for entry in module.entries:
        (kernel,) = _require(what, driver.cuLibraryGetKernel(library, entry.name.encode()))
        # Asking for the function makes the driver load the code now, not at the first launch.
        (functions[entry.name],) = _require(what, driver.cuKernelGetFunction(kernel))
    return functions


def _check_signature(function: Any, signature: str, name: str) -> None:
    """Compare the registry's signature with the parameters the compiled kernel really has."""
    driver, sizes = _driver(), []
    while True:
        status, _, size = driver.cuFuncGetParamInfo(function, len(sizes))
        if status != driver.CUresult.CUDA_SUCCESS:
            break
        sizes.append(size)
    if sizes != parameter_sizes(signature):
        raise CudaError(f"{name}: signature {signature!r} does not fit parameters of {sizes} bytes")


class _Current:
    """Make a context the calling thread's for a while."""

    def __init__(self, context: Any) -> None:
        self._context = context

    def __enter__(self) -> None:
        _require("cuCtxPushCurrent", _driver().cuCtxPushCurrent(self._context))

    def __exit__(self, *_: object) -> None:
        _require("cuCtxPopCurrent", _driver().cuCtxPopCurrent())


@cache
def _primary_context(device: int) -> Any:
    """The context torch uses on a device; held until the process ends."""
    driver = _driver()
    _require("cuInit", driver.cuInit(0))
    # torch's index is the driver's: both obey CUDA_VISIBLE_DEVICES.
    (handle,) = _require("cuDeviceGet", driver.cuDeviceGet(device))
    (context,) = _require("cuDevicePrimaryCtxRetain", driver.cuDevicePrimaryCtxRetain(handle))
    return context


@cache
def _raw_stream() -> Any:
    """A function: device index -> handle of torch's current stream there."""
    torch = _torch()
    raw = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # ten times faster, if it is there
    if raw is not None:
        return raw
    return lambda device: torch.cuda.current_stream(device).cuda_stream


@cache
def _torch() -> Any:
    try:
        import torch
    except ImportError as error:
        raise NoCudaDevice(f"torch is not installed: {_INSTALL}") from error
    if not torch.cuda.is_available():
        raise NoCudaDevice("torch finds no CUDA device")
    torch.cuda.init()
    return torch


@cache
def _driver() -> Any:
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise MissingGpuPackage(f"cuda-bindings is not installed: {_INSTALL}") from error
    return driver


def _require(what: str, answer: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return what a driver call gave besides its status; CudaError if it failed."""
    status, *values = answer
    if status != _driver().CUresult.CUDA_SUCCESS:
        raise CudaError(f"{what}: {_reason(status)}")
    return tuple(values)


def _reason(status: Any) -> str:
    _, text = _driver().cuGetErrorString(status)
    return f"{status.name} ({text.decode()})" if text else str(status.name)


def _volume(dim: Dim3) -> int:
    return dim[0] * dim[1] * dim[2]
