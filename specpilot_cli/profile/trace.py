"""The GPU side of a profiler trace, compactly: kernels as columns, span marks as intervals.

Of a trace only what ran on the GPU is kept, 28 bytes a kernel, so a trace of gigabytes needs a few
megabytes of memory. Times are microseconds since the first event, as the profiler writes them.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specpilot_cli.errors import InputError
from specpilot_cli.io.chrome_trace import ChromeTrace
from specpilot_cli.units import writable

_KERNELS = frozenset(("kernel", "gpu_memcpy", "gpu_memset"))
_SPANS = "gpu_user_annotation"
# `step[VERIFY bs=1 g_sq=8]`; the numbers after the kind are optional and of the engine's choice.
_STEP = re.compile(r"step\[(?P<kind>[A-Z_0-9]+)(?P<facts>(?: \w+=[-\w.]+)*)\]")
_COUNT = re.compile(r"[1-9][0-9]{0,11}")
_MAX_US = 1e18  # thirty thousand years: what is beyond it is no time
_MAX_NAMES = 100_000


@dataclass(frozen=True, slots=True)
class SpanMark:
    """A span of the engine: `kind` such as VERIFY, [start_us, end_us), and its numbers by name."""

    kind: str
    start_us: float
    end_us: float
    facts: Mapping[str, int]


@dataclass(slots=True)
class GpuTrace:
    """Kernels as parallel columns in order of their start; span marks in order of theirs.

    start_us, dur_us: float64; stream, name: int32, `name` an index into `names`.
    """

    path: Path
    device: str
    start_us: array[float] = field(default_factory=lambda: array("d"))
    dur_us: array[float] = field(default_factory=lambda: array("d"))
    stream: array[int] = field(default_factory=lambda: array("i"))
    name: array[int] = field(default_factory=lambda: array("i"))
    names: list[str] = field(default_factory=list)
    spans: list[SpanMark] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.start_us)


def read_gpu_trace(path: Path) -> GpuTrace:
    """The GPU events in `path`, sorted.

    Raises `InputError` for a file that is no whole trace, holds no kernels or spans, or mixes
    several GPUs.
    """
    source = ChromeTrace(path)
    trace = GpuTrace(path, "")
    ids: dict[str, int] = {}
    devices: set[str] = set()
    marks: dict[tuple[str, float, float], SpanMark] = {}
    for number, event in enumerate(source.events(), 1):
        category = event.get("cat")
        wanted = isinstance(category, str) and (category in _KERNELS or category == _SPANS)
        if not wanted or event.get("ph") != "X":
            continue
        name, start, dur = _timed(event, path, number)
        if category == _SPANS:
            if mark := _mark(name, start, dur):
                marks[mark.kind, mark.start_us, mark.end_us] = mark
            continue
        facts = event.get("args")
        args = facts if isinstance(facts, dict) else {}
        devices.add(str(args.get("device", 0)))
        stream = args.get("stream", event.get("tid", 0))
        trace.start_us.append(start)
        trace.dur_us.append(dur)
        trace.stream.append(stream if isinstance(stream, int) and 0 <= stream < 2**31 else 0)
        trace.name.append(ids.setdefault(name, len(ids)))
        if len(ids) > _MAX_NAMES:
            raise InputError(f"over {_MAX_NAMES} names of kernels", where=f"{path}: event {number}")
    trace.names = list(ids)
    trace.device = _device_name(source.header)
    trace.spans = sorted(marks.values(), key=lambda mark: mark.start_us)
    _check(trace, devices)
    _sort(trace)
    return trace


def _timed(event: Mapping[str, Any], path: Path, number: int) -> tuple[str, float, float]:
    name, start, dur = event.get("name"), _number(event.get("ts")), _number(event.get("dur"))
    if not isinstance(name, str) or start is None or dur is None or dur < 0:
        raise InputError(
            "a GPU event lacks its name, start or duration",
            where=f"{path}: event {number}",
            hint="is the file written by torch.profiler?",
        )
    return writable(name), start, dur


def _number(value: object) -> float | None:
    """`value` as a time in microseconds, or None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if abs(value) < _MAX_US else None  # NaN compares as False


def _mark(name: str, start: float, dur: float) -> SpanMark | None:
    match = _STEP.fullmatch(name.strip())
    if match is None:
        return None
    pairs = (part.split("=", 1) for part in match["facts"].split())
    facts = {key: int(value) for key, value in pairs if _COUNT.fullmatch(value)}
    return SpanMark(match["kind"], start, start + dur, facts)


def _device_name(header: Mapping[str, Any]) -> str:
    listed = header.get("deviceProperties")
    first = listed[0] if isinstance(listed, list) and listed else {}
    name = first.get("name") if isinstance(first, dict) else None
    return writable(name) if isinstance(name, str) and name else "unknown GPU"


def _check(trace: GpuTrace, devices: set[str]) -> None:
    where = str(trace.path)
    if not len(trace):
        raise InputError(
            "the trace holds no GPU kernels",
            where=where,
            hint="profile with activities CPU and GPU, on a server that runs on a GPU",
        )
    if len(devices) > 1:
        raise InputError(
            f"the trace mixes {len(devices)} GPUs",
            where=where,
            hint="give the file of one rank, such as `…-TP-0.trace.json.gz`",
        )
    if not trace.spans:
        raise InputError(
            "the trace holds no step spans on the GPU, so its kernels belong to no step",
            where=where,
            hint="SGLang 0.5.19 and later write them; older ones cannot be read",
        )


def _sort(trace: GpuTrace) -> None:
    order = sorted(range(len(trace)), key=trace.start_us.__getitem__)
    trace.start_us = array("d", (trace.start_us[i] for i in order))
    trace.dur_us = array("d", (trace.dur_us[i] for i in order))
    trace.stream = array("i", (trace.stream[i] for i in order))
    trace.name = array("i", (trace.name[i] for i in order))
