"""Why a live step accepted another number of drafts than replay on a recording says it should.

Live decoding and a dense recording compute the same lattice with other batch shapes, so scores
differ by rounding. That may flip a choice only where two alternatives score nearly alike. Each
difference is traced to the choice that flipped, with the gap between the alternatives and the
largest gap that the observed rounding could bridge; a difference beyond it is a bug.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from specpilot_cli.engines.reference.decode import Draft, Slot, select_tree
from specpilot_cli.engines.reference.spec import EngineResult, SpecConfig
from specpilot_cli.schema.lattice import LatticeRecording
from specpilot_kernels.trees import Tree, accepted_nodes

if TYPE_CHECKING:
    from specpilot_cli.engines.reference.engine import ReferenceEngine

Choice = Literal["target argmax", "candidate set", "tree membership", "none"]
# Larger differences between two float32 evaluations of one score are no rounding. Random weights
# of eight layers reach 3e-3 nats, the trained demo pair 1e-4.
MAX_ROUNDING_NATS = 1e-2


@dataclass(frozen=True, slots=True)
class Difference:
    """One step whose live acceptance differs from replay.

    `choice` is what flipped, `gap_nats` how far its alternatives lie apart, `bound_nats` how far
    rounding could have moved them. `explained` = a near-tie.
    """

    request_id: str
    position: int
    live_accepted: int
    replayed_accepted: int
    choice: Choice
    gap_nats: float
    bound_nats: float

    @property
    def explained(self) -> bool:
        """Whether rounding alone accounts for it."""
        return self.choice != "none" and self.gap_nats <= self.bound_nats


@dataclass(frozen=True, slots=True)
class LiveStep:
    """What one verify step saw: its anchor's output index, lattice, tree and acceptance."""

    position: int
    draft: Draft
    tree: Tree
    accepted: int


class StepTracer:
    """A `StepObserver` for `engine.generate`; keeps every step by the request's place, as text."""

    def __init__(self) -> None:
        self.steps: dict[str, list[LiveStep]] = {}

    def __call__(
        self, slot: Slot, draft: Draft, tree: Tree, path: Sequence[int], predicted: Sequence[int]
    ) -> None:
        """Keep the step."""
        step = LiveStep(len(slot.output_ids) - 1, draft, tree, len(path) - 1)
        self.steps.setdefault(slot.job.request_id, []).append(step)


def trace_differences(
    engine: ReferenceEngine,
    spec: SpecConfig,
    results: Sequence[EngineResult],
    tracer: StepTracer,
    recording: LatticeRecording,
    *,
    max_rounding_nats: float = MAX_ROUNDING_NATS,
) -> list[Difference]:
    """Compare every live step with replay at the same anchor; one entry per step that differs.

    `results` come from `engine.generate(..., observer=tracer)` on the recorded requests, in the
    recording's order. Replay builds its trees from the recorded lattices and takes the recorded
    output as truth. Steps after a first differing output token have no recorded counterpart; that
    token itself is reported as a `target argmax` difference. Scores that differ by more than
    `max_rounding_nats` between the lattices explain nothing beyond it (bfloat16 needs more).
    """
    first_step = np.searchsorted(recording.step_request, np.arange(recording.n_requests))
    found: list[Difference] = []
    for index, result in enumerate(results):
        truth = recording.output(index)
        same = _common_prefix(result.output_ids, truth.tolist())
        for step in tracer.steps.get(str(index), []):
            at = step.position
            if at + 1 >= min(same, len(truth)):
                break
            recorded = _recorded_draft(recording, int(first_step[index]) + at)
            replayed = len(accepted_nodes(select_tree(spec, recorded), truth[at + 1 :]))
            live = min(step.accepted, len(truth) - at - 1)
            if live != replayed and at + 1 + min(live, replayed) < same:
                flipped = _flipped_choice(
                    spec, step, recorded, truth[at + 1 :].tolist(), max_rounding_nats
                )
                found.append(Difference(result.request_id, at, live, replayed, *flipped))
        if same < max(len(truth), len(result.output_ids)):
            bound = 2 * max_rounding_nats
            found.append(_token_difference(engine, result, truth.tolist(), same, bound))
    return found


def _common_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    length = min(len(left), len(right))
    return next((i for i in range(length) if left[i] != right[i]), length)


def _recorded_draft(recording: LatticeRecording, step: int) -> Draft:
    return Draft(
        recording.candidate_ids[step],
        recording.edge[step],
        recording.unary[step],
        recording.unary_logsumexp[step],
    )


