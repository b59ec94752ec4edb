"""The public command, as a reader of the paper would run it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

_ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def ceiling() -> Callable[..., dict[str, Any]]:
    """`ceiling(*args)`: results of `specpilot ceiling ... --json`, run in the repository."""

    def run(*args: str) -> dict[str, Any]:
        done = subprocess.run(
            [sys.executable, "-m", "specpilot_cli", "ceiling", *args, "--json"],
            capture_output=True, text=True, cwd=_ROOT, timeout=120, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        results: dict[str, Any] = json.loads(done.stdout)["results"]
        return results

    return run
