"""Gated DeltaNet layers in a verify pass: no state per row, a replay of the accepted path instead.

It replaces `forward_extend` of the target's own linear-attention backend, for verify passes alone.
States and windows in SGLang's pools stay those of the last committed token until the commit, which
replays the accepted rows from what each layer's verify recorded (paper §4.2).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.layers.attention.hybrid_linear_attn_backend import HybridLinearAttnBackend
from sglang.srt.runtime_context import mamba_track_grid

from specpilot_cli.engines.sglang.plugin.tree_buffers import TreeBuffers, first
from specpilot_cli.engines.sglang.plugin.tree_facts import FACTS, REFERENCE
from specpilot_cli.schema.plugin_config import TREE_ALGORITHM, TreePlugin
from specpilot_kernels.tree_verify.commit import GdnCommit
from specpilot_kernels.tree_verify.conv import LayerWeights
from specpilot_kernels.tree_verify.records import GdnShape, ReplayRecord
from specpilot_kernels.tree_verify.verify import MAX_WY_ROWS, gdn_tree_verify, warm

_BACKEND = "GDNAttnBackend"


def recurrent_layers(
    runner: Any, settings: TreePlugin, buffers: TreeBuffers
) -> RecurrentLayers | None:
    """Take over the recurrent layers of a target, None if it has none.

    Raises ValueError for recurrent layers that are not Gated DeltaNet's.
    """
    backend = getattr(runner.attn_backend, "linear_attn_backend", None)
    if backend is None:
        return None
    name = type(backend).__name__
    if name != _BACKEND:
        raise ValueError(f"{TREE_ALGORITHM} does not work with the layers of `{name}`")
    layers = RecurrentLayers(backend, settings, buffers)
    backend.forward_extend = layers.forward_extend
    return layers


class RecurrentLayers:
    """All Gated DeltaNet layers of one target."""

    def __init__(self, backend: Any, settings: TreePlugin, buffers: TreeBuffers) -> None:
        self._backend, self._buffers = backend, buffers
        self._stock: Callable[..., torch.Tensor] = backend.forward_extend
        pool = backend.req_to_token_pool
        self._pool = pool.mamba_pool.mamba_cache
        ids = sorted(pool.mamba_map)
        caches = {layer: pool.mamba2_layer_cache(layer) for layer in ids}
        states = [caches[layer].temporal for layer in ids]
        windows = [caches[layer].conv[0] for layer in ids]
        _, value_heads, value_dim, key_dim = states[0].shape
        keys = (windows[0].shape[1] - value_heads * value_dim) // 2
        shape = GdnShape(keys // key_dim, value_heads, key_dim, value_dim)
        batch, device = buffers.positions.shape[0], states[0].device
        records = [ReplayRecord.allocate(shape, batch, settings.rows, device) for _ in ids]
        self._first = ids[0]
        self._layers = dict(zip(ids, zip(records, states, windows, strict=True), strict=True))
        self._commit = GdnCommit(records, states, windows)
        self._slot = torch.full((batch,), -1, dtype=torch.int64, device=device)
        if device.type == "cuda":
            warm(shape, settings.rows, device.index)
        verify = "wy" if settings.rows <= MAX_WY_ROWS else "path"
        FACTS.kernels["recurrent"] = verify if device.type == "cuda" else REFERENCE
        FACTS.record_bytes = sum(record.nbytes for record in records) // batch
        FACTS.snapshot_bytes = settings.rows * sum(state[0].nbytes for state in states)

    def forward_extend(
        self, layer: Any, forward_batch: Any, mixed_qkv: Any, a: Any, b: Any, **others: Any
    ) -> torch.Tensor:
        """A verify pass's outputs [1, rows, Hv, V] of one layer; any other pass goes to stock."""
        if not forward_batch.forward_mode.is_target_verify():
            return self._stock(
                layer=layer, forward_batch=forward_batch, mixed_qkv=mixed_qkv, a=a, b=b, **others
            )
        batch = forward_batch.batch_size
        if batch > self._slot.shape[0]:  # a dummy pass, larger than any real one
            return mixed_qkv.new_zeros((1, len(mixed_qkv), layer.num_v_heads, layer.head_v_dim))
        record, states, windows = self._layers[layer.layer_id]
        slot = self._slot[:batch]
        if layer.layer_id == self._first:
            slot.copy_(self._backend.forward_metadata.mamba_cache_indices[:batch])
        out = gdn_tree_verify(
            mixed_qkv,
            a,
            b,
            LayerWeights(layer.conv_weights, layer.bias, layer.A_log, layer.dt_bias),
            states,
            windows,
            slot,
            first(self._buffers.trees, batch),
            record,
        )
        return out.unsqueeze(0)

    def commit(
        self, path: torch.Tensor, count: torch.Tensor, *, enabled: torch.Tensor | None = None
    ) -> None:
        """Replay each request's accepted path, of the pass that ran last.

        path int32 [B, D], count int32 [B]; enabled int32 [1], 0 leaves the states alone.
        """
        slot = self._slot[: path.shape[0]]
        if enabled is not None:
            slot = torch.where(enabled > 0, slot, -1)
        self._commit(slot, path, count)

    def keep_on_the_way(
        self, path: torch.Tensor, count: torch.Tensor, prefix_lens: torch.Tensor, batch: Any
    ) -> None:
        """Write the states at the prefix cache's grid to the slots it named, before the commit.

        A request gets there at most once a step, somewhere on its path: its states are copied, and
        the copy is replayed up to that token.
        """
        grid = mamba_track_grid(batch.tree_cache.page_size)
        reached = (prefix_lens + count + 1) // grid
        rows = (reached * grid - prefix_lens).to(torch.int32)  # rows up to there, if any
        wanted = (reached != prefix_lens // grid) & (rows > 0)
        slot = self._slot[: path.shape[0]]
        kept = self._backend._translate_mamba_indices(batch.mamba_track_indices)
        step = torch.where(wanted, 0, -1)
        for states in (self._pool.temporal, *self._pool.conv):
            HybridLinearAttnBackend._scatter_speculative_state_with_mask(
                states, states.unsqueeze(2), kept, step, slot
            )
        self._commit(torch.where(wanted, kept.long(), -1), path, rows - 1)
