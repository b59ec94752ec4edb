"""Layers shared by the target and the drafter: norms, rotary embedding, MLP, masked attention."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS norm over the last axis in float32, result in the dtype of `x`."""
    return F.rms_norm(x.float(), weight.shape, weight, eps).to(x.dtype)


class RMSNorm(nn.Module):
    """RMS norm; `zero_centered` stores weight - 1, as the Qwen3.5 target does."""

    def __init__(self, size: int, eps: float, *, zero_centered: bool = False) -> None:
        super().__init__()
        self.eps, self.zero_centered = eps, zero_centered
        self.weight = nn.Parameter(torch.zeros(size) if zero_centered else torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.float() + 1.0 if self.zero_centered else self.weight.float()
        return rms_norm(x, weight, self.eps)


class MLP(nn.Module):
    """SwiGLU feed-forward layer."""

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Rotary(nn.Module):
    """Rotary position embedding of the first `rotary_dim` channels of each head (neox halves)."""

    inverse: Tensor

    def __init__(self, rotary_dim: int, theta: float) -> None:
        super().__init__()
        self.rotary_dim = rotary_dim
        exponent = torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim
        self.register_buffer("inverse", theta**-exponent, persistent=False)

    def angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin [..., 1, rotary_dim] for positions [...] (the 1 broadcasts over heads)."""
        angle = positions.unsqueeze(-1).float() * self.inverse
        angle = torch.cat([angle, angle], dim=-1).unsqueeze(-2)
        return angle.cos(), angle.sin()

    def apply(self, x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:  # type: ignore[override]
        """Rotate x [..., heads, head_dim]."""
        cos, sin = angles
        head, rest = x[..., : self.rotary_dim], x[..., self.rotary_dim :]
        first, second = head.chunk(2, dim=-1)
        turned = torch.cat([-second, first], dim=-1)
        rotated = head.float() * cos + turned.float() * sin
        return torch.cat([rotated.to(x.dtype), rest], dim=-1)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Softmax attention with grouped heads.

    q [B, N, Hq, D], k, v [B, M, Hkv, D]; mask bool [B, N, M] or [N, M], True = may read; None means
    causal over equal lengths. Returns [B, N, Hq, D].
    """
    if mask is not None and mask.dim() == 3:
        mask = mask.unsqueeze(1)
    out = F.scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=mask,
        is_causal=mask is None,
        enable_gqa=q.shape[2] != k.shape[2],
    )
    return out.transpose(1, 2)
