"""The CUDA modules of the small kernels; see `registry`.

A block must find room on a multiprocessor that two blocks of the Hopper product fill: the one at
work and the next, which reads weights ahead. If it did not, the multiprocessor that holds it would
get none of the next product's blocks, another one two, and the product would wait for that one. A test
computes the room.
"""

from __future__ import annotations

from typing import Final, Literal

from specpilot_kernels.registry import Entry, KernelModule

Gate = Literal["silu", "sigmoid"]
Activation = Literal["silu", "gelu", "gelu_tanh"]

VECTOR: Final = 8
"""BF16 values that a thread loads at once, 16 bytes."""

THREADS: Final = 128
"""Of a block. With 32 registers each it fits beside products of up to 64 rows."""

FEW_ROWS: Final = 16
"""Products of so few rows leave more room: 256 threads with 56 registers each."""

NORM_THREADS: Final = 256
NORM_KEPT: Final = 3
"""The norm of few rows: threads of a block, and vectors that each holds."""

NORM_MOST_VECTORS: Final = 2048
"""Vectors of a row: twice the threads of FlashInfer's block, whose order of the sum is kept."""

GATED_COLS: Final = 128
"""Values of a row of the gated norm: a head of a gated delta network."""

_ARCHITECTURES = ("sm_80", "sm_89", "sm_90", "sm_100", "sm_120")
# Blocks per multiprocessor that the compiler is told to make possible: 65,536 registers shared by
# so many threads. From sm_120 on, which has room for fewer threads, it may take 40 and 64.
_SMALL = (("VECTOR", VECTOR), ("THREADS", THREADS), ("MIN_BLOCKS", 16))
_MOST_REGISTERS = 40
_NORM_ARGUMENTS = "PPPPiqqqff"

NORM: Final = KernelModule(
    name="chained_norm",
    source="chained/csrc/norm.cu",
    entries=(Entry("rms_norm", _NORM_ARGUMENTS, _MOST_REGISTERS),),
    architectures=_ARCHITECTURES,
    macros=(*_SMALL, ("KEPT", 0)),
)

NORM_OF_FEW_ROWS: Final = KernelModule(
    name="chained_norm_of_few_rows",
    source="chained/csrc/norm.cu",
    entries=(Entry("rms_norm", _NORM_ARGUMENTS, 64),),
    architectures=_ARCHITECTURES,
    macros=(
        ("VECTOR", VECTOR),
        ("THREADS", NORM_THREADS),
        ("MIN_BLOCKS", 4),
        ("KEPT", NORM_KEPT),
    ),
)

_GATES: Final[tuple[Gate, ...]] = ("silu", "sigmoid")
_ACTIVATIONS: Final[tuple[Activation, ...]] = ("silu", "gelu", "gelu_tanh")

ACT_AND_MUL: Final[dict[Activation, KernelModule]] = {
    name: KernelModule(
        name=f"chained_{name}_and_mul",
        source="chained/csrc/act_and_mul.cu",
        entries=(Entry("act_and_mul", "PPiq", _MOST_REGISTERS),),
        architectures=_ARCHITECTURES,
        macros=(*_SMALL, ("ACTIVATION", number)),
    )
    for number, name in enumerate(_ACTIVATIONS)
}

GATED_NORM: Final[dict[Gate, KernelModule]] = {
    gate: KernelModule(
        name=f"chained_{gate}_gated_norm",
        source="chained/csrc/gated_norm.cu",
        entries=(Entry("gated_rms_norm", "PPPPiqqf", _MOST_REGISTERS),),
        architectures=_ARCHITECTURES,
        macros=(*_SMALL, ("COLS", GATED_COLS), ("SILU", int(gate == "silu"))),
    )
    for gate in _GATES
}


def all_modules() -> tuple[KernelModule, ...]:
    """Return every module of this package."""
    return (NORM, NORM_OF_FEW_ROWS, *ACT_AND_MUL.values(), *GATED_NORM.values())
