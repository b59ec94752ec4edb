"""What a policy is: a way to choose which drafted tokens the target verifies.

Most policies turn anchors into pop indices: the smallest node budget at which the tree holds the
first d true tokens. Where a budget only cuts one order short, accepted drafts at any budget are a
count over these indices. Policies whose trees do not nest say what each budget accepts instead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, Self, TypeVar

import numpy as np
import numpy.typing as npt

from specpilot_cli.replay.anchors import Anchors, ReplayOptions, Steps
from specpilot_cli.schema.lattice import LatticeSource
from specpilot_cli.ui import Reporter, SilentReporter

#: Budget at which every node that a policy ever reaches is included.
UNLIMITED = int(np.iinfo(np.int32).max) - 1


class Trace(Protocol):
    """One policy at all anchors, for the budgets that it was traced with."""

    @property
    def expected(self) -> npt.NDArray[np.float64] | None:
        """Accepted drafts [A, B] in the policy's own probabilities; None: it has no opinion."""

    def accepted(self, budget: int) -> npt.NDArray[np.int32]:
        """Accepted drafts at every anchor with `budget` nodes, [A] int32."""

    def nodes_used(self, budget: int) -> npt.NDArray[np.int32] | None:
        """Nodes that the policy spends at every anchor, [A] int32; None: all of the budget."""


@dataclass(frozen=True, slots=True, eq=False)
class PolicyTrace:
    """A trace by pop index, [A, P] int32; larger than UNLIMITED where never."""

    pop_index: npt.NDArray[np.int32]
    expected: npt.NDArray[np.float64] | None

    def accepted(self, budget: int) -> npt.NDArray[np.int32]:
        """Accepted drafts at every anchor with `budget` nodes, [A] int32."""
        return np.asarray((self.pop_index <= budget).sum(axis=1), dtype=np.int32)

    def nodes_used(self, budget: int) -> npt.NDArray[np.int32] | None:
        """The whole budget."""
        return None


@dataclass(frozen=True, slots=True, eq=False)
class BudgetTrace:
    """A trace by budget: accepted drafts, and nodes used where not the whole budget, [A] each."""

    accepted_at: dict[int, npt.NDArray[np.int32]]
    expected: npt.NDArray[np.float64] | None
    used_at: dict[int, npt.NDArray[np.int32]] | None = None

    def accepted(self, budget: int) -> npt.NDArray[np.int32]:
        """Accepted drafts at every anchor; KeyError for a budget that was not traced."""
        return self.accepted_at[budget]

    def nodes_used(self, budget: int) -> npt.NDArray[np.int32] | None:
        """Nodes spent at every anchor, or None for the whole budget."""
        return None if self.used_at is None else self.used_at[budget]


StepsT = TypeVar("StepsT", bound=Steps, contravariant=True)


class StepPolicy(Protocol[StepsT]):
    """A way to spend a node budget on what was drafted at each step."""

    @property
    def name(self) -> str:
        """What the command line calls it."""

    @property
    def summary(self) -> str:
        """One line for `--list`."""

    def budgets(self, requested: Sequence[int], n_positions: int) -> list[int | None]:
        """The node budgets worth reporting of those requested, ascending; None = no budget."""

    def trace(self, anchors: StepsT, options: ReplayOptions, budgets: Sequence[int]) -> Trace:
        """Evaluate the policy at every anchor for ascending `budgets` in nodes."""


class Policy(StepPolicy[Anchors], Protocol):
    """A policy over lattices, by its builder's name in `specpilot_kernels.trees.BUILDERS`."""

    def fitted(
        self,
        source: LatticeSource,
        options: ReplayOptions,
        budgets: Sequence[int],
        *,
        reporter: Reporter = SilentReporter(),
    ) -> StepPolicy[Anchors]:
        """The policy after it has learnt from the recording what it has to; most learn nothing."""


class NothingToFit:
    """A policy that needs no look at the recording before it builds trees."""

    __slots__ = ()

    def fitted(
        self,
        source: LatticeSource,
        options: ReplayOptions,
        budgets: Sequence[int],
        *,
        reporter: Reporter = SilentReporter(),
    ) -> Self:
        """Itself."""
        return self


def edge_scores(anchors: Anchors, part: slice, options: ReplayOptions) -> npt.NDArray[np.float32]:
    """Conditional scores of a range of anchors as the options change them, [a, P, K or 1, K].

    Normalised over the candidates, or to the recall of the position where one is given. Scores of a
    DFlash drafter have no predecessor and are normalised over the vocabulary.
    """
    from specpilot_kernels.trees.lattice import temper

    n_positions = anchors.n_positions
    edge = anchors.recording.edge[anchors.step[part], :n_positions]
    if options.temperature != 1.0:
        edge = temper(edge, options.temperature)
    if options.recall is None:
        return edge
    scale = np.log(np.asarray(options.recall[:n_positions], dtype=np.float64))
    return np.asarray(edge + scale[:, None, None], dtype=np.float32)


class EveryBudget:
    """A policy for which each requested node budget is worth reporting."""

    __slots__ = ()

    def budgets(self, requested: Sequence[int], n_positions: int) -> list[int | None]:
        """All of them."""
        return [*sorted(set(requested))]


def trace_prefixes(
    anchors: Anchors,
    budgets: Sequence[int],
    pop_index_of: Callable[
        [slice, npt.NDArray[np.int64]], tuple[npt.NDArray[np.int32], npt.NDArray[np.float64]]
    ],
) -> PolicyTrace:
    """Build one tree per anchor at the largest budget; its prefixes are the smaller ones.

    pop_index_of: from a chunk of anchors and the budgets int64 [B], the pop index of each true
    token int32 [chunk, P] and the expected accepted nodes float64 [chunk, B].
    """
    n_anchors = anchors.n_anchors
    pop_index = np.empty((n_anchors, anchors.n_positions), dtype=np.int32)
    expected = np.empty((n_anchors, len(budgets)), dtype=np.float64)
    sizes = np.asarray(budgets, dtype=np.int64)
    for part in anchors.chunks():
        pop_index[part], expected[part] = pop_index_of(part, sizes)
    return PolicyTrace(pop_index, expected)
