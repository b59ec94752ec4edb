"""The end of a verify pass: which path is accepted, and what of it becomes the request's own.

Accepting and moving KV runs inside the captured verify pass where the target's own argmax decides,
and after it where something else chooses the tokens. Both are one launch without a look at a value.
Recurrent states advance on a stream of their own, beside what the step has left to do.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from specpilot_cli.engines.sglang.plugin.tree_buffers import TreeBuffers, first
from specpilot_cli.engines.sglang.plugin.tree_facts import FACTS
from specpilot_cli.engines.sglang.plugin.tree_recurrent import RecurrentLayers
from specpilot_cli.schema.plugin_config import TreePlugin
from specpilot_kernels.tree_attention.compact import KvPools, compact_kv
from specpilot_kernels.trees.gpu import AcceptedPaths, accept_path


class Commit:
    """Accepts, moves the accepted rows' KV to the front, and advances the recurrent states.

    pool: the target's KV pool. recurrent: None for a target without such layers.
    """

    def __init__(
        self,
        settings: TreePlugin,
        buffers: TreeBuffers,
        pool: Any,
        recurrent: RecurrentLayers | None,
    ) -> None:
        self._settings, self._buffers, self._recurrent = settings, buffers, recurrent
        full = getattr(pool, "full_kv_pool", pool)
        self._pools = KvPools.of([*full.k_buffer, *full.v_buffer])
        on_gpu = buffers.enabled.is_cuda
        self._stream = torch.cuda.Stream() if on_gpu and recurrent is not None else None

    def capture_hook(self, _runner: Any, output: Any, forward_batch: Any, _num_tokens: int) -> None:
        """At the end of the captured verify pass, with its static tensors."""
        FACTS.graphs.add("verify")
        batch, rows = forward_batch.batch_size, self._settings.rows
        self.accept(
            torch.argmax(output.next_token_logits, dim=-1).view(batch, rows),
            forward_batch.seq_lens[:batch],
            forward_batch.out_cache_loc.view(batch, rows),
            enabled=self._buffers.enabled,
        )

    def accept(
        self,
        chosen: torch.Tensor,
        prefix_lens: torch.Tensor,
        slots: torch.Tensor,
        *,
        enabled: torch.Tensor | None = None,
    ) -> AcceptedPaths:
        """Find each request's path and move its KV.

        chosen int64 [B, rows]: the token that follows each row. prefix_lens int64 [B]. slots int64
        [B, rows]: KV slots of the rows, as the target's pool indexes them; the accepted rows end up
        in the first ones. enabled: int32 [1], 0 accepts nothing.
        """
        batch = chosen.shape[0]
        found = accept_path(
            first(self._buffers.trees, batch),
            chosen,
            prefix_lens=prefix_lens,
            enabled=enabled,
            out=self._buffers.accepted.first(batch),
        )
        compact_kv(self._pools, slots, found.path, found.n_accepted)
        return found

    @contextmanager
    def advancing(
        self, found: AcceptedPaths, prefix_lens: torch.Tensor, batch: Any
    ) -> Iterator[None]:
        """Advance the recurrent states by the accepted paths, while the body runs.

        It is over for whatever is launched after the body. prefix_lens int64 [B]; batch: SGLang's,
        which says where the prefix cache wants states on the way.
        """
        if self._recurrent is None:
            yield
        elif self._stream is None:
            self._recurrent.commit(found, prefix_lens, batch)
            yield
        else:
            main = torch.cuda.current_stream()
            self._stream.wait_stream(main)
            with torch.cuda.stream(self._stream):
                self._recurrent.commit(found, prefix_lens, batch)
            try:
                yield
            finally:
                main.wait_stream(self._stream)
