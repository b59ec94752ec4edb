"""Ways to choose which drafted tokens the target verifies, behind one interface.

A policy turns anchors into pop indices: the smallest node budget at which its tree holds the first
d true tokens. Budgets only ever cut a policy's own order short, so accepted drafts at any budget
are a count over these indices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from specpilot_cli.errors import InputError
from specpilot_cli.replay.anchors import Anchors, ReplayOptions
from specpilot_cli.ui import Reporter, SilentReporter

#: Budget at which every node that a policy ever reaches is included.
UNLIMITED = int(np.iinfo(np.int32).max) - 1


@dataclass(frozen=True, slots=True, eq=False)
class PolicyTrace:
    """One policy at all anchors.

    pop_index [A, P] int32: see the module docstring; larger than UNLIMITED where never. expected
    [A, B] float64: accepted drafts per anchor and budget in the drafter's own probabilities, or
    None where it has no opinion.
    """

    pop_index: npt.NDArray[np.int32]
    expected: npt.NDArray[np.float64] | None

    def accepted(self, budget: int) -> npt.NDArray[np.int32]:
        """Accepted drafts at every anchor with `budget` nodes, [A] int32."""
        return np.asarray((self.pop_index <= budget).sum(axis=1), dtype=np.int32)


class Policy(Protocol):
    """A way to spend a node budget on one lattice."""

    @property
    def name(self) -> str:
        """What the command line calls it."""

    @property
    def summary(self) -> str:
        """One line for `--list`."""

    def budgets(self, requested: Sequence[int], n_positions: int) -> list[int | None]:
        """The node budgets worth reporting of those requested, ascending; None = no budget."""

    def trace(
        self,
        anchors: Anchors,
        options: ReplayOptions,
        budgets: Sequence[int],
        *,
        reporter: Reporter = SilentReporter(),
    ) -> PolicyTrace:
        """Evaluate the policy at every anchor for ascending `budgets` in nodes."""


@dataclass(frozen=True, slots=True)
class ChainPolicy:
    """Stock: verify the one chain that the drafter chose (paper §2.1)."""

    name: str = "chain"
    summary: str = "stock: the drafter's one greedy chain"

    def budgets(self, requested: Sequence[int], n_positions: int) -> list[int | None]:
        """Shorter chains where asked for, and the full chain."""
        return [*sorted({n for n in requested if n < n_positions}), n_positions]

    def trace(
        self,
        anchors: Anchors,
        options: ReplayOptions,
        budgets: Sequence[int],
        *,
        reporter: Reporter = SilentReporter(),
    ) -> PolicyTrace:
        """Compare the recorded stock choice with the truth; temperature does not move an argmax."""
        choice = anchors.recording.stock_choice[anchors.step, : anchors.n_positions]
        return PolicyTrace(
            _prefix_index(choice == anchors.truth, ranked=True), _chain_expected(anchors, budgets)
        )


@dataclass(frozen=True, slots=True)
class OraclePolicy:
    """An upper bound: accept while the true token is among the candidates (paper §3.1)."""

    name: str = "oracle"
    summary: str = "upper bound: accepts while the true token is a candidate at all"

    def budgets(self, requested: Sequence[int], n_positions: int) -> list[int | None]:
        """The oracle builds no tree, so no budget applies."""
        return [None]

    def trace(
        self,
        anchors: Anchors,
        options: ReplayOptions,
        budgets: Sequence[int],
        *,
        reporter: Reporter = SilentReporter(),
    ) -> PolicyTrace:
        """The run of true tokens that stay in the lattice."""
        return PolicyTrace(_prefix_index(anchors.truth_in_lattice(), ranked=False), None)


@dataclass(frozen=True, slots=True)
class TreePolicy:
    """Best-first trees, by conditional or by marginal scores (paper §2.2, §4.2)."""

    name: str
    summary: str
    conditional: bool

    def budgets(self, requested: Sequence[int], n_positions: int) -> list[int | None]:
        """All of them."""
        return [*sorted(set(requested))]

    def trace(
        self,
        anchors: Anchors,
        options: ReplayOptions,
        budgets: Sequence[int],
        *,
        reporter: Reporter = SilentReporter(),
    ) -> PolicyTrace:
        """Build one tree per anchor at the largest budget; its prefixes are the smaller ones."""
        from specpilot_kernels.trees.trace import truth_pop_index

        n_anchors = anchors.n_anchors
        pop_index = np.empty((n_anchors, anchors.n_positions), dtype=np.int32)
        expected = np.empty((n_anchors, len(budgets)), dtype=np.float64)
        candidates = anchors.candidate_ids
        for part in anchors.chunks():
            pop_index[part], expected[part] = truth_pop_index(
                candidates[part],
                self._scores(anchors, part, options),
                anchors.truth[part],
                np.asarray(budgets, dtype=np.int64),
                counted_depth=anchors.remaining[part] - 1,  # the bonus is the last token's cover
            )
            reporter.progress(f"replay {self.name}", part.stop, n_anchors)
        return PolicyTrace(pop_index, expected)

    def _scores(
        self, anchors: Anchors, part: slice, options: ReplayOptions
    ) -> npt.NDArray[np.float32]:
        from specpilot_kernels.trees.lattice import marginal_log_probs, temper

        recording, n_positions = anchors.recording, anchors.n_positions
        steps = anchors.step[part]
        if not self.conditional:
            unary = recording.unary[steps, :n_positions]
            norm = recording.unary_logsumexp[steps, :n_positions]
            return marginal_log_probs(unary, norm)[:, :, None, :]
        edge = recording.edge[steps, :n_positions]
        return edge if options.temperature == 1.0 else temper(edge, options.temperature)


POLICIES: dict[str, Policy] = {
    policy.name: policy
    for policy in (
        ChainPolicy(),
        TreePolicy("best-first", "tree of the most probable paths, scored given each parent", True),
        TreePolicy("marginal", "the same tree scored without parents, as DDTree does", False),
        OraclePolicy(),
    )
}


def find_policy(name: str) -> Policy:
    """The policy called `name`; an unknown name is an InputError that lists all."""
    if name not in POLICIES:
        import difflib

        near = difflib.get_close_matches(name, POLICIES, n=1)
        raise InputError(
            f"unknown policy: `{name}`",
            where="--policy",
            hint=(f"did you mean `{near[0]}`? " if near else "")
            + f"known policies: {', '.join(POLICIES)}",
        )
    return POLICIES[name]


def _prefix_index(hit: npt.NDArray[np.bool_], *, ranked: bool) -> npt.NDArray[np.int32]:
    """Pop indices of one path up to its first miss, [A, P]: the depth, or 1 if not `ranked`."""
    index = np.arange(1, hit.shape[1] + 1, dtype=np.int32) if ranked else np.int32(1)
    on_path = np.logical_and.accumulate(hit, axis=1)
    return np.where(on_path, index, np.int32(UNLIMITED + 1)).astype(np.int32)


def _chain_expected(anchors: Anchors, budgets: Sequence[int]) -> npt.NDArray[np.float64] | None:
    """Σ exp(path score) along the stock chain, [A, B]; None if it ever leaves the lattice."""
    recording, n_positions = anchors.recording, anchors.n_positions
    choice = recording.stock_choice[anchors.step, :n_positions]
    match = anchors.candidate_ids == choice[:, :, None]
    if not np.all(match.any(axis=-1)):
        return None
    index = match.argmax(axis=-1)  # [A, P]
    before = np.concatenate([np.zeros_like(index[:, :1]), index[:, :-1]], axis=1)
    edge = recording.edge[anchors.step[:, None], np.arange(n_positions), before, index]
    gain = np.exp(np.cumsum(edge, axis=1, dtype=np.float64))
    gain[np.arange(1, n_positions + 1) >= anchors.remaining[:, None]] = 0.0
    total = np.concatenate([np.zeros((len(gain), 1)), np.cumsum(gain, axis=1)], axis=1)
    return total[:, np.minimum(np.asarray(budgets, dtype=np.int64), n_positions)]
