"""What callers see: the CPU's answers, choice of method, and errors that name what is wrong."""

from __future__ import annotations

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from gdn_cases import Case, chain, make, random_tree  # noqa: E402
from torch import Tensor  # noqa: E402

from specpilot_kernels.tree_verify import (  # noqa: E402
    checks,
    gdn_reference,
    modules,
    stock,
)
from specpilot_kernels.tree_verify.commit import GdnCommit, Keep  # noqa: E402
from specpilot_kernels.tree_verify.records import GdnShape, ReplayRecord, tables  # noqa: E402
from specpilot_kernels.tree_verify.verify import gdn_tree_verify  # noqa: E402

SHAPE = GdnShape(2, 4, 64, 64)


def run(case: Case, record: ReplayRecord | None = None, **options: object) -> Tensor:
    requests, rows = case.trees.parent.shape
    record = record or ReplayRecord.allocate(case.shape, requests, rows, "cpu")
    return gdn_tree_verify(
        case.mixed, case.a, case.b, case.weights, case.states, case.windows, case.slot,
        case.trees, record, **options,  # type: ignore[arg-type]
    )  # fmt: skip


def test_methods_agree_and_auto_is_one_of_them() -> None:
    case = make([random_tree(17, 1)], shape=SHAPE)
    path, wy = run(case, method="path"), run(case, method="wy")
    assert not gdn_reference.far_apart(wy, path).any()
    assert torch.equal(run(case), wy)
    long = make([chain(80)], shape=SHAPE)
    assert torch.equal(run(long), run(long, method="path"))


def test_decoding_row_by_row_is_a_verified_chain() -> None:
    """Verify and commit of one row, ten times, against verify of ten rows and one commit."""
    whole = make([chain(10)], shape=SHAPE)
    step = make([chain(1)], shape=SHAPE, slots=whole.states.shape[0])
    step = replace(step, weights=whole.weights, slot=whole.slot)
    step.states.copy_(whole.states)
    step.windows.copy_(whole.windows)
    record = ReplayRecord.allocate(SHAPE, 1, 1, "cpu")
    one = GdnCommit([record], [step.states], [step.windows])
    anchor = torch.zeros((1, 1), dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    outputs = []
    for row in range(10):
        for name in ("mixed", "a", "b"):
            getattr(step, name).copy_(getattr(whole, name)[row : row + 1])
        outputs.append(run(step, record, method="path"))
        one(whole.slot, *anchor)
    of_whole = ReplayRecord.allocate(SHAPE, 1, 10, "cpu")
    assert torch.equal(torch.cat(outputs), run(whole, of_whole, method="path"))
    GdnCommit([of_whole], [whole.states], [whole.windows])(
        whole.slot, torch.arange(10, dtype=torch.int32)[None], torch.tensor([9], dtype=torch.int32)
    )
    assert torch.equal(whole.states, step.states)
    assert torch.equal(whole.windows, step.windows)


def test_states_on_the_way_to_the_end_of_a_path() -> None:
    """At 16 tokens, of 13 before and 5 committed; the other request's slot is nobody's."""
    case = make([chain(6), chain(6)], shape=SHAPE, slots=5)
    record = ReplayRecord.allocate(SHAPE, 2, 6, "cpu")
    run(case, record, method="path")
    path = torch.tensor([[0, 1, 2, 3, 4], [0, 1, 2, -1, -1]], dtype=torch.int32)
    count = torch.tensor([4, 2], dtype=torch.int32)
    free = next(slot for slot in range(5) if slot not in case.slot.tolist())
    keep = Keep(torch.tensor([free, 5]), torch.tensor([13, 15]), 16)
    short = replace(case, states=case.states.clone(), windows=case.windows.clone())
    plain = replace(case, states=case.states.clone(), windows=case.windows.clone())
    GdnCommit([record], [short.states], [short.windows])(case.slot, path[:, :3].contiguous(),
                                                         torch.tensor([2, 2]).int())  # fmt: skip
    GdnCommit([record], [plain.states], [plain.windows])(case.slot, path, count)
    GdnCommit([record], [case.states], [case.windows])(case.slot, path, count, keep=keep)
    for ours, theirs, three in (
        (case.states, plain.states, short.states), (case.windows, plain.windows, short.windows)
    ):  # fmt: skip
        assert torch.equal(ours[free], three[case.slot[0]])
        others = [slot for slot in range(5) if slot != free]
        assert torch.equal(ours[others], theirs[others])


def test_record_of_the_27b_shape_is_small() -> None:
    """Per node and 48 layers: 1.7 MiB, where a snapshot of all states takes 144 MiB."""
    shape = GdnShape(16, 48, 128, 128)
    record = ReplayRecord.allocate(shape, 1, 32, "meta")
    per_node = 48 * record.nbytes / 32
    # bfloat16 k, v and the row itself; float32 gates of 48 heads and norms of 16.
    assert per_node == 48 * (2 * (8192 + 10240) + 4 * (2 * 48 + 16))
    snapshot = 48 * shape.values * shape.key_dim * 4
    assert snapshot / per_node > 80


def test_taps_leave_the_tree_into_the_window() -> None:
    tap = tables(torch.tensor([[-1, 0, 1, 0, 3, 4, -2]])).tap[0]
    assert tap[:6].tolist() == [
        [-3, -2, -1, 0], [-2, -1, 0, 1], [-1, 0, 1, 2], [-2, -1, 0, 3], [-1, 0, 3, 4], [0, 3, 4, 5]
    ]  # fmt: skip


def _of(case: Case, **changes: object) -> Case:
    return replace(case, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda c: _of(c, mixed=c.mixed.float()), "mixed must be bfloat16"),
        (lambda c: _of(c, mixed=c.mixed[:, :-1]), "mixed must be bfloat16"),
        (lambda c: _of(c, a=c.a[:-1]), "a must be bfloat16"),
        (lambda c: _of(c, slot=c.slot.int()), "slot must be int64"),
        (lambda c: _of(c, states=c.states.bfloat16()), "state pool must be float32"),
        (lambda c: _of(c, states=c.states.transpose(2, 3)), "must be contiguous"),
        (lambda c: _of(c, windows=c.windows[:-1]), "windows must be bfloat16"),
        (lambda c: _of(c, windows=c.windows[:, :-1]), "do not fit 4 value heads"),
        (lambda c: _of(c, trees=replace(c.trees, parent=c.trees.parent.long())), "parent must be"),
        (lambda c: _of(c, trees=replace(c.trees, tap=c.trees.tap[..., :3])), "tap must be"),
        (lambda c: _of(c, weights=replace(c.weights, a_log=c.weights.a_log.double())), "A_log"),
        (lambda c: _of(c, weights=replace(c.weights, conv_weight=c.mixed)), "conv_weight must"),
        (lambda c: _of(c, weights=replace(c.weights, conv_bias=c.mixed[0, 1:])), "conv_bias must"),
    ],
)
def test_what_does_not_fit_is_named(change: object, words: str) -> None:
    case = make([chain(3)], shape=SHAPE)
    with pytest.raises(ValueError, match=words):
        run(change(case))  # type: ignore[operator]


