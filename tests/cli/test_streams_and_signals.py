"""Closed or full streams, a folder that is gone, and signals: a clear end, never a traceback."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from specpilot_cli.convert_w12.verify import verify_folder
from specpilot_cli.io.safetensors_stream import bf16_data, write_safetensors
from specpilot_cli.paths import bundled

Shell = Callable[..., subprocess.CompletedProcess[str]]

_COMMANDS = ["--version", "--help", "doctor", "doctor --json", "ceiling --list"]
_DEMO = bundled("recipes") / "demo-cpu"


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    """Runs `specpilot WORDS` in a shell with redirections, in a folder of its own."""

    def run(words: str, before: str = "") -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            f"{before} {sys.executable} -m specpilot_cli {words}",
            shell=True, executable="/bin/bash", cwd=tmp_path, capture_output=True, text=True,
            stdin=subprocess.DEVNULL, timeout=120, check=False,
        )  # fmt: skip

    return run


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("words", _COMMANDS)
def test_a_full_disk_behind_stdout(shell: Shell, words: str) -> None:
    done = shell(f"{words} > /dev/full")
    assert done.returncode == 3
    assert "No space left on device" in done.stderr
    assert "\n\nhint: " in done.stderr
    assert done.stderr.count("error") == 1
    assert "Traceback" not in done.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_the_output_file_is_written_though_stdout_is_full(shell: Shell, tmp_path: Path) -> None:
    assert shell("ceiling --list -o list.json > /dev/full").returncode == 3
    assert (tmp_path / "list.json").stat().st_size > 100


@pytest.mark.parametrize("words", _COMMANDS)
def test_a_closed_stdout(shell: Shell, words: str) -> None:
    done = shell(f"{words} >&-")
    assert done.returncode == 3
    assert done.stderr.startswith("error: standard output is closed\n\nhint: ")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("words", "code"), [("doctor", 0), ("ceiling none.json --tau 2", 2), ("docto", 2)]
)
def test_a_closed_stderr_changes_no_exit_code(shell: Shell, words: str, code: int) -> None:
    done = shell(f"{words} 2>&-")
    assert (done.returncode, done.stderr) == (code, "")
    assert bool(done.stdout) == (code == 0)


@pytest.mark.parametrize("words", ["--version", "doctor", "ceiling --list"])
def test_a_current_folder_that_is_gone(shell: Shell, words: str) -> None:
    done = shell(words, before="mkdir gone && cd gone && rmdir ../gone &&")
    assert done.returncode == 2
    said = done.stderr[done.stderr.index("error: ") :]
    assert said.startswith("error: the current folder no longer exists\n\nhint: ")


_SLEEP = """
import signal, sys, time
signal.signal(signal.SIGINT, signal.{sigint})
signal.signal(signal.SIGHUP, signal.{sighup})
import specpilot_cli.doctor.checks as checks
import specpilot_cli.main as entry
def sleep():
    try:
        print("ready", file=sys.stderr, flush=True)
        time.sleep({seconds})
        return []
    finally:
        print("cleaned up", file=sys.stderr, flush=True)