def _token_difference(
    engine: ReferenceEngine, result: EngineResult, truth: Sequence[int], at: int, bound: float
) -> Difference:
    """The first output token that differs: its margin under the teacher-forced target."""
    prefix = [*result.prompt_ids, *truth[:at]]
    tokens = [ids[at] for ids in (result.output_ids, truth) if at < len(ids)]
    logprobs = [engine.score([*prefix, token], len(prefix) - 1).logprobs[0] for token in tokens]
    gap = max(logprobs) - min(logprobs) if len(tokens) == 2 else np.inf
    return Difference(result.request_id, at, at, at, "target argmax", float(gap), bound)


def _flipped_choice(
    spec: SpecConfig, step: LiveStep, recorded: Draft, truth: Sequence[int], limit: float
) -> tuple[Choice, float, float]:
    """Which choice between two lattices of one anchor flipped, its gap and the rounding bound."""
    live = step.draft
    missing = _missing_candidate(live, recorded, limit)
    if missing is not None:
        return missing
    trees = (step.tree, select_tree(spec, recorded))
    paths = [accepted_nodes(tree, np.asarray(truth)) for tree in trees]
    if len(paths[0]) == len(paths[1]):
        return "none", float("inf"), 0.0  # equal trees accepted differently: not a near-tie
    longer = 0 if len(paths[0]) > len(paths[1]) else 1
    tree, path = trees[longer], paths[longer]
    node = int(path[len(paths[1 - longer])])  # the first accepted node the other tree lacks
    rounding = edge_rounding(live, recorded)
    if spec.mode == "tree" and spec.scoring == "marginal":
        rounding = marginal_rounding(live, recorded)
    bound = 2 * len(live.candidate_ids) * min(rounding, limit)
    if spec.mode == "chain":
        row_gap = _chain_gap(recorded if longer == 0 else live, trees[1 - longer], tree, node)
        return "tree membership", row_gap, bound
    return "tree membership", float(tree.score[node] - tree.score[-1]), bound


def _chain_gap(draft: Draft, chosen: Tree, other: Tree, node: int) -> float:
    """How far `other`'s token at position `node` scores below the one `chosen` took there."""
    ids = draft.candidate_ids
    before = 0
    if node:
        before = int(np.flatnonzero(ids[node - 1] == chosen.token[node - 1])[0])
    row = draft.edge[node, before]
    taken, rival = (row[ids[node] == tree.token[node]][0] for tree in (chosen, other))
    return float(taken - rival)


def _missing_candidate(
    live: Draft, recorded: Draft, limit: float
) -> tuple[Choice, float, float] | None:
    """The worst candidate that only one of the lattices offers, or None if the sets are equal."""
    worst: tuple[Choice, float, float] | None = None
    rounding = min(_unary_rounding(live, recorded), limit)
    for left, right in ((live, recorded), (recorded, live)):
        for position, ids in enumerate(left.candidate_ids):
            only = ~np.isin(ids, right.candidate_ids[position])
            if only.any():
                unary = left.unary[position]
                gap = float(unary[only].max() - unary.min())
                if worst is None or gap > worst[1]:
                    worst = ("candidate set", gap, 2 * rounding)
    return worst


def _aligned(live: Draft, recorded: Draft, position: int) -> tuple[list[int], list[int]]:
    """Indices of the candidates both lattices offer at `position`, in one order."""
    where = {int(token): i for i, token in enumerate(recorded.candidate_ids[position])}
    pairs = [
        (i, where[int(token)])
        for i, token in enumerate(live.candidate_ids[position])
        if int(token) in where
    ]
    return [i for i, _ in pairs], [j for _, j in pairs]


def _unary_rounding(live: Draft, recorded: Draft) -> float:
    largest = 0.0
    for position in range(len(live.candidate_ids)):
        mine, theirs = _aligned(live, recorded, position)
        difference = live.unary[position][mine] - recorded.unary[position][theirs]
        largest = max(largest, float(np.abs(difference).max(initial=0.0)))
    return largest


def marginal_rounding(live: Draft, recorded: Draft) -> float:
    """Largest difference of a shared candidate's own log-probability between lattices, nats."""
    norm = np.abs(live.unary_logsumexp - recorded.unary_logsumexp).max()
    return _unary_rounding(live, recorded) + float(norm)


def edge_rounding(live: Draft, recorded: Draft) -> float:
    """Largest difference of one edge between lattices of one anchor, in nats.

    Only edges between candidates that both offer count.
    """
    largest = 0.0
    before = ([0], [0])
    for position in range(len(live.candidate_ids)):
        mine, theirs = _aligned(live, recorded, position)
        left = live.edge[position][np.ix_(before[0], mine)]
        right = recorded.edge[position][np.ix_(before[1], theirs)]
        largest = max(largest, float(np.abs(left - right).max(initial=0.0)))
        before = (mine, theirs)
    return largest
