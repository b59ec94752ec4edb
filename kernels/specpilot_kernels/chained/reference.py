"""What the small kernels compute, in torch's own operators; serves tensors on the CPU."""

from __future__ import annotations

import torch

from specpilot_kernels.chained.modules import Activation, Gate


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    residual: torch.Tensor | None,
    weight_bias: float,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the norm of x [rows, cols] and the new residual; see `ops.rms_norm`."""
    values = x.float()
    if residual is not None:
        values = values + residual.float()
    scale = torch.rsqrt(values.square().mean(dim=-1, keepdim=True) + eps)
    normed = values * scale * (weight_bias + weight.float())
    return normed.to(x.dtype), None if residual is None else values.to(x.dtype)


def act_and_mul(x: torch.Tensor, activation: Activation) -> torch.Tensor:
    """Return act(gate) * up of x [rows, 2 * cols]; see `ops.act_and_mul`."""
    gate, up = x.float().chunk(2, dim=-1)
    if activation == "silu":
        made = torch.nn.functional.silu(gate)
    else:
        kind = "tanh" if activation == "gelu_tanh" else "none"
        made = torch.nn.functional.gelu(gate, approximate=kind)
    return (made * up).to(x.dtype)


def gated_rms_norm(
    x: torch.Tensor, z: torch.Tensor, weight: torch.Tensor, eps: float, gate: Gate
) -> torch.Tensor:
    """Return the norm of x [rows, cols] times gate(z); see `ops.gated_rms_norm`."""
    values, gates = x.float(), z.float()
    scale = torch.rsqrt(values.square().mean(dim=-1, keepdim=True) + eps)
    gates = torch.nn.functional.silu(gates) if gate == "silu" else torch.sigmoid(gates)
    return (values * scale * weight.float() * gates).to(x.dtype)
