"""The CUDA modules of W12, codec and GEMM; see `registry`."""

from __future__ import annotations

import struct
from functools import cache
from typing import Final

from specpilot_kernels.registry import Entry, KernelModule
from specpilot_kernels.w12 import layout

ARCHITECTURES: Final = ("sm_80", "sm_89", "sm_90", "sm_100", "sm_120")
"""Codec and portable GEMM need nothing newer than sm_80: plain targets serve every GPU since."""

ENCODE_THREADS: Final = 1024
"""One block of the encoder per multiprocessor: more blocks would not find their inputs in L2."""

ENCODE_COPIES: Final = 1
"""Histograms of exponent fields per warp: 1, 2 or 4."""


def encode_shared_bytes(threads: int = ENCODE_THREADS, copies: int = ENCODE_COPIES) -> int:
    """Return the encoder's dynamic shared memory: per warp its histograms, later its tile."""
    return threads // 32 * max(copies * 256 * 4, 16 * 144)


DECODE_THREADS: Final = 256
DECODE_TILE_COLS: Final = 512

_ENCODE: Final = "PqiiiPPPPPqPP"
_DECODE: Final = "PPPPPiqiiiP"


def encoder(
    *,
    threads: int = ENCODE_THREADS,
    blocks: int = 1,
    prefetch: int = 0,
    copies: int = ENCODE_COPIES,
) -> KernelModule:
    """Return the encoder, by default as it is used; the benchmark times the others.

    threads: per block, a multiple of 512. blocks: that must fit on a multiprocessor. prefetch:
    1 fetches the next tile while one is packed. copies: as `ENCODE_COPIES`.
    """
    return KernelModule(
        name="w12_encode",
        source="w12/csrc/encode.cu",
        entries=(Entry("w12_encode", _ENCODE, 64), Entry("w12_encode_unaligned", _ENCODE, 64)),
        architectures=ARCHITECTURES,
        macros=(
            ("W12_LAYOUT", layout.LAYOUT),
            ("W12_ENCODE_THREADS", threads),
            ("W12_ENCODE_BLOCKS", blocks),
            ("W12_ENCODE_PREFETCH", prefetch),
            ("W12_ENCODE_COPIES", copies),
        ),
    )


ENCODER: Final = encoder()

DECODER: Final = KernelModule(
    name="w12_decode",
    source="w12/csrc/decode.cu",
    entries=(
        Entry("w12_decode", _DECODE, 48),
        Entry("w12_decode_unaligned", _DECODE, 64),
        Entry("w12_compare", _DECODE + "P", 64),
        Entry("w12_compare_unaligned", _DECODE + "P", 64),
    ),
    architectures=ARCHITECTURES,
    macros=(("W12_LAYOUT", layout.LAYOUT),),
)

GEMM_ROWS: Final = (8, 16, 32, 48, 64)
"""Variants of the GEMM kernels, by the most rows of x that they take."""

GEMM_SM90_THREADS: Final = 320
GEMM_SM90_PARAMS: Final = "@9Pq9i4x"
"""`struct Params` of the Hopper kernel, padded to a multiple of its alignment."""

_SM90_SHARED_BYTES: Final = 112 * 1024
"""Two CTAs share the 228 KB of an SM; each needs 1 KB besides, and 1 KB for static variables."""
_SM90_REGISTERS: Final = 96
_SM90_READ_AHEAD_ROWS: Final = 16
_SM90_SLOTS: Final = {48: 96, 64: 48}


def gemm_sm90_slots(rows: int) -> int:
    """Channels of a tile whose corrections have a place in shared memory."""
    return _SM90_SLOTS.get(rows, layout.RECORD_ROWS)


def gemm_sm90_stages(rows: int, *, view_only: bool) -> int:
    """Stages of the ring: as many as fit beside the places for corrections."""
    left = _SM90_SHARED_BYTES - 4 * gemm_sm90_slots(rows) * rows
    return left // _stage_bytes(rows, view_only)


