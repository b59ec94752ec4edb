"""What a plan promises: one wave of programs, tiles that fit, choices by the shape alone."""

from __future__ import annotations

import pytest

from specpilot_kernels.tree_attention import plan
from specpilot_kernels.tree_attention.plan import Tile

H200 = {"multiprocessors": 132, "shared_bytes": 227 * 1024}
RTX_6000 = {"multiprocessors": 188, "shared_bytes": 99 * 1024}


@pytest.mark.parametrize("gpu", [H200, RTX_6000], ids=["H200", "RTX PRO 6000"])
@pytest.mark.parametrize("head_dim", plan.HEAD_DIMS)
@pytest.mark.parametrize(("rows", "kv_heads"), [(1, 8), (54, 4), (198, 4), (528, 2), (774, 4)])
def test_one_wave_fills_the_gpu(
    gpu: dict[str, int], head_dim: int, rows: int, kv_heads: int
) -> None:
    chosen = plan.choose(rows, kv_heads, head_dim, **gpu)
    tile = chosen.tile
    programs = -(-rows // tile.block_m) * (head_dim // tile.value_dim) * kv_heads
    room = gpu["multiprocessors"] * tile.resident
    assert programs * chosen.splits <= max(room, programs)
    assert programs * (chosen.splits + 1) > room
    assert chosen.least_blocks * tile.block_n >= 128


@pytest.mark.parametrize(("head_dim", "large", "tile"), plan.tiles())
def test_tiles_suit_the_kernel(head_dim: int, large: bool, tile: Tile) -> None:
    for size in (tile.block_m, tile.block_n, tile.value_dim, tile.warps):
        assert size & (size - 1) == 0
    assert head_dim % tile.value_dim == 0
    copies = 2 * (head_dim + tile.value_dim) * tile.block_n * 2  # two steps of keys and values
    queries = 2 * tile.block_m * head_dim
    assert (copies + queries) * tile.resident <= (227 if large else 99) * 1024


def test_the_qwen_tree_of_32_nodes_takes_two_tiles_and_sixteen_splits() -> None:
    chosen = plan.choose(33 * 6, 4, 256, **H200)
    assert (chosen.tile.block_m, chosen.splits) == (128, 16)


def test_given_tile_and_splits_are_taken() -> None:
    tile = Tile(64, 32, 256)
    chosen = plan.choose(33 * 6, 4, 256, tile=tile, splits=7, **H200)
    assert (chosen.tile, chosen.splits, chosen.least_blocks) == (tile, 7, 4)


def test_other_head_dimensions_are_refused() -> None:
    with pytest.raises(ValueError, match="heads of 96"):
        plan.choose(8, 1, 96, **H200)
