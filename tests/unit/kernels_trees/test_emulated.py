"""The CUDA sources of the tree kernels against the CPU's builders, byte for byte.

No GPU here: compiled as C++, run by the emulator of one CTA. Float64 additions, multiplications
and divisions are IEEE's on both, so equality here is equality on a GPU as far as the compiler
keeps the operations apart; tests/gpu sees to that, and to speed.
"""

from __future__ import annotations

import ctypes
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is not installed")

import torch
from cuda_emulator import compile_kernel
from emulated_trees import EmulatedTrees
from tree_cases import KINDS, assert_same, dyadic, knife_edge, lattice, target_choices

from specpilot_kernels.trees import calibration_table, modules
from specpilot_kernels.trees._log_softmax import exponential, logarithm
from specpilot_kernels.trees.gpu import accept_path, build_trees


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> EmulatedTrees:
    """Both kernels."""
    if shutil.which("g++") is None:
        pytest.skip("the emulator needs g++")
    return EmulatedTrees(tmp_path_factory.mktemp("emulator"))


@pytest.mark.parametrize("kind", KINDS)
def test_trees_of_every_kind_of_lattice(emulated: EmulatedTrees, kind: str) -> None:
    for seed, (shape, n_nodes) in enumerate(
        [((3, 15, 16, 16), 32), ((1, 15, 16, 16), 63), ((2, 7, 5, 5), 33), ((2, 4, 2, 2), 128)]
    ):
        given, prefix_lens = lattice(seed, kind, shape), torch.arange(shape[0]) << 33
        found = emulated.build(*given, n_nodes, prefix_lens=prefix_lens)
        assert_same(found, build_trees(*given, n_nodes, prefix_lens=prefix_lens))


def test_every_number_of_candidates(emulated: EmulatedTrees) -> None:
    for candidates in (*range(1, 18), 31, 32):
        kind = ("smooth", "two values", "permuted rows", "broken")[candidates % 4]
        given = lattice(candidates, kind, (1, 6, candidates, candidates))
        assert_same(emulated.build(*given, 40), build_trees(*given, 40))


def test_every_number_of_positions_and_depth_caps(emulated: EmulatedTrees) -> None:
    for positions in range(1, 32):
        kind = ("smooth", "two values", "sharp")[positions % 3]
        given = lattice(positions, kind, (1, positions, 4, 4), ids=torch.int32)
        cap = None if positions % 2 else positions // 3
        found = emulated.build(*given, 33, max_depth=cap)
        assert_same(found, build_trees(*given, 33, max_depth=cap))


@pytest.mark.parametrize("kind", ["smooth", "all equal", "impossible"])
def test_every_budget_is_a_prefix(emulated: EmulatedTrees, kind: str) -> None:
    given = lattice(3, kind, (1, 31, 16, 16))
    whole = emulated.build(*given, 128)
    assert_same(whole, build_trees(*given, 128))
    for n_nodes in (0, 1, 2, 31, 32, 33, 63, 64, 65, 96, 127):
        part = emulated.build(*given, n_nodes)
        for name in ("token", "parent", "depth", "score", "tap"):
            assert torch.equal(getattr(part, name), getattr(whole, name)[:, : n_nodes + 1])


@pytest.mark.parametrize("kind", ["smooth", "two values", "huge", "broken"])
def test_scores_without_a_predecessor(emulated: EmulatedTrees, kind: str) -> None:
    given = lattice(5, kind, (2, 15, 1, 16))
    logsumexp = given[1].amax(dim=(2, 3)).nan_to_num(0.0, 3e38, -3e38) + 0.75
    for norm in (None, logsumexp, torch.zeros(2, 15)):
        found = emulated.build(*given, 48, logsumexp=norm)
        assert_same(found, build_trees(*given, 48, logsumexp=norm))


