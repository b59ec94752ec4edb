"""GPU clocks, heat and throttling while the systems serve, once a second.

A clock that sinks during one system's turns looks like a slower system, so the clock is part of the
measurement. One `nvidia-smi` runs for all of it; without one there is nothing to watch.
"""

from __future__ import annotations

import contextlib
import subprocess
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Self

from specpilot_cli.paired_bench.machine import GPU_FIELDS, parse_gpu_lines
from specpilot_cli.paired_bench.types import TimedRequest

_EVERY_S = 1
_CLOCKS_APART = 0.01
# NVML's bits of clocks_throttle_reasons.active; the first two limit nothing while work is done.
_REASONS = {
    0x1: "idle", 0x2: "applications clocks", 0x4: "power cap", 0x8: "hardware slowdown",
    0x10: "sync boost", 0x20: "software thermal slowdown", 0x40: "hardware thermal slowdown",
    0x80: "power brake", 0x100: "display clocks",
}  # fmt: skip
_HARMLESS = ("idle", "applications clocks")


@dataclass(frozen=True, slots=True)
class Sample:
    """One GPU at one moment of the client's monotonic clock; `fields` as nvidia-smi prints them."""

    at_s: float
    fields: Mapping[str, str]


@dataclass(slots=True)
class GpuWatch:
    """Samples every GPU between `with` and its end."""

    samples: list[Sample] = field(default_factory=list)
    _process: subprocess.Popen[str] | None = None
    _thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        command = ["nvidia-smi", f"--query-gpu={','.join(GPU_FIELDS)}", "--format=csv,noheader",
                   "-l", str(_EVERY_S)]  # fmt: skip
        with contextlib.suppress(OSError):
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL, text=True, start_new_session=True,
            )  # fmt: skip
        if self._process is not None:
            self._thread = threading.Thread(target=self._read, name="gpu-watch", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait()
        if self._thread is not None:
            self._thread.join()

    def _read(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        for line in self._process.stdout:
            for fields in parse_gpu_lines(line):
                self.samples.append(Sample(time.monotonic(), fields))


def summarise(samples: Sequence[Sample], rows: Iterable[TimedRequest]) -> list[dict[str, Any]]:
    """One entry per GPU: clocks in MHz, heat, throttling, and the clock while each system served.

    rows: the answers of the comparison. A moment at which two systems served belongs to neither.
    """
    spans: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for row in rows:
        spans[row.system].append((row.answer.submit_s, row.answer.last_byte_s))
    by_gpu: dict[str, list[Sample]] = defaultdict(list)
    for sample in samples:
        by_gpu[sample.fields["uuid"]].append(sample)
    return [_summary_of(uuid, found, spans) for uuid, found in by_gpu.items()]


def _summary_of(
    uuid: str, samples: Sequence[Sample], spans: Mapping[str, Sequence[tuple[float, float]]]
) -> dict[str, Any]:
    sm = [_number(sample.fields["clocks.sm"]) for sample in samples]
    by_system: dict[str, list[float]] = defaultdict(list)
    for sample, clock in zip(samples, sm, strict=True):
        serving = [
            name for name, own in spans.items() if any(a <= sample.at_s <= b for a, b in own)
        ]
        if len(serving) == 1 and clock is not None:
            by_system[serving[0]].append(clock)
    reasons = {
        name
        for sample in samples
        for name in throttle_reasons(sample.fields["clocks_throttle_reasons.active"])
    }
    return {
        "uuid": uuid,
        "name": samples[0].fields["name"],
        "driver_version": samples[0].fields["driver_version"],
        "n_samples": len(samples),
        "sm_mhz": _spread(sm),
        "memory_mhz": _spread([_number(sample.fields["clocks.mem"]) for sample in samples]),
        "temperature_c": _spread([_number(sample.fields["temperature.gpu"]) for sample in samples]),
        "power_w": _spread([_number(sample.fields["power.draw"]) for sample in samples]),
        "throttle_reasons": sorted(reasons),
        "sm_mhz_by_system": {name: median(found) for name, found in by_system.items()},
    }


def gpu_remarks(summaries: Iterable[Mapping[str, Any]]) -> list[str]:
    """What the clocks say against the comparison."""
    said = []
    for gpu in summaries:
        bad = [name for name in gpu["throttle_reasons"] if name not in _HARMLESS]
        if bad:
            said.append(f"{gpu['name']} was throttled while it served: {', '.join(bad)}")
        clocks = gpu["sm_mhz_by_system"]
        if clocks and max(clocks.values()) > (1 + _CLOCKS_APART) * min(clocks.values()):
            text = ", ".join(f"{name} {clock:.0f}" for name, clock in clocks.items())
            said.append(f"{gpu['name']} ran at other clocks for one system (median MHz: {text})")
    return said


def throttle_reasons(active: str) -> list[str]:
    """Names of the bits in nvidia-smi's `clocks_throttle_reasons.active`."""
    try:
        bits = int(active, 16)
    except ValueError:
        return []
    return [name for bit, name in _REASONS.items() if bits & bit]


def _number(text: str) -> float | None:
    try:
        return float(text.split()[0])
    except (ValueError, IndexError):
        return None


def _spread(values: Iterable[float | None]) -> dict[str, float] | None:
    known = [value for value in values if value is not None]
    if not known:
        return None
    return {"min": min(known), "median": median(known), "max": max(known)}
