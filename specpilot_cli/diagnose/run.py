"""All checks on one recording, in the order in which their findings explain each other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from specpilot_cli.diagnose import against, identity, loops, positions, prompts, regions
from specpilot_cli.diagnose.evidence import Evidence, PositionRow, gather
from specpilot_cli.diagnose.facts import DrafterFacts, TargetFacts
from specpilot_cli.diagnose.outcome import Outcome, clear, not_checked
from specpilot_cli.replay.intervals import Estimate
from specpilot_cli.replay.policies import best_tree
from specpilot_cli.replay.run import replay
from specpilot_cli.schema.lattice import LatticeRecording
from specpilot_cli.ui import Reporter, SilentReporter

Bool = npt.NDArray[np.bool_]

TREE_NODES = 32
LEAST_REQUESTS = 5
# Findings that another target's features, or another text, would explain.
_FEATURES = ("recall", "confidence", "against")
# A shift makes every rate by position meaningless.
_EXPLAINED_BY_SHIFT = ("collapse", "selector", "recall", "confidence", "hard-text")


@dataclass(frozen=True, slots=True)
class Given:
    """What was given beside the recording. hashes: of the folders `target` and `drafter`.

    expected_tau: tokens per step that somebody else reports for this pair, or None.
    """

    target: TargetFacts | None = None
    drafter: DrafterFacts | None = None
    hashes: Mapping[str, str] = field(default_factory=dict)
    other: LatticeRecording | None = None
    expected_tau: float | None = None


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """chain, tree, oracle: tokens per step of stock's chain, of the `best_tree` of 32 nodes and of
    all candidates, on this recording; `mode` is how replay judged them.
    """

    outcomes: tuple[Outcome, ...]
    rows: tuple[PositionRow, ...]
    chain: Estimate
    tree: Estimate
    oracle: Estimate
    mode: str
    n_requests: int
    n_anchors: int

    @property
    def found(self) -> tuple[Outcome, ...]:
        """Findings, faults first."""
        order = {"fault": 0, "caution": 1, "note": 2}
        hits = [item for item in self.outcomes if item.state == "found"]
        return tuple(sorted(hits, key=lambda item: order[item.kind]))

    @property
    def verdict(self) -> str:
        """`fail` with a fault or a caution, `invalid` with too few requests to say, else `ok`."""
        if any(item.counts for item in self.outcomes):
            return "fail"
        return "invalid" if self.n_requests < LEAST_REQUESTS else "ok"


def diagnose(
    recording: LatticeRecording,
    given: Given | None = None,
    *,
    reporter: Reporter = SilentReporter(),
) -> Diagnosis:
    """Run every check. Raises InputError if the recording holds nothing to replay."""
    given = given or Given()
    evidence = gather(recording)
    tree = best_tree(recording.metadata.drafter_kind)
    result = replay(recording, ["chain", tree, "oracle"], nodes=[TREE_NODES], reporter=reporter)
    chain = next(row for row in reversed(result.rows) if row.policy == "chain").tau
    other = None if given.other is None else gather(given.other)
    outcomes = _outcomes(evidence, given, other, chain)
    return Diagnosis(
        outcomes=outcomes,
        rows=evidence.rows(),
        chain=chain,
        tree=result.row(tree, TREE_NODES).tau,
        oracle=result.row("oracle", None).tau,
        mode=result.mode,
        n_requests=int((evidence.anchors.count > 0).sum()),
        n_anchors=evidence.anchors.n_anchors,
    )


def _outcomes(
    evidence: Evidence, given: Given, other: Evidence | None, chain: Estimate
) -> tuple[Outcome, ...]:
    drafter = given.drafter
    window = None if drafter is None else drafter.sliding_window
    compared = against.compare(evidence, other)
    first = positions.position_shift(evidence)
    falls = _stronger(
        regions.long_context(evidence, () if window is None else (window,)),
        regions.late_output(evidence),
    )
    sound = _before_the_fall(evidence, falls)
    by_position = [
        positions.recall(evidence, sound),
        positions.confidence(evidence, sound),
        positions.collapse(evidence, None if drafter is None else drafter.block),
        positions.selector(evidence),
        positions.chain_walk(evidence),
        positions.hard_text(evidence),
    ]
    if first.state == "found":
        by_position = [_explained(item) for item in by_position]
    suspicious = [
        item.code for item in (*by_position, compared)
        if item.state == "found" and item.code in _FEATURES
    ]  # fmt: skip
    return (
        identity.hashes(evidence.recording.metadata, dict(given.hashes)),
        identity.configuration(evidence.recording, given.target, drafter),
        first,
        *by_position,
        identity.quantised_target(given.target, suspicious),
        prompts.chat_template(evidence, given.target),
        prompts.thinking(evidence, given.target),
        *falls,
        loops.repetition(evidence),
        regions.short_outputs(evidence),
        regions.kinds_of_text(evidence),
        compared,
        _expected(given.expected_tau, chain),
    )


def _explained(item: Outcome) -> Outcome:
    if item.code not in _EXPLAINED_BY_SHIFT or item.state != "found":
        return item
    return not_checked(item.code, item.title, "drafts are read off position: settle that first")


def _stronger(context: Outcome, output: Outcome) -> tuple[Outcome, Outcome]:
    """Context grows with the output: of two falls along them, keep the one that divides better."""
    if not (context.state == output.state == "found"):
        return context, output
    falls = [item.numbers["early_ratio"] - item.numbers["late_ratio"] for item in (context, output)]
    reason = "acceptance falls along with it, but {} tells early from late better"
    if falls[0] >= falls[1]:
        return context, not_checked(output.code, output.title, reason.format("the context"))
    return not_checked(context.code, context.title, reason.format("the output position")), output


def _before_the_fall(evidence: Evidence, falls: tuple[Outcome, Outcome]) -> Bool | None:
    """Anchors that a fall leaves alone: what is wrong among them has another cause."""
    for item, along in zip(falls, (evidence.context, evidence.output_position), strict=True):
        if item.state == "found":
            return np.asarray(along < item.numbers["limit_tokens"], dtype=np.bool_)
    return None


def _expected(expected: float | None, chain: Estimate) -> Outcome:
    code, title = "expected", "The accept length is the expected one"
    if expected is None:
        return not_checked(code, title, "give the reported accept length with --expect")
    high = chain.value if chain.high is None else chain.high
    numbers = {"tau": chain.value, "expected_tau": expected}
    detail = f"τ {chain.value:.2f} (95 % up to {high:.2f}), expected {expected:.2f}"
    if high >= 0.95 * expected:
        return clear(code, title, detail, **numbers)
    return Outcome(
        code, "found", "The accept length is below what is reported", detail, numbers=numbers,
        next_steps=(
            "compare like with like: the same prompts, thinking switch, block, and the bonus "
            "token counted (τ here counts it)",
        ),
    )  # fmt: skip
