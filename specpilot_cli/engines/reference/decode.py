"""One pass of the reference engine over all its requests: prefill rows or one decode step.

A decode step verifies, per request, the anchor (the last committed token, not yet processed) and
its drafted nodes in one ragged pass, accepts the longest root path that equals the target's own
argmax, and adds the argmax after it (paper §2.1). The accepted rows are then replayed into the
committed state (paper §4.2); rows of rejected branches never reach it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import Tensor

from specpilot_cli.engines.reference.faults import Fault
from specpilot_cli.engines.reference.rows import Segment
from specpilot_cli.engines.reference.score import ScoreList
from specpilot_cli.engines.reference.spec import EngineResult, SpecConfig
from specpilot_kernels.trees import (
    Tree,
    best_first,
    chain,
    edge_log_probs,
    marginal,
    row_parents,
    row_tokens,
    walk_accepted,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from specpilot_cli.engines.reference.drafter import Drafter, DraftState
    from specpilot_cli.engines.reference.model import TargetModel
    from specpilot_cli.engines.reference.state import RequestState


@dataclass(frozen=True, slots=True)
class Job:
    """What to do for one request. `logprob_start` None = no log-probabilities wanted."""

    request_id: str
    input_ids: tuple[int, ...]
    max_new_tokens: int
    stop_ids: frozenset[int] = frozenset()
    logprob_start: int | None = None
    top_logprobs: int = 0
    keep_features: bool = False


@dataclass(slots=True)
class Slot:
    """One request in flight: its committed state and what it has produced so far."""

    job: Job
    state: RequestState
    draft_state: DraftState | None
    prefilled: int = 0
    output_ids: list[int] = field(default_factory=list)
    accept_lengths: list[int] = field(default_factory=list)
    proposed_drafts: int = 0
    finish_reason: dict[str, Any] | None = None
    input_scores: ScoreList | None = None
    output_scores: ScoreList | None = None
    features: list[Tensor] = field(default_factory=list)

    def result(self) -> EngineResult:
        """The finished request; only valid once `finish_reason` is set."""
        if self.finish_reason is None:
            raise RuntimeError(f"request {self.job.request_id} has not finished")
        return EngineResult(
            request_id=self.job.request_id,
            prompt_ids=self.job.input_ids,
            output_ids=tuple(self.output_ids),
            finish_reason=self.finish_reason,
            accept_lengths=tuple(self.accept_lengths),
            proposed_drafts=self.proposed_drafts,
            input_scores=self.input_scores.result() if self.input_scores else None,
            output_scores=self.output_scores.result() if self.output_scores else None,
            features=torch.cat(self.features) if self.features else None,
        )


@dataclass(frozen=True, slots=True)
class Draft:
    """The lattice one request drafted in one step, as numpy arrays.

    `candidate_ids` int32 [L, K], `edge` float32 [L, K, K] (predecessor, candidate) log-softmax,
    `unary` float32 [L, K], `unary_logsumexp` float, float32 [L].
    """

    candidate_ids: NDArray[np.int32]
    edge: NDArray[np.float32]
    unary: NDArray[np.float32]
    unary_logsumexp: NDArray[np.float32]


class StepObserver(Protocol):
    """Sees every verify step of speculative modes; used to trace live steps against replay."""

    def __call__(
        self, slot: Slot, draft: Draft, tree: Tree, path: Sequence[int], predicted: Sequence[int]
    ) -> None:
        """`path` = accepted rows (0 = anchor), `predicted` = argmax of each row, before commit."""


@dataclass(frozen=True, slots=True)
class Core:
    """The loaded models and the settings every pass shares.

    verifier: the model of decode passes; `model` itself unless a fault replaces it.
    """

    model: TargetModel
    verifier: TargetModel
    drafter: Drafter | None
    spec: SpecConfig
    fault: Fault = Fault()  # noqa: RUF009  frozen
    observer: StepObserver | None = None

    def new_slot(self, job: Job) -> Slot:
        """An empty slot with room for the prompt and the whole output."""
        wants_scores = job.logprob_start is not None
        return Slot(
            job=job,
            state=self.model.new_state(len(job.input_ids) + job.max_new_tokens),
            draft_state=self.drafter.new_state() if self.drafter else None,
            input_scores=ScoreList(job.top_logprobs) if wants_scores else None,
            output_scores=ScoreList(job.top_logprobs) if wants_scores else None,
        )


@torch.inference_mode()
def prefill_pass(core: Core, slots: Sequence[Slot], row_budget: int) -> list[Slot]:
    """Process up to `row_budget` prompt rows of `slots`, first come first served.

    Returns the slots whose prompt is complete; each then holds output token 0, or has finished.
    """
    done: list[Slot] = []
    for slot in slots:
        count = min(row_budget, len(slot.job.input_ids) - slot.prefilled)
        if count <= 0:
            break
        row_budget -= count
        tokens = torch.tensor(slot.job.input_ids[slot.prefilled : slot.prefilled + count])
        hidden, features = core.model.prefill(slot.state, tokens)
        _keep_features(core, slot, features)
        _score_prompt(core, slot, hidden)
        slot.prefilled += count
        if slot.prefilled == len(slot.job.input_ids):
            _first_token(core, slot, hidden[-1:])
            done.append(slot)
    return done


@torch.inference_mode()
def decode_pass(core: Core, slots: Sequence[Slot]) -> None:
    """One verify step of every slot in one ragged pass; updates the slots in place."""
    drafts = _draft(core, slots)
    trees = [select_tree(core.spec, draft) if draft else None for draft in drafts]
    segments = [_segment(slot, tree) for slot, tree in zip(slots, trees, strict=True)]
    out = core.verifier.forward_rows(segments)
    logits = core.verifier.logits(out.hidden)
    core.fault.distort(logits, slots, trees)
    predicted: list[int] = logits.argmax(-1).tolist()
    for index, (slot, draft, tree) in enumerate(zip(slots, drafts, trees, strict=True)):
        rows = slice(out.offsets[index], out.offsets[index + 1])
        path = [0] if tree is None else _accepted_rows(tree, predicted[rows])
        if core.observer and draft is not None and tree is not None:
            core.observer(slot, draft, tree, path, predicted[rows])
        _commit(core, slot, tree, path, predicted[rows], logits[rows])
        if slot.finish_reason is None:
            core.fault.commit(core.model, slot.state, out, index, path, tree)
            features = out.features[rows]
            _keep_features(core, slot, features if tree is None else features[path])


def _draft(core: Core, slots: Sequence[Slot]) -> list[Draft | None]:
    if core.spec.mode == "ar":
        return [None] * len(slots)
    if core.drafter is None:
        raise RuntimeError("speculative modes need a drafter")
    states = [slot.draft_state for slot in slots if slot.draft_state is not None]
    anchors = [slot.output_ids[-1] for slot in slots]
    batch = core.drafter.draft(states, anchors, block=core.spec.block)
    edges = edge_log_probs(batch.scores.numpy())
    ids = batch.candidate_ids.numpy().astype(np.int32)
    unary, logsumexp = batch.unary.numpy(), batch.unary_logsumexp.numpy()
    return [Draft(ids[r], edges[r], unary[r], logsumexp[r]) for r in range(len(slots))]


def select_tree(spec: SpecConfig, draft: Draft) -> Tree:
    """The nodes one step verifies, from one request's lattice."""
    if spec.mode == "chain":
        return chain(draft.candidate_ids, draft.edge, length=spec.block - 1)
    if spec.scoring == "marginal":
        return marginal(draft.candidate_ids, draft.unary, draft.unary_logsumexp, spec.n_nodes)
    return best_first(draft.candidate_ids, draft.edge, spec.n_nodes)


