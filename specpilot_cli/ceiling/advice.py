"""What to do next, in words: the largest factor of Eq. 4 and the place in it that holds most time.

The advice names a gap that the profile measured and the mechanism that addresses it on that engine
and device. It promises no gain: whether the mechanism pays is for `replay` and `paired-bench` to
show.
"""

from __future__ import annotations

from dataclasses import dataclass

from specpilot_cli.ceiling.factors import Ceiling, DeviceKind, FactorName
from specpilot_cli.ceiling.peaks import gpu_names, load_gpu
from specpilot_cli.schema.step_profile import KernelClassName, StepProfile
from specpilot_cli.units import format_percent, format_seconds

# The engine of this repository, by its name in step profiles. It is written to be read: its
# kernels are PyTorch calls, and nobody can choose others.
REFERENCE_ENGINE = "specpilot-reference"

# A ceiling this close is within what kernels and timing vary by; tuning further is not worth it.
_NEAR_CEILING = 1.10

LEADERS: dict[FactorName, str] = {
    "tau": "tokens per step lead",
    "kernel": "kernel time above the floors leads",
    "overhead": "time outside the profile leads",
}

_ANYWHERE: dict[KernelClassName, str] = {
    "target_gemm": "make the target's matrix products faster at few rows",
    "head": "make the LM head faster; a bounded low-precision pass that provably keeps the argmax "
    "reads half its bytes",
    "drafter": "make the drafter cheaper: lower precision, or a shorter drafted block",
    "prefill": "let new prompts share the verify step's weight stream",
}
_ACTIONS: dict[DeviceKind, dict[KernelClassName, str]] = {
    "gpu": _ANYWHERE
    | {
        "target_gemm": f"{_ANYWHERE['target_gemm']}; if bytes bound them, `specpilot convert-w12` "
        "removes a quarter of the bytes bit for bit",
        "recurrent": "where a state snapshot is kept per node, as stock SGLang does, walk each "
        "root path from the committed state instead",
        "attention": "split the KV sequence of the verify attention over more blocks",
        "tree": "build the tree and walk the accepted path on the device, in fewer host calls",
        "rest": "fuse the small kernels that run between the matrix products",
    },
    "cpu": _ANYWHERE
    | {
        "recurrent": "fuse the recurrent layers' small operations into one pass over the state",
        "attention": "fuse scores, softmax and values of the verify attention into one pass",
        "tree": "build the tree and walk the accepted path in compiled code",
        "rest": "fuse the small operations that run between the matrix products",
    },
}


@dataclass(frozen=True, slots=True)
class Advice:
    """`headline` states the finding, `next_step` what to try, `notes` what limits the reading."""

    headline: str
    next_step: str
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class BestTree:
    """The tree that `tau_best` belongs to: its policy, its nodes where known, and `gain`, its
    speedup over what runs now at the same step times, where both are known.
    """

    policy: str = "best-first"
    nodes: int | None = None
    gain: float | None = None

    @property
    def pays(self) -> bool:
        """False only where it is known to bring no speed."""
        return self.gain is None or self.gain > 1


_SOME_TREE = BestTree()


def advise(ceiling: Ceiling, *, tree: BestTree = _SOME_TREE) -> Advice:
    """Advice for `ceiling`, whose `tau_best` is that of `tree`."""
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
    headline = f"{LEADERS[lead]} with {value:.2f}× of {factors.product:.2f}×"
    if lead == "tau":
        return Advice(headline, _tau_step(ceiling, tree), notes)
    if lead == "overhead":
        return Advice(headline, _overhead_step(ceiling), notes)
    if ceiling.engine == REFERENCE_ENGINE:
        return Advice(headline, _reference_step(ceiling, tree), notes)
    gap = _kernel_gap(ceiling)
    return Advice(headline, f"{gap.what}: {gap.action}", notes)


