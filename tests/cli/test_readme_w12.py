"""The four commands of README, "Convert a checkpoint in four commands", on the shipped target."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from specpilot_cli.io.hashing import sha256_file

HUB_ID = "Qwen/Qwen3-4B"


def four_commands(readme: str) -> list[list[str]]:
    section = readme.partition("## Convert a checkpoint in four commands")[2].partition("\n## ")[0]
    lines = [line.strip() for line in section.splitlines() if line.startswith("    ")]
    return [shlex.split(line) for line in lines if not line.startswith("pip ")]


@pytest.mark.slow
def test_the_four_commands(repo: Path, tmp_path: Path) -> None:
    commands = four_commands((repo / "README.md").read_text(encoding="utf-8"))
    assert [words[:3] for words in commands] == [
        ["specpilot", "convert-w12", HUB_ID],
        ["specpilot", "w12", "verify"],
        ["python", "-c", commands[2][2]],
        ["specpilot", "w12", "restore"],
    ]
    target = repo / "recipes/demo-cpu/target"
    programs = {"specpilot": [sys.executable, "-m", "specpilot_cli"], "python": [sys.executable]}
    for program, *words in commands:
        words = [str(target) if word == HUB_ID else word for word in words]
        done = subprocess.run(
            [*programs[program], *words],
            cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False,
            env={**os.environ, "HF_HUB_OFFLINE": "1"},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
    for file in target.iterdir():
        assert sha256_file(tmp_path / "Qwen3-4B" / file.name) == sha256_file(file), file.name
