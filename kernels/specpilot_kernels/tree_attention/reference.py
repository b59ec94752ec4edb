"""Tree attention as a formula: the meaning of `attention.tree_attention`, for tests and CPUs."""

from __future__ import annotations

import torch


def tree_attention_reference(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    row_slots: torch.Tensor,
    ancestors: torch.Tensor,
    depth: torch.Tensor,
    *,
    scale: float,
    window: int | None = None,
    logit_cap: float | None = None,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Arguments and result as of `attention.tree_attention`, on any device; computes in `dtype`.

    Reads the keys and values that some row of their request sees, and no others.
    """
    batch, rows = depth.shape
    kv_heads = k_pool.shape[1]
    out = q.new_zeros(q.shape)
    for request in range(batch):
        own = slice(request * rows, (request + 1) * rows)
        used = (depth[request] >= 0).nonzero().flatten()
        begin, end = kv_indptr[request : request + 2].tolist()
        first = begin if window is None else max(begin, end - window + 1)
        slots = torch.cat([kv_indices[first:end], row_slots[own][used].to(kv_indices.dtype)]).long()
        seen = torch.cat(
            [
                _prefix_seen(depth[request, used], end - first, window),
                _tree_seen(ancestors[request], depth[request], used, window),
            ],
            dim=1,
        )
        queries = q[own][used].unflatten(1, (kv_heads, -1)).to(dtype)
        for head in range(kv_heads):
            keys, values = k_pool[slots, head].to(dtype), v_pool[slots, head].to(dtype)
            score = queries[:, head] @ keys.T * scale  # [used, group, keys]
            if logit_cap is not None:
                score = logit_cap * torch.tanh(score / logit_cap)
            weight = score.masked_fill(~seen[:, None], -torch.inf).softmax(dim=-1)
            group = slice(head * queries.shape[2], (head + 1) * queries.shape[2])
            out[own.start + used, group] = (weight @ values).to(out.dtype)
    return out


def _prefix_seen(depth: torch.Tensor, length: int, window: int | None) -> torch.Tensor:
    """[rows, length]: which of the last `length` keys of the prefix each row sees."""
    back = torch.arange(length, 0, -1, device=depth.device)  # distance from the anchor
    if window is None:
        return back.new_ones((len(depth), length), dtype=torch.bool)
    return back[None, :] + depth[:, None] < window


def _tree_seen(
    ancestors: torch.Tensor, depth: torch.Tensor, used: torch.Tensor, window: int | None
) -> torch.Tensor:
    """[used rows, used rows]: which rows of its own tree each row sees, itself included."""
    words = ancestors.view(torch.int64)[used][:, used // 64]
    seen = (words >> (used % 64)) & 1 != 0
    if window is not None:
        seen &= depth[used][:, None] - depth[used][None, :] < window
    return seen
