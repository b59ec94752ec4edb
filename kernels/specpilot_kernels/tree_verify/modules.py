"""The CUDA modules of the Gated DeltaNet tree kernels; see `registry`."""

from __future__ import annotations

import struct
from functools import cache
from typing import Final

from specpilot_kernels.registry import Entry, KernelModule

HEAD_DIMS: Final = (64, 128)
"""Key dimension of the heads that kernels exist for; the value dimension is the same."""

MAX_ROWS: Final = 136
"""Rows of a tree that path verify and commit take, the anchor included."""

WY_ROWS: Final = (16, 24, 40, 72)
"""Variants of WY verify, by the most rows of a tree."""

ROWS_THREADS: Final = 256
ROWS_PER_BLOCK: Final = 2
WALK_THREADS: Final = 128
WALK_COLUMNS: Final = {64: 64, 128: 32}
"""Columns of the state that a block of path verify or commit has, by the head's dimension."""

WY_SLICE: Final = 64

CARVEOUT: Final = 100
"""Percent; the same for all, and W12's: an SM that changes it must be empty first."""

ROWS_PARAMS: Final = "@18P6q7i4x"
COMMIT_PARAMS: Final = "@6P4q8i"
COMMIT_LAYER: Final = "@7P"
VERIFY_PARAMS: Final = "@10Pqf4i4x"
"""`struct Params` of the kernels, the same for path and WY, and `struct Layer` of commit."""

_ARCHITECTURES: Final = ("sm_90",)


def wy_threads(rows: int) -> int:
    """Threads of a block: eight warps that multiply, and one or two that walk up the tree."""
    return 256 + (32 if rows <= 40 else 64)


def wy_shared_bytes(rows: int, dim: int) -> int:
    """`struct Shared` of WY verify."""
    solved = -(-rows // min(rows, 32)) * min(rows, 32)
    halves = 2 * (-(-rows // 16) * 16) * (dim + 16) + rows * (WY_SLICE + 8)
    floats = 2 * rows * (solved + 4) + (solved + rows) * (WY_SLICE + 4) + 8 * rows
    return 2 * halves + 4 * floats


@cache
def rows(dim: int) -> KernelModule:
    """Convolution, norms and gates for heads of `dim` elements."""
    return _module("rows", dim, ROWS_PARAMS, 96)


@cache
def path(dim: int) -> KernelModule:
    """Path verify."""
    return _module("path", dim, VERIFY_PARAMS, 96, MAX_ROWS=MAX_ROWS)


@cache
def commit(dim: int) -> KernelModule:
    """Commit of all layers."""
    return _module("commit", dim, COMMIT_PARAMS, 96, MAX_ROWS=MAX_ROWS)


@cache
def wy(dim: int, rows: int) -> KernelModule:
    """WY verify for up to `rows` rows, one of `WY_ROWS`."""
    blocks = 2 if rows <= 40 and dim == 128 else 1
    warps = -(-blocks * wy_threads(rows) // 32 // 4)  # in a quarter of a multiprocessor
    most = min(512 // warps // 8 * 8, 255)
    return _module(
        "wy", dim, VERIFY_PARAMS, most, suffix=f"_{rows}", ROWS=rows, BLOCKS_PER_SM=blocks
    )


def modules() -> tuple[KernelModule, ...]:
    """Every module of the tree kernels."""
    return tuple(
        module
        for dim in HEAD_DIMS
        for module in (rows(dim), path(dim), commit(dim), *(wy(dim, size) for size in WY_ROWS))
    )


def _module(
    name: str, dim: int, params: str, registers: int, *, suffix: str = "", **macros: int
) -> KernelModule:
    return KernelModule(
        name=f"gdn_{name}_{dim}{suffix}",
        source=f"tree_verify/csrc/{name}.cu",
        entries=(Entry(f"gdn_{name}", f"{struct.calcsize(params)}s", registers),),
        architectures=_ARCHITECTURES,
        macros=(("KDIM", dim), ("VDIM", dim), *macros.items()),
    )
