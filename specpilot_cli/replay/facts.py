"""What a recording itself says, whatever is replayed on it: recall, and stock's own choices."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from specpilot_cli.replay.anchors import Anchors

Int64 = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


@dataclass(slots=True)
class LatticeFacts:
    """Counts over all anchors seen; arrays [P] by position.

    known: anchors whose true token there is known; found: where it is a candidate too. outside:
    anchors whose stock token is not a candidate. compared: anchors whose stock chain should
    be the argmax walk over the recorded scores (DSpark's: where it stays in the lattice);
    differing: those whose chain is not.
    """

    known: Int64
    found: Int64
    outside: Int64
    anchors: int = 0
    requests: int = 0
    compared: int = 0
    differing: int = 0

    @classmethod
    def empty(cls, n_positions: int) -> LatticeFacts:
        """No anchors yet."""
        known, found, outside = (np.zeros(n_positions, dtype=np.int64) for _ in range(3))
        return cls(known, found, outside)

    def add(self, anchors: Anchors) -> None:
        """Count one part."""
        known = anchors.truth >= 0
        self.anchors += anchors.n_anchors
        self.requests += int(np.count_nonzero(anchors.count))
        self.known += known.sum(axis=0)
        self.found += (anchors.truth_in_lattice() & known).sum(axis=0)
        inside, off = stock_walk(anchors)
        self.outside += (~inside).sum(axis=0)
        whole = inside.all(axis=1)
        if anchors.metadata.drafter_kind != "dspark":  # other stock chains never leave
            whole = np.ones_like(whole)
        self.compared += int(whole.sum())
        self.differing += int((off & whole).sum())

    @property
    def recall(self) -> npt.NDArray[np.float64]:
        """How often the true token is a candidate, by position, [P]; NaN where never known."""
        ratio = self.found / np.maximum(self.known, 1)
        return np.where(self.known > 0, ratio, np.nan)

    @property
    def stock_outside(self) -> npt.NDArray[np.float64]:
        """How often stock's own token is not a candidate, by position, [P].

        DSpark's stock chooses over the full vocabulary after its Markov term (paper Eq. 1), so it
        can leave the candidates, which are the best of the backbone's logits.
        """
        return self.outside / max(self.anchors, 1)

    @property
    def chain_mismatch(self) -> float:
        """Share of stock chains inside the lattice that are not its argmax walk."""
        return self.differing / max(self.compared, 1)


def recall_by_position(anchors: Anchors) -> npt.NDArray[np.float64]:
    """How often the true token is a candidate, by position, over all anchors, [P] float64."""
    facts = LatticeFacts.empty(anchors.n_positions)
    facts.add(anchors)
    return facts.recall


def stock_walk(anchors: Anchors) -> tuple[Bools, Bools]:
    """Which of stock's tokens are candidates, [A, P], and whose chain is not the scores' walk, [A].

    The walk takes the best candidate after each choice; among equal scores, any is the best.
    """
    recording, step = anchors.recording, anchors.step
    choice = recording.stock_choice[step, : anchors.n_positions]
    match = anchors.candidate_ids == choice[:, :, None]
    inside, index = match.any(axis=-1), match.argmax(axis=-1)
    off = ~inside.all(axis=1)
    before = np.zeros(anchors.n_anchors, dtype=np.int64)
    for position in range(anchors.n_positions):
        row = recording.edge[step, position, anchors.rows(before)]
        before = index[:, position]
        off |= row[np.arange(len(row)), before] < row.max(axis=-1)
    return inside, off
