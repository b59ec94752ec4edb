"""Messages and progress, always on stderr; stdout belongs to the answer.

Domain code takes a `Reporter` and never sees a terminal.
"""

from __future__ import annotations

import os
import re
import sys
import threading
import time
import weakref
from functools import cache
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID

# Without a terminal, one plain line per label at most this often.
_PLAIN_INTERVAL_S = 5.0

# What a terminal obeys instead of showing: C0 without tab and newline, DEL, C1, and the marks
# that reorder text; and half surrogate pairs, which no stream can write. Names of tensors and
# files are other people's.
_OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    """Return `text` with the characters that would command a terminal as `\\x1b` and the like."""
    return _OBEYED.sub(lambda found: found[0].encode("unicode_escape").decode("ascii"), text)


class Reporter(Protocol):
    """What domain code may say while it works."""

    def note(self, msg: str) -> None:
        """A fact worth knowing; dropped by `--quiet`."""

    def warn(self, msg: str) -> None:
        """Something that weakens the answer; never dropped."""

    def progress(self, label: str, done: int, total: int) -> None:
        """`done` of `total` units of `label`; call as often as convenient."""


class SilentReporter:
    """Says nothing; the default of every domain function."""

    def note(self, msg: str) -> None:
        """Drop `msg`."""

    def warn(self, msg: str) -> None:
        """Drop `msg`."""

    def progress(self, label: str, done: int, total: int) -> None:
        """Drop the progress."""


@cache
def stderr_console() -> Console:
    """The one console for messages; created on first use so that `--help` need not load it."""
    from rich.console import Console

    return Console(stderr=True, highlight=False, soft_wrap=True)


@cache
def stdout_console() -> Console:
    """The console for human-readable answers. Wide when piped, so that names are not cut."""
    from rich.console import Console

    width = None if sys.stdout.isatty() else 200
    return Console(highlight=False, width=width)


_live: weakref.WeakSet[ConsoleReporter] = weakref.WeakSet()


def drop_stdout() -> None:
    """Send what is still buffered to nowhere: flushing it at exit would fail once more."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def stop_live_displays() -> None:
    """Take down every progress bar, so that what is printed next stands alone."""
    for reporter in list(_live):
        reporter.close()


class ConsoleReporter:
    """Notes, warnings and bars on stderr.

    Bars appear only on a terminal, without `quiet`, and without `SPECPILOT_NO_PROGRESS`;
    otherwise progress is a plain line every few seconds and at the end. Safe to call from
    several threads. Use as a context manager, or call `close()`.
    """

    def __init__(self, quiet: bool = False) -> None:
        self._quiet = quiet
        self._console = stderr_console()
        self._bars = (
            self._console.is_terminal
            and not quiet
            and not os.environ.get("SPECPILOT_NO_PROGRESS")
            and os.environ.get("TERM") != "dumb"
        )
        self._show_plain = not quiet and not os.environ.get("SPECPILOT_NO_PROGRESS")
        self._display: Progress | None = None
        self._tasks: dict[str, TaskID] = {}
        self._last_line_s: dict[str, float] = {}
        self._finished: set[str] = set()
        self._lock = threading.RLock()
        _live.add(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Remove the bars; the reporter stays usable."""
        with self._lock:
            if self._display is not None:
                self._display.stop()
            self._display = None
            self._tasks.clear()

    def note(self, msg: str) -> None:
        """Print `msg` unless quiet."""
        if not self._quiet:
            self._print(msg)

    def warn(self, msg: str) -> None:
        """Print `msg` with the word that makes its weight clear without colour."""
        self._print(msg, prefix="[yellow]warning:[/yellow] ")

    def progress(self, label: str, done: int, total: int) -> None:
        """Move the bar of `label`, or print a line now and then without a terminal."""
        with self._lock:
            if self._bars:
                self._move_bar(label, done, total)
            elif self._show_plain:
                self._plain_line(label, done, total)

    def _print(self, msg: str, prefix: str = "") -> None:
        from rich.markup import escape

        with self._lock:
            self._console.print(prefix + escape(printable(msg)))

    def _move_bar(self, label: str, done: int, total: int) -> None:
        from rich.markup import escape

        if self._display is None:
            self._display = _new_display(self._console)
            self._display.start()
        if label not in self._tasks:
            self._tasks[label] = self._display.add_task(escape(label), total=total)
        self._display.update(self._tasks[label], completed=done, total=total)
        if all(task.finished for task in self._display.tasks):
            self.close()

    def _plain_line(self, label: str, done: int, total: int) -> None:
        now_s = time.monotonic()
        if done < total:
            self._finished.discard(label)
            # The first call starts the clock: short work prints its end and nothing else.
            if now_s - self._last_line_s.setdefault(label, now_s) < _PLAIN_INTERVAL_S:
                return
        elif label in self._finished:
            return
        else:
            self._finished.add(label)
        self._last_line_s[label] = now_s
        self._print(f"{label}: {done}/{total}")


def _new_display(console: Console) -> Progress:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    from rich.progress import TimeRemainingColumn as Remaining

    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=30),
        MofNCompleteColumn(),
        Remaining(compact=True),
        console=console,
        transient=True,
    )
