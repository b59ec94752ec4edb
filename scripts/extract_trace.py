"""Cut a torch.profiler trace down to what a step profile needs: a small file for tests.

python scripts/extract_trace.py df8.trace.json.gz tests/fixtures/traces/df8.trace.json.gz

Kept: the device, every GPU span, the kernels of whole decode steps with name, time, duration,
device and stream, and a few host events, so that a reader still has something to skip. Left out:
prompts' kernels, all other host events, and fields that no reader here uses. Kept values are as
they were.
"""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path
from typing import Any

from specpilot_cli.io.chrome_trace import ChromeTrace

_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
_SPANS = "gpu_user_annotation"
_HEADER = ("schemaVersion", "deviceProperties", "displayTimeUnit", "baseTimeNanoseconds")
_HOST_EVENTS = 50


def extract(source: Path) -> dict[str, Any]:
    """The cut trace of `source`."""
    trace = ChromeTrace(source)
    spans, kernels, host = [], [], []
    for event in trace.events():
        category = event.get("cat")
        if category == _SPANS and str(event["name"]).startswith("step["):
            spans.append(_kept(event))
        elif category in _GPU:
            kernels.append(_kept(event))
        elif category == "cpu_op" and len(host) < _HOST_EVENTS:
            host.append(_kept(event))
    prompts = [e for e in spans if e["name"].startswith("step[EXTEND")]
    ends = [e["ts"] + e["dur"] for e in prompts]
    first = max(ends, default=0.0)
    events = host + spans + [event for event in kernels if event["ts"] >= first]
    header = {key: trace.header[key] for key in _HEADER if key in trace.header}
    return {**header, "traceEvents": events, "traceName": source.name}


def _kept(event: dict[str, Any]) -> dict[str, Any]:
    found = {key: event[key] for key in ("ph", "cat", "name", "pid", "tid", "ts", "dur")}
    args = {key: event["args"][key] for key in ("device", "stream") if key in event["args"]}
    return {**found, "args": args} if args else found


def main() -> None:
    """Write the second file from the first."""
    source, target = (Path(name) for name in sys.argv[1:3])
    text = json.dumps(extract(source), separators=(",", ":"), ensure_ascii=False)
    # No time and no name in the gzip header: the same trace gives the same bytes.
    with target.open("wb") as raw, gzip.GzipFile("", "wb", 9, raw, mtime=0) as packed:
        packed.write(text.encode("utf-8"))
    print(f"{target}: {target.stat().st_size} bytes")


if __name__ == "__main__":
    main()
