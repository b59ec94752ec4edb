"""Gated DeltaNet and what surrounds it in Qwen3.5, in PyTorch, under the names SGLang calls.

SGLang reaches these as `torch.ops.sgl_kernel.NAME` and `sgl_kernel.mamba.NAME`. Each follows the
Triton kernel that the GPU has in its place: float32 inside, the recurrence token by token.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch

Tensor = torch.Tensor
_L2_EPS = 1e-6


def fused_sigmoid_mul_cpu(x: Tensor, gate: Tensor) -> None:
    """x *= sigmoid(gate), in place."""
    x.mul_(torch.sigmoid(gate.reshape(x.shape).float()).to(x.dtype))


def fused_qk_gemma_rmsnorm_cpu(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float, head_dim: int
) -> tuple[Tensor, Tensor]:
    """Both normalised by head, [rows * heads, head_dim]."""
    return _gemma_norm(q, q_weight, eps, head_dim), _gemma_norm(k, k_weight, eps, head_dim)


def fused_qk_gemma_rmsnorm_with_gate_cpu(
    q_gate: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float, head_dim: int,
    num_heads: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The same where each head's query lies before its gate."""
    q, gate = q_gate.reshape(-1, num_heads, 2 * head_dim).split(head_dim, dim=-1)
    return (
        _gemma_norm(q, q_weight, eps, head_dim),
        _gemma_norm(k, k_weight, eps, head_dim),
        gate.reshape(-1, head_dim).contiguous(),
    )


def _gemma_norm(x: Tensor, weight: Tensor, eps: float, head_dim: int) -> Tensor:
    rows = x.reshape(-1, head_dim).float()
    scaled = rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + eps)
    return (scaled * (1 + weight.float())).to(x.dtype)


def fused_qkvzba_split_reshape_cat_contiguous_cpu(
    qkvz: Tensor, ba: Tensor, key_heads: int, value_heads: int, key_dim: int, value_dim: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(q, k, v in one row; z by head; b; a)."""
    keys, values = key_heads * key_dim, value_heads * value_dim
    mixed, z = qkvz.split([2 * keys + values, values], dim=-1)
    b, a = ba.split(value_heads, dim=-1)
    return mixed.contiguous(), z.reshape(-1, value_heads, value_dim), b.contiguous(), a.contiguous()


def fused_gdn_gating_cpu(a_log: Tensor, a: Tensor, b: Tensor, dt_bias: Tensor) -> Any:
    """(log decay float32, write strength), both [1, rows, heads]."""
    g = -a_log.float().exp() * torch.nn.functional.softplus(a.float() + dt_bias.float())
    return g[None], torch.sigmoid(b.float())[None]


def causal_conv1d_fn_cpu(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, conv_states: Tensor,
    query_start_loc: Tensor, cache_indices: Tensor, has_initial_state: Tensor,
    activation: str | None = None, **_others: Any,
) -> Tensor:  # fmt: skip
    """Causal depthwise convolution of sequences side by side [C, rows]; windows are updated."""
    out = torch.empty_like(x)
    starts, slots = query_start_loc.tolist(), cache_indices.tolist()
    for number, (begin, end) in enumerate(pairwise(starts)):
        if end == begin:
            continue
        window = conv_states[slots[number]]
        before = window if bool(has_initial_state[number]) else torch.zeros_like(window)
        whole = torch.cat([before.to(x.dtype), x[:, begin:end]], dim=1)
        out[:, begin:end] = _convolve(whole, weight, bias, activation)
        window.copy_(whole[:, -window.shape[1] :])
    return out


def causal_conv1d_update_cpu(
    x: Tensor, conv_states: Tensor, weight: Tensor, bias: Tensor | None = None,
    activation: str | None = None, *, conv_state_indices: Tensor, **_others: Any,
) -> Tensor:  # fmt: skip
    """One token [B, C] for each request."""
    out = torch.empty_like(x)
    for number, slot in enumerate(conv_state_indices.tolist()):
        if slot < 0:
            continue
        whole = torch.cat([conv_states[slot].to(x.dtype), x[number][:, None]], dim=1)
        out[number] = _convolve(whole, weight, bias, activation)[:, 0]
        conv_states[slot].copy_(whole[:, 1:])
    return out


def _convolve(whole: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None) -> Tensor:
    rows = whole.float()[None]
    out = torch.nn.functional.conv1d(
        rows, weight.float()[:, None], None if bias is None else bias.float(),
        groups=weight.shape[0],
    )[0]  # fmt: skip
    if activation is not None:
        out = torch.nn.functional.silu(out)
    return out.to(whole.dtype)


def chunk_gated_delta_rule_cpu(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *, initial_state: Tensor,
    initial_state_indices: Tensor, cu_seqlens: Tensor, **_others: Any,
) -> tuple[Tensor, None, None]:  # fmt: skip
    """Prefill [1, rows, heads, D]: sequences side by side, states updated in place."""
    out = torch.empty_like(v)
    starts, slots = cu_seqlens.tolist(), initial_state_indices.tolist()
    for number, (begin, end) in enumerate(pairwise(starts)):
        part = slice(begin, end)
        state = initial_state[slots[number]]
        out[0, part] = _walk(q[0, part], k[0, part], v[0, part], g[0, part], beta[0, part], state)
    return out, None, None


def fused_sigmoid_gating_delta_rule_update_cpu(
    *, A_log: Tensor, dt_bias: Tensor, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor,
    initial_state_source: Tensor, initial_state_indices: Tensor, **_others: Any,
) -> Tensor:  # fmt: skip
    """One token for each request [1, B, heads, D], states updated in place."""
    g, beta = fused_gdn_gating_cpu(A_log, a, b, dt_bias)
    out = torch.empty_like(v)
    for number, slot in enumerate(initial_state_indices.tolist()):
        if slot < 0:
            continue
        part = slice(number, number + 1)
        state = initial_state_source[slot]
        out[0, part] = _walk(q[0, part], k[0, part], v[0, part], g[0, part], beta[0, part], state)
    return out


def _walk(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> Tensor:
    """The recurrence over rows; state float32 [Hv, V, K] in place."""
    group = v.shape[1] // k.shape[1]
    scale = k.shape[2] ** -0.5
    q, k = (_unit(x).repeat_interleave(group, dim=1) for x in (q, k))
    out = torch.empty_like(v)
    for row in range(v.shape[0]):
        state.mul_(g[row].exp()[:, None, None])
        read = torch.einsum("hvk,hk->hv", state, k[row])
        write = beta[row][:, None] * (v[row].float() - read)
        state.add_(torch.einsum("hv,hk->hvk", write, k[row]))
        out[row] = torch.einsum("hvk,hk->hv", state, q[row] * scale).to(v.dtype)
    return out


def _unit(x: Tensor) -> Tensor:
    x = x.float()
    return x / (x.square().sum(-1, keepdim=True) + _L2_EPS).sqrt()
