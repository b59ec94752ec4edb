"""Kernels of one step to kernel classes, and its time shared out without counting any twice.

Where several kernels run at once, each gets an equal share of that time: the classes then add up
to the time in which the GPU was busy.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from dataclasses import dataclass

from specpilot_cli.profile.names import Family, NameTable
from specpilot_cli.profile.steps import Span, Window
from specpilot_cli.profile.trace import GpuTrace
from specpilot_cli.schema.kernel_classes import FamilyName
from specpilot_cli.schema.step_profile import KernelClassName

OUTSIDE = "outside spans"
# Inside the target's passes a name's family is its class but for these.
_IN_TARGET: dict[FamilyName, KernelClassName] = {
    "gemm": "target_gemm", "gemm_reduce": "target_gemm", "head": "head", "recurrent": "recurrent",
    "attention": "attention", "tree": "tree", "drafter": "rest", "prefill": "rest", "rest": "rest",
}  # fmt: skip
# Beside the passes only a drafter multiplies: the context update on accepted rows.
_OUTSIDE: dict[FamilyName, KernelClassName] = _IN_TARGET | {
    "gemm": "drafter", "gemm_reduce": "drafter", "drafter": "drafter", "prefill": "prefill",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Usage:
    """Seconds and launches."""

    seconds: float
    calls: int


@dataclass(frozen=True, slots=True)
class StepUsage:
    """One step, in seconds. `kernels` by (name index, class); `overlap_s` was counted once.

    `prof_s` is the time inside spans or kernels, `busy_s` the part of it in which a kernel ran,
    `period_s` the time to the next step's start, `spans` seconds by kind and `OUTSIDE`. `w12` names
    the classes with products that read 12-bit weights.
    """

    period_s: float
    prof_s: float
    busy_s: float
    overlap_s: float
    spans: dict[str, float]
    classes: dict[KernelClassName, Usage]
    kernels: dict[tuple[int, KernelClassName], Usage]
    w12: frozenset[KernelClassName]


@dataclass(frozen=True, slots=True)
class _Kernel:
    start_us: float
    end_us: float
    stream: int
    name: int
    family: Family
    span: Span | None


def use_of_step(trace: GpuTrace, window: Window, table: NameTable) -> StepUsage:
    """The step in `window` taken apart."""
    kernels = _inside(trace, window, table)
    classes = [_class(kernel, window) for kernel in kernels]
    for index in _head(kernels, window.target):
        classes[index] = "head"
    shares, busy = _share(kernels)
    by_kernel: dict[tuple[int, KernelClassName], Usage] = {}
    by_class: dict[KernelClassName, Usage] = {}
    for kernel, name, share in zip(kernels, classes, shares, strict=True):
        key = (kernel.name, name)
        old, whole = by_kernel.get(key, Usage(0, 0)), by_class.get(name, Usage(0, 0))
        by_kernel[key] = Usage(old.seconds + 1e-6 * share, old.calls + 1)
        by_class[name] = Usage(whole.seconds + 1e-6 * share, whole.calls + 1)
    durations = sum(kernel.end_us - kernel.start_us for kernel in kernels)
    intervals = [(kernel.start_us, kernel.end_us) for kernel in kernels]
    marks = [(span.start_us, min(span.end_us, window.end_us)) for span in window.spans]
    covered = covered_us(intervals + marks)
    return StepUsage(
        period_s=1e-6 * (window.end_us - window.start_us),
        prof_s=1e-6 * covered,
        busy_s=1e-6 * busy,
        overlap_s=1e-6 * (durations - busy),
        spans=_span_seconds(window, covered),
        classes=by_class,
        kernels=by_kernel,
        w12=frozenset(c for k, c in zip(kernels, classes, strict=True) if k.family.w12),
    )


def covered_us(intervals: list[tuple[float, float]]) -> float:
    """Length of the union of `intervals`."""
    total, reach = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reach))
        reach = max(reach, end)
    return total


def _span_seconds(window: Window, covered: float) -> dict[str, float]:
    """Seconds by kind, passes of a kind added up, and what kernels took outside of all spans."""
    found: dict[str, float] = defaultdict(float)
    cut = [(s.kind, s.start_us, min(s.end_us, window.end_us)) for s in window.spans]
    for kind, start, end in cut:
        found[kind] += 1e-6 * (end - start)
    found[OUTSIDE] = 1e-6 * (covered - covered_us([(start, end) for _, start, end in cut]))
    return dict(found)


def _inside(trace: GpuTrace, window: Window, table: NameTable) -> list[_Kernel]:
    first = bisect_left(trace.start_us, window.start_us)
    last = bisect_left(trace.start_us, window.end_us)
    return [
        _Kernel(
            trace.start_us[i],
            trace.start_us[i] + trace.dur_us[i],
            trace.stream[i],
            trace.name[i],
            table.family(trace.names[trace.name[i]]),
            _span_at(window.spans, trace.start_us[i]),
        )
        for i in range(first, last)
    ]


def _span_at(spans: tuple[Span, ...], time_us: float) -> Span | None:
    """The span that holds `time_us`; of several the one that began last."""
    return next((s for s in reversed(spans) if s.start_us <= time_us < s.end_us), None)


def _class(kernel: _Kernel, window: Window) -> KernelClassName:
    family = kernel.family.name
    if kernel.span is not None:
        if kernel.span.role == "drafter":
            return "drafter"
        if kernel.span.role == "prefill":
            return "prefill"
        return _IN_TARGET[family]
    if family in ("gemm", "gemm_reduce") and not window.drafts:
        return "rest"
    return _OUTSIDE[family]


def _head(kernels: list[_Kernel], target: Span) -> list[int]:
    """Indices of the LM head: the target pass's last matrix product with its reduction.

    Empty where names tell: then `_class` has found it already.
    """
    inside = [i for i, kernel in enumerate(kernels) if kernel.span == target]
    if any(kernels[i].family.name == "head" for i in inside):
        return []
    products = [i for i in inside if kernels[i].family.name == "gemm"]
    if not products:
        return []
    last = products[-1]
    reductions = [
        i for i in inside
        if i > last and kernels[i].family.name == "gemm_reduce"
        and kernels[i].stream == kernels[last].stream
    ]  # fmt: skip
    return [last, *reductions]


def _share(kernels: list[_Kernel]) -> tuple[list[float], float]:
    """Microseconds of each kernel with overlaps shared equally, and of their union."""
    shares = [0.0] * len(kernels)
    edges = sorted(
        [(kernel.start_us, 1, i) for i, kernel in enumerate(kernels)]
        + [(kernel.end_us, 0, i) for i, kernel in enumerate(kernels)]
    )
    running: set[int] = set()
    busy, before = 0.0, 0.0
    for time, begins, index in edges:
        if running:
            busy += time - before
            for other in running:
                shares[other] += (time - before) / len(running)
        before = time
        if begins and kernels[index].end_us > kernels[index].start_us:
            running.add(index)
        else:
            running.discard(index)
    return shares, busy