def test_a_record_of_other_rows_is_refused() -> None:
    case = make([chain(3)], shape=SHAPE)
    for record in (
        ReplayRecord.allocate(SHAPE, 1, 4, "cpu"), ReplayRecord.allocate(SHAPE, 0, 3, "cpu")
    ):  # fmt: skip
        with pytest.raises(ValueError, match=r"record\.kv"):
            run(case, record)


def test_methods_have_limits() -> None:
    with pytest.raises(ValueError, match="at most 72 rows"):
        run(make([chain(73)], shape=SHAPE), method="wy")
    with pytest.raises(ValueError, match="1 to 136 rows"):
        run(make([chain(137)], shape=SHAPE))
    with pytest.raises(ValueError, match="method must be"):
        run(make([chain(2)], shape=SHAPE), method="neumann")


def test_kernels_name_the_heads_they_exist_for() -> None:
    with pytest.raises(ValueError, match="64 or 128 squared, not 96 x 64"):
        checks.check_kernel(GdnShape(1, 1, 64, 96))
    odd = torch.zeros(4, 65)
    with pytest.raises(ValueError, match="16-byte aligned"):
        checks.check_kernel(SHAPE, odd)
    checks.check_kernel(SHAPE, others=(odd,))


def test_a_commit_wants_layers_of_one_kind() -> None:
    case, other = (make([chain(3)], shape=s) for s in (SHAPE, GdnShape(1, 4, 64, 64)))
    record = ReplayRecord.allocate(SHAPE, 1, 3, "cpu")
    with pytest.raises(ValueError, match="for every layer"):
        GdnCommit([record], [case.states], [])
    with pytest.raises(ValueError, match="same shape"):
        GdnCommit([record] * 2, [case.states, other.states], [case.windows, other.windows])
    commit = GdnCommit([record], [case.states], [case.windows])
    two = torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ValueError, match="2 requests, the records have 1"):
        commit(two, two[:, None].int(), two.int())
    with pytest.raises(ValueError, match="path must be int32"):
        commit(case.slot, two[:1, None], two[:1].int())
    one = two[:1, None].int(), two[:1].int()
    with pytest.raises(ValueError, match=r"keep\.slot must be int64 \[1\]"):
        commit(case.slot, *one, keep=Keep(two, two[:1], 64))
    with pytest.raises(ValueError, match="every 0 tokens"):
        commit(case.slot, *one, keep=Keep(two[:1], two[:1], 0))


def test_shared_memory_fits_a_hopper_block() -> None:
    for dim in modules.HEAD_DIMS:
        for rows in modules.WY_ROWS:
            assert modules.wy_shared_bytes(rows, dim) <= 227 * 1024
    # Two blocks of 33 rows on a multiprocessor, each with 1 KB of the driver's.
    assert 2 * (modules.wy_shared_bytes(40, 128) + 1024) <= 228 * 1024


def test_stock_kernels_that_are_not_there_are_a_reason(
    tmp_path: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(stock.SOURCE, str(tmp_path))
    with pytest.raises(stock.StockMissing, match="has no kernels/ops"):
        stock.load()


def test_stock_trees_have_first_children_and_siblings() -> None:
    tree = stock.StockTree.of(torch.tensor([[-1, 0, 0, 1, 1, 2]]))
    assert tree.next_token.tolist() == [[1, 3, 5, -1, -1, -1]]
    assert tree.next_sibling.tolist() == [[-1, 2, -1, 4, -1, -1]]
