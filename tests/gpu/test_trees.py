"""Trees and acceptance on a GPU: every byte is the CPU's, in graphs and compiled code as well."""

from __future__ import annotations

import numpy as np
import pytest

from specpilot_kernels.trees import calibration_table

torch = pytest.importorskip("torch", reason="no CUDA device: torch is not installed")
cases = pytest.importorskip("tree_cases")
gpu = pytest.importorskip("specpilot_kernels.trees.gpu")

pytestmark = pytest.mark.gpu


def on_gpu(tensors):
    return tuple(None if tensor is None else tensor.cuda() for tensor in tensors)


def check(given, n_nodes, *, max_depth=None, logsumexp=None, calibration=None):
    """Build on both; the GPU into poisoned memory."""
    batch, positions, _ = given[0].shape
    cap = positions if max_depth is None else min(max_depth, positions)
    room = gpu.DeviceTrees.empty(batch, n_nodes, cap, torch.device("cuda", 0))
    logsumexp_gpu, calibration_gpu = on_gpu((logsumexp, calibration))
    prefix_lens = torch.arange(batch) << 33
    found = gpu.build_trees(
        *on_gpu(given), n_nodes, max_depth=max_depth, logsumexp=logsumexp_gpu,
        calibration=calibration_gpu, prefix_lens=prefix_lens.cuda(), out=cases.poisoned(room),
    )  # fmt: skip
    wanted = gpu.build_trees(
        *given, n_nodes, max_depth=max_depth, logsumexp=logsumexp, calibration=calibration,
        prefix_lens=prefix_lens,
    )  # fmt: skip
    cases.assert_same(found, wanted)
    return found, wanted


@pytest.mark.parametrize("n_nodes", [32, 63, 128])
@pytest.mark.parametrize("kind", cases.KINDS)
def test_trees_of_every_kind_of_lattice(kind: str, n_nodes: int) -> None:
    for seed, shape in enumerate([(300, 15, 16, 16), (50, 7, 16, 16), (64, 5, 3, 3)]):
        check(cases.lattice(seed, kind, shape), n_nodes)


@pytest.mark.parametrize("kind", ["smooth", "two values", "permuted rows"])
def test_every_budget(kind: str) -> None:
    given = cases.lattice(1, kind, (3, 15, 16, 16))
    for n_nodes in range(129):
        check(given, n_nodes)


def test_every_number_of_candidates_positions_and_depths() -> None:
    for candidates in range(1, 33):
        check(cases.lattice(candidates, "smooth", (4, 15, candidates, candidates)), 48)
    for positions in range(1, 32):
        given = cases.lattice(positions, "two values", (4, positions, 16, 16), ids=torch.int32)
        for max_depth in (0, 1, positions // 2, None):
            check(given, 40, max_depth=max_depth)


def test_other_scores() -> None:
    for kind in ("smooth", "two values", "huge", "tiny"):
        given = cases.lattice(3, kind, (40, 15, 1, 16))
        logsumexp = given[1].amax(dim=(2, 3)) + 0.75
        check(given, 63)
        check(given, 63, logsumexp=logsumexp)
        check(given, 63, logsumexp=torch.zeros_like(logsumexp))
        table = torch.from_numpy(calibration_table(0.83, np.linspace(0.99, 0.3, 16).tolist()))
        check(given, 63, calibration=table)
        check(cases.lattice(4, kind, (40, 16, 16, 16)), 63, calibration=table)


def test_ties_and_last_bits() -> None:
    for candidates, positions in ((2, 12), (3, 8), (5, 6), (16, 15)):
        given = cases.dyadic(candidates, (400, positions, candidates, candidates))
        check(given[:3], 48, logsumexp=given[3])
    for seed in range(400):
        *given, calibration = cases.knife_edge(seed, 16)
        check(given, 4, calibration=calibration)
    # Every candidate of one position is a node: all scores of 40000 rows, each by its bits.
    for kind in ("smooth", "sharp", "neighbouring"):
        check(cases.lattice(9, kind, (40_000, 1, 1, 16)), 16)


@pytest.mark.parametrize("agree", [0.0, 0.5, 0.95, 1.0])
@pytest.mark.parametrize("n_nodes", [0, 1, 32, 63, 128])
def test_accepted_paths(n_nodes: int, agree: float) -> None:
    for seed, kind in enumerate(("smooth", "two values", "impossible", "broken")):
        trees, wanted = check(cases.lattice(seed, kind, (200, 15, 16, 16)), n_nodes)
        target = cases.target_choices(seed, wanted.token, wanted.parent, agree=agree)
        prefix_lens, off = torch.arange(len(target)), torch.zeros(1, dtype=torch.int32)
        for options in ({}, {"prefix_lens": prefix_lens}, {"enabled": off}, {"enabled": off + 1}):
            there = {name: tensor.cuda() for name, tensor in options.items()}
            for found, expected in zip(
                gpu.accept_path(trees, target.cuda(), **there),
                gpu.accept_path(wanted, target, **options),
                strict=True,
            ):
                assert torch.equal(found.cpu(), expected)


def test_a_captured_step_follows_its_inputs() -> None:
    shape, n_nodes = (8, 15, 16, 16), 32
    static = on_gpu(cases.lattice(0, "smooth", shape))
    target = torch.zeros((8, n_nodes + 1), dtype=torch.int64, device="cuda")
    gpu.accept_path(gpu.build_trees(*static, n_nodes), target)  # compiles, loads
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        trees = gpu.build_trees(*static, n_nodes)
        accepted = gpu.accept_path(trees, target)
    for seed, kind in enumerate(cases.KINDS):
        given = cases.lattice(seed, kind, shape)
        wanted = gpu.build_trees(*given, n_nodes)
        choices = cases.target_choices(seed, wanted.token, wanted.parent, agree=0.9)
        for there, here in zip((*static, target), (*given, choices), strict=True):
            there.copy_(here)
        cases.poisoned(trees)
        graph.replay()
        cases.assert_same(trees, wanted)
        for found, expected in zip(accepted, gpu.accept_path(wanted, choices), strict=True):
            assert torch.equal(found.cpu(), expected)


def test_compiled_code() -> None:
    given = cases.lattice(5, "smooth", (4, 15, 16, 16))

    @torch.compile(fullgraph=True)
    def step(ids, scores, anchor):
        trees = gpu.build_trees(ids, scores * 1.0, anchor, 32)
        path, *others = gpu.accept_path(trees, trees.token + 0)
        return trees.token, path + 0, *others

    wanted = gpu.build_trees(*given, 32)
    expected = (wanted.token, *gpu.accept_path(wanted, wanted.token))
    for found, value in zip(step(*on_gpu(given)), expected, strict=True):
        assert torch.equal(found.cpu(), value)


def test_the_current_stream_is_used() -> None:
    given = cases.lattice(6, "smooth", (4, 15, 16, 16))
    wanted = gpu.build_trees(*given, 32)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)  # the copies wait behind it, and so must the kernel
        found = gpu.build_trees(*(tensor.pin_memory().cuda(non_blocking=True) for tensor in given),
                                32)  # fmt: skip
    stream.synchronize()
    cases.assert_same(found, wanted)