def gemm_sm90_shared_bytes(rows: int, *, view_only: bool) -> int:
    """Dynamic shared memory of a CTA."""
    ring = gemm_sm90_stages(rows, view_only=view_only) * _stage_bytes(rows, view_only)
    return ring + 4 * gemm_sm90_slots(rows) * rows


@cache
def gemm_sm90(rows: int, *, view_only: bool = False, stream_only: bool = False) -> KernelModule:
    """The Hopper GEMM for up to `rows` rows, one of `GEMM_ROWS`.

    view_only: reads the 8-bit view of each record alone. stream_only: moves the same bytes and
    multiplies nothing; for benchmarks.
    """
    chosen = (("_view", view_only), ("_stream", stream_only))
    return KernelModule(
        name=f"w12_gemm_sm90{''.join(word for word, yes in chosen if yes)}_{rows}",
        source="w12/csrc/gemm_sm90.cu",
        entries=(Entry("w12_gemm", f"128s{struct.calcsize(GEMM_SM90_PARAMS)}s", _SM90_REGISTERS),),
        architectures=("sm_90a",),
        macros=(
            ("COLS", rows),
            ("STAGES", gemm_sm90_stages(rows, view_only=view_only)),
            ("SLOTS", gemm_sm90_slots(rows)),
            ("VIEW_ONLY", int(view_only)),
            ("STREAM_ONLY", int(stream_only)),
            ("READ_AHEAD", int(view_only and rows <= _SM90_READ_AHEAD_ROWS)),
        ),
    )


def gemm_sm90_modules() -> tuple[KernelModule, ...]:
    """Every variant of the Hopper GEMM."""
    return tuple(
        gemm_sm90(rows, view_only=view, stream_only=stream)
        for view, stream in ((False, False), (True, False), (False, True))
        for rows in GEMM_ROWS
    )


GEMM_MMA_THREADS: Final = 288
GEMM_MMA_PARAMS: Final = "@9P2q6i"
"""`struct Params` of the portable kernel."""

_MMA_SHARED_BYTES: Final = 99 * 1024 - 128
"""What a block has on sm_86, sm_89 and sm_120, less the kernel's few static bytes."""
_MMA_REGISTERS: Final = 224


def gemm_mma_stages(rows: int, *, view_only: bool) -> int:
    """Stages of the ring: as many as fit beside the table of sums."""
    left = _MMA_SHARED_BYTES - 4 * layout.RECORD_ROWS * rows
    return left // _stage_bytes(rows, view_only)


def gemm_mma_shared_bytes(rows: int, *, view_only: bool) -> int:
    """Dynamic shared memory of a CTA."""
    ring = gemm_mma_stages(rows, view_only=view_only) * _stage_bytes(rows, view_only)
    return ring + 4 * layout.RECORD_ROWS * rows


@cache
def gemm_mma(rows: int, *, view_only: bool = False) -> KernelModule:
    """The portable GEMM for up to `rows` rows, one of `GEMM_ROWS`; view_only as above."""
    return KernelModule(
        name=f"w12_gemm_mma{'_view' if view_only else ''}_{rows}",
        source="w12/csrc/gemm_mma.cu",
        entries=(Entry("w12_gemm_mma", f"{struct.calcsize(GEMM_MMA_PARAMS)}s", _MMA_REGISTERS),),
        architectures=ARCHITECTURES,
        macros=(
            ("COLS", rows),
            ("STAGES", gemm_mma_stages(rows, view_only=view_only)),
            ("VIEW_ONLY", int(view_only)),
        ),
    )


def gemm_mma_modules() -> tuple[KernelModule, ...]:
    """Every variant of the portable GEMM."""
    return tuple(gemm_mma(rows, view_only=v) for v in (False, True) for rows in GEMM_ROWS)


def _stage_bytes(rows: int, view_only: bool) -> int:
    """A record, or its view, and the same inputs of x."""
    fetched = layout.VIEW_BYTES if view_only else layout.RECORD_BYTES
    return fetched + 2 * layout.RECORD_COLS * rows
