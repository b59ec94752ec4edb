"""Scratch memory of the GEMM kernels: one piece per CUDA stream.

Kernels leave a workspace as they found it, so launches that run one after the other share one,
and launches that may run at once must not. Each stream therefore has its own; a graph capture
gets one that belongs to the capturing stream's graphs. So:

- eager calls on any number of streams are independent of each other and of replayed graphs;
- graphs captured on the same stream must not be replayed at the same time. (Graphs that shall
  run side by side are captured on different streams.)

Nothing can be allocated for good during a capture: `Pool.warm` keeps spares for streams that are
first seen there.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import cache
from typing import Generic, TypeVar

import torch

from specpilot_kernels import launch

_SPARES = 2

T = TypeVar("T")


class NotWarmed(RuntimeError):
    """A capture needs memory or code that must be prepared before it."""


def refuse_in_capture() -> None:
    """NotWarmed if the current stream is being captured: kernels cannot be loaded there."""
    if torch.cuda.is_current_stream_capturing():
        raise NotWarmed(
            "a CUDA graph is being captured, and the W12 kernels are not loaded: call "
            "specpilot_kernels.w12.gemm.warm() before the capture"
        )


class Pool(Generic[T]):
    """The workspaces of one kernel, on all devices and streams.

    allocate: makes one on a device, filled by work on the current stream.
    """

    def __init__(self, allocate: Callable[[int], T]) -> None:
        self._allocate = allocate
        self._lock = threading.Lock()
        self._owned: dict[tuple[int, int, bool], T] = {}
        self._spares: dict[int, list[T]] = {}

    def of_current_stream(self, device: int) -> T:
        """The workspace for a launch on torch's current stream of `device`, the current device.

        NotWarmed if the stream is capturing, was never captured before, and no spare is left.
        """
        capturing = torch.cuda.is_current_stream_capturing()
        key = (device, launch.current_stream(device), capturing)
        found = self._owned.get(key)
        if found is not None:
            return found
        with self._lock:
            if key not in self._owned:
                self._owned[key] = self._spare(device) if capturing else self._allocate(device)
            return self._owned[key]

    def warm(self, device: int) -> None:
        """Prepare spares for captures to come, and the current stream's workspace."""
        self.of_current_stream(device)
        with self._lock:
            spares = self._spares.setdefault(device, [])
            while len(spares) < _SPARES:
                spares.append(self._allocate(device))
        torch.cuda.current_stream(device).synchronize()  # other streams will use them

    def _spare(self, device: int) -> T:
        spares = self._spares.get(device)
        if not spares:
            raise NotWarmed(
                "a CUDA graph is being captured, and no W12 workspace was prepared for this "
                "stream: call specpilot_kernels.w12.gemm.warm() before the capture"
            )
        return spares.pop()


@cache
def multiprocessors(device: int) -> int:
    """Multiprocessors of a device."""
    return torch.cuda.get_device_properties(device).multi_processor_count
