"""The Gated DeltaNet tree kernels on a GPU: against the reference and each other.

compute-sanitizer --report-api-errors no \\
    python -m pytest tests/gpu/test_tree_verify.py -m gpu -k "every_tree and 33 or commit"
"""

from __future__ import annotations

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch", reason="no CUDA device: torch is not installed")

from gdn_cases import (  # noqa: E402
    Case,
    chain,
    make,
    path_to,
    random_tree,
    same_bits,
    unused,
)
from gdn_runs import accepted, commit, run  # noqa: E402
from torch import Tensor  # noqa: E402

from specpilot_kernels.tree_verify import conv, gdn_reference  # noqa: E402
from specpilot_kernels.tree_verify import verify as tree_verify  # noqa: E402
from specpilot_kernels.tree_verify.commit import GdnCommit, Keep, recorded  # noqa: E402
from specpilot_kernels.tree_verify.records import GdnShape, ReplayRecord  # noqa: E402

pytestmark = pytest.mark.gpu

SMALL = GdnShape(2, 4, 128, 128)
DEMO = GdnShape(2, 2, 64, 64)
LARGE = GdnShape(16, 48, 128, 128)
KINDS = ("random", "near-equal keys", "strong gates")
METHODS = ("path", "wy")
APPROXIMATIONS = 1e-5  # float32, relative: exponentials and square roots of the GPU
STEPS = 100


def exact_outputs(case: Case, record: ReplayRecord) -> Tensor:
    """Float64 outputs [requests, R, Hv, V] of the rows that the kernel recorded."""
    requests, rows = case.trees.parent.shape
    queries = conv.prepare_rows(
        case.mixed, case.a, case.b, case.weights, case.windows, case.slot, case.trees, record,
        case.shape,
    )  # fmt: skip
    x = gdn_reference.prepare(
        torch.cat([queries.q.view(requests, rows, -1), record.kv], dim=-1),
        record.g.double(), record.beta.double(), case.shape, case.trees.parent,
    )  # fmt: skip
    states = case.states[case.slot].double()
    return gdn_reference.path(x, states, case.trees.parent).transpose(1, 2)


