"""Time reads and matrix products on torch's current GPU, in CUDA graphs, L2 cold.

Every time is of a whole graph, replayed until `seconds` have passed after a warm-up that brings
the clocks up. Nothing here decides what is good enough: callers get all times.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from specpilot_kernels import launch
from specpilot_kernels.build import GpuError
from specpilot_kernels.probe.modules import STREAM_READ, SUMS, THREADS, TILE_BYTES
from specpilot_kernels.timing import Work, captured, replayed
from specpilot_kernels.w12.selfcheck import cold_copies, free_bytes
from specpilot_kernels.w12.shapes import Shape

READ_BYTES = 4 << 30
"""Read per replay where memory allows: at least thirty times the largest L2."""

SQUARE = 8192
__all__ = [
    "READ_BYTES",
    "SQUARE",
    "Device",
    "RowTimes",
    "Times",
    "device",
    "free_bytes",
    "read_times",
    "row_times",
    "square_times",
]  # fmt: skip

_WARM_UP_S, _SECONDS = 0.3, 0.5
_LEAST, _MOST = 15, 400


@dataclass(frozen=True, slots=True)
class Device:
    """The GPU as its driver describes it; sizes in bytes."""

    name: str
    capability: tuple[int, int]
    memory_bytes: int
    multiprocessors: int
    shared_memory_per_block_bytes: int
    l2_bytes: int


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of each replay, and what one replay moves and computes."""

    seconds: tuple[float, ...]
    bytes: int
    flops: int


@dataclass(frozen=True, slots=True)
class RowTimes:
    """Products of `rows` rows with every weight of a model's layer set, one after the other."""

    rows: int
    times: Times


def device() -> Device:
    """Describe torch's current GPU. GpuUnavailable without one."""
    launch.capability()
    found = torch.cuda.get_device_properties(torch.cuda.current_device())
    return Device(
        found.name,
        (found.major, found.minor),
        found.total_memory,
        found.multi_processor_count,
        found.shared_memory_per_block_optin,
        found.L2_cache_size,
    )


def read_times(n_bytes: int = READ_BYTES) -> Times:
    """Read `n_bytes` of device memory per replay, or a quarter of what is free.

    The kernel's sum of the buffer is compared with torch's, so that a read that was left out is a
    GpuError and no fast result. GpuError also without a usable GPU.
    """
    reader = launch.prepare(STREAM_READ, "stream_read", block=(THREADS, 1, 1))
    size = min(n_bytes, free_bytes() // 4) // TILE_BYTES * TILE_BYTES
    buffer = torch.empty(size // 4, dtype=torch.int32, device="cuda").random_()
    sums = torch.zeros(SUMS, dtype=torch.int32, device="cuda")

    def read() -> None:
        reader((size // TILE_BYTES, 1, 1), buffer.data_ptr(), size // 16, sums.data_ptr())

    read()
    expected = int(buffer.sum(dtype=torch.int64).item())
    found = int(sums.sum(dtype=torch.int64).item())
    if (found - expected) % 2**32 != 0:
        raise GpuError("the read kernel did not read every byte once")
    return Times(_replayed([read]), size, 0)


def square_times(size: int = SQUARE) -> Times:
    """BF16 products of two normal [size, size] matrices with FP32 accumulation, by torch."""
    a, b = _normal((size, size)), _normal((size, size))
    out = torch.empty_like(a)
    work = partial(torch.mm, a, b, out=out)
    return Times(_replayed([work]), 3 * 2 * size * size, 2 * size**3)


def row_times(shapes: Sequence[Shape], rows: Sequence[int]) -> list[RowTimes]:
    """BF16 products [rows, in] x [out, in]^T of all `shapes` in one graph, for each of `rows`.

    The weights are repeated until they exceed L2 by far, so every product reads its weight from
    memory, as a decode step does. OutOfMemoryError if two copies of them do not fit.
    """
    weights = [_normal(shape) for shape in shapes]
    n_bytes = sum(weight.nbytes for weight in weights)
    copies = min(cold_copies(n_bytes), max(2, free_bytes() // (2 * n_bytes)))
    sets = [weights, *([w.clone() for w in weights] for _ in range(copies - 1))]
    found = []
    for count in rows:
        inputs = {width: _normal((count, width)) for width in {shape[1] for shape in shapes}}
        outputs = [
            torch.empty((count, shape[0]), dtype=torch.bfloat16, device="cuda") for shape in shapes
        ]
        works = [
            partial(torch.mm, inputs[weight.shape[1]], weight.t(), out=out)
            for group in sets
            for weight, out in zip(group, outputs, strict=True)
        ]
        flops = sum(2 * count * shape[0] * shape[1] for shape in shapes)
        times = _replayed(works, seconds=_SECONDS / 4)
        each = Times(tuple(second / copies for second in times), n_bytes, flops)
        found.append(RowTimes(count, each))
    return found


def _normal(shape: Shape) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_()


def _replayed(works: list[Work], *, seconds: float = _SECONDS) -> tuple[float, ...]:
    """Seconds of each replay of a graph of `works`, in order."""
    for work in works:  # libraries choose kernels and take workspace before anything is captured
        work()
    torch.cuda.synchronize()
    graph = captured(works)
    _spin(graph, min(_WARM_UP_S, seconds))
    found: list[float] = []
    while len(found) < _LEAST or (sum(found) < seconds and len(found) < _MOST):
        found.append(replayed(graph))
    return tuple(found)


def _spin(graph: torch.cuda.CUDAGraph, seconds: float) -> None:
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        graph.replay()
        torch.cuda.synchronize()
