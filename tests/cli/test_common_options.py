"""`-q` and `-v`: every command takes both, and `-v` tells where values come from."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer.main

from specpilot_cli.app import app

Run = Callable[..., subprocess.CompletedProcess[str]]
LATTICE = Path(__file__).parents[2] / "recipes/demo-cpu/recordings/block-8.safetensors"


def _leaves(command: Any, path: str = "") -> dict[str, Any]:
    children = getattr(command, "commands", None)
    if children is None:
        return {path: command}
    found: dict[str, Any] = {}
    for name, child in children.items():
        found |= _leaves(child, f"{path} {name}".strip())
    return found


@pytest.mark.parametrize("name", _leaves(typer.main.get_command(app)))
def test_every_command_can_be_quiet_and_verbose(name: str) -> None:
    command = _leaves(typer.main.get_command(app))[name]
    flags = {flag: param for param in command.params for flag in param.opts}
    assert flags["-q"] is flags["--quiet"]
    assert flags["-v"] is flags["--verbose"]
    assert flags["-v"].is_flag
    if "-o" in flags and flags["-o"].required is False:
        assert {"--json", "--force"} <= set(flags)


def test_verbose_tells_where_values_come_from(
    specpilot: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPECPILOT_GPU", "h200")
    monkeypatch.setenv("SPECPILOT_NO_CONFIG", "0")
    (tmp_path / "specpilot.toml").write_text("[ceiling]\nrows = 9\n", encoding="utf-8")
    arguments = ("ceiling", "--target", "llama-3.1-8b", "--json")
    plain = specpilot(*arguments, cwd=tmp_path)
    told = specpilot(*arguments, "-v", "-q", cwd=tmp_path)
    assert told.returncode == plain.returncode == 0, told.stderr
    assert told.stdout == plain.stdout
    assert plain.stderr == ""
    lines = told.stderr.splitlines()
    assert "--target: llama-3.1-8b (command line)" in lines
    assert "--gpu: h200 (environment)" in lines
    assert f"--rows: 9 ({tmp_path / 'specpilot.toml'})" in lines
    assert "--requests: 1 (default)" in lines
    assert not any(line.startswith(("--verbose", "--drafter")) for line in lines)


def test_commands_without_progress_take_quiet_too(specpilot: Run, tmp_path: Path) -> None:
    loud = specpilot("lattice", "inspect", str(LATTICE))
    quiet = specpilot("lattice", "inspect", str(LATTICE), "-q", "-o", str(tmp_path / "i.json"))
    assert (quiet.returncode, quiet.stdout, quiet.stderr) == (0, loud.stdout, "")
    assert '"steps": 472' in (tmp_path / "i.json").read_text(encoding="utf-8")
