"""Full attention in a verify pass: every row sees the prefix and its own ancestors.

It replaces `forward_extend` of the target's own backend object, for verify passes alone. Where the
prefix lies is the backend's metadata; which rows are ancestors comes from the step's buffers, so a
captured graph needs no mask of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from specpilot_cli.engines.sglang.plugin.tree_buffers import TreeBuffers
from specpilot_cli.schema.plugin_config import TREE_ALGORITHM
from specpilot_kernels.tree_attention.attention import tree_attention

SUPPORTED = ("TritonAttnBackend", "TorchNativeAttnBackend")


def full_backend(backend: Any) -> Any:
    """The backend object that a verify pass's full-attention layers reach.

    Raises ValueError for one that this module does not know.
    """
    from sglang.srt.layers.attention.hybrid_attn_backend import HybridAttnBackend
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    while True:
        if isinstance(backend, HybridAttnBackend):
            backend = backend._select_backend(ForwardMode.TARGET_VERIFY)
        elif hasattr(backend, "full_attn_backend"):
            backend = backend.full_attn_backend
        else:
            break
    name = type(backend).__name__
    if name not in SUPPORTED:
        raise ValueError(
            f"{TREE_ALGORITHM} does not work with the attention backend `{name}`: give "
            "`--attention-backend triton`"
        )
    return backend


class TreeAttention:
    """`forward_extend` of one backend object."""

    def __init__(self, backend: Any, buffers: TreeBuffers, rows: int) -> None:
        self._backend, self._buffers, self._rows = backend, buffers, rows
        self._stock: Callable[..., torch.Tensor] = backend.forward_extend
        self._prefix_of: tuple[Any, tuple[torch.Tensor, torch.Tensor]] | None = None
        if type(backend.token_to_kv_pool).__name__ == "SWAKVPool":
            raise ValueError(f"{TREE_ALGORITHM} does not work with a sliding-window KV pool yet")

    def install(self) -> None:
        """Take the stock method's place on its object."""
        self._backend.forward_extend = self.forward_extend

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **others: Any,
    ) -> torch.Tensor:
        """A verify pass's attention [rows, heads * D]; any other pass goes to stock."""
        batch = forward_batch.batch_size
        trees = self._buffers.trees
        # A dummy pass may be larger than any real one: there are no trees for it.
        if not forward_batch.forward_mode.is_target_verify() or batch > trees.depth.shape[0]:
            return self._stock(q, k, v, layer, forward_batch, save_kv_cache, **others)
        refused = [name for name, value in others.items() if value is not None]
        if refused:
            raise ValueError(f"{TREE_ALGORITHM} does not know the attention options {refused}")
        pool = self._backend.token_to_kv_pool
        slots = forward_batch.out_cache_loc
        if save_kv_cache:
            self._write(pool, layer, forward_batch, k, v)
        indptr, indices = self._prefix(forward_batch)
        window = layer.sliding_window_size
        out = tree_attention(
            q.view(-1, layer.tp_q_head_num, layer.qk_head_dim),
            pool.get_key_buffer(layer.layer_id),
            pool.get_value_buffer(layer.layer_id),
            indptr,
            indices,
            slots,
            trees.ancestors[:batch],
            trees.depth[:batch],
            scale=layer.scaling,
            # SGLang counts the tokens before a row, not the row itself
            window=None if window is None or window < 0 else window + 1,
            logit_cap=layer.logit_cap or None,
        )
        return out.view(-1, layer.tp_q_head_num * layer.v_head_dim)

    def _write(self, pool: Any, layer: Any, forward_batch: Any, k: Any, v: Any) -> None:
        from sglang.srt.mem_cache.memory_pool import KVWriteLoc

        pool.set_kv_buffer(
            layer,
            KVWriteLoc.for_batch(forward_batch, swa_loc=None),
            k.view(-1, layer.tp_k_head_num, layer.qk_head_dim),
            v.view(-1, layer.tp_v_head_num, layer.v_head_dim),
        )

    def _prefix(self, forward_batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Where each request's prefix begins in a list of KV slots, and the list."""
        metadata = self._backend.forward_metadata
        if metadata is not None:
            return metadata.kv_indptr[: forward_batch.batch_size + 1], metadata.kv_indices
        if self._prefix_of is None or self._prefix_of[0] is not forward_batch:
            table = self._backend.req_to_token_pool.req_to_token
            lengths = forward_batch.seq_lens.tolist()
            rows = forward_batch.req_pool_indices.tolist()
            parts = [table[row, :length] for row, length in zip(rows, lengths, strict=True)]
            indptr = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
            self._prefix_of = (forward_batch, (indptr, torch.cat(parts)))
        return self._prefix_of[1]
