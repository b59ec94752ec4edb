"""The policies by name: chain, best-first trees, the oracle, and the published alternatives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from specpilot_cli.errors import InputError
from specpilot_cli.replay.alternatives import CostAwarePolicy, LevelPolicy, SequoiaPolicy
from specpilot_cli.replay.anchors import Anchors, ReplayOptions
from specpilot_cli.replay.policy import (
    UNLIMITED,
    EveryBudget,
    NothingToFit,
    Policy,
    PolicyTrace,
    edge_scores,
    trace_prefixes,
)
from specpilot_cli.schema.lattice import DrafterKind


@dataclass(frozen=True, slots=True)
class ChainPolicy(NothingToFit):
    """Stock: verify the one chain that the drafter chose (paper §2.1)."""

    name: str = "chain"
    summary: str = "stock: the drafter's one greedy chain"

    def budgets(self, requested: Sequence[int], n_positions: int) -> list[int | None]:
        """Shorter chains where asked for, and the full chain."""
        return [*sorted({n for n in requested if n < n_positions}), n_positions]

    def trace(
        self, anchors: Anchors, options: ReplayOptions, budgets: Sequence[int]
    ) -> PolicyTrace:
        """Compare the recorded stock choice with the truth; temperature does not move an argmax."""
        choice = anchors.recording.stock_choice[anchors.step, : anchors.n_positions]
        return PolicyTrace(
            _prefix_index(choice == anchors.truth, ranked=True), _chain_expected(anchors, budgets)
        )


@dataclass(frozen=True, slots=True)
class OraclePolicy(NothingToFit):
    """An upper bound: accept while the true token is among the candidates (paper §3.1)."""

    name: str = "oracle"
    summary: str = "upper bound: accepts while the true token is a candidate at all"

    def budgets(self, requested: Sequence[int], n_positions: int) -> list[int | None]:
        """The oracle builds no tree, so no budget applies."""
        return [None]

    def trace(
        self, anchors: Anchors, options: ReplayOptions, budgets: Sequence[int]
    ) -> PolicyTrace:
        """The run of true tokens that stay in the lattice."""
        return PolicyTrace(_prefix_index(anchors.truth_in_lattice(), ranked=False), None)


@dataclass(frozen=True, slots=True)
class TreePolicy(EveryBudget, NothingToFit):
    """Best-first trees, by conditional or by marginal scores (paper §2.2, §4.2)."""

    name: str
    summary: str
    conditional: bool

    def trace(
        self, anchors: Anchors, options: ReplayOptions, budgets: Sequence[int]
    ) -> PolicyTrace:
        """Build one tree per anchor at the largest budget; its prefixes are the smaller ones."""
        from specpilot_kernels.trees.trace import truth_pop_index

        def walk(
            part: slice, sizes: npt.NDArray[np.int64]
        ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float64]]:
            return truth_pop_index(
                anchors.candidate_ids[part],
                self._scores(anchors, part, options),
                anchors.truth[part],
                sizes,
                counted_depth=anchors.remaining[part] - 1,  # the bonus is the last token's cover
            )

        return trace_prefixes(anchors, budgets, walk)

    def _scores(
        self, anchors: Anchors, part: slice, options: ReplayOptions
    ) -> npt.NDArray[np.float32]:
        from specpilot_kernels.trees.lattice import marginal_log_probs

        if self.conditional:
            return edge_scores(anchors, part, options)
        recording, n_positions = anchors.recording, anchors.n_positions
        steps = anchors.step[part]
        unary = recording.unary[steps, :n_positions]
        norm = recording.unary_logsumexp[steps, :n_positions]
        return marginal_log_probs(unary, norm)[:, :, None, :]


POLICIES: dict[str, Policy] = {
    policy.name: policy
    for policy in (
        ChainPolicy(),
        TreePolicy("best-first", "tree of the most probable paths, scored given each parent", True),
        TreePolicy("marginal", "the same tree scored without parents, as DDTree does", False),
        LevelPolicy("eagle-2", "EAGLE-2: --top-k paths per level, then the N best of all", True),
        LevelPolicy("opt-tree", "OPT-Tree: level by level; the same tree as best-first", False),
        SequoiaPolicy(),
        CostAwarePolicy(),
        OraclePolicy(),
    )
}


def default_policies(options: ReplayOptions, kind: DrafterKind = "dflash2") -> list[str]:
    """All but those that add nothing: OPT-Tree's rows are best-first's; cost needs step times."""
    left_out = {"opt-tree"} | (set() if options.step_cost is not None else {"cost-aware"})
    left_out |= {"best-first"} - {best_tree(kind)}
    return [name for name in POLICIES if name not in left_out]


def best_tree(kind: DrafterKind) -> str:
    """The policy of the best tree that a drafter's scores allow: given the predecessor, if any."""
    return "marginal" if kind == "dflash" else "best-first"


def find_policy(name: str, kind: DrafterKind = "dflash2") -> Policy:
    """The policy called `name`; an unknown name is an InputError that lists all.

    Best-first by conditional scores needs a drafter that has them, so it is refused for `dflash`.
    """
    if name not in POLICIES:
        import difflib

        near = difflib.get_close_matches(name, POLICIES, n=1)
        raise InputError(
            f"unknown policy: `{name}`",
            where="--policy",
            hint=(f"did you mean `{near[0]}`? " if near else "")
            + f"known policies: {', '.join(POLICIES)}",
        )
    if name == "best-first" and best_tree(kind) != name:
        raise InputError(
            "policy `best-first` needs scores given the predecessor, which a dflash drafter "
            "does not have",
            where="--policy",
            hint="use `marginal`, the best tree that its scores allow",
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
    rows = anchors.rows(before)
    edge = recording.edge[anchors.step[:, None], np.arange(n_positions), rows, index]
    gain = np.exp(np.cumsum(edge, axis=1, dtype=np.float64))
    gain[np.arange(1, n_positions + 1) >= anchors.remaining[:, None]] = 0.0
    total = np.concatenate([np.zeros((len(gain), 1)), np.cumsum(gain, axis=1)], axis=1)
    return total[:, np.minimum(np.asarray(budgets, dtype=np.int64), n_positions)]
