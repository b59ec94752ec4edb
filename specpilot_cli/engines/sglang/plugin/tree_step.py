"""One decode step with trees: draft, build, verify, accept, commit. Mixed into a stock worker.

Stock's worker keeps what surrounds the step: loading the drafter, its KV pool, prefills, graphs.
The step's parts that depend on the drafter are methods of the subclass.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.layers.logprob_processor import compute_spec_logprobs
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
from sglang.srt.speculative.dflash_info import DFlashVerifyInput
from sglang.srt.speculative.dflash_utils import apply_dflash_verify_logits_adjustments
from sglang.srt.speculative.spec_utils import GrammarTree, build_grammar_vocab_mask

from specpilot_cli.engines.sglang.plugin.recorder_steps import device_of, largest_batch
from specpilot_cli.engines.sglang.plugin.tree_attention import TreeAttention, full_backend
from specpilot_cli.engines.sglang.plugin.tree_buffers import (
    Outcome,
    TreeBuffers,
    first,
    make_buffers,
)
from specpilot_cli.engines.sglang.plugin.tree_commit import Commit
from specpilot_cli.engines.sglang.plugin.tree_facts import FACTS, REFERENCE
from specpilot_cli.engines.sglang.plugin.tree_input import tree_draft_input
from specpilot_cli.engines.sglang.plugin.tree_recurrent import recurrent_layers
from specpilot_cli.engines.sglang.plugin.tree_sampling import choose_tokens, chosen_by_argmax
from specpilot_cli.schema.plugin_config import TreePlugin
from specpilot_kernels.trees.gpu import AcceptedPaths

Publish = Callable[..., None] | None


@dataclass(frozen=True, slots=True)
class Window:
    """Where a step of `batch` requests writes its KV.

    prefix_lens int64 [B]; positions and slots int64 [B, W], slots as `req_to_token` has them;
    plan: SGLang's, with their ids in each pool.
    """

    batch: int
    prefix_lens: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    plan: Any


class TreeSteps:
    """Mixed in front of DFLASH's or DSPARK's worker class."""

    settings: TreePlugin
    model_runner: Any
    _target_worker: Any
    _built_in_graph = False

    def init_attention_backends(self) -> None:
        """Both models' backends exist, no graph is captured: hook the target's."""
        super().init_attention_backends()  # type: ignore[misc]
        settings, runner = self.settings, self.model_runner
        device = device_of(self)
        batch = largest_batch(self)
        self._positions = torch.zeros((batch, settings.window), dtype=torch.int64, device=device)
        self._buffers: TreeBuffers = make_buffers(settings, batch, device)
        backend = full_backend(runner.attn_backend)
        TreeAttention(backend, self._buffers, settings.rows).install()
        recurrent = recurrent_layers(runner, settings, self._buffers)
        self._commit = Commit(settings, self._buffers, runner.token_to_kv_pool, recurrent)
        if device.type == "cuda":
            runner.capture_tail_hooks.append(self._commit.capture_hook)
        self._prepare_drafts()
        on_gpu = device.type == "cuda"
        FACTS.kernels |= {
            "trees": "cuda" if on_gpu else REFERENCE,
            "attention": "triton" if on_gpu else REFERENCE,
        }
        FACTS.settings = settings

    def forward_batch_generation(
        self, batch: Any, on_publish: Publish = None, grammar_barrier: Any = None, **others: Any
    ) -> Any:
        """Stock's for prefills; a step with trees for everything that is decoding."""
        mode = batch.forward_mode
        if mode.is_extend() or batch.is_extend_in_batch or mode.is_idle():
            result = super().forward_batch_generation(  # type: ignore[misc]
                batch, on_publish, grammar_barrier, **others
            )
            given = result.next_draft_input
            result.next_draft_input = tree_draft_input(
                given.bonus_tokens, given.new_seq_lens, self.settings
            )
            return result
        return self._decode(batch, on_publish, grammar_barrier)

    def _decode(self, batch: Any, on_publish: Publish, grammar_barrier: Any) -> Any:
        if batch.seq_lens.is_cuda:  # it may come from another stream
            batch.seq_lens.record_stream(torch.cuda.current_stream())
        window = self._open_window(batch)
        self._draft(batch, window)
        grammar = self._grammar_tree(batch)
        output = self._verify(batch, window)
        found = self._accept(batch, window, output, grammar, grammar_barrier)
        logits = output.logits_output
        with self._commit.advancing(found, window.prefix_lens, batch):
            # a copy, since the next step writes there
            outcome = self._buffers.accepted.outcome(window.batch)
            if on_publish is not None:
                on_publish(outcome.length)
            if batch.return_logprob:
                self._logprobs(batch, logits, found.place, outcome)
            rows = logits.hidden_states[found.place.view(-1)]
            self._keep_context(window, rows, outcome.n_committed)
        logits.hidden_states = None  # large, and the scheduler would copy it
        FACTS.steps += window.batch
        return GenerationBatchResult(
            logits_output=logits,
            next_token_ids=outcome.committed.view(-1),
            accept_lens=outcome.n_committed,
            can_run_cuda_graph=output.can_run_cuda_graph,
            next_draft_input=tree_draft_input(outcome.bonus, outcome.length, self.settings),
            speculative_num_draft_tokens=self.settings.rows,
            speculative_output_stride=self.settings.depth + 1,
            new_seq_lens=outcome.length,
            routed_experts_output=output.routed_experts_output,
            indexer_topk_output=output.indexer_topk_output,
        )

    def _open_window(self, batch: Any) -> Window:
        """One launch: KV slots, positions, and the last tokens as the draft pass's first."""
        settings, count = self.settings, len(batch.seq_lens)
        lengths = batch.seq_lens_cpu
        plan = self.model_runner.kv_index_translator.plan_uniform_extend(
            req_pool_indices=batch.req_pool_indices,
            seq_lens=batch.seq_lens,
            seq_lens_cpu=batch.spec_info.nxt_kv_lens_cpu if lengths is None else lengths,
            width=settings.window,
            positions_out=self._positions[:count],
            anchor_src=batch.spec_info.bonus_tokens,
            anchor_out=self._block_ids(count),
        )
        return Window(
            batch=count,
            prefix_lens=batch.seq_lens,
            positions=self._positions[:count],
            slots=plan.write_virtual.view(count, settings.window),
            plan=plan,
        )

    def _verify(self, batch: Any, window: Window) -> Any:
        """The target's pass over all rows; in a graph it accepts as well."""
        rows, count = self.settings.rows, window.batch
        asked = DFlashVerifyInput(
            draft_token=self._buffers.trees.token[:count].reshape(-1),
            positions=self._buffers.trees.position[:count].reshape(-1),
            draft_token_num=rows,
            custom_mask=None,
            capture_hidden_mode=CaptureHiddenMode.FULL,
            kv_loc_plan=window.plan,
            kv_loc_cols=None if rows == self.settings.window else slice(0, rows),
        )
        saved = (batch.seq_lens_cpu, batch.seq_lens_sum)
        batch.out_cache_loc = window.slots[:, :rows].reshape(-1)
        if batch.seq_lens_cpu is not None:
            batch.seq_lens_cpu = batch.seq_lens_cpu + rows
            batch.seq_lens_sum = int(batch.seq_lens_cpu.sum())
        elif batch.spec_info.nxt_kv_lens_cpu is not None:
            batch.seq_lens_cpu = batch.spec_info.nxt_kv_lens_cpu
            batch.seq_lens_sum = int(batch.spec_info.nxt_kv_lens_sum)
        self._let_graph_accept(chosen_by_argmax(batch))
        prepared, _ = asked.prepare_for_verify(batch, self._target_worker)
        batch.seq_lens_cpu, batch.seq_lens_sum = saved
        return self._target_worker.forward_batch_generation(
            batch=None, forward_batch=prepared, is_verify=True, skip_attn_backend_init=True
        )

    def _let_graph_accept(self, wanted: bool) -> None:
        if getattr(self, "_graph_accepts", None) is not wanted:
            self._graph_accepts = wanted
            self._buffers.enabled.fill_(int(wanted))

    def _accept(
        self, batch: Any, window: Window, output: Any, grammar: Any, barrier: Any
    ) -> AcceptedPaths:
        count, rows = window.batch, self.settings.rows
        if output.can_run_cuda_graph and self._graph_accepts:
            return self._buffers.accepted.first(count)
        logits = output.logits_output.next_token_logits
        apply_dflash_verify_logits_adjustments(
            next_token_logits=logits, sampling_info=batch.sampling_info, draft_token_num=rows
        )
        if grammar is not None:
            mask = build_grammar_vocab_mask(
                reqs=batch.reqs,
                tree=grammar,
                sampling_info=batch.sampling_info,
                device=logits.device,
                barrier=barrier,
            )
            if mask is not None:
                mask.apply(logits)
        chosen = choose_tokens(
            logits, batch.sampling_info, self._buffers.trees.position[:count].reshape(-1), rows
        )
        slots = window.plan.write_ids(self.model_runner.kv_index_translator)
        return self._commit.accept(
            chosen.view(count, rows),
            window.prefix_lens,
            slots.view(count, self.settings.window)[:, :rows].contiguous(),
        )

    def _grammar_tree(self, batch: Any) -> Any:
        """The trees as first children and next siblings, on their way to the host."""
        if not batch.has_grammar:
            return None
        trees = first(self._buffers.trees, len(batch.seq_lens))
        parent = trees.parent.long()
        rows = parent.shape[1]
        later = torch.arange(rows, device=parent.device)
        same = parent[:, :, None] == parent[:, None, :]
        younger = later[None, None, :] > later[None, :, None]
        sibling = torch.where(same & younger & (parent >= 0)[:, :, None], later, rows).amin(-1)
        child = torch.where(parent[:, None, :] == later[None, :, None], later, rows).amin(-1)
        links = [torch.where(link < rows, link, -1) for link in (child, sibling)]
        return GrammarTree.from_device(*links, trees.token)

    def _logprobs(self, batch: Any, logits: Any, places: torch.Tensor, outcome: Outcome) -> None:
        """Log-probabilities of the committed tokens [B, D], each after its row of the path."""
        tokens, nobodys = outcome.committed, len(places) * self.settings.rows
        steps = torch.arange(tokens.shape[1], device=tokens.device)
        used = torch.where(steps < outcome.n_committed[:, None], places, nobodys)
        # SGLang gathers what follows a row from the row's place
        follows = tokens.new_zeros(nobodys + 1).scatter_(0, used.view(-1), tokens.view(-1))
        compute_spec_logprobs(batch, logits, follows, accept_index=places)

    def _build_in_graph(self, runner: Any) -> None:
        """Have the trees built at the end of the draft model's captured pass."""

        def hook(_runner: Any, output: Any, forward_batch: Any, _num_tokens: int) -> None:
            self._build(output.hidden_states, forward_batch.input_ids, forward_batch.positions)

        runner.capture_tail_hooks.append(hook)
        self._built_in_graph = True
        FACTS.graphs.add("draft")

    def _prepare_drafts(self) -> None:
        """Once the buffers exist, before graphs are captured."""
        raise NotImplementedError

    def _build(
        self, hidden: torch.Tensor, input_ids: torch.Tensor, positions: torch.Tensor
    ) -> None:
        """Trees of a draft pass's rows: hidden states, tokens and positions."""
        raise NotImplementedError

    def _block_ids(self, batch: int) -> torch.Tensor:
        """Token ids of the draft pass int64 [B, any], masks but for the first column."""
        raise NotImplementedError

    def _draft(self, batch: Any, window: Window) -> None:
        """Run the drafter and leave the trees in the buffers."""
        raise NotImplementedError

    def _keep_context(self, window: Window, hidden: torch.Tensor, counts: torch.Tensor) -> None:
        """Write the drafter's KV of the committed rows.

        hidden [B * D, H]: the target's features along each path; counts int32 [B]: valid ones.
        """
        raise NotImplementedError
