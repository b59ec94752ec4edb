"""The CUDA module of the bandwidth probe; see `registry`."""

from __future__ import annotations

from typing import Final

from specpilot_kernels.registry import Entry, KernelModule

THREADS: Final = 512
LOADS: Final = 8
"""Loads of 16 bytes that a thread has under way: 64 KiB per block."""

SUMS: Final = 4096
"""Places that warps add to, enough that no two often meet."""

TILE_BYTES: Final = THREADS * LOADS * 16

STREAM_READ: Final = KernelModule(
    name="stream_read",
    source="probe/csrc/stream_read.cu",
    entries=(Entry("stream_read", "PqP", 64),),
    architectures=("sm_80", "sm_89", "sm_90", "sm_100", "sm_120"),
    macros=(("STREAM_THREADS", THREADS), ("STREAM_LOADS", LOADS), ("STREAM_SUMS", SUMS)),
)
