"""The CUDA modules of W12, codec and GEMM; see `registry`."""

from __future__ import annotations

import struct
from typing import Final

from specpilot_kernels.registry import Entry, KernelModule
from specpilot_kernels.w12 import layout

ARCHITECTURES: Final = ("sm_80", "sm_89", "sm_90", "sm_100", "sm_120")
"""Codec and portable GEMM need nothing newer than sm_80: plain targets serve every GPU since."""

ENCODE_THREADS: Final = 1024
"""One block of the encoder per multiprocessor: more blocks would not find their inputs in L2."""

ENCODE_SHARED_BYTES: Final = ENCODE_THREADS // 32 * 16 * 144
"""Dynamic shared memory of the encoder: a tile of 16 rows x 144 bytes per warp."""

DECODE_THREADS: Final = 256
DECODE_TILE_COLS: Final = 512

_ENCODE: Final = "PqiiiPPPPPqPP"
_DECODE: Final = "PPPPPiqiiiP"

ENCODER: Final = KernelModule(
    name="w12_encode",
    source="w12/csrc/encode.cu",
    entries=(Entry("w12_encode", _ENCODE, 64), Entry("w12_encode_unaligned", _ENCODE, 64)),
    architectures=ARCHITECTURES,
    macros=(
        ("W12_LAYOUT", layout.LAYOUT),
        ("W12_ENCODE_THREADS", ENCODE_THREADS),
        ("W12_ENCODE_BLOCKS", 1),
        ("W12_ENCODE_PREFETCH", 0),
    ),
)

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

GEMM_MMA_PARAMS: Final = struct.Struct("@9P2q6i")
"""`Params` of the portable GEMM, field by field."""

GEMM_MMA_THREADS: Final = 288
GEMM_MMA_COLS: Final = (8, 16, 32, 48, 64)
"""Rows of x that portable GEMM kernels are compiled for."""

_GEMM_MMA_SHARED: Final = 99 * 1024 - 128
"""What a block has on sm_86, sm_89 and sm_120, less the kernel's few static bytes."""


def gemm_mma(cols: int, *, view_only: bool = False) -> KernelModule:
    """Return the portable GEMM for up to `cols` rows of x, one of GEMM_MMA_COLS.

    view_only: the variant that reads only the 8-bit view of each record.
    """
    return KernelModule(
        name=f"w12_gemm_mma_{cols}" + ("_view" if view_only else ""),
        source="w12/csrc/gemm_mma.cu",
        entries=(Entry("w12_gemm_mma", f"{GEMM_MMA_PARAMS.size}s", 224),),
        architectures=ARCHITECTURES,
        macros=(
            ("COLS", cols),
            ("STAGES", _gemm_mma_ring(cols, view_only)[0]),
            ("VIEW_ONLY", int(view_only)),
        ),
    )


def gemm_mma_shared_bytes(cols: int, *, view_only: bool = False) -> int:
    """Return the dynamic shared memory of `gemm_mma(cols)`: its table of sums and its ring."""
    stages, stage_bytes = _gemm_mma_ring(cols, view_only)
    return _gemm_mma_sums(cols) + stages * stage_bytes


def _gemm_mma_ring(cols: int, view_only: bool) -> tuple[int, int]:
    """As many stages as fit beside the table of sums, and the bytes of one."""
    record = layout.VIEW_BYTES if view_only else layout.RECORD_BYTES
    stage_bytes = record + layout.RECORD_COLS * cols * 2
    return (_GEMM_MMA_SHARED - _gemm_mma_sums(cols)) // stage_bytes, stage_bytes


def _gemm_mma_sums(cols: int) -> int:
    return layout.RECORD_ROWS * cols * 4
