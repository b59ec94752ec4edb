"""Gated DeltaNet on trees in readable torch, float32 or float64, any device (paper §4.2).

Per value head with committed state S [V, K] (a row per value channel, as engines keep it), and for
each row a key k, query q (both divided by their norm, q also by sqrt(K)), value v, decay
alpha = exp(g) and write strength beta:

    S <- alpha S;   u = beta (v - S k);   S <- S + u k^T;   o = S q

`path` walks this from every row's parent. `wy` gives the same outputs from the committed state
alone: with D_ij the decay from row j to row i, Gamma_i that from the committed state,

    (I + A) U = diag(beta) (V - diag(Gamma) K S^T),    A_ij = beta_i D_ij <k_i, k_j>, j above i
    O = diag(Gamma) Q S^T + (D o Q K^T) U

`replay` is the commit. B requests, R rows, Hk key heads and Hv value heads throughout; rows whose
parent is -2 give zeros.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from specpilot_kernels.tree_verify.records import UNUSED_PARENT, WIDTH, GdnShape

L2_EPS = 1e-6


class Inputs(NamedTuple):
    """What the recurrence reads, per value head.

    q, k [B, Hv, R, K] normalised, v [B, Hv, R, V], g, beta [B, Hv, R].
    """

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor


def convolve(
    mixed: Tensor, weight: Tensor, bias: Tensor | None, window: Tensor, tap: Tensor
) -> Tensor:
    """Causal convolution along root paths, then SiLU.

    mixed [B, R, C]; weight [C, 4], oldest first; bias [C] or None; window [B, C, 3], the committed
    inputs, oldest first; tap [B, R, 4]. In bfloat16 every product is rounded to bfloat16 and the
    sum is float32, oldest first, which are the bits of the stock kernel. Result as `mixed`.
    """
    wide = torch.float64 if mixed.dtype == torch.float64 else torch.float32
    source = torch.cat([window.transpose(1, 2), mixed], dim=1)  # row i is at i + 3
    index = tap.long() + WIDTH - 1
    batch = torch.arange(mixed.shape[0], device=mixed.device).unsqueeze(1)
    total = torch.zeros(mixed.shape, dtype=wide, device=mixed.device)
    if bias is not None:
        total = total + bias.to(wide)
    for j in range(WIDTH):
        gathered = source[batch, index[:, :, j].clamp(min=0)]  # a row without node may say anything
        total = total + (gathered * weight[:, j].to(mixed.dtype)).to(wide)
    return (total / (1 + (-total).exp())).to(mixed.dtype)


def gates(a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """Log decay g and write strength beta of a, b [..., Hv], in the dtype of `a_log`."""
    x = a.to(a_log.dtype) + dt_bias.to(a_log.dtype)
    softplus = torch.where(x <= 20, (1 + x.exp()).log(), x)
    return -a_log.exp() * softplus, 1 / (1 + (-b.to(a_log.dtype)).exp())


def inverse_norms(x: Tensor, shape: GdnShape) -> Tensor:
    """1 / |x| of each head of x [B, R, keys]: [B, R, Hk]."""
    heads = x.reshape(*x.shape[:-1], shape.key_heads, shape.key_dim)
    return 1 / (heads.square().sum(-1) + L2_EPS).sqrt()


def prepare(convolved: Tensor, g: Tensor, beta: Tensor, shape: GdnShape, parent: Tensor) -> Inputs:
    """Split rows [B, R, C] into heads in the dtype of `g` [B, R, Hv], and normalise.

    Rows without node become zeros.
    """
    used = (parent != UNUSED_PARENT).to(g.dtype).unsqueeze(-1)
    convolved = torch.where(used.bool(), convolved, torch.zeros_like(convolved)).to(g.dtype)
    q, k, v = torch.split(convolved, [shape.keys, shape.keys, shape.values], dim=-1)
    lead = convolved.shape[:2]
    scales = (inverse_norms(x, shape).unsqueeze(-1) for x in (q, k))
    heads = (x.reshape(*lead, shape.key_heads, shape.key_dim) for x in (q, k))
    q, k = (x * scale for x, scale in zip(heads, scales, strict=True))
    repeats = shape.value_heads // shape.key_heads
    q, k = (x.repeat_interleave(repeats, dim=2).transpose(1, 2) for x in (q, k))
    v = v.reshape(*lead, shape.value_heads, shape.value_dim).transpose(1, 2)
    g, beta = (torch.where(used.bool(), x, torch.zeros_like(x)) for x in (g, beta))
    return Inputs(q * shape.key_dim**-0.5, k, v, g.transpose(1, 2), beta.transpose(1, 2))


def advance(x: Inputs, row: int, state: Tensor) -> Tensor:
    """State [B, Hv, V, K] after one row."""
    state = state * x.g[:, :, row].exp()[..., None, None]
    k = x.k[:, :, row].unsqueeze(-2)
    u = x.beta[:, :, row].unsqueeze(-1) * (x.v[:, :, row] - (state * k).sum(-1))
    return state + u.unsqueeze(-1) * k


def path(x: Inputs, state: Tensor, parent: Tensor) -> Tensor:
    """Outputs [B, Hv, R, V] row by row, each from its parent's state; keeps a state per row."""
    outputs, states = [], [state]
    batch = torch.arange(state.shape[0], device=state.device)
    for row in range(parent.shape[1]):
        from_state = torch.stack(states)[(parent[:, row].long() + 1).clamp(min=0), batch]
        states.append(advance(x, row, from_state))
        outputs.append((states[-1] * x.q[:, :, row].unsqueeze(-2)).sum(-1))
    out = torch.stack(outputs, dim=2)
    return out * (parent != UNUSED_PARENT)[:, None, :, None]


