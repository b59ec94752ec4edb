"""Ctrl-C and SIGTERM in the middle of `convert-w12`: what was done stays, and it is said."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.unit.convert_w12.conftest import MakeCheckpoint, convert, digests, weights


def interrupted(source: Path, target: Path, number: signal.Signals) -> tuple[int, str]:
    """Exit code and messages of a conversion that gets a signal once it has begun two shards.

    On a busy machine a run may be through before the signal is sent: then another one is tried.
    """
    for _ in range(10):
        ended = _interrupted_once(source, target, number)
        if ended is not None:
            return ended
        shutil.rmtree(target)
    raise AssertionError("every run finished before it could be interrupted")


def _interrupted_once(source: Path, target: Path, number: signal.Signals) -> tuple[int, str] | None:
    command = [sys.executable, "-m", "specpilot_cli", "convert-w12", str(source)]
    child = subprocess.Popen(
        [*command, "-o", str(target), "--workers", "1"],
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    partial = target.with_name(f".{target.name}.partial")
    try:
        deadline = time.monotonic() + 60
        while len(list(partial.glob("*.safetensors"))) < 2 and child.poll() is None:
            assert time.monotonic() < deadline
            time.sleep(0.0005)
        with contextlib.suppress(ProcessLookupError):
            os.kill(child.pid, number)
        _, said = child.communicate(timeout=60)
        return None if child.returncode == 0 else (child.returncode, said)
    finally:
        child.kill()
        child.wait()


@pytest.fixture
def source(make_checkpoint: MakeCheckpoint) -> Path:
    tensors = {f"layers.{i}.weight": weights(i, 1024, 1024) for i in range(16)}
    return make_checkpoint(tensors, shards=8)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_what_was_done_is_kept_and_continued(
    number: signal.Signals, source: Path, tmp_path: Path
) -> None:
    target, partial = tmp_path / "w12", tmp_path / ".w12.partial"
    code, said = interrupted(source, target, number)
    assert code == 130
    assert f"interrupted; `{partial}` (" in said
    assert "kept: continue with --resume" in said
    assert said.endswith("interrupted\n")
    assert "Traceback" not in said
    assert not target.exists()
    kept = {file.name: file.stat().st_ino for file in partial.iterdir()}
    done = subprocess.run(
        [sys.executable, "-m", "specpilot_cli", "convert-w12", source, "-o", target, "--resume"],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0
    assert "continuing from" in done.stderr
    first = min(kept)
    assert (target / first).stat().st_ino == kept[first]
    convert(source, tmp_path / "whole")
    assert digests(target) == digests(tmp_path / "whole")


def test_a_run_without_resume_starts_over_and_says_so(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "w12"
    assert interrupted(source, target, signal.SIGINT)[0] == 130
    done = subprocess.run(
        [sys.executable, "-m", "specpilot_cli", "convert-w12", source, "-o", target, "--quiet"],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0
    assert "removed `" in done.stderr
    assert "--resume would have continued" in done.stderr