def overhead_note(ceiling: Ceiling) -> str | None:
    """Why the overhead factor is below 1, in words; None where it is not."""
    if ceiling.overhead_s >= 0:
        return None
    slower = format_percent(ceiling.t_prof_s / ceiling.t_step_s - 1)
    cause = (
        "timing noise, since the timers' own cost is taken out"
        if ceiling.engine == REFERENCE_ENGINE
        else "timing noise or the profiler's own cost, and sits in the kernel factor"
    )
    return (
        f"the overhead factor is below 1: the profiled steps ran {slower} slower than the plain "
        f"ones, which is {cause}"
    )


def period_note(profile: StepProfile) -> str | None:
    """How much of the time outside the profile a trace shows at all; None without a trace.

    Between profiled steps the GPU idles for a while that the trace does show. What the step takes
    beyond that was seen by the client only.
    """
    if profile.trace is None or profile.t_step_s is None:
        return None
    idle = max(0.0, profile.trace.period_s - profile.t_prof_s)
    hidden = profile.t_step_s - profile.trace.period_s
    if hidden <= 0:
        return (
            f"profiled steps followed each other every {format_seconds(profile.trace.period_s)}, "
            "slower than the timed ones: the profiler's own cost is in the trace's gaps"
        )
    return (
        f"of the time outside the profile the trace shows {format_seconds(idle)}, in which the GPU "
        f"idles between steps; {format_seconds(hidden)} a step were seen by the client only "
        "(scheduling that the profiled steps overlapped, the prompt, the reply's way back, or "
        "fewer tokens per step than the timing assumed)"
    )


def device_note(profile: StepProfile, ceiling: Ceiling) -> str | None:
    """That the floors are of another device than the one that ran; None where they are not."""
    ran = profile.device.gpu_profile
    if ran is None or ran not in gpu_names():
        return None
    own, used = load_gpu(ran).title, ceiling.peaks.title
    if own == used:
        return None
    return (
        f"the step ran on {own} and is compared with the peaks of {used}: if that is another "
        "device, the kernel factor mixes the two; --what-if-gpu projects the step there instead"
    )


def _tau_step(ceiling: Ceiling, tree: BestTree) -> str:
    article = "an" if tree.policy[0] in "aeiou" else "a"
    size = "" if tree.nodes is None else f" of {tree.nodes} nodes"
    what = f"{article} {tree.policy} tree{size}"
    best, now = f"{ceiling.tau_best:.2f}", f"{ceiling.tau:.2f}"
    if not tree.pays:
        return (
            f"{what} commits {best} tokens per step against {now} now and brings no speed at "
            f"these step times ({tree.gain:.2f}×)"
        )
    return f"verify {what}: the recorded candidates hold {best} tokens per step against {now} now"


@dataclass(frozen=True, slots=True)
class _Gap:
    """The largest gap inside the profile: what it is, and what would close it."""

    what: str
    action: str


def _kernel_gap(ceiling: Ceiling) -> _Gap:
    worst = max(ceiling.classes, key=lambda item: item.slack_s)
    gap = ceiling.unattributed_s
    if gap > worst.slack_s:
        on_gpu = ceiling.device_kind == "gpu"
        return _Gap(
            f"{format_seconds(gap)} of the profiled step are gaps between kernels",
            "capture the step in one graph, or launch fewer kernels"
            if on_gpu
            else "run fewer and larger operations per step",
        )
    share = format_percent(worst.slack_s / ceiling.t_step_s)
    return _Gap(
        f"`{worst.name}` is {format_seconds(worst.slack_s)} above its floor ({share} of the step)",
        _ACTIONS[ceiling.device_kind][worst.name],
    )


def _reference_step(ceiling: Ceiling, tree: BestTree) -> str:
    """Kernels lead on an engine whose kernels cannot be chosen: say so, and what remains."""
    text = (
        f"{_kernel_gap(ceiling).what}; the reference engine runs each layer as many small "
        "PyTorch operations, and no mechanism changes that: the kernel factor is for an engine "
        "with fused kernels"
    )
    if ceiling.factors.tau is None or ceiling.factors.tau <= 1:
        return text
    if not tree.pays:
        return f"{text}; {_tau_step(ceiling, tree)}"
    return f"{text}. Here the tokens are what can be had: {_tau_step(ceiling, tree)}"


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
    noise = overhead_note(ceiling)
    return tuple(notes) if noise is None else (*notes, noise)
