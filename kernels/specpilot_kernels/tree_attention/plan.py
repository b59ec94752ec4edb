"""How tree attention is laid on a GPU: the tile of each program, and how many share the keys."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Final

HEAD_DIMS: Final = (64, 128, 256, 512)
TREE_BLOCK: Final = 32
"""Rows of the tree that are keys together; in `kernels`, `_TREE_N`."""

_LEAST_KEYS: Final = 128
_LARGE_SHARED_BYTES: Final = 220 * 1024


@dataclass(frozen=True, slots=True)
class Tile:
    """What one program holds.

    block_m: rows times heads; block_n: keys of a step; value_dim: columns of the values, where
    fewer than the head's the scores are computed again for each part; warps, stages: Triton's
    options; resident: programs that one multiprocessor holds at a time.
    """

    block_m: int
    block_n: int
    value_dim: int
    warps: int = 8
    stages: int = 3
    resident: int = 1


@dataclass(frozen=True, slots=True)
class Plan:
    """A tile, the programs that share the keys of a KV head, and the fewest blocks worth one."""

    tile: Tile
    splits: int
    least_blocks: int


# By head dimension: for few and for many rows. Chosen so that neither loop over keys spills a
# register and accumulators stay within half of the register file.
_LARGE: Final = {
    64: (Tile(64, 64, 64, warps=4, resident=2), Tile(128, 128, 64)),
    128: (Tile(64, 64, 128, warps=4, resident=2), Tile(128, 128, 128)),
    256: (Tile(64, 64, 256), Tile(128, 64, 256)),
    # One stage less: beside 128 KB of queries two steps of keys fit, and nothing else.
    512: (Tile(128, 32, 256, stages=2), Tile(128, 32, 256, stages=2)),
}
# Within the 99 KB of a block on sm_86, sm_89 and sm_120.
_SMALL: Final = {
    64: (Tile(64, 64, 64, warps=4, resident=2), Tile(64, 64, 64, warps=4, resident=2)),
    128: (Tile(64, 64, 128, warps=4), Tile(64, 64, 128, warps=4)),
    256: (Tile(64, 32, 256), Tile(64, 32, 256)),
    512: (Tile(32, 16, 256, warps=4), Tile(32, 16, 256, warps=4)),
}


def tiles() -> tuple[tuple[int, bool, Tile], ...]:
    """Every (head dimension, whether it needs a large shared memory, tile) that may be chosen."""
    return tuple(
        (head_dim, table is _LARGE, tile)
        for table in (_LARGE, _SMALL)
        for head_dim, pair in table.items()
        for tile in dict.fromkeys(pair)
    )


@cache
def choose(
    rows: int,
    kv_heads: int,
    head_dim: int,
    *,
    multiprocessors: int,
    shared_bytes: int,
    tile: Tile | None = None,
    splits: int | None = None,
) -> Plan:
    """Plan for `rows` rows times heads of a group, per request; one wave of programs.

    multiprocessors, shared_bytes: of the GPU, the latter what a block may take. tile, splits:
    taken as they are where given. ValueError for a head dimension without a tile.
    """
    if head_dim not in HEAD_DIMS:
        raise ValueError(f"heads of {head_dim} are not supported, only {HEAD_DIMS}")
    if tile is None:
        few, many = (_LARGE if shared_bytes >= _LARGE_SHARED_BYTES else _SMALL)[head_dim]
        tile = few if rows <= few.block_m else many
    if splits is None:
        programs = -(-rows // tile.block_m) * (head_dim // tile.value_dim) * kv_heads
        splits = max(1, multiprocessors * tile.resident // programs)
    return Plan(tile, splits, max(1, _LEAST_KEYS // tile.block_n))
