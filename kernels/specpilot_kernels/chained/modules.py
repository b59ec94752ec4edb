"""The CUDA modules of the small kernels; see `registry`."""

from __future__ import annotations

from typing import Final, Literal

from specpilot_kernels.registry import Entry, KernelModule

Gate = Literal["silu", "sigmoid"]
Activation = Literal["silu", "gelu", "gelu_tanh"]

VECTOR: Final = 8
"""BF16 values that a thread loads at once, 16 bytes."""

NORM_THREADS: Final = 1024
"""The most threads of a row's block."""

NORM_ROUNDS: Final = 2
"""The most vectors that a thread of the norm keeps."""

ACT_THREADS: Final = 256

GATED_COLS: Final = 128
"""Values of a row of the gated norm: a head of a gated delta network."""

GATED_THREADS: Final = 128

_ARCHITECTURES = ("sm_80", "sm_89", "sm_90", "sm_100", "sm_120")

NORM: Final = KernelModule(
    name="chained_norm",
    source="chained/csrc/norm.cu",
    entries=(Entry("rms_norm", "PPPPiqqqff", 64),),
    architectures=_ARCHITECTURES,
    macros=(("VECTOR", VECTOR), ("MAX_THREADS", NORM_THREADS), ("ROUNDS", NORM_ROUNDS)),
)

_GATES: Final[tuple[Gate, ...]] = ("silu", "sigmoid")
_ACTIVATIONS: Final[tuple[Activation, ...]] = ("silu", "gelu", "gelu_tanh")

ACT_AND_MUL: Final[dict[Activation, KernelModule]] = {
    name: KernelModule(
        name=f"chained_{name}_and_mul",
        source="chained/csrc/act_and_mul.cu",
        entries=(Entry("act_and_mul", "PPiq", 64),),
        architectures=_ARCHITECTURES,
        macros=(("VECTOR", VECTOR), ("THREADS", ACT_THREADS), ("ACTIVATION", number)),
    )
    for number, name in enumerate(_ACTIVATIONS)
}

GATED_NORM: Final[dict[Gate, KernelModule]] = {
    gate: KernelModule(
        name=f"chained_{gate}_gated_norm",
        source="chained/csrc/gated_norm.cu",
        entries=(Entry("gated_rms_norm", "PPPPiqqf", 64),),
        architectures=_ARCHITECTURES,
        macros=(
            ("VECTOR", VECTOR),
            ("THREADS", GATED_THREADS),
            ("COLS", GATED_COLS),
            ("SILU", int(gate == "silu")),
        ),
    )
    for gate in _GATES
}


def all_modules() -> tuple[KernelModule, ...]:
    """Return every module of this package."""
    return (NORM, *ACT_AND_MUL.values(), *GATED_NORM.values())