checks.run_checks = sleep
sys.argv = ["specpilot", "doctor"]
sys.exit(entry.main())
"""


def _signalled(
    program: str, number: signal.Signals, folder: Path, *arguments: str
) -> tuple[int, str]:
    """Exit code and messages of a program that is sent a signal once it says `ready`."""
    child = subprocess.Popen(
        [sys.executable, "-c", program, *arguments],
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, cwd=folder,
    )  # fmt: skip
    try:
        assert child.stderr is not None
        for line in child.stderr:
            if line == "ready\n":
                break
        child.send_signal(number)
        said = child.stderr.read()
        return child.wait(timeout=30), said
    finally:
        child.kill()
        child.wait()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_interrupt_and_clean_up(tmp_path: Path, number: signal.Signals) -> None:
    program = _SLEEP.format(sigint="default_int_handler", sighup="SIG_DFL", seconds=60)
    code, said = _signalled(program, number, tmp_path)
    assert code == 130
    assert said == "cleaned up\ninterrupted\n"


def test_sigterm_ends_a_background_job_too(tmp_path: Path) -> None:
    program = _SLEEP.format(sigint="SIG_IGN", sighup="SIG_DFL", seconds=60)
    code, said = _signalled(program, signal.SIGTERM, tmp_path)
    assert (code, said) == (130, "cleaned up\ninterrupted\n")


def test_nohup_is_respected(tmp_path: Path) -> None:
    program = _SLEEP.format(sigint="SIG_IGN", sighup="SIG_IGN", seconds=1)
    assert _signalled(program, signal.SIGHUP, tmp_path) == (0, "cleaned up\n")


_ANNOUNCED = """
import sys
import {module} as module
import specpilot_cli.main as entry
work = module.{function}
def announced(*args, **kwargs):
    print("ready", file=sys.stderr, flush=True)
    return work(*args, **kwargs)
module.{function} = announced
sys.exit(entry.main(sys.argv[1:]))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_recording_that_is_stopped_leaves_nothing(tmp_path: Path, number: signal.Signals) -> None:
    program = _ANNOUNCED.format(
        module="specpilot_cli.engines.reference.record", function="record_dense"
    )
    code, said = _signalled(
        program, number, tmp_path, "record", "--target", str(_DEMO / "target"),
        "--drafter", str(_DEMO / "drafter"), "--prompts", str(_DEMO / "prompts" / "dev.jsonl"),
        "-o", "l.safetensors", "--outputs", "answers.jsonl",
    )  # fmt: skip
    assert code == 130
    assert "Traceback" not in said
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_conversion_that_is_stopped_can_be_resumed(
    tmp_path: Path, number: signal.Signals
) -> None:
    rng = np.random.default_rng(0)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}", encoding="utf-8")
    tensors = {
        f"layers.{i}.weight": bf16_data(rng.integers(0x3D00, 0x3E00, (2048, 2048), dtype=np.uint16))
        for i in range(8)
    }
    write_safetensors(tmp_path / "model" / "model.safetensors", tensors)
    words = ["convert-w12", "model", "-o", "w12", "--workers", "1"]
    program = _ANNOUNCED.format(
        module="specpilot_cli.convert_w12.convert", function="convert_folder"
    )
    code, said = _signalled(program, number, tmp_path, *words)
    assert code == 130
    assert "Traceback" not in said
    assert not (tmp_path / "w12").exists()
    again = subprocess.run(
        [sys.executable, "-m", "specpilot_cli", *words, "--resume"],
        cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert again.returncode == 0, again.stderr
    assert verify_folder(tmp_path / "w12", tmp_path / "model").verdict == "identical"
    assert {path.name for path in tmp_path.iterdir()} == {"model", "w12"}


def test_a_stopped_client_prints_no_traceback(tmp_path: Path) -> None:
    """Interrupted inside an event loop, with SIGINT ignored as in a background job."""
    program = """
import os, signal, socket, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)
from specpilot_cli.engines.base import GenerateRequest
from specpilot_cli.engines.http_client import HttpEngine
import specpilot_cli.doctor.checks as checks
import specpilot_cli.main as entry
def ask():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with HttpEngine(url) as engine:
            requests = [GenerateRequest(str(i), (1,), 4) for i in range(8)]
            plain = type(engine._engine)._generate
            async def generate(self, request):
                if request.request_id == "5":
                    print("ready", file=sys.stderr, flush=True)
                    os.kill(os.getpid(), signal.SIGTERM)  # handled inside this task
                return await plain(self, request)
            type(engine._engine)._generate = generate
            engine.generate_many(requests, concurrency=8)
checks.run_checks = ask
sys.exit(entry.main(["doctor"]))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path, timeout=60,
        check=False,
    )  # fmt: skip
    assert done.returncode == 130
    assert done.stderr.startswith("ready\n")
    assert "Traceback" not in done.stderr
    assert "KeyboardInterrupt" not in done.stderr
