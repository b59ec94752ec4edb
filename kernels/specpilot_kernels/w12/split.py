"""How the Hopper GEMM's units of work are shared out; see "Work split" in `csrc/gemm_sm90.cu`.

A split depends on the shape of the weight and on the GPU alone. It never looks at the rows of x,
so a row's result does not depend on which other rows come with it.
"""

from __future__ import annotations

from dataclasses import dataclass

EVEN_SPLIT_WORTH_UNITS = 4
"""Units a CTA may take on top, if in exchange every tile is shared by equally many CTAs. Measured
on an H200 (132 SMs): 40 x 96 units (3 more) and 128 x 80 (2 more) gain, 40 x 272 (8 more) and
112 x 80 (12 more) lose."""


@dataclass(frozen=True, slots=True)
class Split:
    """Units of `tiles` x `blocks`, tile by tile, for `workers` CTAs.

    workers: CTAs with work, at least 1, never more than units.
    split_tiles: tiles 0 .. split_tiles - 1 are shared out by unit, evenly.
    share: floor(units of those tiles / workers). longer: the remainder; CTAs 0 .. longer - 1
        have one unit more.
    whole_tiles: whole tiles per CTA, after the split ones.
    """

    tiles: int
    blocks: int
    workers: int
    split_tiles: int
    share: int
    longer: int
    whole_tiles: int

    def units(self, cta: int) -> list[range]:
        """The units of a CTA: its share of the split tiles, then its whole tiles."""
        begin = cta * self.share + min(cta, self.longer)
        end = begin + self.share + (cta < self.longer)
        first = (self.split_tiles + cta * self.whole_tiles) * self.blocks
        return [range(begin, end), range(first, first + self.whole_tiles * self.blocks)]


def split(tiles: int, blocks: int, sms: int, *, workers: int | None = None) -> Split:
    """Share out tiles x blocks units on a GPU with `sms` multiprocessors.

    workers: that many CTAs instead of the rule's choice; ValueError outside 1 .. sms.
    """
    if min(tiles, blocks, sms) < 1:
        raise ValueError(f"no work for {tiles} x {blocks} units on {sms} multiprocessors")
    chosen = _workers(tiles, blocks, sms) if workers is None else workers
    if not 1 <= chosen <= sms:
        raise ValueError(f"{chosen} CTAs, but all must be resident on {sms} multiprocessors")
    chosen = min(chosen, tiles * blocks)
    shared = tiles % chosen
    if 0 < shared < chosen // 4 and tiles > chosen:
        shared += chosen  # a CTA's share should be long enough to hide the adding up
    units = shared * blocks
    return Split(
        tiles, blocks, chosen, shared, units // chosen, units % chosen, (tiles - shared) // chosen
    )


def _workers(tiles: int, blocks: int, sms: int) -> int:
    per_tile = sms // tiles
    if per_tile < 1:
        return sms
    if per_tile >= blocks:
        return tiles * blocks
    more = blocks / per_tile - tiles * blocks / sms
    return tiles * per_tile if more <= EVEN_SPLIT_WORTH_UNITS else sms
