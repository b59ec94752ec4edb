from __future__ import annotations

import io

import pytest
from rich.console import Console

from specpilot_cli import ui


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """A captured stderr that is not a terminal."""
    stream = io.StringIO()
    monkeypatch.setattr(ui, "stderr_console", lambda: Console(file=stream, soft_wrap=True))
    return stream


def test_brackets_in_messages_survive(screen: io.StringIO) -> None:
    reporter = ui.ConsoleReporter()
    reporter.note("shape [m, n] of [bf16]")
    reporter.warn("lattice [red] is short")
    assert screen.getvalue() == "shape [m, n] of [bf16]\nwarning: lattice [red] is short\n"


def test_quiet_keeps_warnings_only(screen: io.StringIO) -> None:
    reporter = ui.ConsoleReporter(quiet=True)
    reporter.note("n")
    reporter.progress("work", 3, 3)
    reporter.warn("w")
    assert screen.getvalue() == "warning: w\n"


def test_without_a_terminal_progress_is_throttled_to_plain_lines(
    screen: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr(ui.time, "monotonic", lambda: now[0])
    reporter = ui.ConsoleReporter()
    for done in range(1, 101):
        now[0] += 0.125
        reporter.progress("replay", done, 100)
        reporter.progress("replay", done, 100)
    lines = screen.getvalue().splitlines()
    assert lines == ["replay: 41/100", "replay: 81/100", "replay: 100/100"]


def test_progress_can_be_switched_off(screen: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECPILOT_NO_PROGRESS", "1")
    reporter = ui.ConsoleReporter()
    reporter.progress("work", 1, 1)
    reporter.note("still here")
    assert screen.getvalue() == "still here\n"


def test_bars_leave_nothing_behind_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    terminal = Console(file=stream, force_terminal=True, width=80)
    monkeypatch.setattr(ui, "stderr_console", lambda: terminal)
    monkeypatch.setenv("TERM", "xterm")
    with ui.ConsoleReporter() as reporter:
        reporter.progress("work [x]", 1, 2)
        assert reporter._display is not None
        assert terminal._live_stack
        ui.stop_live_displays()
        assert not terminal._live_stack
        reporter.progress("work [x]", 1, 2)
        reporter.progress("work [x]", 2, 2)
        assert reporter._display is None
    assert "work [x]" in stream.getvalue()


def test_silent_reporter_satisfies_the_protocol(capsys: pytest.CaptureFixture[str]) -> None:
    reporter: ui.Reporter = ui.SilentReporter()
    reporter.note("a")
    reporter.warn("b")
    reporter.progress("c", 1, 2)
    assert capsys.readouterr() == ("", "")
