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
GEMM_MMA_STAGES: Final = {8: 7, 16: 6, 32: 5, 48: 4, 64: 3}
"""Rows of x that a portable GEMM kernel is compiled for -> stages of its ring.

As many as fit, with the table of sums, into the 99 KB that a block has on sm_86, sm_89 and sm_120.
"""


def gemm_mma(cols: int, *, view_only: bool = False) -> KernelModule:
    """Return the portable GEMM for up to `cols` rows of x, a key of GEMM_MMA_STAGES.

    view_only: the variant that reads only the 8-bit view of each record.
    """
    return KernelModule(
        name=f"w12_gemm_mma_{cols}" + ("_view" if view_only else ""),
        source="w12/csrc/gemm_mma.cu",
        entries=(Entry("w12_gemm_mma", f"{GEMM_MMA_PARAMS.size}s", 224),),
        architectures=ARCHITECTURES,
        macros=(
            ("COLS", cols), ("STAGES", GEMM_MMA_STAGES[cols]), ("VIEW_ONLY", int(view_only)),
        ),
    )  # fmt: skip


def gemm_mma_shared_bytes(cols: int, *, view_only: bool = False) -> int:
    """Return the dynamic shared memory of `gemm_mma(cols)`: its ring and its table of sums."""
    record = layout.VIEW_BYTES if view_only else layout.RECORD_BYTES
    inputs = cols * layout.RECORD_COLS * 2
    sums = layout.RECORD_ROWS * cols * 4
    return GEMM_MMA_STAGES[cols] * (record + inputs) + sums
