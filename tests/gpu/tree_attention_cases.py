"""Adversarial inputs of tree attention, what must come of them, and how near it must come.

Shared by the tests on a GPU, on the CPU and in Triton's interpreter; needs torch alone. Whatever
no row may read holds NaN: slots of nobody, slots of rows that stand for nothing, prefix slots
behind every row's window, and the queries of rows that stand for nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch

Trees = list[list[int]]
"""Parent row of each row, by request: -1 for the anchor, -2 for a row that stands for nothing."""


_STALE = 64
"""Slots of nobody behind the indices of the last prefix, as in a buffer that a graph keeps."""


@dataclass(frozen=True, slots=True)
class Case:
    """prefix: tokens before the anchor of each request; rows: of a request.

    tree: "random", "chain", "star" or "empty" (no rows at all), of `nodes` rows, or of different
    numbers by request where given. gain: how much larger than N(0, 1) queries are.
    """

    prefix: tuple[int, ...]
    rows: int
    heads: int = 2
    kv_heads: int = 1
    head_dim: int = 16
    tree: str | tuple[str, ...] = "random"
    nodes: int | tuple[int, ...] | None = None
    window: int | None = None
    logit_cap: float | None = None
    gain: float = 1.0
    minus_inf: bool = False
    strided: bool = False
    index: torch.dtype = torch.int64
    splits: int = 3


CASES: dict[str, Case] = {
    "ragged": Case((37, 0, 5, 80), 7, heads=4, kv_heads=2, nodes=(6, 3, 0, 6)),
    "one row": Case((20, 3), 1, heads=4),
    "no prefix": Case((0,), 7),
    "one token of prefix": Case((1, 1), 6, tree="chain"),
    "nothing at all": Case((0, 0), 1),
    "empty requests between": Case((9, 20, 0, 33), 6, tree=("empty", "random", "empty", "chain")),
    "129 rows": Case((3,), 129, heads=1, tree="random", splits=2),
    "129 rows in one chain": Case((2,), 129, heads=1, tree="chain", window=40, splits=4),
    "word ends inside": Case((5,), 70, heads=1, tree="random"),
    "star": Case((18,), 33, heads=1, tree="star"),
    "group of 6": Case((40,), 6, heads=12, kv_heads=2),
    "group of 16": Case((50,), 5, heads=16),
    "runs cross requests": Case((1, 130, 3, 2), 5, splits=4, index=torch.int32),
    "more splits than blocks": Case((17, 2), 3, splits=9),
    "one split": Case((70, 3), 5, splits=1),
    "window smaller than the depth": Case((30, 1), 9, tree="chain", window=3),
    "window begins in the tree": Case((30, 30), 12, tree=("chain", "random"), window=5),
    "window begins in the prefix": Case((70, 4), 9, window=41),
    "window of one token": Case((30, 0), 6, window=1),
    "window of all": Case((30, 8), 6, window=1000),
    "cap": Case((40,), 7, logit_cap=5.0, gain=8.0),
    "cap and window": Case((40, 2), 7, logit_cap=30.0, window=20, gain=20.0),
    "huge logits": Case((40,), 7, gain=3000.0),
    "huge logits under a cap": Case((40,), 7, gain=3000.0, logit_cap=50.0),
    "minus infinity": Case((40,), 7, minus_inf=True),
    "strided": Case((25, 7), 6, heads=4, kv_heads=2, strided=True),
}


@dataclass(frozen=True, slots=True)
class Inputs:
    """What `tree_attention` takes, in order, and the parents that its tables were made from."""

    tensors: tuple[torch.Tensor, ...]
    parents: Trees
    case: Case

    @property
    def options(self) -> dict[str, Any]:
        """Keyword arguments, without the number of splits."""
        case = self.case
        scale = case.head_dim**-0.5
        return {"scale": scale, "window": case.window, "logit_cap": case.logit_cap}

    def to(self, device: str) -> Inputs:
        """The same on another device, with strides kept."""
        return replace(self, tensors=tuple(tensor.to(device) for tensor in self.tensors))


def make(case: Case, dtype: torch.dtype, *, seed: int = 0) -> Inputs:
    """Random inputs on the CPU; slots are dealt out at random."""
    generator = torch.Generator().manual_seed(seed)
    batch, rows = len(case.prefix), case.rows
    parents = _trees(case, generator)
    depth, ancestors = tables(parents)
    count = sum(case.prefix) + batch * rows + 5
    dealt = torch.randperm(count, generator=generator)
    prefix, own = dealt[: sum(case.prefix)], dealt[sum(case.prefix) :][: batch * rows]

    def normal(first: int, heads: int) -> torch.Tensor:
        width = 2 * case.head_dim if case.strided else case.head_dim
        values = torch.randn((first, heads, width), generator=generator)
        return values.to(dtype)[..., : case.head_dim]

    q = normal(batch * rows, case.heads)
    k, v = normal(count, case.kv_heads), normal(count, case.kv_heads)
    q *= case.gain
    if case.minus_inf:
        q.abs_().add_(0.1)
        k[dealt[::7]] = -torch.inf
    indptr = torch.tensor([0, *case.prefix]).cumsum(0)
    seen = torch.zeros(count, dtype=torch.bool)
    for begin, length in zip(indptr.tolist(), case.prefix, strict=False):
        seen[prefix[begin : begin + length][-_reach(case) :] if _reach(case) else []] = True
    used = depth.flatten() >= 0
    seen[own[used]] = True
    for tensor, kept in ((q, used), (k, seen), (v, seen)):
        tensor[~kept] = torch.nan
    indices = torch.cat([prefix, dealt[-1:].expand(_STALE)])
    tensors = (
        q, k, v, indptr.to(case.index), indices.to(case.index), own.to(case.index), ancestors, depth
    )  # fmt: skip
    return Inputs(tensors, parents, case)


def _reach(case: Case) -> int:
    """Tokens of the prefix that a row may see."""
    return max(case.prefix) if case.window is None else case.window - 1


def _trees(case: Case, generator: torch.Generator) -> Trees:
    trees = []
    for request in range(len(case.prefix)):
        kind = case.tree if isinstance(case.tree, str) else case.tree[request]
        nodes = case.nodes[request] if isinstance(case.nodes, tuple) else case.nodes
        nodes = case.rows - 1 if nodes is None else nodes
        above = {
            "chain": lambda row: row - 1,
            "star": lambda row: 0,
            "random": lambda row: int(torch.randint(row, (), generator=generator)),
        }
        parent = [] if kind == "empty" else [-1, *(above[kind](r) for r in range(1, nodes + 1))]
        trees.append(parent + [-2] * (case.rows - len(parent)))
    return trees


def tables(parents: Trees) -> tuple[torch.Tensor, torch.Tensor]:
    """depth int32 [B, R] and ancestors uint64 [B, R, words] of trees given by their parents."""
    rows = len(parents[0])
    depth = torch.full((len(parents), rows), -1, dtype=torch.int32)
    words = torch.zeros((len(parents), rows, -(-rows // 64)), dtype=torch.int64)
    for request, tree in enumerate(parents):
        for row in range(rows):
            path = path_of(tree, row)
            depth[request, row] = len(path) - 1
            for above in path:
                bit = above % 64
                words[request, row, above // 64] |= (1 << bit) - (1 << 64 if bit == 63 else 0)
    return depth, words.view(torch.uint64)


def path_of(tree: list[int], row: int) -> list[int]:
    """Rows from the anchor down to `row`; none for a row that stands for nothing."""
    path = []
    while row >= 0 and tree[row] != -2:
        path.append(row)
        row = tree[row]
    return path[::-1]


def linearised(inputs: Inputs, *, magnitude: bool = False) -> torch.Tensor:
    """What each row sees as a sequence of its own, attended to in float64: [B * R, heads, D].

    From the parents alone, not from the tables. magnitude: with the values' absolutes, so that
    the result bounds how large the terms of each element are.
    """
    q, k, v, indptr, indices, own, *_ = inputs.tensors
    case = inputs.case
    out = torch.zeros(q.shape, dtype=torch.float64)
    group = case.heads // case.kv_heads
    for number in range(q.shape[0]):
        request, row = divmod(number, case.rows)
        path = [int(own[request * case.rows + r]) for r in path_of(inputs.parents[request], row)]
        if not path:
            continue
        sequence = [*indices[int(indptr[request]) : int(indptr[request + 1])].tolist(), *path]
        sequence = sequence[-case.window :] if case.window else sequence
        for head in range(case.heads):
            keys, values = (pool[sequence, head // group].double() for pool in (k, v))
            score = keys @ q[number, head].double() * inputs.options["scale"]
            if case.logit_cap is not None:
                score = case.logit_cap * torch.tanh(score / case.logit_cap)
            weight = torch.exp(score - score.max())
            values = values.abs() if magnitude else values
            out[number, head] = weight @ values / weight.sum()
    return out


def worst(out: torch.Tensor, inputs: Inputs) -> float:
    """Largest error of `out` in units of what its dtype may lose; at most 1 is right.

    Allowed, element by element: rounding the result and the weights to the dtype, and float32
    scores, whose error grows with their size and is a relative error of the weights. inf where
    something is NaN, or a row that stands for nothing is not exactly zero.
    """
    expected, terms = linearised(inputs), linearised(inputs, magnitude=True)
    unused = inputs.tensors[-1].flatten().cpu() < 0
    out = out.cpu().double()
    if not out.isfinite().all() or out[unused].any():
        return float("inf")
    step = torch.finfo(inputs.tensors[0].dtype).eps
    largest_score = 1.0 if inputs.case.gain == 1.0 else 20.0 * inputs.case.gain
    allowed = (2.0 * step + largest_score * 2.0**-20) * terms + 1e-30
    return float(((out - expected).abs() / allowed).max())


@contextlib.contextmanager
def poisoned_memory() -> Iterator[None]:
    """New tensors of floats are full of NaN: what a kernel does not write, shows."""
    empty = torch.empty

    def poisoned(*args: Any, **kwargs: Any) -> torch.Tensor:
        made = empty(*args, **kwargs)
        return made.fill_(torch.nan) if made.dtype.is_floating_point else made

    with mock.patch.object(torch, "empty", poisoned):
        yield
