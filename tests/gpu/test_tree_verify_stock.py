"""Chains have the bits of SGLang's own kernels, which are loaded from their sources.

Skipped where they are not: set $SPECPILOT_SGLANG_SOURCE to the folder that holds `kernels/ops`.
The bits are those of Triton on Hopper; other GPUs order the sums differently.
"""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="no CUDA device: torch is not installed")

from gdn_cases import Case, chain, make, random_tree, same_bits  # noqa: E402
from gdn_runs import commit, run  # noqa: E402

from specpilot_kernels.tree_verify import gdn_reference  # noqa: E402
from specpilot_kernels.tree_verify import stock as stock_kernels  # noqa: E402
from specpilot_kernels.tree_verify.records import GdnShape  # noqa: E402
from specpilot_kernels.tree_verify.stock import (  # noqa: E402
    Batch,
    Snapshots,
    Stock,
    StockMissing,
    StockTree,
)

pytestmark = pytest.mark.gpu

LARGE = GdnShape(16, 48, 128, 128)
DEMO = GdnShape(2, 2, 64, 64)
KINDS = ("random", "near-equal keys", "strong gates")


@pytest.fixture(scope="module")
def stock() -> Stock:
    """The stock kernels."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("bits are compared on compute capability 9.0 only")
    try:
        return stock_kernels.load()
    except StockMissing as error:
        pytest.skip(f"no stock kernels: {error}")


def moved_on(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """Copies of states and windows, which the stock kernels change."""
    return case.states.clone(), case.windows.clone()


@pytest.mark.parametrize("shape", [LARGE, DEMO], ids=["27B", "demo"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [1, 2, 3, 8, 16, 33])
def test_path_and_commit_have_the_bits_of_stock(
    stock: Stock, rows: int, kind: str, shape: GdnShape
) -> None:
    case = make([chain(rows), chain(rows)], shape=shape, kind=kind, seed=rows).to("cuda")
    out, record = run(case, "path")
    states, windows = moved_on(case)
    batch = Batch.of(case.slot, rows)
    convolved = stock.convolve(case.mixed, case.weights, windows, batch)
    keys = case.shape.keys
    assert same_bits(record.kv.view(2 * rows, -1), convolved[:, keys:].contiguous())
    expected = stock.recur(convolved, case.a, case.b, case.weights, states, batch, case.shape)
    assert same_bits(out.view_as(expected), expected)
    commit(case, record, [list(range(rows))] * 2)
    assert same_bits(case.states, states)
    assert same_bits(case.windows, windows)


def test_a_commit_of_part_of_a_chain_is_stocks_snapshot(stock: Stock) -> None:
    case = make([chain(16)], shape=LARGE).to("cuda")
    _, record = run(case, "wy")
    states, windows = moved_on(case)
    snapshots, batch = Snapshots.allocate(LARGE, 1, 16), Batch.of(case.slot, 16)
    convolved = stock.convolve(case.mixed, case.weights, windows, batch, snapshots=snapshots)
    stock.recur(convolved, case.a, case.b, case.weights, states, batch, LARGE, snapshots=snapshots)
    for count in (1, 2, 7, 16):
        part = make([chain(16)], shape=LARGE).to("cuda")
        commit(part, record, [list(range(count))])
        assert same_bits(part.states[part.slot[0]], snapshots.states[0, count - 1])
        assert same_bits(part.windows[part.slot[0]], snapshots.windows[0, count - 1])


def test_stock_rounds_the_convolution_of_a_tree_differently(stock: Stock) -> None:
    """Newest first in trees, oldest first in chains: ours follow the chain, which decoding is."""
    tree = random_tree(16, 1)
    case = make([tree], shape=LARGE).to("cuda")
    out, _ = run(case, "path")
    states, windows = moved_on(case)
    snapshots, batch = Snapshots.allocate(LARGE, 1, 16), Batch.of(case.slot, 16)
    of_stock = StockTree.of(case.trees.parent)
    convolved = stock.convolve(
        case.mixed, case.weights, windows, batch, snapshots=snapshots, tree=of_stock
    )
    expected = stock.recur(
        convolved, case.a, case.b, case.weights, states, batch, LARGE, snapshots=snapshots,
        tree=of_stock,
    )  # fmt: skip
    close = ~gdn_reference.far_apart(out.view_as(expected), expected)
    assert close.double().mean() > 0.9
    assert torch.allclose(out.view_as(expected).float(), expected.float(), rtol=0.05, atol=0.02)
