"""The small kernels' operators on the CPU, against float64, and what they refuse."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from specpilot_kernels.chained import ops
from specpilot_kernels.chained.modules import ACT_AND_MUL, GATED_NORM


def rows(number: int, cols: int, *, scale: float = 1.0, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (scale * torch.randn((number, cols), generator=generator)).to(torch.bfloat16)


def rounded(exact: torch.Tensor, made: torch.Tensor) -> bool:
    """Whether float64 values were rounded to BF16, give or take an error of float32."""
    return bool(((exact - made.double()).abs() <= exact.abs() * (2.0**-8 + 2.0**-20) + 1e-40).all())


@pytest.mark.parametrize("bias", [0.0, 1.0])
@pytest.mark.parametrize("scale", [1e-17, 1.0, 1e17])
def test_norms(bias: float, scale: float) -> None:
    x, residual = rows(5, 136, scale=scale), rows(5, 136, scale=scale, seed=1)
    weight = rows(1, 136, seed=2)[0]
    eps = 1e-6 * scale**2 if scale < 1 else 1e-6
    for other in (None, residual):
        total = x.double() + (0 if other is None else other.double())
        size = (total.square().mean(-1, keepdim=True) + eps).sqrt()
        exact = total / size * (weight.double() + bias)
        if other is None:
            assert rounded(exact, ops.rms_norm(x, weight, eps, weight_bias=bias))
            continue
        given = x.clone(), residual.clone()
        normed, added = ops.add_rms_norm(*given, weight, eps, weight_bias=bias)
        assert (normed is given[0], added is given[1]) == (True, True)
        assert rounded(exact, normed)
        assert rounded(total, added)


@pytest.mark.parametrize("activation", ACT_AND_MUL)
def test_activations(activation: Any) -> None:
    x = rows(7, 48, scale=3)
    x[0, :4] = torch.tensor([0.0, -0.0, 120.0, -120.0])
    gate, up = x.double().chunk(2, dim=-1)
    if activation == "silu":
        exact = gate * torch.sigmoid(gate)
    elif activation == "gelu":
        exact = gate * 0.5 * (1 + torch.erf(gate / math.sqrt(2)))
    else:
        inner = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
        exact = gate * 0.5 * (1 + torch.tanh(inner))
    made = ops.act_and_mul(x, activation).double()
    # 1 + erf cancels where the gate is far below zero.
    tolerance = (exact * up).abs() * 2.0**-8 + 1e-6 * up.abs()
    assert ((exact * up - made).abs() <= tolerance).all()


@pytest.mark.parametrize("gate", GATED_NORM)
def test_gated_norms(gate: Any) -> None:
    x, z, weight = rows(9, 128), rows(9, 128, scale=4, seed=1), rows(1, 128, seed=2)[0]
    total = x.double()
    normed = total / (total.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()
    gates = z.double().sigmoid() * (z.double() if gate == "silu" else 1)
    assert rounded(normed * gates, ops.gated_rms_norm(x, z, weight, 1e-6, gate))


def test_what_the_gated_norm_cannot_read_is_refused() -> None:
    x, weight = rows(2, 128), rows(1, 128)[0]
    for bad in ((x[:, :64], x[:, :64], weight[:64]), (x, x[:1], weight), (x, x.float(), weight)):
        assert not ops.accepts_gated_norm(*bad)
        with pytest.raises(ValueError, match="the gated norm cannot read"):
            ops.gated_rms_norm(*bad, 1e-6)
    with pytest.raises(ValueError, match="tanh"):
        ops.gated_rms_norm(x, x, weight, 1e-6, "tanh")  # type: ignore[arg-type]


def test_strided_rows_and_no_rows() -> None:
    wide = rows(4, 96)
    part = wide[:, 16:80]
    assert torch.equal(ops.act_and_mul(part, "silu"), ops.act_and_mul(part.contiguous(), "silu"))
    weight = rows(1, 64)[0]
    assert torch.equal(
        ops.rms_norm(part, weight, 1e-6), ops.rms_norm(part.contiguous(), weight, 1e-6)
    )
    assert ops.rms_norm(part[:0], weight, 1e-6).shape == (0, 64)
    assert ops.act_and_mul(part[:0], "silu").shape == (0, 32)


@pytest.mark.parametrize(("x", "weight"), [
    (torch.zeros(2, 12, dtype=torch.bfloat16), torch.zeros(12, dtype=torch.bfloat16)),
    (torch.zeros(2, 16), torch.zeros(16)),
    (torch.zeros(2, 16, dtype=torch.bfloat16), torch.zeros(16)),
    (torch.zeros(2, 16, dtype=torch.bfloat16), torch.zeros(8, dtype=torch.bfloat16)),
    (torch.zeros(2, 17, dtype=torch.bfloat16)[:, 1:], torch.zeros(16, dtype=torch.bfloat16)),
    (torch.zeros(16, 2, dtype=torch.bfloat16).T, torch.zeros(16, dtype=torch.bfloat16)),
    (torch.zeros(16, dtype=torch.bfloat16), torch.zeros(16, dtype=torch.bfloat16)),
    (torch.zeros(1, 2 * ops.MAX_COLS, dtype=torch.bfloat16),
     torch.zeros(2 * ops.MAX_COLS, dtype=torch.bfloat16)),
])  # fmt: skip
def test_what_the_norm_cannot_read_is_refused(x: torch.Tensor, weight: torch.Tensor) -> None:
    assert not ops.accepts_norm(x, weight)
    with pytest.raises(ValueError, match="the norm cannot read"):
        ops.rms_norm(x, weight, 1e-6)


def test_a_residual_or_an_activation_that_does_not_fit_is_refused() -> None:
    x, weight = rows(2, 16), rows(1, 16)[0]
    before = x.clone()
    with pytest.raises(ValueError, match="residual"):
        ops.add_rms_norm(x, rows(3, 16), weight, 1e-6)
    assert torch.equal(x, before)
    with pytest.raises(ValueError, match="relu"):
        ops.act_and_mul(x, "relu")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="cannot read"):
        ops.act_and_mul(rows(2, 24), "silu")
