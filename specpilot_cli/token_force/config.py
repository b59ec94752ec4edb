"""Every number that decides a token-forcing verdict, in one place."""

from __future__ import annotations

from dataclasses import dataclass

from specpilot_cli.errors import InputError


@dataclass(frozen=True, slots=True)
class TokenForceSettings:
    """Limits of both rules and of the audit. Defaults follow paper §3.3 where it gives one.

    alpha: one-sided error of each rule. rate_margin: rate above stock's that the rate rule
    tolerates (0.005 = 0.5 points). delta_nats: near-tie threshold; None calibrates it from AR.
    strata: also test early and late positions, sharing alpha (our addition). split_position:
    first late position; None takes 2048, or half the median length where outputs are shorter.
    min_requests: fewer paired requests carry no verdict. min_stratum_requests: fewer leave a
    stratum out. max_stock_mismatch: a stock rate above it means that the scorer is not stock's
    model, so there is no verdict. audit_limit: audited events per system. probe_offsets: how
    many tokens before an event stock's own decoding starts. probe_concurrency: requests in
    flight while stock is probed. prefill_tails: tokens kept after an event when it is scored at
    other prefill lengths. margin_top: best tokens whose decode-path log-probabilities are asked
    for. n_worst: events shown in full.
    """

    alpha: float = 0.05
    rate_margin: float = 0.005
    delta_nats: float | None = None
    strata: bool = True
    split_position: int | None = None
    min_requests: int = 8
    min_stratum_requests: int = 8
    max_stock_mismatch: float = 0.05
    audit_limit: int = 200
    probe_offsets: tuple[int, ...] = (0, 4, 32)
    probe_concurrency: int = 8
    prefill_tails: tuple[int, ...] = (0, 64)
    margin_top: int = 20
    n_worst: int = 10
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0.0 < self.alpha < 0.5:
            raise InputError(f"alpha must lie between 0 and 0.5, got {self.alpha}")
        if not 0.0 < self.rate_margin < 1.0:
            raise InputError(f"the rate margin must lie between 0 and 1, got {self.rate_margin}")
        if self.delta_nats is not None and not 0.0 < self.delta_nats <= 5.0:
            raise InputError(
                f"delta must lie in (0, 5] nats, got {self.delta_nats}",
                where="--delta",
                hint="0.125 to 0.5 nats are usual; --ar calibrates it",
            )
        if self.split_position is not None and self.split_position < 1:
            raise InputError(f"the split position must be at least 1, got {self.split_position}")
        if self.min_requests < 2 or self.min_stratum_requests < 2:
            raise InputError("a spread between requests needs at least 2 of them")
        if self.audit_limit < 1:
            raise InputError("the audit needs at least one event")
