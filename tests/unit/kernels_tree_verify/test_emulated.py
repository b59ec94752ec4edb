"""The CUDA sources on the CPU against the reference, and their bits against each other.

Approximate functions are exact here, and tensor cores round once per product; tests/gpu judges the
real ones.
"""

from __future__ import annotations

import ctypes
from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from emulated import EmulatedGpu, Verified, emulated_gpu, gpu, verify  # noqa: E402, F401
from gdn_cases import Case, chain, make, random_tree, same_bits, unused  # noqa: E402
from torch import Tensor  # noqa: E402

from specpilot_kernels.tree_verify import (  # noqa: E402
    conv,
    gdn_reference,
    modules,
)
from specpilot_kernels.tree_verify.commit import GdnCommit, Keep  # noqa: E402
from specpilot_kernels.tree_verify.records import GdnShape, ReplayRecord  # noqa: E402
from specpilot_kernels.tree_verify.verify import gdn_tree_verify  # noqa: E402

SMALL = GdnShape(1, 2, 64, 64)
LARGE = GdnShape(1, 1, 128, 128)
KINDS = ("random", "near-equal keys", "strong gates")
METHODS = ("path", "wy")

pytestmark = pytest.mark.usefixtures("gpu")


def reference(case: Case, method: str = "path") -> Tensor:
    """Outputs of the float32 reference, as `verify` gives them."""
    requests, rows = case.trees.parent.shape
    record = ReplayRecord.allocate(case.shape, requests, rows, "cpu")
    w = case.weights
    out = gdn_tree_verify(
        case.mixed, case.a, case.b, w, case.states, case.windows, case.slot, case.trees, record,
        method=method,  # type: ignore[arg-type]
    )  # fmt: skip
    return out.view(requests, rows, *out.shape[1:])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("method", METHODS)
def test_trees_of_every_kind(method: str, kind: str) -> None:
    trees = [random_tree(19, 1), unused(random_tree(11, 2), 19)]
    case = make(trees, shape=SMALL, kind=kind, bias=kind == "random")
    assert not gdn_reference.far_apart(verify(case, method).out, reference(case)).any()


@pytest.mark.parametrize("rows", [1, 8, 33, 65])
def test_every_variant_of_wy(rows: int) -> None:
    """Chains of 33 and 65 rows are solved in two and three blocks."""
    case = make([chain(rows)], shape=GdnShape(1, 1, 64, 64))
    assert not gdn_reference.far_apart(verify(case, "wy").out, reference(case)).any()


@pytest.mark.parametrize("method", METHODS)
def test_heads_of_128(method: str) -> None:
    case = make([random_tree(33, 7)], shape=LARGE)
    assert not gdn_reference.far_apart(verify(case, method).out, reference(case)).any()


def test_shared_memory_is_what_the_launch_asks_for(emulated_gpu: EmulatedGpu) -> None:  # noqa: F811
    for rows in modules.WY_ROWS:
        library = emulated_gpu.library(modules.wy(64, rows), "gdn_wy")
        assert library.shared_bytes() == modules.wy_shared_bytes(rows, 64)


def fma(x: np.ndarray, y: np.ndarray, z: np.ndarray) -> np.ndarray:
    """x y + z; products are exact in float64, and rounding twice hardly ever shows."""
    return (x.astype(np.float64) * y.astype(np.float64) + z).astype(np.float32)


def stock_scale(x: np.ndarray) -> np.float32:
    """1 / |x|: here a key is spread over all 32 lanes."""
    lanes = x.reshape(32, -1)
    sums = fma(lanes[:, 0], lanes[:, 0], lanes[:, 1] * lanes[:, 1])
    for e in range(2, lanes.shape[1]):
        sums = fma(lanes[:, e], lanes[:, e], sums)
    for distance in (16, 8, 4, 2, 1):
        sums = sums + sums[np.arange(32) ^ distance]
    return np.float32(1) / np.sqrt(sums[0] + np.float32(1e-6))


def stock_dots(x: np.ndarray, s: np.ndarray) -> np.ndarray:
    """x [K] times every row of s [V, K], in the order of the stock kernel.

    A lane of its tile has four neighbouring k, and sums fma(k3, fma(k2, fma(k0, k1 s1))); lanes
    meet in a butterfly, farthest first.
    """
    four, tile = x.reshape(-1, 4), s.reshape(len(s), -1, 4)
    sums = fma(four[:, 0], tile[:, :, 0], four[:, 1] * tile[:, :, 1])
    for e in (2, 3):
        sums = fma(four[:, e], tile[:, :, e], sums)
    lanes = np.arange(len(four))
    for distance in (16, 8, 4, 2, 1):
        if distance < len(four):
            sums = sums + sums[:, lanes ^ distance]
    return sums[:, 0]