@pytest.mark.parametrize("kind", ["smooth", "two values", "sharp", "broken"])
def test_calibrated_scores(emulated: EmulatedTrees, kind: str) -> None:
    given = lattice(6, kind, (2, 9, 16, 16))
    recall = np.linspace(0.98, 0.4, 15)  # of more positions than this drafter is asked for
    table = torch.from_numpy(calibration_table(1.37, recall.tolist()))
    found = emulated.build(*given, 40, calibration=table)
    assert_same(found, build_trees(*given, 40, calibration=table))
    assert not torch.equal(found.score, build_trees(*given, 40).score)


def test_ties_between_depths(emulated: EmulatedTrees) -> None:
    for candidates, positions in ((2, 9), (3, 5), (5, 4)):
        given = dyadic(candidates, (40, positions, candidates, candidates))
        found = emulated.build(*given[:3], 24, logsumexp=given[3])
        assert_same(found, build_trees(*given[:3], 24, logsumexp=given[3]))


def test_the_last_bit_of_a_norm(emulated: EmulatedTrees) -> None:
    for seed in range(60):
        *given, calibration = knife_edge(seed, 16)
        found = emulated.build(*given, 4, calibration=calibration)
        assert_same(found, build_trees(*given, 4, calibration=calibration))


_FUNCTIONS_DRIVER = """
#include "gpu_emulator.h"
KERNEL
extern "C" void run(const double* x, double* exponentials, double* logarithms, int count) {
  for (int i = 0; i < count; ++i) {
    exponentials[i] = exponential(-x[i]);
    logarithms[i] = logarithm(1.0 + x[i]);
  }
}
"""


def test_exponential_and_logarithm_bit_for_bit(tmp_path: Path) -> None:
    if shutil.which("g++") is None:
        pytest.skip("the emulator needs g++")
    module = replace(modules.build_trees(16), source="trees/csrc/log_softmax.cuh")
    library = compile_kernel(module, _FUNCTIONS_DRIVER, tmp_path)
    spread = 42.0 * np.random.default_rng(0).random(20_000) ** 3
    x = np.array([0.0, 5e-324, 1e-16, 0.41421356237309515, 1.0, 31.0, 40.0, np.inf, np.nan])
    x = np.concatenate([np.where(x == np.inf, 1e300, x), spread])
    found = np.empty((2, x.size))
    pointers = [array.ctypes.data_as(ctypes.c_void_p) for array in (x, found[0], found[1])]
    library.run(*pointers, x.size)
    wanted = [[exponential(-v) for v in x.tolist()], [logarithm(1.0 + v) for v in x.tolist()]]
    assert np.array_equal(found, wanted, equal_nan=True)
    with np.errstate(under="ignore"):
        np.testing.assert_allclose(found[0], np.where(x > 40, 0.0, np.exp(-x)), rtol=2e-14)
    np.testing.assert_allclose(found[1], np.log(1.0 + x), rtol=4e-15)


@pytest.mark.parametrize("agree", [0.0, 0.3, 0.9, 1.0])
@pytest.mark.parametrize("n_nodes", [0, 1, 32, 63, 128])
def test_accepted_paths(emulated: EmulatedTrees, n_nodes: int, agree: float) -> None:
    for seed, kind in enumerate(("smooth", "two values", "impossible", "broken")):
        shape = (4, 12, 6, 6) if seed else (4, 3, 2, 2)  # the small one cannot fill the rows
        trees = build_trees(*lattice(seed, kind, shape), n_nodes)
        target = target_choices(seed, trees.token, trees.parent, agree=agree)
        prefix_lens = torch.tensor([5, 0, 1 << 40, 77]) if seed % 2 else None
        for switch in (None, 1, 0):
            enabled = None if switch is None else torch.tensor([switch], dtype=torch.int32)
            found = emulated.accept(trees, target, prefix_lens, enabled)
            wanted = accept_path(trees, target, prefix_lens=prefix_lens, enabled=enabled)
            assert all(map(torch.equal, found, wanted))
