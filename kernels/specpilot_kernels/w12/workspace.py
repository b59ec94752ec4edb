"""Scratch memory of the GEMM kernels: one piece per CUDA stream.

Kernels leave a workspace as they found it, so launches that run one after the other share one,
and launches that may run at once must not. Each stream therefore has its own; a graph capture
gets one that belongs to the capturing stream's graphs. So:

- eager calls on any number of streams are independent of each other and of replayed graphs;
- graphs captured on the same stream must not be replayed at the same time. (Graphs that shall
  run side by side are captured on different streams.)

Nothing can be allocated for good during a capture: `Pool.warm` keeps spares for streams that are
first seen there.

A kernel whose CTAs wait for each other needs room for all of them. One that takes half of every
multiprocessor has it beside another one, not beside two: with each of three kernels half in place,
all would wait for ever. Its pool lets the eager calls of a thread run on two streams at a time; a
third stream waits until one of them is done with what it was given. What a graph does is settled
when it is captured: `Pool.warm` keeps spares for two streams.
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

    allocate: makes one on a device, filled by work on the current stream. most_streams: streams of
    a device on which the kernel may run at the same time, as far as calls outside of captures go;
    None: any number.
    """

    def __init__(self, allocate: Callable[[int], T], *, most_streams: int | None = None) -> None:
        self._allocate = allocate
        self._most_streams = most_streams
        self._lock = threading.Lock()
        self._running: dict[int, dict[int, torch.cuda.Stream]] = {}
        self._owned: dict[tuple[int, int, bool], T] = {}
        self._spares: dict[int, list[T]] = {}

    def of_current_stream(self, device: int) -> T:
        """The workspace for a launch on torch's current stream of `device`, the current device.

        NotWarmed if the stream is capturing, was never captured before, and no spare is left.
        """
        capturing = torch.cuda.is_current_stream_capturing()
        stream = launch.current_stream(device)
        if self._most_streams is not None and not capturing:
            self._take_turn(device, stream)
        key = (device, stream, capturing)
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

    def _take_turn(self, device: int, stream: int) -> None:
        """Let the current stream wait for another one, if it is one too many."""
        running = self._running.setdefault(device, {})
        if stream in running:
            return
        with self._lock:
            current = torch.cuda.current_stream(device)
            while self._most_streams is not None and len(running) >= self._most_streams:
                # the one that came first; whoever returns later is the newest again
                current.wait_stream(running.pop(next(iter(running))))
            running[stream] = current

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
