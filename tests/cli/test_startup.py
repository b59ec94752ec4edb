"""What `specpilot --help` costs, and what it must not load."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

_HEAVY = (
    "torch", "numpy", "scipy", "pandas", "numba", "matplotlib", "transformers", "sglang",
    "safetensors", "httpx", "jinja2", "yaml",
)  # fmt: skip
_LIMIT_S = 0.6


def _help(*python_options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *python_options, "-m", "specpilot_cli", "--help"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )


def test_help_loads_no_heavy_package() -> None:
    lines = _help("-X", "importtime").stderr.splitlines()
    loaded = {line.rsplit("|", 1)[-1].strip().split(".")[0] for line in lines}
    assert "typer" in loaded
    assert loaded.isdisjoint(_HEAVY), sorted(loaded & set(_HEAVY))


def test_help_is_quick() -> None:
    took_s = []
    for _ in range(7):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        _help()
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        took_s.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    # Processor time, and the fastest of several: other work on the machine stretches the clock's.
    assert min(took_s) < _LIMIT_S


def test_the_installed_command_is_the_module(tmp_path: Path) -> None:
    script = Path(sys.executable).parent / "specpilot"
    done = subprocess.run(
        [script, "--version"], capture_output=True, text=True, timeout=60, check=True,
        cwd=tmp_path, env={**os.environ, "PATH": "/usr/bin:/bin"},
    )  # fmt: skip
    assert done.stdout.startswith("specpilot ")
