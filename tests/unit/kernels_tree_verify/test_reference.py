"""The readable forms against each other, against Transformers, and against the reference engine."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from gdn_cases import Case, chain, make, random_tree, unused  # noqa: E402
from torch import Tensor  # noqa: E402

from specpilot_kernels.tree_verify import gdn_reference  # noqa: E402
from specpilot_kernels.tree_verify.records import GdnShape, tables  # noqa: E402

SHAPE = GdnShape(2, 6, 16, 24)
EXACT = 1e-13  # float64, relative to the largest value
SINGLE = 2e-6  # float32, likewise
KINDS = ("random", "near-equal keys", "strong gates")


def inputs(case: Case, dtype: torch.dtype) -> tuple[gdn_reference.Inputs, Tensor]:
    """Inputs of the recurrence, and each request's state."""
    requests, rows = case.trees.parent.shape
    w = case.weights
    convolved = gdn_reference.convolve(
        case.mixed.view(requests, rows, -1), w.conv_weight, w.conv_bias, case.windows[case.slot],
        case.trees.tap,
    )  # fmt: skip
    a, b = (x.view(requests, rows, -1) for x in (case.a, case.b))
    g, beta = gdn_reference.gates(a, b, w.a_log.to(dtype), w.dt_bias)
    x = gdn_reference.prepare(convolved, g, beta, case.shape, case.trees.parent)
    return x, case.states[case.slot].to(dtype)


def distance(actual: Tensor, expected: Tensor) -> float:
    return ((actual - expected).abs().max() / expected.abs().max()).item()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [1, 2, 9, 33, 65])
def test_both_forms_are_equal_in_float64(rows: int, kind: str) -> None:
    trees = [random_tree(rows, 1), random_tree(rows, 2, depth=rows), chain(rows)]
    x, state = inputs(make(trees, shape=SHAPE, kind=kind), torch.float64)
    parent = torch.tensor(trees)
    expected = gdn_reference.path(x, state, parent)
    assert distance(gdn_reference.wy(x, state, parent), expected) < EXACT


def test_near_equal_keys_need_substitution() -> None:
    """The trap is real: with these keys, powers of A grow until float32 has no digit left."""
    rows = 64
    x, state = inputs(make([chain(rows)], shape=SHAPE, kind="near-equal keys"), torch.float32)
    parent = torch.tensor([chain(rows)])
    exactly = inputs(make([chain(rows)], shape=SHAPE, kind="near-equal keys"), torch.float64)
    expected = gdn_reference.path(*exactly, parent)
    _, decay = gdn_reference.decays(x.g, parent)
    system = (x.beta.unsqueeze(-1) * decay * (x.k @ x.k.transpose(-1, -2))).tril(-1)
    power, largest = system, 0.0
    while power.abs().max() > 0:
        power = power @ power
        largest = max(largest, power.abs().max().item())
    assert largest > 1e6
    assert distance(gdn_reference.wy(x, state, parent).double(), expected) < SINGLE


@pytest.mark.parametrize("kind", KINDS)
def test_chain_is_transformers_recurrence(kind: str) -> None:
    modeling = pytest.importorskip("transformers.models.qwen3_5.modeling_qwen3_5")
    recurrent = modeling.torch_recurrent_gated_delta_rule
    recurrent = getattr(recurrent, "__wrapped__", recurrent)  # not a GPU's, where one is installed
    case = make([chain(12), chain(12)], shape=SHAPE, kind=kind)
    x, state = inputs(case, torch.float32)
    w = case.weights
    convolved = gdn_reference.convolve(
        case.mixed.view(2, 12, -1), w.conv_weight, None, case.windows[case.slot], case.trees.tap
    )
    q, k, v = convolved.split([SHAPE.keys, SHAPE.keys, SHAPE.values], dim=-1)
    q, k = (t.view(2, 12, 2, 16).repeat_interleave(3, dim=2) for t in (q, k))
    expected, final = recurrent(
        q, k, v.view(2, 12, 6, 24), g=x.g.transpose(1, 2), beta=x.beta.transpose(1, 2),
        initial_state=state.transpose(-1, -2), output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )  # fmt: skip
    actual = gdn_reference.path(x, state, case.trees.parent)
    assert torch.allclose(actual.transpose(1, 2).bfloat16().float(), expected.float(),
                          rtol=2**-7, atol=1e-4)  # fmt: skip
    replayed = gdn_reference.replay(x, state, list(range(12)))
    assert distance(replayed.transpose(-1, -2), final) < SINGLE


