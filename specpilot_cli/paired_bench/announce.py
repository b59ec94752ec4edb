"""What a benchmark says before it is timed: its size, the smallest effect it finds, the noise."""

from __future__ import annotations

from specpilot_cli.paired_bench.promotion import promotion_bound
from specpilot_cli.paired_bench.types import Noise, PairedBenchSettings, Plan
from specpilot_cli.ui import Reporter


def announce_plan(plan: Plan, settings: PairedBenchSettings, reporter: Reporter) -> None:
    """Say what will be measured, and the smallest effect that it can find."""
    counts = ", ".join(f"{name} {n}" for name, n in plan.n_requests.items())
    levels = ", ".join(map(str, settings.batches))
    reporter.note(
        f"{sum(plan.n_requests.values())} timed requests ({counts}), {levels} in flight, "
        f"{settings.runs} runs, {settings.aa_sessions} A/A session(s): {plan.n_answers} answers"
    )
    noise = (
        f"A/A noise of {plan.assumed_nu_log:.2%} counted"
        if plan.assumed_nu_log
        else "A/A noise adds twice itself"
    )
    reporter.note(
        f"smallest gain found with {plan.power:.0%} power: "
        f"{plan.detectable_identical_ratio - 1:+.1%} if the outputs are identical "
        f"(assuming {plan.sigma_identical_log:.0%} request noise), "
        f"{plan.detectable_diverging_ratio - 1:+.1%} if they differ "
        f"(assuming {plan.sigma_diverging_log:.0%}); {noise}"
    )


def noise_sentence(noise: Noise, settings: PairedBenchSettings) -> str:
    """What a comparison has to beat with this noise."""
    low, high = (
        promotion_bound(base, noise.nu_log)
        for base in (settings.base_identical_ratio, settings.base_diverging_ratio)
    )
    return (
        f"A/A noise {noise.nu_log:.2%}: to be promoted, the lower bound has to exceed {low:.4f}× "
        f"({high:.4f}× if any output token differs)"
    )