def stock_chain(verified: Verified, state: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Outputs [rows, V] and final state [V, K] of a chain, one head, as the stock kernel rounds."""
    exp2 = ctypes.CDLL("libm.so.6").exp2f
    exp2.restype, exp2.argtypes = ctypes.c_float, [ctypes.c_float]
    record, s = verified.record, state.numpy().copy()
    keys, outputs = s.shape[1], []
    for row in range(rows):
        raw = record.kv[0, row].float().numpy()
        k, q = raw[:keys], verified.queries.q[row].float().numpy()
        k, q = stock_scale(k) * k, stock_scale(q) * q
        s = s * np.float32(exp2(record.g[0, row].item() * np.float32(1.4426950216293335)))
        u = (raw[keys:] - stock_dots(k, s)) * record.beta[0, row].numpy()
        s = fma(k[None, :], u[:, None], s)
        outputs.append(stock_dots(np.float32(keys**-0.5) * q, s))
    return torch.from_numpy(np.stack(outputs)).bfloat16(), torch.from_numpy(s)


@pytest.mark.parametrize("dim", modules.HEAD_DIMS)
def test_chains_have_the_bits_of_the_stock_order(dim: int) -> None:
    case = make([chain(6)], shape=GdnShape(1, 1, dim, dim))
    verified = verify(case, "path")
    out, state = stock_chain(verified, case.states[case.slot[0], 0], 6)
    assert same_bits(verified.out[0, :, 0], out)
    commit(case, verified.record, [list(range(6))])
    assert same_bits(case.states[case.slot[0], 0], state)


def commit(
    case: Case, record: ReplayRecord, paths: list[list[int]], keep: Keep | None = None
) -> None:
    """Replay in place, through the launcher."""
    longest = max(map(len, paths)) + 2
    padded = [path + [-1] * (longest - len(path)) for path in paths]
    of_model = GdnCommit([record], [case.states], [case.windows])
    of_model._layers = of_model._table()
    of_model(
        case.slot, torch.tensor(padded, dtype=torch.int32),
        torch.tensor([len(path) - 1 for path in paths], dtype=torch.int32), keep=keep,
    )  # fmt: skip


def test_states_on_the_way_are_those_of_a_shorter_path() -> None:
    """Bit for bit, in other slots. With 6, 5 and 60 tokens before, a multiple of 8 is passed."""
    paths = [[0, 1, 2, 3], [0, 1, 2, 3, 4, 5], [0], [0, 1, 2], [], [0, 1, 2, 3, 4, 5]]
    lengths, kept_rows = [6, 5, 8, 4, 7, 60], {0: 2, 1: 3, 5: 4}
    case = make([chain(6)] * 6, shape=SMALL, slots=12)
    record = verify(case, "path").record
    others = [slot for slot in range(12) if slot not in case.slot.tolist()]
    slots = torch.tensor(others)
    keep = Keep(slots, torch.tensor(lengths), 8)
    before = case.states.clone(), case.windows.clone()
    plain = replace(case, states=before[0].clone(), windows=before[1].clone())
    commit(plain, record, paths)
    commit(case, record, paths, keep)
    for request in range(6):
        slot, other = case.slot[request], others[request]
        assert same_bits(case.states[slot], plain.states[slot])
        assert same_bits(case.windows[slot], plain.windows[slot])
        short = replace(case, states=before[0].clone(), windows=before[1].clone())
        if request in kept_rows:
            commit(short, record, [path[: kept_rows[request]] for path in paths])
            assert same_bits(case.states[other], short.states[slot])
            assert same_bits(case.windows[other], short.windows[slot])
        else:
            assert same_bits(case.states[other], before[0][other])
            assert same_bits(case.windows[other], before[1][other])
    nowhere = replace(case, states=before[0].clone(), windows=before[1].clone())
    commit(nowhere, record, paths, Keep(torch.full((6,), -1), keep.length, 8))
    assert same_bits(nowhere.states, plain.states)
    assert same_bits(nowhere.windows, plain.windows)


def test_commit_replays_each_requests_path() -> None:
    trees = [[-1, 0, 1, 0, 3], [-1, 0, 0, 2, -2], [-1, -2, -2, -2, -2]]
    case = make(trees, shape=SMALL, slots=5)
    case.slot[2] = -1  # nobody
    record = verify(case, "path").record
    before = case.states.clone()
    states, windows = case.states.clone(), case.windows.clone()
    GdnCommit([record], [states], [windows])(  # tensors on the CPU run the reference
        case.slot, torch.tensor([[0, 3, 4], [0, -1, -1], [0, -1, -1]], dtype=torch.int32),
        torch.tensor([2, 0, 0], dtype=torch.int32),
    )  # fmt: skip
    commit(case, record, [[0, 3, 4], [0], [0]])
    assert torch.allclose(case.states, states, rtol=1e-5, atol=1e-6)
    assert same_bits(case.windows, windows)
    changed = (case.states != before).flatten(1).any(1)
    assert set(changed.nonzero().flatten().tolist()) == set(case.slot[:2].tolist())


@pytest.mark.parametrize("method", METHODS)
def test_sibling_order_changes_no_bit(method: str) -> None:
    """The same tree with its rows in another order, parents still first."""
    tree = [-1, 0, 0, 1, 1, 2, 2, 5, 3]
    order = [0, 2, 6, 5, 7, 1, 4, 3, 8]  # row i of the other tree is row order[i] of this one
    place = {row: i for i, row in enumerate(order)}
    case = make([tree], shape=SMALL)
    moved = make([[-1 if row == 0 else place[tree[row]] for row in order]], shape=SMALL)
    for name in ("mixed", "a", "b"):
        getattr(moved, name).copy_(getattr(case, name)[order])
    assert same_bits(verify(moved, method).out, verify(case, method).out[:, order])


@pytest.mark.parametrize("method", METHODS)
def test_dropped_subtrees_change_no_other_bit(method: str) -> None:
    tree = [-1, 0, 0, 1, 2, 4, 4, 3]
    case = make([tree], shape=SMALL)
    kept = [0, 1, 3, 7]  # without row 2 and all below it
    pruned = make([[-2 if row not in kept else parent for row, parent in enumerate(tree)]],
                  shape=SMALL)  # fmt: skip
    assert same_bits(verify(pruned, method).out[:, kept], verify(case, method).out[:, kept])
    assert (verify(pruned, method).out[:, [2, 4, 5, 6]] == 0).all()


@pytest.mark.parametrize("method", METHODS)
def test_nobodys_rows_are_zeros_and_poison_is_not_read(method: str) -> None:
    case = make([chain(5), chain(5), unused(chain(2), 5)], shape=SMALL, slots=3)
    alone = verify(case, method).out
    case.slot[1] = 3  # beyond the pool
    case.mixed[5:10] = torch.nan
    case.mixed[12:] = torch.nan
    out = verify(case, method).out
    assert (out[1] == 0).all()
    assert (out[2, 2:] == 0).all()
    assert same_bits(out[[0, 2]], alone[[0, 2]])


@pytest.mark.parametrize("value", [2.0**127, 3.3e38, -float("inf"), float("nan")])
def test_states_that_cannot_be_split(value: float) -> None:
    """Three bfloat16 parts of such numbers would overflow; the others' outputs are as ever."""
    case = make([random_tree(6, 1)], shape=GdnShape(1, 1, 64, 64))
    column = 20
    before = verify(case, "wy").out
    case.states[case.slot[0], 0, column, 3] = value
    out, expected = verify(case, "wy").out, reference(case)
    others = [c for c in range(64) if c != column]
    assert not gdn_reference.far_apart(out[..., others], before[..., others]).any()
    seen, right = out[..., column].float(), expected[..., column].float()
    assert torch.equal(seen.isfinite(), right.isfinite())
    assert torch.allclose(seen[right.isfinite()], right[right.isfinite()], rtol=2**-6)


def test_record_is_the_references() -> None:
    case = make([random_tree(9, 1), unused(random_tree(4, 2), 9)], shape=SMALL, bias=True)
    requests, rows = case.trees.parent.shape
    expected = ReplayRecord.allocate(SMALL, requests, rows, "cpu")
    gdn_tree_verify(
        case.mixed, case.a, case.b, case.weights, case.states, case.windows, case.slot, case.trees,
        expected, method="path",
    )  # fmt: skip
    record = verify(case, "path").record
    used = case.trees.parent != -2
    assert same_bits(record.kv, expected.kv)
    assert same_bits(record.mixed[used], case.mixed.view(requests, rows, -1)[used])
    for name in ("k_scale", "g", "beta"):
        assert torch.allclose(getattr(record, name), getattr(expected, name), rtol=1e-6), name


def test_rows_written_by_the_projection_are_not_copied() -> None:
    case = make([chain(4)], shape=SMALL)
    expected = verify(case, "path")
    record = ReplayRecord.allocate(SMALL, 1, 4, "cpu")
    record.mixed.copy_(case.mixed.view(1, 4, -1))
    conv.prepare_rows(
        record.mixed.view(4, -1), case.a, case.b, case.weights, case.windows, case.slot,
        case.trees, record, SMALL,
    )  # fmt: skip
    assert same_bits(record.kv, expected.record.kv)
    assert same_bits(record.mixed, case.mixed.view(1, 4, -1))
