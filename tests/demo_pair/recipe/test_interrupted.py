"""A run that ends early, however and whenever: no server stays, and nothing looks finished."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specpilot_cli.io.json_file import read_json
from specpilot_cli.io.lattice_file import read_lattice

pytestmark = pytest.mark.slow

# What the run says when it gets there.
MOMENTS = {
    "weights": "1/5",
    "recording": "greedy outputs",
    "server start": "starting tuned",
    "benchmark": "expected time",
}
QUICK = {"nodes": "8", "budgets": "[8]", "new_tokens": 32}
Start = Callable[..., Any]


def _interrupt(start: Start, number: signal.Signals, moment: str, **more: Any) -> Any:
    run = start(**QUICK, **more)
    run.wait_for(MOMENTS[moment])
    run.process.send_signal(number)
    return run


def _check_unfinished(folder: Path) -> None:
    """Marked, without a result or a report; what is there under its own name is whole."""
    assert (folder / "UNFINISHED").is_file()
    assert not (folder / "result.json").exists()
    assert not (folder / "report.html").exists()
    for path in folder.glob("*.safetensors"):
        assert read_lattice(path).n_requests == 4
    for path in folder.glob("*.json"):
        read_json(path)
    if (folder / "target-w12").exists():
        assert (folder / "target-w12" / "w12_manifest.json").is_file()


def _check_servers_ended_themselves(folder: Path) -> None:
    """None had to be killed after ten seconds."""
    logs = sorted((folder / "logs").glob("*.log"))
    assert [log.stem for log in logs] == ["ar", "baseline", "candidate"]
    for log in logs:
        assert log.read_text(encoding="utf-8").splitlines()[-1] == "interrupted"


@pytest.mark.parametrize("moment", MOMENTS)
def test_ctrl_c_ends_servers_and_says_so(start: Start, moment: str) -> None:
    run = _interrupt(start, signal.SIGINT, moment)
    code, out, said = run.end(within_s=60)
    assert code == 130, said
    assert out == ""
    assert run.survivors(within_s=1) == []
    assert f"interrupted, no result: `{run.out}` holds an unfinished run" in said
    assert "error" not in said
    assert "Traceback" not in said
    _check_unfinished(run.out)
    assert list(run.out.glob(".*")) == []
    if moment == "benchmark":
        _check_servers_ended_themselves(run.out)


@pytest.mark.parametrize(
    ("number", "sigint"),
    [(signal.SIGTERM, signal.SIG_DFL), (signal.SIGTERM, signal.SIG_IGN),
     (signal.SIGHUP, signal.SIG_IGN)],
    ids=["SIGTERM", "SIGTERM in the background", "SIGHUP in the background"],
)  # fmt: skip
def test_other_signals_are_an_interruption_too(
    start: Start, number: signal.Signals, sigint: signal.Handlers
) -> None:
    run = _interrupt(start, number, "benchmark", sigint=sigint)
    code, out, said = run.end(within_s=60)
    assert (code, out) == (130, ""), said
    assert "Traceback" not in said
    assert "KeyboardInterrupt" not in said
    assert run.survivors(within_s=1) == []
    assert "interrupted, no result" in said
    _check_unfinished(run.out)
    _check_servers_ended_themselves(run.out)


@pytest.mark.parametrize("moment", MOMENTS)
def test_killing_the_run_kills_its_servers(start: Start, moment: str) -> None:
    run = _interrupt(start, signal.SIGKILL, moment)
    assert run.end(within_s=60)[0] == -signal.SIGKILL
    assert run.survivors() == []
    _check_unfinished(run.out)
    again = subprocess.run(
        [sys.executable, "-m", "specpilot_cli", "apply", "recipe", str(run.recipe),
         "--out", str(run.out)],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert again.returncode == 2
    assert "is in use: it holds an unfinished run" in again.stderr


@pytest.mark.parametrize("victim", ["candidate", "ar"])
def test_a_server_that_dies_ends_the_run_with_its_log(start: Start, victim: str) -> None:
    run = start(**QUICK)
    run.wait_for(MOMENTS["benchmark"])
    label = {"candidate": "tuned", "ar": "plain decoding"}[victim]
    log = run.out / "logs" / f"{victim}.log"
    shown = log.read_text(encoding="utf-8").splitlines()[-1]
    os.kill(_server(run, victim), signal.SIGKILL)
    code, out, said = run.end(within_s=60)
    assert code == 3, said
    assert out == ""
    assert f"error: the {label} server ended with status 137\n" in said
    assert shown in said
    assert f"hint: the whole log is in {log}" in said
    assert said.count("error:") == 1
    assert run.survivors(within_s=1) == []
    _check_unfinished(run.out)


def _server(run: Any, system: str) -> int:
    """The server process of `system`, not its guard."""
    wanted = {"candidate": "--mode\0tree", "ar": "--mode\0ar"}[system]
    for entry in Path("/proc").iterdir():
        try:
            command = (entry / "cmdline").read_text() if entry.name.isdigit() else ""
        except OSError:
            continue
        if wanted in command and str(run.recipe) in command and "guard.py" not in command:
            return int(entry.name)
    raise AssertionError(f"no server of {system}")
