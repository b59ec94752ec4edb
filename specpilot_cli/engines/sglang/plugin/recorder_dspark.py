"""Lattices of DSPARK: the base logits' best tokens, with edges from its Markov head (paper Eq. 1).

DSPARK itself drafts one chain over the whole vocabulary and has no lattice. `draft_markov_block` is
where base logits, anchor and chain meet, in the captured draft graph and in the eager path alike,
so the lattice is built there. Stock's chain may leave the K best tokens; it is recorded as it is.

Mode dense: SGLang's simulated acceptance commits a token of the wrong row with DSPARK. So the hook
puts a token in front that the target does not want, and the server rejects the whole draft by
itself and commits the target's own token. Should the target want it after all, the step commits
more, a position stays without a lattice, and the request is left out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch

from specpilot_cli.engines.sglang.plugin.recorder_core import Recorder, Shape
from specpilot_cli.engines.sglang.plugin.recorder_lattice import (
    full_logsumexp,
    markov_scores,
    write_lattice,
)
from specpilot_cli.engines.sglang.plugin.recorder_steps import (
    device_of,
    largest_batch,
    record_step,
    writes_here,
)

PACKAGE: Final = "sglang.srt.speculative.dspark_components"
SINCE: Final = (0, 5, 22)
"""Before it, the chain is sampled in a method of each Markov head, fused differently."""
TOP_K: Final = 16


class DsparkHooks:
    """Hook functions for one process. In mode anchored they change nothing SGLang computes."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._open = False

    def table(self) -> list[tuple[str, str, Callable[..., Any]]]:
        """(target, kind of hook, function)."""
        worker = f"{PACKAGE}.dspark_worker_v2.DSparkWorkerV2"
        return [
            (f"{worker}.init_cuda_graphs", "AROUND", self.open),
            (f"{worker}.forward_batch_generation", "AROUND", self.step),
            (f"{PACKAGE}.dspark_draft.draft_markov_block", "AROUND", self.block),
        ]

    def open(self, original: Callable[..., Any], worker: Any) -> Any:
        """AROUND init_cuda_graphs: buffers before, because the captured draft writes into them."""
        try:
            if worker._hosts_draft:
                self._prepare(worker)
        except Exception as error:  # noqa: BLE001 - the server must start whatever happens here
            self._recorder.fail(f"the recorder does not fit this server: {error!r}")
        result = original(worker)
        if getattr(getattr(worker, "_draft_sampler", None), "_megakernel_steps", None) is not None:
            self._recorder.fail(
                "the draft runs in NVIDIA's megakernel, which keeps its logits to itself"
            )
        return result

    def _prepare(self, worker: Any) -> None:
        refusal = head_refusal(worker.draft_model.markov_head)
        if refusal is not None:
            self._recorder.fail(refusal)
            return
        shape = Shape(
            algorithm="DSPARK",
            block=int(worker.gamma),
            positions=int(worker.gamma),
            candidates=TOP_K,
            max_rows=largest_batch(worker),
        )
        self._recorder.open(shape, device_of(worker), writes=writes_here())
        self._open = True

    def step(
        self, original: Callable[..., Any], worker: Any, batch: Any, *args: Any, **kw: Any
    ) -> Any:
        """AROUND forward_batch_generation."""
        return record_step(self._recorder, original, worker, batch, *args, **kw)

    def block(
        self,
        original: Callable[..., Any],
        *,
        markov_head: Any,
        base_logits: torch.Tensor,
        anchor_tokens: torch.Tensor,
        **others: Any,
    ) -> Any:
        """AROUND draft_markov_block: base_logits [bs, L, V], anchor_tokens [bs]."""
        result = original(
            markov_head=markov_head,
            base_logits=base_logits,
            anchor_tokens=anchor_tokens,
            **others,
        )
        rows = self._recorder.rows(base_logits.shape[0]) if self._open else None
        layout = self._recorder.layout
        if rows is not None and layout is not None:
            try:
                write_lattice(
                    layout,
                    rows,
                    anchor=anchor_tokens,
                    **markov_lattice(markov_head, base_logits, anchor_tokens, _best),
                )
                rows[0][:, layout.stock].copy_(result[0])
            except Exception as error:  # noqa: BLE001 - the draft itself is complete
                self._recorder.fail(f"a lattice could not be recorded: {error!r}")
            if self._recorder.dense:
                return (_unwanted(result[0], base_logits), *result[1:])
        return result


def _unwanted(tokens: torch.Tensor, base_logits: torch.Tensor) -> torch.Tensor:
    """Drafted tokens [bs, L] with the first replaced by the one the drafter holds least likely."""
    first = base_logits[:, 0].argmin(dim=-1, keepdim=True)
    return torch.cat([first.to(tokens.dtype), tokens[:, 1:]], dim=1)


def unsupported(recorder: Recorder) -> list[tuple[str, str, Callable[..., Any]]]:
    """Hooks for versions before `SINCE`: say so if the server runs DSPARK."""

    def refuse(_worker: Any) -> None:
        recorder.fail("recording DSPARK needs SGLang 0.5.22 or later; DFLASH works with this one")

    return [(f"{PACKAGE}.dspark_worker_v2.DSparkWorkerV2.init_cuda_graphs", "BEFORE", refuse)]


def head_refusal(head: Any) -> str | None:
    """Why no lattice can be built from this Markov head, or None."""
    name = type(head).__name__
    if name != "VanillaMarkov":
        return (
            f"the Markov head is `{name}`: only the vanilla head scores a pair of tokens by itself"
        )
    if getattr(head, "vocab_shard", None) is not None:
        return (
            "the Markov head is sharded over the ranks; start the server with "
            "SGLANG_DSPARK_OPT_MARKOV_W2_TP_SHARD=0"
        )
    return None


def markov_lattice(
    head: Any,
    base_logits: torch.Tensor,
    anchor: torch.Tensor,
    best: Callable[[torch.Tensor, int], tuple[torch.Tensor, torch.Tensor]],
    top_k: int = TOP_K,
) -> dict[str, torch.Tensor]:
    """The lattice of base logits [bs, L, V], as `write_lattice` takes it.

    best: (logits [N, V], K) to (values, ids), both [N, K].
    """
    bs, positions, vocabulary = base_logits.shape
    flat = base_logits.reshape(-1, vocabulary)
    values, ids = best(flat, top_k)
    ids = ids.long().view(bs, positions, top_k)
    unary = values.float().view(bs, positions, top_k)
    return {
        "candidate_ids": ids,
        "scores": markov_scores(head, ids, unary, anchor),
        "unary": unary,
        "unary_logsumexp": full_logsumexp(flat).view(bs, positions),
    }


def _best(logits: torch.Tensor, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The fastest top-k that this server has: torch's takes a millisecond on a large vocabulary."""
    from sglang.srt.models.dflash import _radix_topk

    values, ids = _radix_topk(logits, top_k)
    return values, ids
