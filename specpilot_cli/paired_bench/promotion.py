"""The promote rule (paper §3.2): a gain must clear noise and a margin, with 95 % confidence.

Promote if and only if the one-sided lower bound of the gain exceeds 1 + base + 2 nu. The base is
1 % when every output token equals the baseline's and 3 % otherwise: systems that answer with
other tokens differ in what they had to generate, which no amount of timing removes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from specpilot_cli import stats
from specpilot_cli.paired_bench.types import (
    ENOUGH_AA_SESSIONS,
    AaSession,
    Decision,
    Noise,
    PairedBenchSettings,
)

SessionCells = Mapping[str, Sequence[float]]


def promotion_bound(base_ratio: float, nu_log: float) -> float:
    """What the lower bound has to exceed, as a ratio."""
    return 1.0 + base_ratio + 2.0 * nu_log


def measure_noise(
    sessions: Mapping[str, SessionCells], *, same_launch: bool, settings: PairedBenchSettings
) -> Noise:
    """nu from A/A sessions; each session maps benchmarks to per-request mean log-ratios."""
    estimates = {name: stats.clustered_log_gain(cells) for name, cells in sessions.items()}
    nu = stats.aa_noise([estimate.log_gain for estimate in estimates.values()])
    bound = promotion_bound(settings.base_identical_ratio, nu)
    rows = []
    for name, estimate in estimates.items():
        lower = stats.lower_bound(estimate, confidence=settings.confidence)
        rows.append(AaSession(name, estimate.gain, lower, estimate.n_requests, lower > bound))
    pooled = {f"{s}/{b}": values for s, cells in sessions.items() for b, values in cells.items()}
    return Noise(
        nu_log=nu,
        sigma_log=stats.pooled_sigma(pooled),
        sessions=tuple(rows),
        same_launch=same_launch,
        provisional=len(rows) < ENOUGH_AA_SESSIONS,
    )


def decide(
    lower_bound_ratio: float, *, nu_log: float, identical: bool, settings: PairedBenchSettings
) -> Decision:
    """Apply the rule; the reason names the numbers that decided."""
    base = settings.base_identical_ratio if identical else settings.base_diverging_ratio
    bound = promotion_bound(base, nu_log)
    promoted = lower_bound_ratio > bound
    tokens = "all output tokens equal" if identical else "some output tokens differ"
    reason = (
        f"lower bound {lower_bound_ratio:.4f}× {'exceeds' if promoted else 'does not exceed'} "
        f"{bound:.4f}× = 1 + {base:.0%} ({tokens}) + 2 × {nu_log:.2%} A/A noise"
    )
    return Decision(
        verdict="promote" if promoted else "no",
        lower_bound_ratio=lower_bound_ratio,
        bound_ratio=bound,
        base_ratio=base,
        identical=identical,
        reason=reason,
    )
