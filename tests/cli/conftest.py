"""Run `specpilot` as its users do: a process with an exit code and two streams."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def specpilot(tmp_path: Path) -> Run:
    """`specpilot(*args, code=, cwd=, **env)`: with `code`, that Python runs before `main()`."""

    def run(
        *args: str, code: str = "", cwd: Path = tmp_path, **env: str
    ) -> subprocess.CompletedProcess[str]:
        program = (
            f"import sys\nimport specpilot_cli.main as entry\n{code}\n"
            "sys.exit(entry.main(sys.argv[1:]))"
        )
        return subprocess.run(
            [sys.executable, "-c", program, *args],
            capture_output=True,
            text=True,
            cwd=cwd,
            env={**os.environ, "COLUMNS": "100", **env},
            stdin=subprocess.DEVNULL,
            timeout=120,
            check=False,
        )

    return run