def _segment(slot: Slot, tree: Tree | None) -> Segment:
    anchor = slot.output_ids[-1]
    if tree is None:
        return Segment(slot.state, [anchor], [-1])
    return Segment(slot.state, row_tokens(tree, anchor).tolist(), row_parents(tree).tolist())


def _accepted_rows(tree: Tree, predicted: Sequence[int]) -> list[int]:
    """Rows of the longest root path that equals the target's argmax; row 0 is the anchor."""
    nodes, _ = walk_accepted(tree, np.asarray(predicted))
    return [0, *(nodes + 1).tolist()]


def _commit(
    core: Core,
    slot: Slot,
    tree: Tree | None,
    path: Sequence[int],
    predicted: Sequence[int],
    logits: Tensor,
) -> None:
    """Append the accepted drafts and the bonus token, cut at the budget or at a stop token."""
    new = [predicted[row] for row in path]  # equals the drafts on the path, then the bonus
    new = _cut(slot, new)
    slot.accept_lengths.append(min(len(path) - 1, len(new)))
    slot.proposed_drafts += 0 if tree is None else tree.n_nodes
    new = core.fault.emit(slot, new)
    slot.output_ids.extend(new)
    if slot.output_scores is not None:
        slot.output_scores.add_logits(logits[list(path[: len(new)])], new)


def _cut(slot: Slot, new: list[int]) -> list[int]:
    """`new` cut at the first stop token or at the token budget; sets the finish reason."""
    job = slot.job
    remaining = job.max_new_tokens - len(slot.output_ids)
    new = new[:remaining]
    for index, token in enumerate(new):
        if token in job.stop_ids:
            slot.finish_reason = {"type": "stop", "matched": token}
            return new[: index + 1]
    if len(new) == remaining:
        slot.finish_reason = {"type": "length", "length": job.max_new_tokens}
    return new


def _first_token(core: Core, slot: Slot, hidden: Tensor) -> None:
    logits = core.model.logits(hidden)
    core.fault.distort(logits, [slot], [None])
    token = int(logits.argmax(-1))
    if slot.output_scores is not None:
        slot.output_scores.add_logits(logits, [token])
    slot.output_ids.extend(core.fault.emit(slot, _cut(slot, [token])))


def _score_prompt(core: Core, slot: Slot, hidden: Tensor) -> None:
    start, ids = slot.job.logprob_start, slot.job.input_ids
    if slot.input_scores is None or start is None:
        return
    first = max(start, slot.prefilled)
    last = min(slot.prefilled + hidden.shape[0], len(ids) - 1)
    if first < last:
        rows = hidden[first - slot.prefilled : last - slot.prefilled]
        slot.input_scores.add_hidden(core.model, rows, list(ids[first + 1 : last + 1]))


def _keep_features(core: Core, slot: Slot, features: Tensor) -> None:
    if core.drafter is not None and slot.draft_state is not None:
        core.drafter.append_context(slot.draft_state, features)
    if slot.job.keep_features:
        slot.features.append(features.clone())
