"""The linters pass, and the import rules really catch what they forbid."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest


def _run(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command], cwd=folder, capture_output=True, text=True, timeout=300,
        check=False,
    )  # fmt: skip


_LINT_IMPORTS = ("-c", "from importlinter.cli import lint_imports_command as c; c()", "--no-cache")


def test_ruff_passes(repo: Path) -> None:
    done = _run(repo, "-m", "ruff", "check", ".")
    assert done.returncode == 0, done.stdout


@pytest.mark.slow
def test_mypy_passes(repo: Path) -> None:
    done = _run(repo, "-m", "mypy")
    assert done.returncode == 0, done.stdout


def test_import_rules_hold(repo: Path) -> None:
    done = _run(repo, *_LINT_IMPORTS)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("file", "line", "contract"),
    [
        ("specpilot_cli/errors.py", "import specpilot_cli.ui", "CLI layers"),
        ("specpilot_cli/replay/extra.py", "import specpilot_cli.ceiling", "CLI layers"),
        ("specpilot_cli/replay/extra.py", "import rich", "Only commands and report"),
        ("specpilot_cli/replay/extra.py", "import torch", "torch only"),
        ("kernels/specpilot_kernels/extra.py", "import specpilot_cli.errors", "Kernels never"),
        ("specpilot_cli/unplaced.py", "", "CLI layers"),
    ],
)
def test_each_import_rule_can_fail(
    repo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, line: str, contract: str
) -> None:
    for name in ("specpilot_cli", "kernels"):
        shutil.copytree(
            repo / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__", "*.cu")
        )
    shutil.copy(repo / "pyproject.toml", tmp_path)
    with (tmp_path / file).open("a", encoding="utf-8") as stream:
        stream.write(f"\n{line}\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{tmp_path / 'kernels'}")
    done = _run(tmp_path, *_LINT_IMPORTS)
    assert done.returncode == 1
    broken = [found for found in done.stdout.splitlines() if " BROKEN" in found]
    assert any(contract in found for found in broken), done.stdout
