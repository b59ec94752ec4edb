"""Small lattices for tree tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from specpilot_kernels.trees import edge_log_probs

Lattice = tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]


def make_lattice(
    seed: int, n_positions: int, n_candidates: int, *, kind: str = "smooth", n_lattices: int = 0
) -> Lattice:
    """Candidate ids and edges; `kind` is smooth, tied (few distinct scores) or saturated."""
    rng = np.random.default_rng(seed)
    lead = (n_lattices,) if n_lattices else ()
    shape = (*lead, n_positions, n_candidates, n_candidates)
    scores: npt.NDArray[Any] = rng.normal(size=shape) * 2 - 2 * np.log1p(np.arange(n_candidates))
    if kind == "tied":
        scores = rng.integers(0, 2, size=shape).astype(float)
    elif kind == "saturated":
        scores = np.where(rng.random(shape) < 0.3, 500.0, rng.integers(-3, 3, size=shape))
    scores[..., 0, :, :] = scores[..., 0, :1, :]
    edge = edge_log_probs(scores)
    if kind == "saturated":
        edge[edge < -400] = -np.inf
    ids = np.argsort(rng.random((*lead, n_positions, 4 * n_candidates)), axis=-1)
    return ids[..., :n_candidates].astype(np.int32), edge


@pytest.fixture
def lattice() -> Callable[..., Lattice]:
    """The factory `make_lattice`."""
    return make_lattice
