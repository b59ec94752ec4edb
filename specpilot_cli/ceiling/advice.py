"""What to do next, in words: the largest factor of Eq. 4 and the place in it that holds most time.

The advice names a gap that the profile measured and the mechanism that addresses it. It promises
no gain: whether the mechanism pays is for `replay` and `paired-bench` to show.
"""

from __future__ import annotations

from dataclasses import dataclass

from specpilot_cli.ceiling.factors import Ceiling, FactorName
from specpilot_cli.schema.step_profile import KernelClassName
from specpilot_cli.units import format_percent, format_seconds

# A ceiling this close is within what kernels and timing vary by; tuning further is not worth it.
_NEAR_CEILING = 1.10

FACTOR_WORDS: dict[FactorName, str] = {
    "tau": "tokens per step",
    "kernel": "kernel time above the floors",
    "overhead": "time outside the profile",
}

_CLASS_ACTION: dict[KernelClassName, str] = {
    "target_gemm": "make the target's matrix products faster at few rows; if bytes bound them, "
    "`specpilot convert-w12` removes a quarter of the bytes bit for bit",
    "head": "make the LM head faster; a bounded low-precision pass that provably keeps the argmax "
    "reads half its bytes",
    "recurrent": "replace per-node state snapshots by kernels that walk each root path",
    "attention": "split the KV sequence of the verify attention over more blocks",
    "drafter": "make the drafter cheaper: lower precision, or a shorter drafted block",
    "tree": "build the tree and walk the accepted path on the device, in fewer host calls",
    "prefill": "let new prompts share the verify step's weight stream",
    "rest": "fuse the small kernels that run between the matrix products",
}


@dataclass(frozen=True, slots=True)
class Advice:
    """`headline` states the finding, `next_step` what to try, `notes` what limits the reading."""

    headline: str
    next_step: str
    notes: tuple[str, ...]


def advise(ceiling: Ceiling, *, best_nodes: int | None = None) -> Advice:
    """Advice for `ceiling`; `best_nodes` is the budget that `tau_best` belongs to, if known."""
    factors = ceiling.factors
    notes = _notes(ceiling)
    if factors.product < _NEAR_CEILING and factors.tau is not None:
        return Advice(
            f"the step is within {format_percent(factors.product - 1)} of its ceiling",
            "tuning this step further pays little: change what a step is, for example verify two "
            "chained drafts per exact pass",
            notes,
        )
    lead = factors.leading
    value = {"tau": factors.tau, "kernel": factors.kernel, "overhead": factors.overhead}[lead]
    headline = f"{FACTOR_WORDS[lead]} lead with {value:.2f}× of {factors.product:.2f}×"
    if lead == "tau":
        return Advice(headline, _tau_step(ceiling, best_nodes), notes)
    if lead == "kernel":
        return Advice(headline, _kernel_step(ceiling), notes)
    return Advice(headline, _overhead_step(ceiling), notes)


def _tau_step(ceiling: Ceiling, best_nodes: int | None) -> str:
    size = "a best-first tree" if best_nodes is None else f"a best-first tree of {best_nodes} nodes"
    return (
        f"verify {size}: the recorded candidates hold {ceiling.tau_best:.2f} tokens per step "
        f"against {ceiling.tau:.2f} now"
    )


def _kernel_step(ceiling: Ceiling) -> str:
    worst = max(ceiling.classes, key=lambda item: item.slack_s)
    gap = ceiling.unattributed_s
    if gap > worst.slack_s:
        return (
            f"{format_seconds(gap)} of the profiled step are gaps between kernels: capture the "
            "step in one graph, or launch fewer kernels"
        )
    share = worst.slack_s / ceiling.t_step_s
    return (
        f"`{worst.name}` is {format_seconds(worst.slack_s)} above its floor "
        f"({format_percent(share)} of the step): {_CLASS_ACTION[worst.name]}"
    )


def _overhead_step(ceiling: Ceiling) -> str:
    share = ceiling.overhead_s / ceiling.t_step_s
    return (
        f"{format_seconds(ceiling.overhead_s)} ({format_percent(share)} of the step) lie outside "
        "the profile: look for host waits between draft and verify, tokenising, and scheduling"
    )


def _notes(ceiling: Ceiling) -> tuple[str, ...]:
    notes = []
    if ceiling.factors.tau is None:
        notes.append(
            "the tokens factor is missing: pass --lattices FILE or --tau-best X to include it"
        )
    elif ceiling.factors.tau < 1:
        notes.append("the best tree accepts less than this system does now: check the lattices")
    fast = [item.name for item in ceiling.classes if item.beats_floor]
    if fast:
        notes.append(
            f"{', '.join(fast)} ran faster than the floor: a peak rate is set too low for this "
            "working set (caches), so the ceiling is understated"
        )
    unknown = [item.name for item in ceiling.classes if item.bound == "measured"]
    if unknown:
        notes.append(
            f"bytes and FLOPs are not counted for {', '.join(unknown)}: no slack is claimed there"
        )
    if ceiling.overhead_s < 0:
        notes.append(
            "the profiled step is slower than the unprofiled one: the profiler itself costs time, "
            "which sits in the kernel factor"
        )
    return tuple(notes)
