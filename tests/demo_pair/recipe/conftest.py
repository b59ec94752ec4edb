"""`specpilot apply recipe` as a process that tests can watch, interrupt and kill."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

DEADLINE_S = 120.0
Condition = Callable[[], bool]


def processes_on(folder: Path) -> list[int]:
    """Ids of running processes whose command line names `folder`, this test's own left out."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            command = (entry / "cmdline").read_bytes() if entry.name.isdigit() else b""
        except OSError:
            continue
        if str(folder).encode() in command and int(entry.name) != os.getpid():
            found.append(int(entry.name))
    return found


class RecipeProcess:
    """A run under way; `lines` holds what it has said on stderr."""

    def __init__(
        self, recipe: Path, out: Path, *options: str, sigint: signal.Handlers = signal.SIG_DFL
    ) -> None:
        self.recipe, self.out = recipe, out
        self.lines: list[str] = []
        self._queue: queue.Queue[str | None] = queue.Queue()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "specpilot_cli", "apply", "recipe", str(recipe),
             "--out", str(out), *options],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            cwd=recipe.parent,
            # as a shell leaves it: ignored in `command &`, whatever this test runs under
            preexec_fn=lambda: signal.signal(signal.SIGINT, sigint),
        )  # fmt: skip
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self._queue.put(line.rstrip("\n"))
        self._queue.put(None)

    def wait_for(self, text: str) -> None:
        """Return once a line with `text` has come."""
        deadline = time.monotonic() + DEADLINE_S
        while not any(text in line for line in self.lines):
            line = self._queue.get(timeout=max(0.1, deadline - time.monotonic()))
            assert line is not None, f"ended before `{text}`: {self.lines}"
            self.lines.append(line)

    def end(self, within_s: float) -> tuple[int, str, str]:
        """Exit code, stdout and all of stderr; fails if the process runs on."""
        assert self.process.stdout is not None
        code = self.process.wait(within_s)
        out = self.process.stdout.read()
        while (line := self._queue.get(timeout=within_s)) is not None:
            self.lines.append(line)
        return code, out, "\n".join(self.lines)

    def survivors(self, within_s: float = 10.0) -> list[int]:
        """Processes of this run that are still there after `within_s` seconds."""
        deadline = time.monotonic() + within_s
        while (found := processes_on(self.recipe)) and time.monotonic() < deadline:
            time.sleep(0.05)
        return found


@pytest.fixture
def start(
    tmp_path: Path, make_recipe: Callable[..., Path]
) -> Iterator[Callable[..., RecipeProcess]]:
    """`start(*options, sigint=, **recipe)`: a run in `tmp_path / "run"`, killed after the test."""
    started: list[RecipeProcess] = []

    def begin(
        *options: str, sigint: signal.Handlers = signal.SIG_DFL, **recipe: object
    ) -> RecipeProcess:
        run = RecipeProcess(make_recipe(**recipe), tmp_path / "run", *options, sigint=sigint)
        started.append(run)
        return run

    yield begin
    for run in started:
        run.process.kill()
        run.process.wait()
