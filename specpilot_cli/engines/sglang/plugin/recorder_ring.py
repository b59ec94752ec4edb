"""Device rows and the pinned host slots they are copied to, without a wait on either side."""

from __future__ import annotations

import queue

import numpy as np
import numpy.typing as npt
import torch

# Pinned memory is taken from everyone; a second of steps is what a slow disk may need.
RING_BYTES = 64 << 20
MAX_SLOTS = 128
MIN_SLOTS = 4


class PinnedSlot:
    """Room for one step's rows on the host, int32 [rows, words], and the event of their copy."""

    def __init__(self, ring: HostRing, room: torch.Tensor, *, on_gpu: bool) -> None:
        self._ring = ring
        self._tensor = room
        self._array: npt.NDArray[np.int32] = room.numpy()
        # blocking: the writer sleeps in the driver instead of spinning beside the scheduler.
        self._copied = torch.cuda.Event(blocking=True) if on_gpu else None

    def fill(self, rows: torch.Tensor) -> None:
        """Start the copy of device rows int32 [n, words] on the current stream."""
        self._tensor[: rows.shape[0]].copy_(rows, non_blocking=True)
        if self._copied is not None:
            self._copied.record()

    def rows(self, count: int) -> npt.NDArray[np.int32]:
        """Wait for the copy and return its first `count` rows, int32 [count, words]."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._array[:count]

    def release(self) -> None:
        """Give the slot back."""
        self._ring.free.put(self)


class HostRing:
    """A fixed number of slots; taken by the scheduler's thread, given back by the writer's."""

    def __init__(
        self, rows: int, words: int, *, on_gpu: bool, ring_bytes: int = RING_BYTES
    ) -> None:
        count = min(MAX_SLOTS, max(MIN_SLOTS, ring_bytes // (4 * rows * words)))
        self.slots = count
        self.free: queue.SimpleQueue[PinnedSlot] = queue.SimpleQueue()
        room = torch.empty((count, rows, words), dtype=torch.int32, pin_memory=on_gpu)
        for number in range(count):
            self.free.put(PinnedSlot(self, room[number], on_gpu=on_gpu))

    def take(self) -> PinnedSlot | None:
        """A free slot, or None at once if the writer is that far behind."""
        try:
            return self.free.get_nowait()
        except queue.Empty:
            return None
