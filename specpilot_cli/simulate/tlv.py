"""Two-level verification in replay: tokens per exact pass, and when a cycle pays (paper §4.3).

A cycle drafts, checks the tree with a low-precision pass Q, drafts again from the end of the chain
that Q returns, and verifies chain and new subtree in one exact pass. Whether Q agrees with the
exact argmax is recorded per output position, because disagreements are no coin flips: a run of them
stalls every cycle, where a rate alone would spread them evenly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from specpilot_cli.errors import InputError
from specpilot_cli.replay.intervals import Estimate, gain_estimate, tau_estimate
from specpilot_cli.schema.lattice import LatticeRecording
from specpilot_cli.simulate.forest import grow
from specpilot_cli.simulate.policy import BatchPolicy
from specpilot_cli.ui import Reporter, SilentReporter

Int = npt.NDArray[np.int64]
Bool = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class CycleTimes:
    """Seconds: one draft, the Q pass, the exact pass, and what lies between the passes of a
    one-level step and of a two-level cycle.
    """

    draft_s: float
    q_pass_s: float
    exact_pass_s: float
    one_level_glue_s: float
    two_level_glue_s: float

    @property
    def one_level_s(self) -> float:
        """A step with one exact pass."""
        return self.draft_s + self.exact_pass_s + self.one_level_glue_s

    @property
    def cycle_s(self) -> float:
        """A two-level cycle."""
        return 2 * self.draft_s + self.q_pass_s + self.exact_pass_s + self.two_level_glue_s

    def break_even_q_pass_s(self, tau_ratio: float) -> float:
        """The longest Q pass that does not lose, with `tau_ratio` times the tokens per pass."""
        return (
            self.one_level_s * (tau_ratio - 1)
            - self.draft_s
            - (self.two_level_glue_s - self.one_level_glue_s)
        )


@dataclass(frozen=True, slots=True)
class TwoLevel:
    """Tokens per exact pass with one and with two levels at the same nodes and block.

    agreement: share of output positions at which Q agrees. tau_shuffled: what the same number of
    disagreements, spread at random, would give. first_wrong: share of cycles that Q's chain ends
    early. speedup and the break-even need times.
    """

    nodes: int
    block: int
    agreement: float
    tau_one: Estimate
    tau_two: Estimate
    ratio: Estimate
    tau_shuffled: float
    first_wrong: float
    times: CycleTimes | None

    @property
    def speedup(self) -> float | None:
        """Two levels over one, in tokens per second."""
        if self.times is None:
            return None
        return self.ratio.value * self.times.one_level_s / self.times.cycle_s

    @property
    def break_even_q_pass_s(self) -> float | None:
        """See `CycleTimes.break_even_q_pass_s`."""
        return None if self.times is None else self.times.break_even_q_pass_s(self.ratio.value)


def two_level(
    recording: LatticeRecording,
    agrees: Sequence[Bool],
    *,
    nodes: int,
    block: int | None = None,
    times: CycleTimes | None = None,
    seed: int = 0,
    reporter: Reporter = SilentReporter(),
) -> TwoLevel:
    """Replay cycles of `nodes` nodes along each request's own trajectory.

    agrees: by request, whether Q's argmax is the output token at each output position, [n] bool.
    Raises InputError for flags that do not fit the outputs.
    """
    lengths = np.diff(recording.output_offsets)
    wrong = [r for r, flags in enumerate(agrees) if len(flags) != lengths[r]]
    if len(agrees) != recording.n_requests or wrong:
        raise InputError(
            "the agreement flags do not fit the recording's outputs"
            + (f": request `{recording.metadata.requests[wrong[0]].request_id}`" if wrong else ""),
            hint="make the flags from the same outputs, one per output token",
        )
    used = recording.n_positions + 1 if block is None else block
    policy = BatchPolicy(f"block {used}", "tree", nodes=nodes, block=used)
    forest = grow(recording, [policy], where="--block", reporter=reporter)
    index = forest.trees[used].index
    first = forest.anchors.first
    walk = [_one_level(index, int(first[r]), int(lengths[r])) for r in range(recording.n_requests)]
    cycles = [_cycles(index, int(first[r]), agrees[r], nodes) for r in range(recording.n_requests)]
    shuffled = _shuffled(agrees, seed)
    spread = [
        _cycles(index, int(first[r]), shuffled[r], nodes) for r in range(recording.n_requests)
    ]
    tokens = np.maximum(lengths - 1, 0).astype(np.int64)
    one = np.array(walk, dtype=np.int64)
    two = np.array([count for count, _ in cycles], dtype=np.int64)
    flags = np.concatenate([np.asarray(item[1:], dtype=np.bool_) for item in agrees])
    return TwoLevel(
        nodes=nodes,
        block=used,
        agreement=float(flags.mean()),
        tau_one=tau_estimate(tokens, one),
        tau_two=tau_estimate(tokens, two),
        ratio=gain_estimate(tokens, two, tokens, one),
        tau_shuffled=float(tokens.sum() / max(1, sum(count for count, _ in spread))),
        first_wrong=sum(early for _, early in cycles) / max(1, int(two.sum())),
        times=times,
    )


def _accepted(row: npt.NDArray[np.int32], nodes: int) -> int:
    return int(np.searchsorted(row, nodes, side="right"))


def _one_level(index: npt.NDArray[np.int32], first: int, length: int) -> int:
    """Steps that one exact pass each takes, with every traced node."""
    position = steps = 0
    widest = int(np.iinfo(np.int32).max) - 1
    while position < length - 1:
        position += _accepted(index[first + position], widest) + 1
        steps += 1
    return steps


def _cycles(index: npt.NDArray[np.int32], first: int, agrees: Bool, nodes: int) -> tuple[int, int]:
    """Cycles of one request, and how many ended where Q left the exact path."""
    position = cycles = early = 0
    last = len(agrees) - 1
    while position < last:
        cycles += 1
        chain = min(_accepted(index[first + position], nodes) + 1, last - position)
        wrong = np.flatnonzero(~agrees[position + 1 : position + 1 + chain])
        if len(wrong):
            # the exact pass takes the chain up to there and adds its own token
            position += int(wrong[0]) + 1
            early += 1
            continue
        position += chain
        if position < last:
            rest = max(0, nodes - chain)
            position += min(_accepted(index[first + position], rest) + 1, last - position)
    return cycles, early


def _shuffled(agrees: Sequence[Bool], seed: int) -> list[Bool]:
    """The flags in random places; the first of each request stays, for no pass predicts its token.

    Prefill's token belongs to no cycle: a disagreement moved there would vanish.
    """
    rng = np.random.default_rng(seed)
    later = [np.asarray(item[1:], dtype=np.bool_) for item in agrees]
    flat = rng.permutation(np.concatenate(later))
    parts = np.split(flat, np.cumsum([len(part) for part in later])[:-1])
    return [np.concatenate([item[:1], part]) for item, part in zip(agrees, parts, strict=True)]
