"""Trees with DFLASH's drafters: stock's draft pass, then the selector's lattice."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.lora.layers import unwrap_lora_layer
from sglang.srt.model_executor.forward_batch_info import (
    CaptureHiddenMode,
    ForwardBatch,
    ForwardMode,
)
from sglang.srt.runtime_context import get_spec
from sglang.srt.speculative import dflash_worker_v2
from sglang.srt.speculative.spec_utils import draft_tp_context

from specpilot_cli.engines.sglang.plugin.tree_lattice import TreeBuilder, selector_lattice
from specpilot_cli.engines.sglang.plugin.tree_step import TreeSteps, Window
from specpilot_cli.schema.plugin_config import TREE_ALGORITHM


class DflashTreeWorker(TreeSteps, dflash_worker_v2.DFlashWorkerV2):  # type: ignore[misc]
    """The worker of `SPECPILOT_TREE` for a DFlash2 drafter."""

    def __init__(self, *args: Any, **kw: Any) -> None:
        # stock has one width, and means the block by it
        with get_spec().override(speculative_num_draft_tokens=self.settings.block):
            super().__init__(*args, **kw)
        self.speculative_num_draft_tokens = self.settings.rows
        if self.selector is None:
            raise ValueError(
                f"{TREE_ALGORITHM} needs a drafter with a lattice: "
                f"`{type(self.draft_model).__name__}` is no DFlash2 drafter"
            )

    def _prepare_drafts(self) -> None:
        target = self._target_worker.model_runner.model
        self.draft_model.lm_head = unwrap_lora_layer(target.lm_head)
        self._masked = torch.full(
            (len(self._positions), self.settings.block),
            int(self._mask_token_id),
            dtype=torch.int64,
            device=self._positions.device,
        )
        lattice = selector_lattice(self.draft_model, self.settings)
        self._builder = TreeBuilder(lattice, self.settings, self._buffers)

    def _maybe_build_draft_sampler(self) -> None:
        """Stock asks while it captures: the trees are built at the end of the draft's graph."""
        self._build_in_graph(self.draft_model_runner)

    def _build(self, hidden: torch.Tensor, input_ids: torch.Tensor, positions: Any) -> None:
        block = self.settings.block
        by_request = hidden.view(-1, block, hidden.shape[-1])
        self._builder.build(
            by_request[:, 1:],  # the first row holds the last committed token
            input_ids.view(-1, block)[:, 0],
            positions.view(-1, block)[:, 0],
        )

    def _block_ids(self, batch: int) -> torch.Tensor:
        return self._masked[:batch]

    def _draft(self, batch: Any, window: Window) -> None:
        block, count = self.settings.block, window.batch
        ids = self._block_ids(count)
        embed = unwrap_lora_layer(
            dflash_worker_v2._resolve_dflash_embedding_module(
                self.draft_model, self._target_worker.model_runner.model
            )
        )
        embedded = embed(ids)
        if self._noise_embed_scale != 1.0:
            embedded = embedded * self._noise_embed_scale
        known = batch.seq_lens_cpu
        lengths = batch.spec_info.nxt_kv_lens_cpu if known is None else known + block
        forward_batch = ForwardBatch(
            forward_mode=ForwardMode.TARGET_VERIFY,
            batch_size=count,
            input_ids=ids.flatten(),
            req_pool_indices=batch.req_pool_indices,
            seq_lens=window.prefix_lens,
            out_cache_loc=window.slots[:, :block].reshape(-1),
            seq_lens_sum=int(lengths.sum()),
            seq_lens_cpu=lengths,
            positions=window.positions[:, :block].reshape(-1),
            input_embeds=embedded.view(-1, embedded.shape[-1]),
            spec_algorithm=self.model_runner.spec_algorithm,
            spec_info=self._draft_block_spec_info,
            capture_hidden_mode=CaptureHiddenMode.NULL,
            global_num_token_non_padded_cpu=count * block,
            can_run_decode_cuda_graph=batch.can_run_decode_cuda_graph,
        )
        window.plan.bind(
            forward_batch,
            self.draft_model_runner.kv_index_translator,
            cols=None if block == self.settings.window else slice(0, block),
        )
        with torch.inference_mode(), draft_tp_context(self.draft_parallel_layout):
            drafted = self.draft_model_runner.forward(forward_batch)
            if not (drafted.can_run_graph and self._built_in_graph):
                hidden = drafted.logits_output.hidden_states
                self._build(hidden, forward_batch.input_ids, forward_batch.positions)

    def _keep_context(self, window: Window, hidden: torch.Tensor, counts: torch.Tensor) -> None:
        width = self.settings.depth + 1
        slots = window.plan.write_ids(self.draft_model_runner.kv_index_translator)
        slots = slots.view(window.slots.shape)[:, :width].contiguous()
        self._append_target_hidden_to_draft_kv_by_loc(
            target_hidden=hidden,
            cache_loc=slots.view(-1),
            cache_loc_2d=slots,
            positions=window.positions[:, :width].reshape(-1),
            commit_lens=counts,
        )
