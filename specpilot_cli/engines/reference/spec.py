"""Settings and results of the reference engine: plain values, no torch.

`SpecConfig` says how a step proposes tokens (none, the stock greedy chain, or a best-first
tree, paper §2.1 and §4.2); `EngineResult` is one finished request.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from specpilot_cli.errors import InputError

Mode = Literal["ar", "chain", "tree"]
Scoring = Literal["conditional", "marginal"]

MODES: tuple[Mode, ...] = ("ar", "chain", "tree")
SCORINGS: tuple[Scoring, ...] = ("conditional", "marginal")
# More rows than this per request is a typing error, not a tree: the widest tree of the paper
# has 64 rows, and a pass grows quadratically in its ancestor masks.
MAX_NODES = 1024


@dataclass(frozen=True, slots=True)
class SpecConfig:
    """How one step proposes tokens.

    `block` counts the anchor, so the drafter predicts `block - 1` positions. `n_nodes` is the
    budget of a tree and is ignored by the other modes. `scoring` selects path scores
    conditioned on the parent (paper §4.2) or DDTree's marginal ones.
    """

    mode: Mode = "ar"
    block: int = 8
    n_nodes: int = 16
    scoring: Scoring = "conditional"

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise InputError(
                f"unknown decoding mode `{self.mode}`", hint=f"choose one of: {', '.join(MODES)}"
            )
        if self.scoring not in SCORINGS:
            raise InputError(
                f"unknown tree scoring `{self.scoring}`",
                hint=f"choose one of: {', '.join(SCORINGS)}",
            )
        if self.mode != "ar" and self.block < 2:
            raise InputError(
                f"block must be at least 2, got {self.block}",
                hint="a block of B holds the anchor and B - 1 drafted positions",
            )
        if self.mode == "tree" and not 1 <= self.n_nodes <= MAX_NODES:
            raise InputError(
                f"nodes must be between 1 and {MAX_NODES}, got {self.n_nodes}",
                hint="8 to 64 nodes are usual",
            )

    @property
    def drafts(self) -> int:
        """Most drafted nodes one step verifies for one request."""
        if self.mode == "ar":
            return 0
        return self.block - 1 if self.mode == "chain" else self.n_nodes

    @property
    def rows(self) -> int:
        """Rows of one request in a full step: the anchor's row and its nodes."""
        return self.drafts + 1

    def describe(self) -> dict[str, Any]:
        """The settings that act in this mode, as a JSON object."""
        out: dict[str, Any] = {"mode": self.mode, "rows": self.rows, "nodes": self.drafts}
        if self.mode != "ar":
            out["block"] = self.block
        if self.mode == "tree":
            out["scoring"] = self.scoring
        return out


@dataclass(frozen=True, slots=True)
class TokenScores:
    """Log-probabilities of consecutive tokens under the target, natural logarithm.

    `token_ids` int list [n]; `logprobs` [n]; `top_ids` and `top_logprobs` [n][k], best first.
    """

    token_ids: list[int]
    logprobs: list[float]
    top_ids: list[list[int]]
    top_logprobs: list[list[float]]


@dataclass(frozen=True, slots=True)
class EngineResult:
    """One finished request.

    `accept_lengths` has one entry per verify step: accepted drafts, bonus not counted and cut
    at the tokens the output still had room for, so that
    `sum(min(a + 1, remaining)) == len(output_ids) - 1`. `finish_reason` is SGLang's object.
    `input_scores` covers the prompt from the requested position, `output_scores` the output.
    `features` float tensor [committed rows, F], only where the caller asked to keep them.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    finish_reason: Mapping[str, Any]
    accept_lengths: tuple[int, ...] = ()
    proposed_drafts: int = 0
    input_scores: TokenScores | None = None
    output_scores: TokenScores | None = None
    features: Any = field(default=None, compare=False, repr=False)

    @property
    def verify_steps(self) -> int:
        """Exact target passes after the prefill."""
        return len(self.accept_lengths)
