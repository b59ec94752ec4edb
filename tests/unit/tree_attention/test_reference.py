"""The formula against each row's own sequence; what the function refuses; the operator."""

from __future__ import annotations

from collections.abc import Callable

import pytest

torch = pytest.importorskip("torch")

from tree_attention_cases import CASES, Case, Inputs, make, tables, worst  # noqa: E402

from specpilot_kernels.tree_attention.attention import tree_attention  # noqa: E402
from specpilot_kernels.tree_attention.reference import tree_attention_reference  # noqa: E402

SMALL = Case((12, 3), 5, heads=4, kv_heads=2)


@pytest.mark.parametrize("name", CASES, ids=str)
def test_each_row_attends_to_its_path_as_a_sequence(name: str) -> None:
    inputs = make(CASES[name], torch.float32)
    out = tree_attention_reference(*inputs.tensors, **inputs.options, dtype=torch.float64)
    assert worst(out, inputs) <= 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_function_takes_the_formula_on_a_cpu(dtype: torch.dtype) -> None:
    inputs = make(CASES["ragged"], dtype)
    out = tree_attention(*inputs.tensors, **inputs.options, n_splits=5)
    assert out.dtype == dtype
    assert worst(out, inputs) <= 1


def test_cases_tell_a_tree_from_a_chain() -> None:
    """The cases would notice a kernel that lets every row see all rows before it."""
    inputs = make(CASES["star"], torch.float32)
    q, k, v, indptr, indices, own, ancestors, depth = inputs.tensors
    rows = ancestors.shape[1]
    causal = torch.tensor([[[(1 << min(r + 1, 63)) - 1] for r in range(rows)]])
    wrong = tree_attention_reference(q, k, v, indptr, indices, own, causal, depth, **inputs.options)
    assert worst(wrong, inputs) > 100


def test_the_order_of_siblings_changes_nothing_but_the_order_of_rows() -> None:
    inputs = make(Case((20,), 5, nodes=4), torch.float32)
    parents = [[-1, 0, 0, 1, 2]]
    swapped = [[-1, 0, 0, 2, 1]]
    order = torch.tensor([0, 2, 1, 3, 4])
    q, k, v, indptr, indices, own, *_ = inputs.tensors

    def run(tree: list[list[int]], rows: torch.Tensor) -> torch.Tensor:
        depth, ancestors = tables(tree)
        return tree_attention_reference(
            q[rows], k, v, indptr, indices, own[rows], ancestors, depth, **inputs.options
        )

    straight = run(parents, torch.arange(5))
    assert torch.allclose(run(swapped, order), straight[order], rtol=1e-6, atol=1e-6)
    assert not torch.allclose(straight[1], straight[2])


def _with(inputs: Inputs, index: int, change: Callable[[torch.Tensor], torch.Tensor]) -> list:
    tensors = list(inputs.tensors)
    tensors[index] = change(tensors[index])
    return tensors


@pytest.mark.parametrize(
    ("index", "change", "word"),
    [
        (0, lambda q: q[:-1], "q is"),
        (0, lambda q: q.double(), "q is"),
        (0, lambda q: q[:, :3], "share"),
        (0, lambda q: q.transpose(1, 2).contiguous().transpose(1, 2), "contiguous"),
        (1, lambda k: k.half(), "k_pool"),
        (2, lambda v: v[:-1], "v_pool"),
        (2, lambda v: v[..., :8], "v_pool"),
        (3, lambda indptr: indptr[:-1], "kv_indptr"),
        (4, lambda indices: indices.float(), "kv_indices"),
        (5, lambda slots: slots[1:], "row_slots"),
        (6, lambda bits: bits.view(torch.int64)[..., :0], "ancestors"),
        (6, lambda bits: bits.view(torch.int32), "ancestors"),
        (7, lambda depth: depth.long(), "depth is"),
        (7, lambda depth: depth[0], "depth is"),
        (7, lambda depth: depth.T.contiguous().T, "contiguous"),
        (5, lambda slots: slots.to("meta"), "meta"),
    ],
)
def test_what_does_not_fit_is_refused(
    index: int, change: Callable[[torch.Tensor], torch.Tensor], word: str
) -> None:
    inputs = make(SMALL, torch.bfloat16)
    with pytest.raises(ValueError, match=word):
        tree_attention(*_with(inputs, index, change), **inputs.options)


@pytest.mark.parametrize(
    "option", [{"scale": 0.0}, {"scale": float("nan")}, {"window": 0}, {"logit_cap": -1.0},
               {"logit_cap": float("inf")}, {"n_splits": 0}],
)  # fmt: skip
def test_options_that_mean_nothing_are_refused(option: dict[str, float]) -> None:
    inputs = make(SMALL, torch.bfloat16)
    with pytest.raises(ValueError, match=next(iter(option))):
        tree_attention(*inputs.tensors, **{**inputs.options, **option})


def test_no_request_gives_no_rows() -> None:
    q, k, v, _, indices, own, ancestors, depth = make(SMALL, torch.bfloat16).tensors
    indptr = torch.zeros(1, dtype=torch.int64)
    out = tree_attention(q[:0], k, v, indptr, indices, own[:0], ancestors[:0], depth[:0], scale=1.0)
    assert out.shape == (0, 4, 16)


def test_operator_is_one_that_torch_may_compile() -> None:
    inputs = make(CASES["strided"], torch.bfloat16)
    torch.library.opcheck(
        torch.ops.specpilot.tree_attention.default, (*inputs.tensors, 0.25, None, None, None),
        test_utils=("test_schema", "test_faketensor"),
    )  # fmt: skip
