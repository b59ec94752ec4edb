"""Gated DeltaNet recurrence in three equal forms: step, chain chunks, tree (paper Eq. 2, §4.2).

Per value head with state S [K, V] and one token (k, v, q, decay a = exp(g), write strength beta):

    u = beta * (v - a * S^T k);   S <- a * S + k u^T;   o = S^T q

Keys and queries are L2-normalised and the query is scaled by K^-1/2 first; Eq. (2) of the paper
leaves both out. `replay` walks this recurrence. `tree_scan` gives the outputs of all rows of a
tree at once, each row seeing only its own root path and no state but the committed one: unrolling
the recurrence along ancestors j of row i leaves one strictly lower triangular system

    (I + A) U = diag(beta) (V - diag(Gamma) K S0),   A_ij = beta_i D_ij <k_i, k_j>

with Gamma_i the decay from the committed state to row i and D_ij the decay from row j to row i.
`chain_scan` is the same algebra over chunks of a long chain, carrying the state between chunks.
The triangular system is solved by substitution: powers of A overflow when keys repeat.

All tensors are float32; B is a batch of requests (or sequences), H value heads, N or T rows.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

L2_EPS = 1e-6
CHUNK = 64


def normalise(q: Tensor, k: Tensor, n_value_heads: int) -> tuple[Tensor, Tensor]:
    """L2-normalise and scale q, k [..., Hk, K] and repeat them for the value heads they serve."""
    key_dim = q.shape[-1]
    # an RMS norm is an L2 norm times sqrt(K); its mean turns the sum's epsilon into eps / K
    q = F.rms_norm(q, (key_dim,), eps=L2_EPS / key_dim) * key_dim**-1.0
    k = F.rms_norm(k, (key_dim,), eps=L2_EPS / key_dim) * key_dim**-0.5
    repeats = n_value_heads // q.shape[-2]
    if repeats > 1:
        q, k = q.repeat_interleave(repeats, dim=-2), k.repeat_interleave(repeats, dim=-2)
    return q, k


def tree_scan(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, ancestors: Tensor
) -> Tensor:
    """Outputs of all tree rows from the committed state, without a state per row.

    q, k [B, H, N, K] (normalised), v [B, H, N, V], g, beta [B, H, N], state [B, H, K, V];
    ancestors bool [B, N, N]: row i may read row j, the diagonal included. Returns o [B, H, N, V].
    """
    on_path = ancestors.unsqueeze(1)
    log_gamma = (on_path.to(g.dtype) @ g.unsqueeze(-1)).squeeze(-1)  # sum of g along the root path
    decay = (log_gamma.unsqueeze(-1) - log_gamma.unsqueeze(-2)).masked_fill(~on_path, -torch.inf)
    decay = decay.exp()
    gamma = log_gamma.exp().unsqueeze(-1)
    system = (beta.unsqueeze(-1) * decay) * (k @ k.transpose(-1, -2))
    rhs = beta.unsqueeze(-1) * (v - gamma * (k @ state))
    # unitriangular: the diagonal (beta <k, k>) is ignored and read as one, as (I + A) asks
    u = torch.linalg.solve_triangular(system, rhs, upper=False, unitriangular=True)
    return gamma * (q @ state) + (decay * (q @ k.transpose(-1, -2))) @ u


def chain_scan(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Outputs and final state of chains of T rows, in chunks of 64 (shapes as in `tree_scan`)."""
    batch, heads, length, key_dim = k.shape
    pad = -length % min(CHUNK, max(length, 1))
    chunk = min(CHUNK, max(length, 1))
    if pad:  # beta = 0 and g = 0: padded rows neither write nor decay
        q, k, v = (F.pad(x, (0, 0, 0, pad)) for x in (q, k, v))
        g, beta = F.pad(g, (0, pad)), F.pad(beta, (0, pad))
    q, k, v = (x.unflatten(2, (-1, chunk)) for x in (q, k, v))
    g, beta = g.unflatten(2, (-1, chunk)), beta.unflatten(2, (-1, chunk)).unsqueeze(-1)
    log_gamma = g.cumsum(-1)
    causal = torch.ones(chunk, chunk, dtype=torch.bool, device=k.device).tril()
    decay = (log_gamma.unsqueeze(-1) - log_gamma.unsqueeze(-2)).masked_fill(~causal, -torch.inf)
    decay = decay.exp()
    gamma = log_gamma.exp().unsqueeze(-1)
    system = beta * decay * (k @ k.transpose(-1, -2))
    solved = torch.linalg.solve_triangular(
        system, torch.cat([beta * v, beta * gamma * k], dim=-1), upper=False, unitriangular=True
    )
    writes, reads = solved.split([v.shape[-1], key_dim], dim=-1)
    scores = decay * (q @ k.transpose(-1, -2))
    q_decayed = gamma * q
    k_decayed = (log_gamma[..., -1:] - log_gamma).exp().unsqueeze(-1) * k
    last = gamma[..., -1:, :]
    if state is None:
        state = k.new_zeros(batch, heads, key_dim, v.shape[-1])
    outputs = []
    for c in range(k.shape[2]):
        u = writes[:, :, c] - reads[:, :, c] @ state
        outputs.append(q_decayed[:, :, c] @ state + scores[:, :, c] @ u)
        state = last[:, :, c] * state + k_decayed[:, :, c].transpose(-1, -2) @ u
    return torch.cat(outputs, dim=2)[:, :, :length], state


def replay(k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> Tensor:
    """State after the given rows, one recurrence step per row: the commit of an accepted path.

    k [B, H, T, K] (normalised), v [B, H, T, V], g, beta [B, H, T], state [B, H, K, V] (kept).
    """
    alpha = g.exp()
    for t in range(k.shape[2]):
        state = state * alpha[:, :, t, None, None]
        k_t = k[:, :, t].unsqueeze(-1)
        read = (state * k_t).sum(-2)
        u = beta[:, :, t, None] * (v[:, :, t] - read)
        state = state + k_t * u.unsqueeze(-2)
    return state
