"""A recording as the checks see it: what was drafted, what followed, and where they part."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from specpilot_cli.diagnose.rates import Counts, count
from specpilot_cli.replay.anchors import AS_RECORDED, Anchors, prepare
from specpilot_cli.schema.lattice import LatticeRecording

Bool = npt.NDArray[np.bool_]
Float = npt.NDArray[np.float64]

#: Drafts that the score of an anchor looks at: enough to see a collapse, few enough that most
#: anchors have as many output tokens left.
SCORED_DRAFTS = 4


@dataclass(frozen=True, slots=True)
class PositionRow:
    """One drafted position, over anchors whose drafts before it were all right.

    accepted: share whose draft is right. in_lattice: share whose true token is a candidate.
    own: the drafter's own probability of its choice, given the draft before it.
    """

    position: int
    anchors: int
    accepted: float
    in_lattice: float
    own: float


@dataclass(frozen=True, slots=True, eq=False)
class Evidence:
    """Per anchor and position, [A, P] each.

    choice int32: stock's chain. hit: it is right. before: all drafts before it are right too.
    known: the output has a token there. in_lattice: that token is a candidate. own: probability of
    the choice given the choice before it. score [A]: share of the first drafts that stock would
    have accepted; scored [A]: where the output is long enough to say so. context [A] int64: tokens
    before the draft, prompt included.
    """

    recording: LatticeRecording
    anchors: Anchors
    choice: npt.NDArray[np.int32]
    hit: Bool
    before: Bool
    known: Bool
    in_lattice: Bool
    own: Float
    score: Float
    scored: Bool
    context: npt.NDArray[np.int64]
    output_position: npt.NDArray[np.int64]

    @property
    def n_positions(self) -> int:
        """Drafted positions, P."""
        return int(self.hit.shape[1])

    def at(
        self, position: int, values: npt.NDArray[np.generic], within: Bool | None = None
    ) -> Counts:
        """Rate of `values` [A, P] at a position, over anchors whose drafts before are right.

        within [A]: count only these anchors.
        """
        where = self.before[:, position] & self.known[:, position]
        if within is not None:
            where = where & within
        return self.rate(values[:, position], where)

    def rate(self, values: npt.NDArray[np.generic], where: Bool) -> Counts:
        """Rate of `values` [A] over the anchors `where` [A], by request."""
        return count(values, where, self.anchors.request, self.recording.n_requests)

    def rows(self) -> tuple[PositionRow, ...]:
        """Acceptance by position, as far as any anchor got."""
        found = []
        for position in range(self.n_positions):
            accepted, inside, own = (
                self.at(position, values) for values in (self.hit, self.in_lattice, self.own)
            )
            if accepted.n_trials == 0:
                break
            row = PositionRow(position, accepted.n_trials, accepted.value, inside.value, own.value)
            found.append(row)
        return tuple(found)


def gather(recording: LatticeRecording) -> Evidence:
    """Line up what was drafted with what followed. Raises InputError if nothing can be replayed."""
    anchors = prepare(recording, AS_RECORDED)
    choice = recording.stock_choice[anchors.step]
    known = anchors.truth >= 0
    hit = (choice == anchors.truth) & known
    path = np.logical_and.accumulate(hit, axis=1)
    before = np.concatenate([np.ones_like(path[:, :1]), path[:, :-1]], axis=1)
    counted = min(SCORED_DRAFTS, hit.shape[1])
    position = recording.step_position[anchors.step]
    prompt = np.diff(recording.prompt_offsets)[anchors.request]
    return Evidence(
        recording=recording,
        anchors=anchors,
        choice=choice,
        hit=hit,
        before=before,
        known=known,
        in_lattice=anchors.truth_in_lattice() & known,
        own=_own_probability(anchors, choice),
        score=path[:, :counted].sum(axis=1) / counted,
        scored=anchors.remaining >= counted,
        context=prompt + position + 1,
        output_position=position,
    )


def _own_probability(anchors: Anchors, choice: npt.NDArray[np.int32]) -> Float:
    """The drafter's probability of its choice after its choice before, [A, P]; 0 off the lattice.

    The selector's scores are normalised over the candidates alone; the probability that unary
    logits give to all candidates together takes that back.
    """
    recording = anchors.recording
    found = np.zeros(choice.shape, dtype=np.float64)
    for part in anchors.chunks():
        step = anchors.step[part]
        match = recording.candidate_ids[step] == choice[part][:, :, None]
        inside = np.logical_and.accumulate(match.any(axis=-1), axis=1)
        index = match.argmax(axis=-1)
        previous = np.concatenate([np.zeros_like(index[:, :1]), index[:, :-1]], axis=1)
        positions = np.arange(choice.shape[1])
        if recording.edge.shape[2] == 1:  # no predecessor: normalised over the vocabulary already
            edge = recording.edge[step[:, None], positions, 0, index].astype(np.float64)
            found[part] = np.where(inside, np.exp(edge), 0.0)
            continue
        edge = recording.edge[step[:, None], positions, previous, index].astype(np.float64)
        unary = recording.unary[step].astype(np.float64)
        norm = recording.unary_logsumexp[step].astype(np.float64)
        mass = np.minimum(np.exp(unary - norm[..., None]).sum(axis=-1), 1.0)
        found[part] = np.where(inside, np.exp(edge) * mass, 0.0)
    return found
