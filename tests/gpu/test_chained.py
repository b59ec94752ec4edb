"""The small kernels on a GPU: against float64 and their references, in graphs, before W12."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from w12_cases import exact

from specpilot_kernels.chained import ops, reference
from specpilot_kernels.chained.modules import ACT_AND_MUL, GATED_NORM
from specpilot_kernels.w12 import gemm

pytestmark = pytest.mark.gpu

COLS = (8, 256, 264, 2560, 4096, 5120, 8192, 8200, 16384)


def rows(number: int, cols: int, *, scale: float = 1.0, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator(device="cuda").manual_seed(seed)
    made = scale * torch.randn((number, cols), generator=generator, device="cuda")
    return made.to(torch.bfloat16)


def steps_apart(one: torch.Tensor, other: torch.Tensor) -> int:
    """The largest difference in steps of BF16; both are of one sign or near zero."""
    steps = (one.view(torch.int16).int() - other.view(torch.int16).int()).abs()
    tiny = (one.float() - other.float()).abs() < 1e-30
    return int(steps.masked_fill(tiny, 0).max())


@pytest.mark.parametrize("cols", COLS)
@pytest.mark.parametrize("number", [1, 7, 64, 300])
def test_norms_are_the_references_within_a_step(number: int, cols: int) -> None:
    ops.warm()
    weight = rows(1, cols, seed=2)[0]
    for bias in (0.0, 1.0):
        x, residual = rows(number, cols), rows(number, cols, seed=1)
        alone = ops.rms_norm(x, weight, 1e-6, weight_bias=bias)
        expected = reference.rms_norm(x, weight, 1e-6, None, bias)[0]
        assert steps_apart(alone, expected) <= 1
        normed, sums = reference.rms_norm(x, weight, 1e-6, residual, bias)
        assert sums is not None
        ops.add_rms_norm(x, residual, weight, 1e-6, weight_bias=bias)
        assert torch.equal(residual, sums)
        assert steps_apart(x, normed) <= 1


@pytest.mark.parametrize("activation", ACT_AND_MUL)
@pytest.mark.parametrize(("number", "cols"), [(1, 17408), (3, 8), (64, 14336), (500, 264)])
def test_activations_are_the_references(activation: Any, number: int, cols: int) -> None:
    ops.warm()
    x = rows(number, 2 * cols, scale=4)
    made = ops.act_and_mul(x, activation)
    assert steps_apart(made, reference.act_and_mul(x, activation)) <= 1


@pytest.mark.parametrize("gate", GATED_NORM)
@pytest.mark.parametrize("number", [1, 48, 47 * 48])
def test_gated_norms_are_the_references_within_a_step(gate: Any, number: int) -> None:
    ops.warm()
    wide, weight = rows(number, 384), rows(1, 128, seed=2)[0]
    x, z = wide[:, 8:136], wide[:, 256:]
    made = ops.gated_rms_norm(x, z, weight, 1e-6, gate)
    assert steps_apart(made, reference.gated_rms_norm(x, z, weight, 1e-6, gate)) <= 1


def test_not_a_number_stays_one_and_infinity_too() -> None:
    x = rows(2, 64)
    x[0, 3], x[1, 5] = float("nan"), float("inf")
    weight = rows(1, 64, seed=1)[0]
    normed = ops.rms_norm(x, weight, 1e-6)
    assert normed[0].isnan().all()
    expected = reference.rms_norm(x, weight, 1e-6, None, 0.0)[0]
    assert torch.equal(normed[1].isnan(), expected[1].isnan())
    made = ops.act_and_mul(x, "silu")
    assert torch.equal(made.isnan(), reference.act_and_mul(x, "silu").isnan())


def test_rows_with_gaps_leave_the_gaps_alone() -> None:
    wide, other = rows(4, 96), rows(4, 96, seed=1)
    before, before_other = wide.clone(), other.clone()
    weight = rows(1, 64, seed=2)[0]
    x, residual = wide[:, 16:80], other[:, 8:72]
    normed, sums = reference.rms_norm(x, weight, 1e-6, residual, 1.0)
    ops.add_rms_norm(x, residual, weight, 1e-6, weight_bias=1.0)
    assert torch.equal(residual, sums)
    assert steps_apart(x, normed) <= 1
    x.copy_(before[:, 16:80])
    residual.copy_(before_other[:, 8:72])
    assert torch.equal(wide, before)
    assert torch.equal(other, before_other)


def test_a_chain_of_products_and_small_kernels_in_a_graph() -> None:
    """Each reads what the one before wrote, though all may start early; many replays agree."""
    ops.warm()
    gemm.warm()
    hidden, wide, layers = 1024, 2048, 6
    weights = [
        (exact(rows(2 * wide, hidden, scale=0.03, seed=2 * i)),
         exact(rows(hidden, wide, scale=0.03, seed=2 * i + 1)))
        for i in range(layers)
    ]  # fmt: skip
    norm = rows(1, hidden, seed=99)[0]
    start = rows(33, hidden, seed=100)

    def run(*, dependent: bool, ours: bool) -> torch.Tensor:
        residual = start.clone()
        x = torch.zeros_like(start)
        for gate_up, down in weights:
            if ours:
                ops.add_rms_norm(x, residual, norm, 1e-6)
            else:
                x, residual = reference.rms_norm(x, norm, 1e-6, residual, 0.0)
            both = gemm.gemm(x, gate_up, dependent=dependent)
            made = ops.act_and_mul(both, "silu") if ours else reference.act_and_mul(both, "silu")
            x = gemm.gemm(made, down, dependent=dependent)
        return x + residual

    plain = run(dependent=False, ours=True)
    other = run(dependent=False, ours=False).float()
    # A rounding of one norm spreads over the layers, and the last sum cancels here and there.
    assert (other - plain.float()).abs().max() <= 2.0**-4 * plain.float().abs().max()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(dependent=True, ours=True)
    for _ in range(50):
        out.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, plain)
