"""What one Gated DeltaNet layer is, and what verify leaves behind for commit to replay.

`TreeTables` is what the kernels read of a batch of trees, the same for all layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Protocol

import torch
from torch import Tensor

WIDTH: Final = 4
"""Taps of the causal convolution; a committed window has one less."""

ANCHOR_PARENT: Final = -1
UNUSED_PARENT: Final = -2
"""Parent of a row that no node has: its outputs are zeros, and nothing of it is read."""


class Trees(Protocol):
    """A batch of trees, as `TreeTables` describes; device trees offer the same."""

    @property
    def parent(self) -> Tensor: ...
    @property
    def tap(self) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class TreeTables:
    """Trees of one step: R rows each, row 0 the anchor, then the nodes, parents first.

    parent: int32 [requests, R]: -1 for the anchor, -2 for a row that no node has.
    tap: int32 [requests, R, 4]: the rows that a row's convolution reads, oldest first, itself
        last; negative where the path has left the tree: -1 is the newest committed input.
    """

    parent: Tensor
    tap: Tensor


def tables(parent: Tensor) -> TreeTables:
    """Build the tables of trees from parents int [requests, R]; plain and slow, for tests."""
    taps = []
    for tree in parent.tolist():
        for row in range(len(tree)):
            at, chain = row, []
            for _ in range(WIDTH):
                chain.append(at)
                at = tree[at] if at >= 0 else at - 1
            taps.append(chain[::-1])
    tap = torch.tensor(taps, dtype=torch.int32, device=parent.device)
    return TreeTables(parent.to(torch.int32), tap.view(*parent.shape, WIDTH))


@dataclass(frozen=True, slots=True)
class GdnShape:
    """Heads of a layer: each key head serves value_heads / key_heads value heads."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int

    @property
    def keys(self) -> int:
        """Channels of all queries, and of all keys."""
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        """Channels of all values."""
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """Channels of the convolution: queries, keys, values."""
        return 2 * self.keys + self.values


@dataclass(frozen=True, slots=True)
class ReplayRecord:
    """All that a commit needs of one layer's verify; no state.

    kv: bfloat16 [requests, R, keys + values], k and v after convolution and SiLU, k not normalised.
    k_scale: float32 [requests, R, key_heads], 1 / |k|.
    g, beta: float32 [requests, R, value_heads], log decay and write strength.
    mixed: bfloat16 [requests, R, channels], before the convolution. The layer's projection may
        write here itself; `gdn_tree_verify` then copies nothing.
    """

    kv: Tensor
    k_scale: Tensor
    g: Tensor
    beta: Tensor
    mixed: Tensor

    @classmethod
    def allocate(
        cls, shape: GdnShape, requests: int, rows: int, device: torch.device | str
    ) -> ReplayRecord:
        """Make room for `requests` trees of `rows` rows; contents undefined."""

        def room(width: int, dtype: torch.dtype) -> Tensor:
            return torch.empty((requests, rows, width), dtype=dtype, device=device)

        return cls(
            room(shape.keys + shape.values, torch.bfloat16),
            room(shape.key_heads, torch.float32),
            room(shape.value_heads, torch.float32),
            room(shape.value_heads, torch.float32),
            room(shape.channels, torch.bfloat16),
        )

    @property
    def requests(self) -> int:
        """Trees that there is room for."""
        return self.kv.shape[0]

    @property
    def rows(self) -> int:
        """Rows per tree."""
        return self.kv.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes of the record."""
        return sum(t.nbytes for t in (self.kv, self.k_scale, self.g, self.beta, self.mixed))
