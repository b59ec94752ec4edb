"""From a draft pass's hidden states to trees: plain tensor operations, safe to capture in a graph.

DFLASH's selector scores pairs of tokens itself. DSPARK has base logits and a Markov head, whose
best tokens make the lattice (paper Eq. 1).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from specpilot_cli.engines.sglang.plugin.recorder_lattice import full_logsumexp, markov_scores
from specpilot_cli.engines.sglang.plugin.tree_buffers import TreeBuffers, first
from specpilot_cli.schema.plugin_config import TreePlugin
from specpilot_kernels.trees import calibration_table
from specpilot_kernels.trees.gpu import build_trees

TOP_K = 16
"""Candidates of a DSPARK position."""


@dataclass(frozen=True, slots=True)
class Lattice:
    """What a tree is built from.

    candidate_ids int64 [B, L, K]; scores [B, L, K, K] by predecessor and candidate, or the
    candidates' own logits [B, L, 1, K] with their logsumexp float32 [B, L] over the vocabulary.
    """

    candidate_ids: torch.Tensor
    scores: torch.Tensor
    logsumexp: torch.Tensor | None = None


LatticeOf = Callable[[torch.Tensor, torch.Tensor], Lattice]
"""Hidden states of the drafted positions [B, L, H] and the last committed token [B]."""


def selector_lattice(model: Any, settings: TreePlugin) -> LatticeOf:
    """Of a DFlash2 drafter, whose `lm_head` is attached."""
    from sglang.srt.models import dflash
    from sglang.srt.speculative import dflash_worker_v2

    def conditional(hidden: torch.Tensor, anchor: torch.Tensor) -> Lattice:
        return Lattice(*dflash_worker_v2._selector_lattice(model, hidden, anchor))

    def marginal(hidden: torch.Tensor, _anchor: torch.Tensor) -> Lattice:
        batch, positions, width = hidden.shape
        with _kept_logits(dflash) as kept:
            ids, unary = model.compute_candidates(hidden.reshape(-1, width))
        whole = full_logsumexp(kept[0], model._transform_unary_logits)
        return Lattice(
            ids.view(batch, positions, -1),
            unary.view(batch, positions, 1, -1),
            whole.view(batch, positions),
        )

    return conditional if settings.scoring == "conditional" else marginal


@contextmanager
def _kept_logits(module: Any) -> Iterator[list[torch.Tensor]]:
    """Keep the logits [N, V] that the selector's candidates are taken from."""
    original, kept = module._project_candidate_logits, []

    def keep(*args: Any, num_org: int, **kw: Any) -> torch.Tensor:
        logits = original(*args, num_org=num_org, **kw)
        kept.append(logits[:, :num_org])  # a quantised head adds padding
        return logits

    module._project_candidate_logits = keep
    try:
        yield kept
    finally:
        module._project_candidate_logits = original


def markov_lattice(model: Any, settings: TreePlugin) -> LatticeOf:
    """Of a DSPARK drafter with a vanilla Markov head."""
    from sglang.srt.models.dflash import _radix_topk

    def build(hidden: torch.Tensor, anchor: torch.Tensor) -> Lattice:
        batch, positions, width = hidden.shape
        logits, _ = model.compute_base_logits(hidden.reshape(-1, width))
        values, ids = _radix_topk(logits, TOP_K)
        ids = ids.long().view(batch, positions, TOP_K)
        unary = values.float().view(batch, positions, TOP_K)
        if settings.scoring == "marginal":
            whole = full_logsumexp(logits).view(batch, positions)
            return Lattice(ids, unary[:, :, None], whole)
        return Lattice(ids, markov_scores(model.markov_head, ids, unary, anchor))

    return build


class TreeBuilder:
    """Builds the trees of a draft pass into the step's buffers, in a graph or outside of one."""

    def __init__(self, lattice_of: LatticeOf, settings: TreePlugin, buffers: TreeBuffers) -> None:
        self._lattice_of, self._settings, self._buffers = lattice_of, settings, buffers
        self._calibration = _table(settings, buffers.enabled.device)

    def build(self, hidden: torch.Tensor, anchor: torch.Tensor, prefix_lens: torch.Tensor) -> None:
        """hidden [B, L, H], anchor int64 [B], prefix_lens int64 [B]: the anchor's position."""
        batch, settings = hidden.shape[0], self._settings
        lattice = self._lattice_of(hidden, anchor)
        build_trees(
            lattice.candidate_ids,
            lattice.scores.float().contiguous(),
            anchor.contiguous(),
            settings.nodes,
            max_depth=settings.depth,
            logsumexp=lattice.logsumexp,
            calibration=self._calibration,
            prefix_lens=prefix_lens.contiguous(),
            out=first(self._buffers.trees, batch),
        )


def _table(settings: TreePlugin, device: torch.device) -> torch.Tensor | None:
    """The calibration as `build_trees` takes it, float64 [L, 2]."""
    fit = settings.calibration
    if fit is None:
        return None
    recall = fit.recall_by_position_ratio[: settings.block - 1]
    return torch.from_numpy(calibration_table(fit.temperature, recall)).to(device)
