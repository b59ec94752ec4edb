"""The end of a verify pass: which path is accepted, and what of it becomes the request's own.

Operations without a look at a value, so they run inside the captured verify pass where the target's
own argmax decides, and after it where something else chooses the tokens.
"""

from __future__ import annotations

from typing import Any

import torch

from specpilot_cli.engines.sglang.plugin.tree_buffers import Accepted, TreeBuffers, first
from specpilot_cli.engines.sglang.plugin.tree_facts import FACTS
from specpilot_cli.engines.sglang.plugin.tree_recurrent import RecurrentLayers
from specpilot_cli.schema.plugin_config import TreePlugin
from specpilot_kernels.tree_attention.compact import KvPools, compact_kv
from specpilot_kernels.trees.gpu import accept_path


class Commit:
    """Accepts, moves the accepted rows' KV to the front, and advances the recurrent states.

    pool: the target's KV pool. recurrent: None for a target without such layers. advances_in_graph:
    a captured pass advances the states itself; not where the prefix cache wants them on the way.
    """

    def __init__(
        self,
        settings: TreePlugin,
        buffers: TreeBuffers,
        pool: Any,
        recurrent: RecurrentLayers | None,
        *,
        advances_in_graph: bool,
    ) -> None:
        self._settings, self._buffers, self._recurrent = settings, buffers, recurrent
        self._advances_in_graph = advances_in_graph
        full = getattr(pool, "full_kv_pool", pool)
        self._pools = KvPools.of([*full.k_buffer, *full.v_buffer])

    def capture_hook(self, _runner: Any, output: Any, forward_batch: Any, _num_tokens: int) -> None:
        """At the end of the captured verify pass, with its static tensors."""
        FACTS.graphs.add("verify")
        batch, rows = forward_batch.batch_size, self._settings.rows
        found = self.accept(
            torch.argmax(output.next_token_logits, dim=-1).view(batch, rows),
            forward_batch.seq_lens[:batch],
            forward_batch.out_cache_loc.view(batch, rows),
            enabled=self._buffers.enabled,
        )
        if self._recurrent is not None and self._advances_in_graph:
            self._recurrent.commit(found.path, found.count, enabled=self._buffers.enabled)

    def accept(
        self,
        chosen: torch.Tensor,
        prefix_lens: torch.Tensor,
        slots: torch.Tensor,
        *,
        enabled: torch.Tensor | None = None,
    ) -> Accepted:
        """Find each request's path and move its KV.

        chosen int64 [B, rows]: the token that follows each row. prefix_lens [B]. slots int64
        [B, rows]: KV slots of the rows, as the target's pool indexes them; the accepted rows end up
        in the first ones. enabled: int32 [1], 0 accepts nothing.
        """
        batch = chosen.shape[0]
        trees = first(self._buffers.trees, batch)
        found = self._buffers.accepted.first(batch)
        path, count, bonus = found.path, found.count, found.packed.new_empty(batch)
        accept_path(trees, chosen, out=(path, count, bonus))
        if enabled is not None:
            count.copy_(torch.where(enabled > 0, count, -1))
        committed = chosen.gather(1, path.clamp_min(0).long())
        width = path.shape[1]
        found.packed[:, :width] = torch.where(path >= 0, committed, 0)
        found.packed[:, width] = bonus
        found.packed[:, width + 1] = prefix_lens + count + 1
        found.packed[:, width + 2] = count + 1
        compact_kv(self._pools, slots, path, count)
        return found

    def advance(
        self, found: Accepted, prefix_lens: torch.Tensor, batch: Any, *, in_graph: bool
    ) -> None:
        """Advance the recurrent states by the accepted paths, unless the graph did.

        prefix_lens int64 [B]; batch: SGLang's, which says where the prefix cache wants a copy.
        """
        if self._recurrent is None or (in_graph and self._advances_in_graph):
            return
        if batch.mamba_track_indices is not None:
            self._recurrent.keep_on_the_way(found.path, found.count, prefix_lens, batch)
        self._recurrent.commit(found.path, found.count)
