"""Trees, layers and inputs for the tests of the Gated DeltaNet tree kernels."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from specpilot_kernels.tree_verify.conv import LayerWeights
from specpilot_kernels.tree_verify.records import GdnShape, TreeTables, tables


def chain(rows: int) -> list[int]:
    """Parents of a chain."""
    return list(range(-1, rows - 1))


def random_tree(rows: int, seed: int, *, depth: int = 16) -> list[int]:
    """Parents of a tree grown like a best-first one: long branches and short ones."""
    generator = torch.Generator().manual_seed(seed)
    parents, depths = [-1], [0]
    while len(parents) < rows:
        recent = torch.rand((), generator=generator).item() < 0.6
        at = len(parents) - 1 if recent else int(
            torch.randint(len(parents), (), generator=generator)
        )  # fmt: skip
        if depths[at] >= depth:
            continue
        parents.append(at)
        depths.append(depths[at] + 1)
    return parents


def unused(parents: list[int], rows: int) -> list[int]:
    """The tree with rows that no node has behind it."""
    return parents + [-2] * (rows - len(parents))


def path_to(tree: list[int], row: int) -> list[int]:
    """Rows from the anchor to `row`."""
    path = [row]
    while tree[path[-1]] >= 0:
        path.append(tree[path[-1]])
    return path[::-1]


@dataclass(frozen=True, slots=True)
class Case:
    """A layer, a pool of states, and one step's rows; everything on one device."""

    shape: GdnShape
    weights: LayerWeights
    mixed: Tensor
    a: Tensor
    b: Tensor
    states: Tensor
    windows: Tensor
    slot: Tensor
    trees: TreeTables

    @property
    def rows(self) -> int:
        """Rows per request."""
        return self.trees.parent.shape[1]

    def to(self, device: str) -> Case:
        """The case on another device."""
        w = self.weights
        bias = None if w.conv_bias is None else w.conv_bias.to(device)
        weights = LayerWeights(
            w.conv_weight.to(device), bias, w.a_log.to(device), w.dt_bias.to(device)
        )
        trees = TreeTables(self.trees.parent.to(device), self.trees.tap.to(device))
        moved = {
            name: getattr(self, name).to(device)
            for name in ("mixed", "a", "b", "states", "windows", "slot")
        }
        return replace(self, weights=weights, trees=trees, **moved)

    def with_trees(self, parents: list[list[int]]) -> Case:
        """The same rows in other trees."""
        return replace(self, trees=tables(torch.tensor(parents)))


def make(
    parents: list[list[int]],
    *,
    shape: GdnShape,
    kind: str = "random",
    slots: int | None = None,
    seed: int = 0,
    bias: bool = False,
) -> Case:
    """Inputs of a step for the trees `parents`, of equal length.

    kind: "random"; "near-equal keys" (all keys of a head almost the same, beta near one);
    "strong gates" (decays down to exp(-80)).
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*size: int, std: float = 1.0) -> Tensor:
        return torch.randn(size, generator=generator) * std

    requests, rows = len(parents), len(parents[0])
    slots = requests + 2 if slots is None else slots
    total = requests * rows
    mixed, a, b = normal(total, shape.channels), normal(total, shape.value_heads), None
    b = normal(total, shape.value_heads)
    windows = normal(slots, shape.channels, 3)
    if kind == "near-equal keys":
        keys = slice(shape.keys, 2 * shape.keys)
        one = normal(shape.keys)
        mixed[:, keys] = one + 0.01 * normal(total, shape.keys)
        windows[:, keys] = one[:, None] + 0.01 * normal(slots, shape.keys, 3)
        a, b = a - 8, b + 8
    elif kind == "strong gates":
        a = 6 * a + 4
    weights = LayerWeights(
        normal(shape.channels, 4, std=0.5).bfloat16(),
        normal(shape.channels, std=0.1).bfloat16() if bias else None,
        normal(shape.value_heads, std=0.5),
        normal(shape.value_heads),
    )
    slot = torch.randperm(slots, generator=generator)[:requests]
    states = normal(slots, shape.value_heads, shape.value_dim, shape.key_dim, std=0.3)
    return Case(
        shape, weights, mixed.bfloat16(), a.bfloat16(), b.bfloat16(), states, windows.bfloat16(),
        slot, tables(torch.tensor(parents)),
    )  # fmt: skip


def same_bits(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors have the same patterns."""
    words = {2: torch.int16, 4: torch.int32}[x.element_size()]
    return torch.equal(x.contiguous().view(words), y.contiguous().view(words))
