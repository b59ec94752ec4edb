"""Made-up traces: spans and kernels at chosen times."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

REPO = Path(__file__).resolve().parents[3]

Kernel = tuple[str, float, float, int]  # name, start µs, duration µs, stream
Mark = tuple[str, float, float, int]  # label inside step[…], start µs, duration µs, stream


@pytest.fixture
def traces() -> Path:
    """Extracts of real traces, made by scripts/extract_trace.py."""
    return REPO / "tests" / "fixtures" / "traces"


@pytest.fixture
def make_trace(tmp_path: Path) -> Callable[..., Path]:
    """`make_trace(kernels, marks)` writes a trace of one H200."""

    def make(
        kernels: Sequence[Kernel], marks: Sequence[Mark], *, name: str = "t.json", **more: Any
    ) -> Path:
        events: list[dict[str, Any]] = [
            {"ph": "X", "cat": "kernel", "name": kernel, "ts": start, "dur": dur, "tid": stream,
             "args": {"device": 0, "stream": stream}}
            for kernel, start, dur, stream in kernels
        ]  # fmt: skip
        events += [
            {"ph": "X", "cat": "gpu_user_annotation", "name": f"step[{label}]", "ts": start,
             "dur": dur, "tid": stream}
            for label, start, dur, stream in marks
        ]  # fmt: skip
        document = {"deviceProperties": [{"name": "NVIDIA H200"}], "traceEvents": events} | more
        path = tmp_path / name
        path.write_text(json.dumps(document))
        return path

    return make
