"""The CUDA modules of the Gated DeltaNet tree kernels; see `registry`."""

from __future__ import annotations

import struct
from functools import cache
from typing import Final, Literal, get_args

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

Form = Literal["solve", "direct"]
"""How WY verify comes to its outputs: by U, or by weights of the right sides solved meanwhile."""

WY_FORM: Final[Form] = "solve"

CARVEOUT: Final = 100
"""Percent; the same for all, and W12's: an SM that changes it must be empty first."""

ROWS_PARAMS: Final = "@18P6q7i4x"
COMMIT_PARAMS: Final = "@6P4q8i"
COMMIT_LAYER: Final = "@7P"
VERIFY_PARAMS: Final = "@10Pqf4i4x"
"""`struct Params` of the kernels, the same for path and WY, and `struct Layer` of commit."""

_ARCHITECTURES: Final = ("sm_90",)


def wy_threads(rows: int, form: Form) -> int:
    """Threads of a block.

    Eight warps multiply; "solve" has one or two that walk up the tree, "direct" four that solve.
    """
    return 256 + (128 if form == "direct" else 32 if rows <= 40 else 64)


def wy_shared_bytes(rows: int, dim: int, form: Form) -> int:
    """`struct Shared` of WY verify."""
    halves = 2 * (-(-rows // 16) * 16) * (dim + 16) + rows * (WY_SLICE + 8)
    solved = rows if form == "direct" else -(-rows // min(rows, 32)) * min(rows, 32)
    floats = 2 * rows * (solved + 4) + (solved + rows) * (WY_SLICE + 4) + 8 * rows
    paths = rows * rows + 4 * 8 if form == "direct" else 0
    return 2 * halves + 4 * floats + paths


@cache
def rows(dim: int, per_block: int = ROWS_PER_BLOCK) -> KernelModule:
    """Convolution, norms and gates for heads of `dim` elements, `per_block` rows in a block."""
    return _module("rows", dim, ROWS_PARAMS, 96, suffix=f"_{per_block}", PER_BLOCK=per_block)


@cache
def path(dim: int) -> KernelModule:
    """Path verify."""
    return _module("path", dim, VERIFY_PARAMS, 96, MAX_ROWS=MAX_ROWS)


@cache
def commit(dim: int) -> KernelModule:
    """Commit of all layers."""
    return _module("commit", dim, COMMIT_PARAMS, 96, MAX_ROWS=MAX_ROWS)


@cache
def wy(dim: int, rows: int, form: Form) -> KernelModule:
    """WY verify for up to `rows` rows, one of `WY_ROWS`."""
    suffix = f"_{rows}"
    if form == "direct":  # at most 128 where a block of `rows` shall find room beside
        most = 128 if rows <= 40 else 168
        return _module(
            "wy_direct", dim, VERIFY_PARAMS, most, entry="gdn_wy", suffix=suffix, ROWS=rows
        )
    blocks = 2 if rows <= 40 and dim == 128 else 1
    warps = -(-blocks * wy_threads(rows, form) // 32 // 4)  # in a quarter of a multiprocessor
    most = min(512 // warps // 8 * 8, 255)
    return _module("wy", dim, VERIFY_PARAMS, most, suffix=suffix, ROWS=rows, BLOCKS_PER_SM=blocks)


def modules() -> tuple[KernelModule, ...]:
    """Every module of the tree kernels."""
    forms: tuple[Form, ...] = get_args(Form)
    return tuple(
        module
        for dim in HEAD_DIMS
        for module in (
            rows(dim), path(dim), commit(dim),
            *(wy(dim, size, form) for size in WY_ROWS for form in forms),
        )
    )  # fmt: skip


def _module(
    name: str, dim: int, params: str, registers: int, *, entry: str | None = None,
    suffix: str = "", **macros: int,
) -> KernelModule:  # fmt: skip
    signature = f"{struct.calcsize(params)}s"
    return KernelModule(
        name=f"gdn_{name}_{dim}{suffix}",
        source=f"tree_verify/csrc/{name}.cu",
        entries=(Entry(entry or f"gdn_{name}", signature, registers),),
        architectures=_ARCHITECTURES,
        macros=(("KDIM", dim), ("VDIM", dim), *macros.items()),
    )
