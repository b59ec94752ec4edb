"""Lattices for the tests of the tree kernels, on the CPU: ordinary ones and malicious ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields

import numpy as np
import numpy.typing as npt
import torch

from specpilot_kernels.trees._log_softmax import exponential, logarithm
from specpilot_kernels.trees.gpu import DeviceTrees

Scores = npt.NDArray[np.float32]
Shape = tuple[int, int, int, int]  # B, L, P, K


def _smooth(rng: np.random.Generator, shape: Shape) -> Scores:
    """About as sharp as a trained selector's."""
    unary = -4.5 * np.log1p(np.arange(shape[-1])) + 0.3 * rng.normal(size=shape)
    return (unary + rng.normal(size=shape)).astype(np.float32)


def _two_values(rng: np.random.Generator, shape: Shape) -> Scores:
    return rng.integers(0, 2, size=shape).astype(np.float32)


def _all_equal(rng: np.random.Generator, shape: Shape) -> Scores:
    return np.full(shape, rng.normal(), np.float32)


def _permuted_rows(rng: np.random.Generator, shape: Shape) -> Scores:
    """Every row holds the same scores in another order: norms differ in their last bits alone."""
    row = rng.normal(size=shape[-1]).astype(np.float32) * np.float32(2.0)
    return rng.permuted(np.broadcast_to(row, shape), axis=-1)


def _neighbouring(rng: np.random.Generator, shape: Shape) -> Scores:
    """Scores a few units in the last place apart."""
    start = np.float32(rng.normal() * 8).view(np.int32)
    return (start + rng.integers(-2, 3, size=shape, dtype=np.int32)).view(np.float32)


def _sharp(rng: np.random.Generator, shape: Shape) -> Scores:
    """Norms near zero: whether float64 keeps them decides how differences are rounded."""
    return (30.0 * rng.normal(size=shape)).astype(np.float32)


def _saturated(rng: np.random.Generator, shape: Shape) -> Scores:
    chosen = rng.random(shape) < 0.3
    return np.where(chosen, 500.0, rng.integers(-3, 3, size=shape)).astype(np.float32)


def _huge(rng: np.random.Generator, shape: Shape) -> Scores:
    """Up to the largest floats, so that differences are beyond float32."""
    return (rng.choice([-3.4e38, -1e30, -1.0, 0.0, 1e30, 3.4e38], size=shape)).astype(np.float32)


def _tiny(rng: np.random.Generator, shape: Shape) -> Scores:
    """Denormals and both zeros."""
    return rng.choice([-1e-45, -0.0, 0.0, 1e-45, 1e-39], size=shape).astype(np.float32)


def _impossible(rng: np.random.Generator, shape: Shape) -> Scores:
    """Many candidates of probability zero, rows with no other among them."""
    scores = _smooth(rng, shape)
    scores[rng.random(shape) < 0.6] = -np.inf
    return scores


def _broken(rng: np.random.Generator, shape: Shape) -> Scores:
    """Some rows have a NaN or an infinity, at any place."""
    scores = _smooth(rng, shape)
    spoilt = rng.random(shape) < 0.1 / shape[-1]
    scores[spoilt] = rng.choice([np.nan, np.inf, -np.inf], size=int(spoilt.sum()))
    return scores


def _bfloat16(rng: np.random.Generator, shape: Shape) -> Scores:
    return (_smooth(rng, shape).view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)


KINDS: dict[str, Callable[[np.random.Generator, Shape], Scores]] = {
    "smooth": _smooth,
    "two values": _two_values,
    "all equal": _all_equal,
    "permuted rows": _permuted_rows,
    "neighbouring": _neighbouring,
    "sharp": _sharp,
    "saturated": _saturated,
    "huge": _huge,
    "tiny": _tiny,
    "impossible": _impossible,
    "broken": _broken,
    "bfloat16": _bfloat16,
}


def lattice(
    seed: int, kind: str, shape: Shape, *, ids: torch.dtype = torch.int64
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """candidate_ids [B, L, K], scores [B, L, P, K] and anchor [B].

    Positions share tokens, some positions name one twice, and the predecessors of the first have
    different rows: only row 0 may be read there.
    """
    rng = np.random.default_rng(seed)
    batch, positions, _, candidates = shape
    scores = np.ascontiguousarray(KINDS[kind](rng, shape))
    tokens = rng.integers(0, 4 * candidates, size=(batch, positions, candidates))
    anchor = rng.integers(0, 200_000, size=batch)
    return torch.from_numpy(tokens).to(ids), torch.from_numpy(scores), torch.from_numpy(anchor)


def knife_edge(
    seed: int, candidates: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """`lattice` of one position, and a calibration that makes its scores hang on one bit.

    Before rounding, the log-probability of the best candidate lies in the middle between two
    float32 values, so that any other way to compute the norm rounds to the wrong one.
    """
    ids, _, anchor = lattice(seed, "smooth", (1, 1, candidates, candidates))
    row = np.random.default_rng(seed).normal(size=candidates).astype(np.float32)
    shifted = row.astype(np.float64) - float(row.max())
    exact = -logarithm(sum(map(exponential, shifted.tolist())))
    near = np.float32(1.25 * exact)  # within a factor of two, so that the difference is exact
    middle = (float(near) + float(np.nextafter(near, np.float32(-np.inf)))) / 2
    scores = np.broadcast_to(row, (1, 1, candidates, candidates)).copy()
    calibration = torch.tensor([[1.0, middle - exact]], dtype=torch.float64)
    return ids, torch.from_numpy(scores), anchor, calibration


def dyadic(seed: int, shape: Shape) -> tuple[torch.Tensor, ...]:
    """`lattice` with scores whose sums tie at many depths, and the zero norms that keep them so."""
    ids, scores, anchor = lattice(seed, "two values", shape)
    values = np.array([-2.0, -1.0, -0.5, -0.0, 0.0], dtype=np.float32)
    chosen = np.random.default_rng(seed).integers(0, 5, size=tuple(scores.shape))
    return ids, torch.from_numpy(values[chosen]), anchor, torch.zeros(shape[:2])


def target_choices(
    seed: int, token: torch.Tensor, parent: torch.Tensor, *, agree: float
) -> torch.Tensor:
    """What a target says after each row, [B, R] int64: often the token of a child.

    agree: how often, where a row has children.
    """
    rng = np.random.default_rng(seed)
    target = rng.integers(0, 200_000, size=tuple(token.shape))
    for request, (tokens, parents) in enumerate(zip(token.tolist(), parent.tolist(), strict=True)):
        order = rng.permutation(len(tokens))
        for row in order:
            if parents[row] >= 0 and rng.random() < agree:
                target[request, parents[row]] = tokens[row]
    return torch.from_numpy(target)


def poisoned(trees: DeviceTrees) -> DeviceTrees:
    """The same trees, every byte 0x5A."""
    for tensor in tensors_of(trees).values():
        tensor.view(torch.uint8).fill_(0x5A)
    return trees


def tensors_of(trees: DeviceTrees) -> dict[str, torch.Tensor]:
    """The tensors of trees by name."""
    return {f.name: getattr(trees, f.name) for f in fields(trees) if f.name != "max_depth"}


def assert_same(found: DeviceTrees, wanted: DeviceTrees) -> None:
    """Compare all bytes, zeros' signs included."""
    assert found.max_depth == wanted.max_depth
    for name, tensor in tensors_of(wanted).items():
        other = tensors_of(found)[name].cpu()
        assert torch.equal(other.view(torch.uint8), tensor.view(torch.uint8)), name
