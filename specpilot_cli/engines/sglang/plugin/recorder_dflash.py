"""Lattices of DFLASH with a DFlash2 drafter: the hooks on SGLang's worker, drafter and selector.

The selector's functions run inside the captured draft graph, or eagerly where a batch has none.
The hooks write into fixed rows in both cases, so they need not know which it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from specpilot_cli.engines.sglang.plugin.recorder_core import Recorder, Shape
from specpilot_cli.engines.sglang.plugin.recorder_lattice import full_logsumexp, write_lattice
from specpilot_cli.engines.sglang.plugin.recorder_steps import (
    device_of,
    largest_batch,
    record_step,
    writes_here,
)

WORKER = "sglang.srt.speculative.dflash_worker_v2"
MODEL = "sglang.srt.models.dflash"


class DflashHooks:
    """Hook functions for one process. They change nothing that SGLang computes."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        # Set while the selector builds a lattice; its parts come from two functions below it.
        self._building = False
        self._logits: torch.Tensor | None = None
        self._unary: torch.Tensor | None = None

    def table(self) -> list[tuple[str, str, Callable[..., Any]]]:
        """(target, kind of hook, function)."""
        return [
            (f"{WORKER}.DFlashWorkerV2.init_cuda_graphs", "BEFORE", self.open),
            (f"{WORKER}.DFlashWorkerV2.forward_batch_generation", "AROUND", self.step),
            (f"{WORKER}._selector_lattice", "AROUND", self.lattice),
            (f"{MODEL}._project_candidate_logits", "AFTER", self.logits),
            (f"{MODEL}.DFlash2DraftModel.compute_candidates", "AFTER", self.candidates),
            (f"{MODEL}.CandidateSelector.sample_path", "AFTER", self.path),
        ]

    def open(self, worker: Any) -> None:
        """BEFORE init_cuda_graphs: the worker is complete, and nothing was captured yet."""
        try:
            selector = worker.selector
            if selector is None:
                self._recorder.fail(
                    f"the drafter `{type(worker.draft_model).__name__}` has no lattice: recording "
                    "with DFLASH needs a DFlash2 drafter"
                )
                return
            shape = Shape(
                algorithm="DFLASH",
                block=int(worker.block_size),
                positions=int(worker.block_size) - 1,
                candidates=int(selector.top_k),
                max_rows=largest_batch(worker),
            )
            self._recorder.open(shape, device_of(worker), writes=writes_here())
        except Exception as error:  # noqa: BLE001 - the server must start whatever happens here
            self._recorder.fail(f"the recorder does not fit this server: {error!r}")

    def step(
        self, original: Callable[..., Any], worker: Any, batch: Any, *args: Any, **kw: Any
    ) -> Any:
        """AROUND forward_batch_generation."""
        return record_step(self._recorder, original, worker, batch, *args, **kw)

    def lattice(
        self,
        original: Callable[..., Any],
        draft_model: Any,
        pred_hidden: torch.Tensor,
        anchor_token_ids: torch.Tensor,
    ) -> Any:
        """AROUND _selector_lattice: the one place that knows candidates, scores and anchor."""
        self._building = True
        try:
            candidate_ids, scores = original(draft_model, pred_hidden, anchor_token_ids)
        finally:
            logits, unary = self._logits, self._unary
            self._building, self._logits, self._unary = False, None, None
        rows = self._recorder.rows(candidate_ids.shape[0])
        layout = self._recorder.layout
        if rows is not None and layout is not None:
            try:
                if logits is None or unary is None:
                    raise RuntimeError("the selector read no logits")
                write_lattice(
                    layout,
                    rows,
                    anchor=anchor_token_ids,
                    candidate_ids=candidate_ids,
                    scores=scores,
                    unary=unary,
                    unary_logsumexp=_whole_vocabulary(
                        full_logsumexp(logits, draft_model._transform_unary_logits)
                    ),
                )
            except Exception as error:  # noqa: BLE001 - the draft itself is complete
                self._recorder.fail(f"a lattice could not be recorded: {error!r}")
        return candidate_ids, scores

    def logits(self, result: torch.Tensor, *_args: Any, num_org: int, **_kw: Any) -> None:
        """AFTER _project_candidate_logits: logits [N, V] of this rank's part of the vocabulary."""
        if self._building:
            self._logits = result[:, :num_org]  # a quantised head adds padding

    def candidates(self, result: Any, *_args: Any, **_kw: Any) -> None:
        """AFTER compute_candidates: (ids, unary logits), both [N, K]."""
        if self._building:
            self._unary = result[1]

    def path(self, result: Any, *_args: Any, **_kw: Any) -> None:
        """AFTER sample_path: (tokens [bs, L], q); the tokens are what stock drafts."""
        tokens = result[0]
        rows, layout = self._recorder.rows(tokens.shape[0]), self._recorder.layout
        if rows is not None and layout is not None:
            rows[0][:, layout.stock].copy_(tokens)


def _whole_vocabulary(local: torch.Tensor) -> torch.Tensor:
    """Logsumexp [N] of all tensor-parallel ranks from each one's own."""
    from sglang.srt.distributed.communication_op import tensor_model_parallel_all_gather
    from sglang.srt.runtime_context import get_parallel

    if get_parallel().tp_size == 1:
        return local
    return torch.logsumexp(tensor_model_parallel_all_gather(local[:, None], dim=-1), dim=-1)
