"""The shell scripts parse, and nothing in the repository depends on one machine."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

_SCRIPTS = (".ci/run", "scripts/test.sh", "scripts/venv.sh", "scripts/demo.sh")


@pytest.mark.parametrize("name", _SCRIPTS)
def test_script_parses(repo: Path, name: str) -> None:
    subprocess.run(["bash", "-n", name], cwd=repo, check=True, timeout=10)


@pytest.mark.parametrize("name", [".ci/run", "scripts/test.sh", "scripts/demo.sh"])
def test_script_is_executable(repo: Path, name: str) -> None:
    assert os.access(repo / name, os.X_OK)


def test_a_current_environment_is_reused(repo: Path, tmp_path: Path) -> None:
    """A matching stamp means no pip run: the fake `python -m venv` here would fail."""
    (tmp_path / "pyproject.toml").write_text("x = 1\n", encoding="utf-8")
    venv = tmp_path / "env"
    (venv / "bin").mkdir(parents=True)
    (venv / "bin" / "specpilot").write_text("#!/bin/sh\n", encoding="utf-8")
    (venv / "bin" / "specpilot").chmod(0o755)
    stamp = (
        '{ cat pyproject.toml; python3 -VV; echo "test $SPECPILOT_CPU_TORCH $PWD"; }'
        " | sha256sum | cut -d' ' -f1 > env/.stamp"
    )
    source = f"source {repo / 'scripts' / 'venv.sh'}"
    script = f"set -eu; {source}; {stamp}; ensure_venv env test && echo reused"
    done = subprocess.run(
        ["bash", "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True
    )
    assert (done.stdout, done.stderr) == ("reused\n", "")


def test_sglang_is_pinned(repo: Path) -> None:
    """Nothing is resolved when the environment of the real engine is made."""
    text = (repo / "tests/sglang/cpu_engine/requirements.txt").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    assert [line for line in lines if not re.fullmatch(r"[\w.-]+==[\w.]+", line)] == []
    assert "sglang==0.5.23" in lines


def test_no_file_names_the_folder_it_was_written_in(repo: Path) -> None:
    names = subprocess.run(
        ["git", "ls-files"], cwd=repo, capture_output=True, text=True, timeout=60, check=True
    ).stdout.splitlines()
    assert len(names) > 100
    here = f"{repo}/".encode()
    assert [name for name in names if here in (repo / name).read_bytes()] == []
