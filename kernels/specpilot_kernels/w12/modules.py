"""The CUDA modules of the W12 codec; see `registry`."""

from __future__ import annotations

from typing import Final

from specpilot_kernels.registry import Entry, KernelModule
from specpilot_kernels.w12 import layout

ARCHITECTURES: Final = ("sm_80", "sm_89", "sm_90", "sm_100", "sm_120")
"""The codec uses nothing newer than sm_80, so plain targets serve every GPU since."""

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
