"""The CUDA modules of the tree builder and of acceptance; see `registry`."""

from __future__ import annotations

from functools import cache
from typing import Final

from specpilot_kernels.registry import Entry, KernelModule

MAX_NODES: Final = 128
CANDIDATES: Final = (16, 32)
"""Variants of the builder, by the most candidates of a position."""

BUILD_THREADS: Final = 256
ACCEPT_THREADS: Final = 32

_ARCHITECTURES: Final = ("sm_80", "sm_89", "sm_90", "sm_100", "sm_120")
_BUILD: Final = "PPPPPPPPPPPPPiiiiii"


@cache
def build_trees(candidates: int) -> KernelModule:
    """The tree builder for up to `candidates` candidates, one of `CANDIDATES`."""
    return KernelModule(
        name=f"build_trees_{candidates}",
        source="trees/csrc/build_trees.cu",
        entries=(Entry("build_trees", _BUILD, 255),),
        architectures=_ARCHITECTURES,
        macros=(("CANDIDATES", candidates), ("THREADS", BUILD_THREADS)),
    )


ACCEPT_PATH: Final = KernelModule(
    name="accept_path",
    source="trees/csrc/accept_path.cu",
    entries=(Entry("accept_path", "PPPPPPPPPPPPii", 64),),
    architectures=_ARCHITECTURES,
)


def all_modules() -> tuple[KernelModule, ...]:
    """Every module of this folder."""
    return (*(build_trees(candidates) for candidates in CANDIDATES), ACCEPT_PATH)


def build_shared_bytes(positions: int, predecessors: int, variant: int) -> int:
    """Dynamic shared memory of the builder: rows, ranked scores, ranked candidates."""
    places = (1 + (positions - 1) * predecessors) * (variant + 1)
    return 16 * (MAX_NODES + 1) + 4 * places + places
