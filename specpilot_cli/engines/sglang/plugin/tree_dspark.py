"""Trees with DSPARK's drafters: stock's draft pass, then a lattice of base logits and Markov head.

A vanilla head scores a pair of tokens by itself; other heads carry a state along the path, and have
no lattice.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.lora.layers import unwrap_lora_layer
from sglang.srt.runtime_context import get_spec
from sglang.srt.speculative.dspark_components.dspark_planner import VerifyWindow
from sglang.srt.speculative.dspark_components.dspark_worker_v2 import DSparkWorkerV2
from sglang.srt.speculative.ragged_verify import RaggedVerifyMode, read_ragged_verify_mode

from specpilot_cli.engines.sglang.plugin.recorder_dspark import head_refusal
from specpilot_cli.engines.sglang.plugin.tree_lattice import TreeBuilder, markov_lattice
from specpilot_cli.engines.sglang.plugin.tree_step import TreeSteps, Window
from specpilot_cli.schema.plugin_config import TREE_ALGORITHM


class DsparkTreeWorker(TreeSteps, DSparkWorkerV2):  # type: ignore[misc]
    """The worker of `SPECPILOT_TREE` for a DSPARK drafter."""

    def __init__(self, *args: Any, **kw: Any) -> None:
        if read_ragged_verify_mode() is not RaggedVerifyMode.STATIC:
            raise ValueError(f"{TREE_ALGORITHM} needs SGLANG_RAGGED_VERIFY_MODE=static")
        # stock has one width, and means by it the drafted tokens and the one before them
        with get_spec().override(speculative_num_draft_tokens=self.settings.block):
            super().__init__(*args, **kw)
        self.speculative_num_draft_tokens = self.settings.rows
        refusal = head_refusal(self.draft_model.markov_head)
        if refusal is None and self._draft_is_moe:
            refusal = "the drafter is one of DeepSeek-V4"
        if refusal is None and not self.sample_from_anchor:
            refusal = "the drafter does not draft from the anchor's row"
        if refusal is not None:
            raise ValueError(f"{TREE_ALGORITHM} does not work with this drafter: {refusal}")

    def _prepare_drafts(self) -> None:
        lattice = markov_lattice(self.draft_model, self.settings)
        self._builder = TreeBuilder(lattice, self.settings, self._buffers)

    def _maybe_build_draft_sampler(self) -> None:
        """Stock asks while it captures: the trees are built at the end of the draft's graph."""
        self._build_in_graph(self.draft_model_runner)

    def _build(self, hidden: torch.Tensor, input_ids: torch.Tensor, positions: Any) -> None:
        drafted = self.settings.block - 1
        self._builder.build(
            hidden.view(-1, drafted, hidden.shape[-1]),
            input_ids.view(-1, drafted)[:, 0],
            positions.view(-1, drafted)[:, 0],
        )

    def _block_ids(self, batch: int) -> torch.Tensor:
        device = self._positions.device  # with its number: stock compares devices
        ids: torch.Tensor = self._proposer.draft_block_ids_view(bs=batch, device=device)
        return ids

    def _draft(self, batch: Any, window: Window) -> None:
        target = self._target_worker.model_runner.model
        with self._draft_context():
            drafted = self._proposer._run_forward(
                batch=batch,
                draft_input=batch.spec_info,
                verify_window=VerifyWindow(
                    positions_2d=window.positions,
                    verify_cache_loc=window.plan.write_virtual,
                    verify_cache_loc_2d=window.slots,
                    kv_loc_plan=window.plan,
                ),
                bs=window.batch,
                device=self.device,
                embed_module=unwrap_lora_layer(target.get_input_embeddings()),
                anchor_prepared=True,
            )
            if not (drafted.can_run_graph and self._built_in_graph):
                self._build(
                    drafted.raw_hidden,
                    drafted.draft_block_ids,
                    window.positions[:, : self.settings.block - 1].contiguous(),
                )

    def _keep_context(self, window: Window, hidden: torch.Tensor, counts: torch.Tensor) -> None:
        width = self.settings.depth + 1
        slots = self._kv_injector.ids_for(window.plan)
        slots = slots.view(window.slots.shape)[:, :width].contiguous()
        self._kv_injector.inject_target_hidden(
            target_hidden=hidden,
            cache_loc=slots.view(-1),
            cache_loc_2d=slots,
            positions=window.positions[:, :width].reshape(-1),
            commit_lens=counts,
        )
