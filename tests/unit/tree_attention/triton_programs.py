"""Run a program of this folder where Triton is: SGLang's environment, or this one if it has it."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.sglang.cpu_engine.server import PYTHON

_HERE = Path(__file__).resolve().parent
_KERNELS = _HERE.parents[2] / "kernels"


def lines_of(program: str, *arguments: str, timeout_s: float = 1500.0) -> list[dict[str, Any]]:
    """The JSON lines that it prints; skips without Triton, or fails where CI runs."""
    python = str(PYTHON) if PYTHON.exists() else sys.executable
    if python == sys.executable and importlib.util.find_spec("triton") is None:
        missing = f"no Triton: {PYTHON} is missing; scripts/test.sh sets it up"
        if os.environ.get("CI") == "true":
            pytest.fail(missing)
        pytest.skip(missing)
    environment = {**os.environ, "PYTHONPATH": str(_KERNELS), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [python, "-W", "ignore", str(_HERE / program), *arguments],
        env=environment, capture_output=True, text=True, check=False, timeout=timeout_s,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]