@pytest.mark.parametrize("shape", [SMALL, DEMO], ids=["128", "64"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("method", METHODS)
def test_outputs_are_as_near_to_float64_as_rounding_allows(
    method: str, kind: str, shape: GdnShape
) -> None:
    case = make([random_tree(33, 1), random_tree(33, 2)], shape=shape, kind=kind).to("cuda")
    out, record = run(case, method)
    expected = exact_outputs(case, record)
    error = (out.double() - expected).abs()
    # Half a step of bfloat16, and float32 sums.
    largest = expected.abs().amax(-1, keepdim=True)
    assert (error <= 2.0**-8 * expected.abs() + 2.0**-16 * largest).all()


def test_rows_and_gates_are_the_references() -> None:
    case = make([random_tree(33, 3), unused(random_tree(20, 4), 33)], shape=SMALL, bias=True)
    on_gpu = case.to("cuda")
    _, record = run(on_gpu, "path")
    expected = ReplayRecord.allocate(SMALL, 2, 33, "cpu")
    tree_verify.gdn_tree_verify(
        case.mixed, case.a, case.b, case.weights, case.states, case.windows, case.slot, case.trees,
        expected, method="path",
    )  # fmt: skip
    used = case.trees.parent != -2
    assert same_bits(record.mixed.cpu()[used], expected.mixed[used])
    difference = (record.kv.cpu().float() - expected.kv.float()).abs()
    assert (difference <= 2.0**-7 * expected.kv.float().abs() + 1e-30).all()
    assert (difference > 0).double().mean() < 1e-3  # the GPU's exponential
    for name in ("k_scale", "g", "beta"):
        actual, right = getattr(record, name).cpu(), getattr(expected, name)
        tolerance = 2.0**-7 if name == "k_scale" else APPROXIMATIONS
        assert torch.allclose(actual, right, rtol=tolerance, atol=1e-6), name


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [1, 9, 16, 17, 33, 40, 65, 72])
def test_wy_is_path_up_to_rounding_on_every_tree(rows: int, kind: str) -> None:
    trees = [
        random_tree(rows, 1), chain(rows), random_tree(rows, 2, depth=4), [-1] + [0] * (rows - 1),
        unused(random_tree(max(1, rows // 2), 3), rows),
    ]  # fmt: skip
    for shape in (SMALL, DEMO):
        case = make(trees, shape=shape, kind=kind, seed=rows).to("cuda")
        wy, path = run(case, "wy")[0], run(case, "path")[0]
        assert wy.isfinite().all()
        assert not gdn_reference.far_apart(wy, path).any()


@pytest.mark.parametrize("kind", KINDS)
def test_wy_is_path_along_a_hundred_committed_steps(kind: str) -> None:
    """States as a server has them: every step commits a path of another tree."""
    case = make([random_tree(33, 0)] * 2, shape=SMALL, kind=kind).to("cuda")
    for step in range(STEPS):
        trees = [random_tree(33, 2 * step), random_tree(33, 2 * step + 1)]
        fresh = make(trees, shape=SMALL, kind=kind, seed=step).to("cuda")
        fresh.states.copy_(case.states)
        fresh.windows.copy_(case.windows)
        fresh.slot.copy_(case.slot)
        wy, record = run(fresh, "wy")
        path, _ = run(fresh, "path")
        assert not gdn_reference.far_apart(wy, path).any(), step
        commit(fresh, record, [path_to(trees[0], 32), path_to(trees[1], step % 33)])
        case.states.copy_(fresh.states)
        case.windows.copy_(fresh.windows)
    assert case.states.isfinite().all()


@pytest.mark.parametrize("method", METHODS)
def test_sibling_order_changes_no_bit(method: str) -> None:
    rows, tree = 33, random_tree(33, 8, depth=6)
    depth = [len(path_to(tree, row)) for row in range(rows)]
    order = sorted(range(rows), key=lambda row: (depth[row], -row))  # by level, siblings reversed
    place = {row: i for i, row in enumerate(order)}
    case = make([tree], shape=SMALL)
    moved = make([[-1 if row == 0 else place[tree[row]] for row in order]], shape=SMALL)
    for name in ("mixed", "a", "b"):
        getattr(moved, name).copy_(getattr(case, name)[order])
    first, second = run(case.to("cuda"), method)[0], run(moved.to("cuda"), method)[0]
    assert same_bits(second, first[:, order])


@pytest.mark.parametrize("method", METHODS)
def test_dropped_subtrees_change_no_other_bit(method: str) -> None:
    tree = random_tree(33, 9)
    case = make([tree], shape=SMALL)
    gone = {5}
    for row in range(6, 33):
        if tree[row] in gone:
            gone.add(row)
    kept = [row for row in range(33) if row not in gone]
    pruned = make([[-2 if row in gone else above for row, above in enumerate(tree)]], shape=SMALL)
    whole, part = run(case.to("cuda"), method)[0], run(pruned.to("cuda"), method)[0]
    assert same_bits(part[:, kept], whole[:, kept])
    assert (part[:, sorted(gone)] == 0).all()


@pytest.mark.parametrize("method", METHODS)
def test_requests_do_not_see_each_other(method: str) -> None:
    trees = [random_tree(17, seed) for seed in range(8)]
    case = make(trees, shape=LARGE).to("cuda")
    together = run(case, method)[0]
    for request in (0, 3, 7):
        alone = make([trees[request]], shape=LARGE, slots=case.states.shape[0]).to("cuda")
        rows = slice(17 * request, 17 * request + 17)
        for name in ("mixed", "a", "b"):
            getattr(alone, name).copy_(getattr(case, name)[rows])
        alone.states.copy_(case.states)
        alone.windows.copy_(case.windows)
        alone.slot.copy_(case.slot[request : request + 1])
        single = Case(
            alone.shape, case.weights, alone.mixed, alone.a, alone.b, alone.states, alone.windows,
            alone.slot, alone.trees,
        )  # fmt: skip
        assert same_bits(run(single, method)[0][0], together[request])


@pytest.mark.parametrize("method", METHODS)
def test_nobodys_rows_are_zeros_and_poison_is_not_read(method: str) -> None:
    case = make([chain(9), chain(9), unused(chain(2), 9)], shape=SMALL, slots=3).to("cuda")
    alone = run(case, method)[0]
    case.slot[1] = 3  # beyond the pool
    case.mixed[9:18] = torch.nan
    case.mixed[20:] = torch.nan
    out, _ = run(case, method)
    assert (out[1] == 0).all()
    assert (out[2, 2:] == 0).all()
    assert same_bits(out[[0, 2]], alone[[0, 2]])


@pytest.mark.parametrize("value", [2.0**127, 3.3e38, -float("inf"), float("nan")])
def test_states_that_cannot_be_split(value: float) -> None:
    case = make([random_tree(33, 1)], shape=SMALL).to("cuda")
    before = run(case, "wy")[0]
    case.states[case.slot[0], 0, 20, 3] = value
    wy, path = run(case, "wy")[0], run(case, "path")[0]
    assert torch.equal(wy.isfinite(), path.isfinite())
    others = [c for c in range(128) if c != 20]
    assert not gdn_reference.far_apart(wy[..., others], before[..., others]).any()
    assert not gdn_reference.far_apart(wy[..., others], path[..., others]).any()


@pytest.mark.parametrize("method", METHODS)
def test_verify_writes_no_state(method: str) -> None:
    case = make([random_tree(33, 1)], shape=SMALL).to("cuda")
    states, windows = case.states.clone(), case.windows.clone()
    run(case, method)
    assert same_bits(case.states, states)
    assert same_bits(case.windows, windows)


def test_commit_of_all_layers_is_each_layers_own() -> None:
    layers = [make([random_tree(17, 1), random_tree(17, 2)], shape=SMALL, seed=s).to("cuda")
              for s in range(3)]  # fmt: skip
    for layer in layers:
        layer.slot.copy_(layers[0].slot)
    records = [run(layer, "wy")[1] for layer in layers]
    paths = [path_to(random_tree(17, 1), 16), [0]]
    expected = []
    for layer, record in zip(layers, records, strict=True):
        x = recorded(record.kv, record.g.double(), record.beta.double(), SMALL)
        for request, rows in enumerate(paths):
            one = gdn_reference.Inputs(*(t[request : request + 1] for t in x))
            state = layer.states[layer.slot[request]].double()[None]
            window = layer.windows[layer.slot[request]]
            expected.append((
                gdn_reference.replay(one, state, rows)[0],
                gdn_reference.next_window(window, record.mixed[request], rows),
            ))  # fmt: skip
    GdnCommit(records, [c.states for c in layers], [c.windows for c in layers])(
        layers[0].slot, *accepted(paths)
    )
    for i, (state, window) in enumerate(expected):
        layer = layers[i // 2]
        slot = layer.slot[i % 2]
        error = (layer.states[slot].double() - state).abs().max()
        assert error <= APPROXIMATIONS * state.abs().max()
        assert same_bits(layer.windows[slot], window)


@pytest.mark.parametrize("dim", [64, 128])
def test_states_on_the_way_are_those_of_a_shorter_path(dim: int) -> None:
    """With 6, 5 and 61 tokens before, a multiple of 16 is passed by the first and the last."""
    paths = [list(range(17)), [0, 1, 2], [0, 1, 2, 3]]
    lengths, kept_rows = [6, 5, 61], {0: 10, 2: 3}
    case = make([chain(17)] * 3, shape=GdnShape(1, 2, dim, dim), slots=8).to("cuda")
    record = run(case, "path")[1]
    others = [slot for slot in range(8) if slot not in case.slot.tolist()][:3]
    keep = Keep(torch.tensor(others).cuda(), torch.tensor(lengths).cuda(), 16)
    plain, before = (
        replace(case, states=case.states.clone(), windows=case.windows.clone()) for _ in range(2)
    )
    commit(plain, record, paths)
    GdnCommit([record], [case.states], [case.windows])(case.slot, *accepted(paths), keep=keep)
    for request, other in enumerate(others):
        slot, wanted = case.slot[request], before
        if request in kept_rows:
            wanted = replace(case, states=before.states.clone(), windows=before.windows.clone())
            commit(wanted, record, [path[: kept_rows[request]] for path in paths])
        source = slot if request in kept_rows else other
        assert same_bits(case.states[other], wanted.states[source])
        assert same_bits(case.windows[other], wanted.windows[source])
        assert same_bits(case.states[slot], plain.states[slot])
        assert same_bits(case.windows[slot], plain.windows[slot])


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dependent", [True, False], ids=["dependent", "plain"])
def test_a_replayed_graph_gives_the_eager_result(method: str, dependent: bool) -> None:
    """Verify of two layers and the commit in one graph, replayed with other rows and trees."""
    layers = [make([random_tree(33, 1)], shape=SMALL, seed=s).to("cuda") for s in range(2)]
    layers[1].slot.copy_(layers[0].slot)
    trees, slot = layers[0].trees, layers[0].slot
    records = [ReplayRecord.allocate(SMALL, 1, 33, "cuda") for _ in layers]
    path, count = accepted([[0]])
    pools = [c.states for c in layers], [c.windows for c in layers]
    commit_all = GdnCommit(records, *pools)
    tree_verify.warm(SMALL, 33, 0)

    def step() -> list[Tensor]:
        outs = [
            tree_verify.gdn_tree_verify(
                c.mixed, c.a, c.b, c.weights, c.states, c.windows, slot, trees, record,
                method=method, dependent=dependent,  # type: ignore[arg-type]
            )
            for c, record in zip(layers, records, strict=True)
        ]  # fmt: skip
        commit_all(slot, path, count, dependent=dependent)
        return outs

    begin = [t.clone() for pool in pools for t in pool]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()

    def rewind() -> None:
        for tensor, value in zip([t for pool in pools for t in pool], begin, strict=True):
            tensor.copy_(value)

    for seed in range(10):
        tree = random_tree(33, seed)
        fresh = make([tree], shape=SMALL, seed=seed).to("cuda")
        trees.parent.copy_(fresh.trees.parent)
        trees.tap.copy_(fresh.trees.tap)
        for layer in layers:
            layer.mixed.copy_(fresh.mixed)
        new_path, new_count = accepted([path_to(tree, 32)])
        path.copy_(new_path)
        count.copy_(new_count)
        rewind()
        graph.replay()
        replayed = [t.clone() for t in [*captured, *pools[0], *pools[1]]]
        rewind()
        eager = [*step(), *pools[0], *pools[1]]
        assert all(same_bits(x, y) for x, y in zip(replayed, eager, strict=True))
