"""Every CUDA module of the package: its source, entry points, targets and resource limits.

A module is one `.cu` file compiled with one set of macros. Tests compile each module for each of
its architectures on a machine without a GPU and hold every entry point to the limits stated here;
`build` and `launch` take the same objects at run time. To add a kernel, write a `KernelModule`
beside its launcher and list it in `all_modules`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Entry:
    """One `extern "C" __global__` function.

    name: as in the source.
    signature: `struct` codes of the parameters in order, without alignment: P pointer, i int32,
        I uint32, q int64, Q uint64, f float32, d float64, "128s" a tensor map or a struct of 128
        bytes.
    max_registers: the most registers per thread that the launch geometry allows for.
    """

    name: str
    signature: str
    max_registers: int


@dataclass(frozen=True, slots=True)
class KernelModule:
    """One compilation unit.

    name: unique in the registry; cache of loaded modules and error messages use it.
    source: path of the `.cu` file relative to the package `specpilot_kernels`.
    architectures: NVRTC targets such as "sm_80" or "sm_90a". A plain target also serves later
        GPUs of the same major version, one with a suffix only its own.
    macros: (name, value) pairs given to the compiler as -Dname=value.
    """

    name: str
    source: str
    entries: tuple[Entry, ...]
    architectures: tuple[str, ...]
    macros: tuple[tuple[str, str | int], ...] = ()

    def entry(self, name: str) -> Entry:
        """Return the entry point called `name`; KeyError if the module has none."""
        for entry in self.entries:
            if entry.name == name:
                return entry
        raise KeyError(f"module {self.name} has no kernel {name}")


def all_modules() -> tuple[KernelModule, ...]:
    """Return every module of the package; imports neither torch nor CUDA."""
    from specpilot_kernels.chained import modules as chained
    from specpilot_kernels.probe import modules as probe
    from specpilot_kernels.w12 import modules as w12

    gemm = (*w12.gemm_sm90_modules(), *w12.gemm_mma_modules())
    return (w12.ENCODER, w12.DECODER, *gemm, *chained.all_modules(), probe.STREAM_READ)
