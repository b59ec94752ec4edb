"""Gated DeltaNet layers in a verify pass: no state per row, a replay of the accepted path instead.

It replaces `forward_extend` of the target's own linear-attention backend, for verify passes alone.
States and windows in SGLang's pools stay those of the last committed token until the commit, which
replays the accepted rows from what each layer's verify recorded (paper §4.2).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.runtime_context import mamba_track_grid

from specpilot_cli.engines.sglang.plugin.tree_buffers import TreeBuffers, first
from specpilot_cli.engines.sglang.plugin.tree_facts import FACTS, REFERENCE
from specpilot_cli.schema.plugin_config import TREE_ALGORITHM, TreePlugin
from specpilot_kernels.tree_verify.commit import GdnCommit, Keep
from specpilot_kernels.tree_verify.conv import LayerWeights
from specpilot_kernels.tree_verify.records import GdnShape, ReplayRecord
from specpilot_kernels.tree_verify.verify import MAX_WY_ROWS, gdn_tree_verify, warm
from specpilot_kernels.trees.gpu import AcceptedPaths

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
        ids = sorted(pool.mamba_map)
        caches = {layer: pool.mamba2_layer_cache(layer) for layer in ids}
        states = [caches[layer].temporal for layer in ids]
        windows = [caches[layer].conv[0] for layer in ids]
        _, value_heads, value_dim, key_dim = states[0].shape
        keys = (windows[0].shape[1] - value_heads * value_dim) // 2
        shape = GdnShape(keys // key_dim, value_heads, key_dim, value_dim)
        batch, device = len(buffers.trees.token), states[0].device
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

    def commit(self, found: AcceptedPaths, prefix_lens: torch.Tensor, batch: Any) -> None:
        """Replay each request's accepted path, of the pass that ran last.

        prefix_lens int64 [B]. Where SGLang's batch names slots for the prefix cache, the states at
        its grid go there, if a path passes it.
        """
        keep = None
        if batch.mamba_track_indices is not None:
            kept = self._backend._translate_mamba_indices(batch.mamba_track_indices)
            grid = mamba_track_grid(batch.tree_cache.page_size)
            keep = Keep(kept.to(torch.int64), prefix_lens, grid)
        slot = self._slot[: len(found.path)]
        # The kernel ahead of it is on another stream, so there is none to start beside.
        self._commit(slot, found.path, found.n_accepted, keep=keep, dependent=False)
