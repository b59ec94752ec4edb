"""Every unit of work goes to exactly one CTA, and CTAs have about equally many."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specpilot_kernels.w12.split import Split, split

SIZES = st.integers(1, 700)


def first_cta_of_each_tile(shares: Split) -> list[set[int]]:
    """The CTAs that have units of each tile."""
    ctas: list[set[int]] = [set() for _ in range(shares.tiles)]
    for cta in range(shares.workers):
        for units in shares.units(cta):
            for tile in {unit // shares.blocks for unit in units}:
                ctas[tile].add(cta)
    return ctas


@given(tiles=SIZES, blocks=st.integers(1, 60), sms=st.integers(1, 150))
def test_every_unit_has_one_cta(tiles: int, blocks: int, sms: int) -> None:
    shares = split(tiles, blocks, sms)
    units = [u for cta in range(shares.workers) for part in shares.units(cta) for u in part]
    assert sorted(units) == list(range(tiles * blocks))
    assert 1 <= shares.workers <= min(sms, tiles * blocks)


@given(tiles=SIZES, blocks=st.integers(1, 60), sms=st.integers(1, 150))
def test_the_load_is_even(tiles: int, blocks: int, sms: int) -> None:
    shares = split(tiles, blocks, sms)
    loads = [sum(len(part) for part in shares.units(cta)) for cta in range(shares.workers)]
    assert max(loads) - min(loads) <= 1
    fewest = -(-tiles * blocks // sms)
    assert max(loads) <= fewest + 4  # what an even split of tiles may cost


@given(tiles=SIZES, blocks=st.integers(1, 60), sms=st.integers(1, 150))
def test_whole_tiles_have_one_cta(tiles: int, blocks: int, sms: int) -> None:
    shares = split(tiles, blocks, sms)
    ctas = first_cta_of_each_tile(shares)
    assert all(len(owners) == 1 for owners in ctas[shares.split_tiles :])
    for owners in ctas[: shares.split_tiles]:  # neighbours, so that the order of sums is theirs
        assert max(owners) - min(owners) == len(owners) - 1


@pytest.mark.parametrize(
    ("tiles", "blocks", "workers", "split_tiles"),
    [(40, 96, 120, 40), (40, 272, 132, 40), (112, 80, 132, 112), (128, 80, 128, 0),
     (272, 80, 132, 140), (1940, 80, 132, 92), (1, 1, 1, 0), (1, 500, 132, 1)],
    ids=["gdn_out", "down", "attn_qkv", "gdn_in", "gate_up", "head", "one unit", "one tile"],
)  # fmt: skip
def test_what_was_measured_on_132_multiprocessors(
    tiles: int, blocks: int, workers: int, split_tiles: int
) -> None:
    shares = split(tiles, blocks, 132)
    assert (shares.workers, shares.split_tiles) == (workers, split_tiles)


def test_an_even_split_gives_every_tile_equally_many_ctas() -> None:
    assert {len(ctas) for ctas in first_cta_of_each_tile(split(40, 96, 132))} == {3}


def test_workers_can_be_chosen_but_must_be_resident() -> None:
    assert split(40, 96, 132, workers=80).workers == 80
    assert split(1, 3, 132, workers=80).workers == 3
    for wrong in (0, 133):
        with pytest.raises(ValueError, match="resident"):
            split(40, 96, 132, workers=wrong)
    with pytest.raises(ValueError, match="no work"):
        split(0, 96, 132)


@pytest.mark.parametrize("multiprocessors", [1, 28, 108, 132, 188])
def test_the_portable_split_gives_whole_tiles_or_even_shares(multiprocessors: int) -> None:
    portable = pytest.importorskip("specpilot_kernels.w12.gemm_mma").split
    for tiles in [1, 2, 8, 27, 40, 112, 128, 131, 133, 256, 1940]:
        for blocks in [1, 2, 64, 80, 96, 272]:
            ctas, units = portable(tiles, blocks, multiprocessors), tiles * blocks
            assert 1 <= ctas <= min(multiprocessors, units, 8 * tiles)
            even = -(-units // min(multiprocessors, units, 8 * tiles))
            most = -(-units // ctas)
            # Fewer CTAs only for whole tiles, and only if that takes no longer than a join.
            assert most == even or (most % blocks == 0 and units % ctas == 0 and most <= even + 3)
