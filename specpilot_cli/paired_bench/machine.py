"""What was measured on what: the machine's load and GPUs, and how a server describes itself."""

from __future__ import annotations

import math
import os
import platform
import subprocess
from collections.abc import Mapping
from typing import Any

from specpilot_cli.settings import available_cores

GPU_FIELDS = (
    "uuid", "name", "driver_version", "clocks.sm", "clocks.mem", "temperature.gpu", "power.draw",
    "clocks_throttle_reasons.active",
)  # fmt: skip


def load_average_1min() -> float | None:
    """The one-minute load average, or None where the system has none."""
    try:
        return os.getloadavg()[0]
    except (AttributeError, OSError):
        return None


def describe_machine() -> dict[str, Any]:
    """Python, system, processors, load and GPUs at this moment."""
    return {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}",
        "machine": platform.machine(),
        "cpu_count": available_cores(),
        "load_average_1min": load_average_1min(),
        "gpus": gpu_state(),
    }


def gpu_state() -> list[dict[str, str]]:
    """One entry per NVIDIA GPU with its clocks and temperature; empty without `nvidia-smi`."""
    command = ["nvidia-smi", f"--query-gpu={','.join(GPU_FIELDS)}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return parse_gpu_lines(done.stdout)


def parse_gpu_lines(text: str) -> list[dict[str, str]]:
    """`nvidia-smi` CSV without a header: one dict per line; lines of another shape are skipped."""
    rows = ([cell.strip() for cell in line.split(",")] for line in text.splitlines())
    return [dict(zip(GPU_FIELDS, row, strict=True)) for row in rows if len(row) == len(GPU_FIELDS)]


def recordable(value: Any) -> Any:
    """A server's description fit for a file: NaN and Infinity become None, secrets are hidden.

    Half characters, which no file can hold, become question marks.
    """
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode("utf-8")
    if isinstance(value, Mapping):
        return {
            recordable(str(key)): "(hidden)" if item and _is_secret(str(key)) else recordable(item)
            for key, item in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [recordable(item) for item in value]
    return value


def _is_secret(key: str) -> bool:
    name = key.lower()
    return name.endswith(("api_key", "hf_token")) or "password" in name or "secret" in name


def mechanism_state(server_info: Mapping[str, Any]) -> dict[str, Any]:
    """What a server says about specpilot's own mechanisms; empty for a plain server.

    The reference engine reports it at the top, the SGLang plugin inside the scheduler's state.
    """
    states = server_info.get("internal_states")
    inner = states[0] if isinstance(states, list) and states else {}
    for holder in (server_info, inner if isinstance(inner, Mapping) else {}):
        own = holder.get("specpilot")
        if isinstance(own, Mapping):
            return dict(own)
    return {}