def test_tree_is_the_reference_engines_tree() -> None:
    engine = pytest.importorskip("specpilot_cli.engines.reference.gdn")
    trees = [random_tree(33, 5), random_tree(33, 6)]
    x, state = inputs(make(trees, shape=SHAPE), torch.float64)
    parent = torch.tensor(trees)
    ancestors = gdn_reference.decays(torch.zeros_like(x.g), parent)[1][:, 0] > 0
    expected = engine.tree_scan(*x, state.transpose(-1, -2), ancestors)
    assert distance(gdn_reference.wy(x, state, parent), expected) < EXACT


def test_convolution_follows_root_paths() -> None:
    """Row by row: the last four inputs of (window, root path) in plain float64."""
    tree = random_tree(20, 3)
    case = make([tree], shape=SHAPE, bias=True)
    mixed, window = case.mixed.double(), case.windows[case.slot].double()
    weight, bias = case.weights.conv_weight.double(), case.weights.conv_bias.double()
    actual = gdn_reference.convolve(mixed[None], weight, bias, window, case.trees.tap)[0]
    for row in range(20):
        path, at = [], row
        while at >= 0:
            path.append(at)
            at = tree[at]
        seen = torch.cat([window[0].T, mixed[path[::-1]]])[-4:]
        total = (seen * weight.T).sum(0) + bias
        assert torch.allclose(actual[row], total * total.sigmoid(), rtol=1e-12, atol=1e-12)


def test_bfloat16_products_are_rounded_one_by_one() -> None:
    # 1 + 2^-7 squared is 1 + 2^-6 + 2^-14, which bfloat16 rounds to 1 + 2^-6.
    one = torch.full((1, 1, 1), 1 + 2**-7, dtype=torch.bfloat16)
    weight = torch.tensor([[0, 0, 0, 1 + 2**-7]], dtype=torch.bfloat16)
    total = torch.tensor(1 + 2**-6)
    y = gdn_reference.convolve(
        one, weight, None, torch.zeros(1, 1, 3).bfloat16(), tables(torch.tensor([[-1]])).tap
    )
    assert y.item() == (total * total.sigmoid()).bfloat16().item()


def test_commit_is_the_state_and_window_at_the_end_of_the_path() -> None:
    tree = [-1, 0, 1, 0, 3, 4]
    case = make([tree], shape=SHAPE)
    x, state = inputs(case, torch.float64)
    branch = [0, 3, 4, 5]
    alone = make([chain(4)], shape=SHAPE)
    taken = case.mixed[branch]
    own = gdn_reference.Inputs(*(t[:, :, branch] for t in x))
    expected = state
    for row in range(4):
        expected = gdn_reference.advance(own, row, expected)
    assert torch.equal(gdn_reference.replay(x, state, branch), expected)
    window = gdn_reference.next_window(alone.windows[0], case.mixed, branch)
    assert torch.equal(window, taken[1:].T)
    window = gdn_reference.next_window(alone.windows[0], case.mixed, [0])
    assert torch.equal(window, torch.cat([alone.windows[0][:, 1:], case.mixed[:1].T], dim=1))


@pytest.mark.parametrize("form", [gdn_reference.path, gdn_reference.wy])
def test_rows_without_node_give_zeros_and_change_nothing(form: object) -> None:
    tree = random_tree(7, 4)
    case = make([unused(tree, 12)], shape=SHAPE)
    case.mixed[7:] = torch.nan
    case.a[7:], case.b[7:] = torch.nan, torch.nan
    x, state = inputs(case, torch.float64)
    out = form(x, state, case.trees.parent)  # type: ignore[operator]
    assert (out[:, :, 7:] == 0).all()
    few = gdn_reference.Inputs(*(t[:, :, :7] for t in x))
    expected = form(few, state, torch.tensor([tree]))  # type: ignore[operator]
    assert distance(out[:, :, :7], expected) < EXACT
