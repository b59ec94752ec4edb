"""Where a decode step's time goes, from a trace and from an unprofiled timing of the same server.

The profiler slows the host and hardly the kernels. So a step's kernel time is taken from the trace,
its length from a timing without the profiler, and what no kernel fills is the difference.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from specpilot_cli.profile.attribute import covered_us
from specpilot_cli.profile.names import NameTable, load_kernel_classes, short_name
from specpilot_cli.profile.steps import Window, find_steps
from specpilot_cli.profile.trace import GpuTrace, read_gpu_trace

TOP_K = re.compile(r"top_?k|sortKeyValue|bitonicSortKV|radixSortKV|BlockwiseWithinK", re.IGNORECASE)
"""Kernels that choose the drafter's candidates; torch's own are several."""
_LONGEST = 24


def step_times(path: Path, unprofiled_ms: float) -> dict[str, Any]:
    """Milliseconds per step of a trace; `unprofiled_ms` is a step's length without the profiler.

    kernel_ms: some kernel runs. idle_ms: unprofiled_ms less that. top_k_ms: kernels that choose
    candidates. outside_spans: kernels outside the passes of drafter and target, and their time.
    longest: kernel -> (milliseconds, launches), per step. Errors as in `find_steps`.
    """
    trace = read_gpu_trace(path)
    windows, _ = find_steps(trace, NameTable(load_kernel_classes()))
    whole = sum(window.end_us - window.start_us for window in windows)
    busy = 0.0
    names: dict[str, list[float]] = defaultdict(lambda: [0.0, 0])
    outside = [0.0, 0]
    for window in windows:
        kernels = _inside(trace, window)
        busy += covered_us([(a, min(b, window.end_us)) for a, b, _ in kernels])
        for begin, end, name in kernels:
            _add(names[name], end - begin)
            if not any(span.start_us <= begin < span.end_us for span in window.spans):
                _add(outside, end - begin)
    count = 1e3 * len(windows)
    ordered = sorted(names.items(), key=lambda item: -item[1][0])
    top_k = [times for name, times in ordered if TOP_K.search(name)]
    return {
        "steps": len(windows),
        "unprofiled_ms": unprofiled_ms,
        "profiled_ms": whole / count,
        "kernel_ms": busy / count,
        "idle_ms": unprofiled_ms - busy / count,
        "top_k_ms": sum(times[0] for times in top_k) / count,
        "launches": sum(times[1] for times in names.values()) / len(windows),
        "outside_spans": {"ms": outside[0] / count, "launches": outside[1] / len(windows)},
        "longest": _longest(ordered, len(windows)),
    }


def _inside(trace: GpuTrace, window: Window) -> list[tuple[float, float, str]]:
    """(begin, end, name) of the kernels that begin in a window."""
    first = bisect_left(trace.start_us, window.start_us)
    last = bisect_left(trace.start_us, window.end_us)
    return [
        (trace.start_us[i], trace.start_us[i] + trace.dur_us[i], trace.names[trace.name[i]])
        for i in range(first, last)
    ]


def _add(place: list[float], micros: float) -> None:
    place[0] += micros
    place[1] += 1


def _longest(
    ordered: Sequence[tuple[str, list[float]]], steps: int
) -> dict[str, tuple[float, float]]:
    """The kernels that take most, by their short names."""
    found: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for name, (micros, launches) in ordered:
        place = found[short_name(name)]
        place[0] += micros / steps / 1e3
        place[1] += launches / steps
    best = sorted(found.items(), key=lambda item: -item[1][0])[:_LONGEST]
    return {name: (round(ms, 4), round(calls, 2)) for name, (ms, calls) in best}
