from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest
from rich.console import Console

from specpilot_cli import ui
from specpilot_cli.main import main
from specpilot_cli.report import tables
from specpilot_cli.report.tables import print_line, print_pairs, print_table
from specpilot_cli.ui import ConsoleReporter, printable

OBEYED = {"\x1b", "\x07", "\r", "\x9b", "\u202e"}


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


def test_names_cannot_command_the_terminal(
    screen: io.StringIO, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "a\x1b[2J\x1b]0;x\x07\r\x9bm\u202eb\tc\nd — ü"
    shown = "a\\x1b[2J\\x1b]0;x\\x07\\r\\x9bm\\u202eb\tc\nd — ü"
    assert printable(name) == shown
    with ConsoleReporter() as reporter:
        reporter.note(name)
        reporter.warn(name)
    assert not OBEYED & set(screen.getvalue())
    print_line(name)
    print_pairs([(name, name)], title=name)
    print_table([name], [(name,)], title=name)
    plain = Console(width=60, highlight=False, force_terminal=False)
    monkeypatch.setattr(tables, "stdout_console", lambda: plain)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    print_pairs([(name, name)], title=name)
    print_table(["tensor"], [(name,)], title=name)
    out = capsys.readouterr().out
    assert out.count("x1b[2J") == 12
    assert not OBEYED & set(out)


def test_errors_cannot_command_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["w12", "verify", str(tmp_path / "a\x1b[2Jb")]) == 2
    err = capsys.readouterr().err
    assert "a\\x1b[2Jb" in err
    assert not OBEYED & set(err)