def decays(g: Tensor, parent: Tensor) -> tuple[Tensor, Tensor]:
    """Gamma [B, Hv, R] and D [B, Hv, R, R], zero beyond root paths, as products down the tree.

    Products, since exp(sum - sum) loses digits where gates are strong.
    """
    batch, heads, rows = g.shape
    decay = torch.zeros((batch, heads, rows, rows), dtype=g.dtype, device=g.device)
    gamma = torch.zeros_like(g)
    alpha = g.exp()
    every = torch.arange(batch, device=g.device)
    for row in range(rows):
        above = parent[:, row].long()
        inside = (above >= 0)[:, None]
        from_parent = decay[every, :, above.clamp(min=0)] * inside[..., None]
        before = torch.where(
            inside, gamma[every, :, above.clamp(min=0)], torch.ones_like(g[:, :, 0])
        )
        decay[:, :, row] = alpha[:, :, row, None] * from_parent
        decay[:, :, row, row] = 1
        gamma[:, :, row] = alpha[:, :, row] * before
    used = (parent != UNUSED_PARENT)[:, None]
    return gamma * used, decay * used[..., None]


def wy(x: Inputs, state: Tensor, parent: Tensor) -> Tensor:
    """Outputs [B, Hv, R, V] of all rows at once from the committed state."""
    gamma, decay = decays(x.g, parent)
    system = x.beta.unsqueeze(-1) * decay * (x.k @ x.k.transpose(-1, -2))
    right = x.beta.unsqueeze(-1) * (x.v - gamma.unsqueeze(-1) * (x.k @ state.transpose(-1, -2)))
    # The diagonal is read as ones. Substitution, never powers of A: they overflow when keys repeat.
    u = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    weights = decay * (x.q @ x.k.transpose(-1, -2))
    return gamma.unsqueeze(-1) * (x.q @ state.transpose(-1, -2)) + weights @ u


def replay(x: Inputs, state: Tensor, accepted: list[int]) -> Tensor:
    """State after the rows `accepted`, in order: the commit of one request (B = 1)."""
    for row in accepted:
        state = advance(x, row, state)
    return state


def next_window(window: Tensor, mixed: Tensor, accepted: list[int]) -> Tensor:
    """Window [C, 3] after the rows `accepted` of mixed [R, C]."""
    return torch.cat([window, mixed[accepted].T], dim=1)[:, -(WIDTH - 1) :]


def far_apart(actual: Tensor, expected: Tensor) -> Tensor:
    """Where bfloat16 [.., V] differ by more than rounding explains: bool, as they are.

    That is more than one step of bfloat16 and more than 2^-17 of the largest output of the row and
    head, which entries that nearly cancel may be off by.
    """
    x, y = actual.float(), expected.float()
    exponent = torch.frexp(torch.maximum(x.abs(), y.abs())).exponent.float()
    allowed = torch.maximum(torch.exp2(exponent - 8), 2.0**-17 * y.abs().amax(-1, keepdim=True))
    return ~((x - y).abs() <= allowed)
