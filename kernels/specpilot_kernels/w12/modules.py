"""The CUDA modules of the W12 codec; see `registry`."""

from __future__ import annotations

from typing import Final

from specpilot_kernels.registry import Entry, KernelModule
from specpilot_kernels.w12 import layout

ARCHITECTURES: Final = ("sm_80", "sm_89", "sm_90", "sm_100", "sm_120")
"""The codec uses nothing newer than sm_80, so plain targets serve every GPU since."""

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
