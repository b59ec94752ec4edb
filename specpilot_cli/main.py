"""Entry point: run the application and turn exceptions into a message and an exit code."""

from __future__ import annotations

import errno
import gc
import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from specpilot_cli.errors import InputError, MachineError, SpecPilotError

_INTERRUPTED = 130
_READER_LEFT = 128 + signal.SIGPIPE
_OBJECTS_BETWEEN_COLLECTIONS = 100_000
_MACHINE_ERRORS = frozenset(
    {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO, errno.ENOMEM, errno.EMFILE,
     errno.EBADF}
)  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Run `specpilot` with `argv` (default: the process arguments); returns the exit code.

    Without `argv` the process is taken to end after it.
    """
    if argv is None:
        # Imports make hundreds of thousands of objects that stay. To search for garbage among them
        # every 700 objects, as is the default, takes 7 % of a short command's time.
        gc.set_threshold(_OBJECTS_BETWEEN_COLLECTIONS, 10, 10)
    with _stopped_as_interrupted():
        code = _flushed(_run(argv))
    if argv is None:
        # All is cleaned up: a late Ctrl-C may end the process, and shall print no traceback.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        # Python would search everything for garbage twice more, half a second where torch is.
        gc.freeze()
    return code


def _run(argv: Sequence[str] | None) -> int:
    try:
        _check_surroundings()
        from specpilot_cli.app import app

        app(args=None if argv is None else list(argv), prog_name="specpilot")
    except SystemExit as stop:
        code = _code_of(stop)
        # Typer turns Ctrl-C inside a command into this exit code, and says nothing.
        return code if code != _INTERRUPTED else _interrupted()
    except KeyboardInterrupt:
        return _interrupted()
    except SpecPilotError as error:
        _stop_displays()
        _explain(error)
        return error.exit_code
    except OSError as error:
        _stop_displays()
        return _explain_os_error(error)
    except RuntimeError as error:
        _stop_displays()
        return _explain_runtime_error(error)
    except Exception as error:  # noqa: BLE001 - the one place where any bug becomes a message
        _stop_displays()
        _report_bug(error)
        return SpecPilotError.exit_code
    return 0


def _interrupted() -> int:
    _stop_displays()
    _say("interrupted")
    return _INTERRUPTED


@contextmanager
def _stopped_as_interrupted() -> Iterator[None]:
    """Let SIGTERM and SIGHUP stop a command as Ctrl-C does: cleaned up, exit code 130.

    A signal that is ignored stays ignored (`nohup`).
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    ends = [n for n in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) == signal.SIG_DFL]

    def stop(*_: object) -> None:
        for number in ends:  # a supervisor sends both: the second must not cut the clean-up short
            signal.signal(number, signal.SIG_IGN)
        # an event loop takes SIGINT in its own way, where SIGINT is not ignored (`command &`)
        if signal.getsignal(signal.SIGINT) in (signal.SIG_IGN, signal.SIG_DFL, None):
            raise KeyboardInterrupt
        signal.raise_signal(signal.SIGINT)

    for number in ends:
        signal.signal(number, stop)
    try:
        yield
    finally:
        for number in ends:
            signal.signal(number, signal.SIG_DFL)


def _check_surroundings() -> None:
    """What every command needs: a stream for its answer, and a folder to stand in."""
    if sys.stderr is None:  # closed: messages have nowhere to go, the exit code still tells
        sys.stderr = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w", encoding="utf-8")
    if sys.stdout is None:
        raise MachineError(
            "standard output is closed", hint="redirect it to a file, or to /dev/null"
        )
    try:
        Path.cwd()
    except FileNotFoundError as error:
        raise InputError(
            "the current folder no longer exists", hint="change to a folder that does"
        ) from error


def _code_of(stop: SystemExit) -> int:
    if stop.code is None:
        return 0
    if isinstance(stop.code, int):
        return stop.code
    _say(str(stop.code))
    return SpecPilotError.exit_code


def _flushed(code: int) -> int:
    """`code`, or that of an answer which cannot be delivered.

    At the interpreter's own exit the failure would be a traceback.
    """
    if sys.stdout is None:
        return code
    try:
        sys.stdout.flush()
    except OSError as error:
        from specpilot_cli.ui import drop_stdout

        drop_stdout()
        if isinstance(error, BrokenPipeError):
            return code or _READER_LEFT
        error.filename = error.filename or "standard output"
        return code or _explain_os_error(error)
    return code


def _explain(error: SpecPilotError) -> None:
    _say(error.message, label="error", style="bold red")
    if error.where is not None:
        _say(f"  at {error.where}")
    if error.hint is not None:
        _say("")
        _say(error.hint, label="hint", style="cyan")
    if _debugging():
        traceback.print_exception(error)


def _explain_os_error(error: OSError) -> int:
    """What the file system answered: a full or broken disk is the machine's, the rest is input."""
    if error.errno is None:
        _report_bug(error)
        return SpecPilotError.exit_code
    where = None if error.filename is None else str(error.filename)
    kind = MachineError if error.errno in _MACHINE_ERRORS else InputError
    known = kind(error.strerror or str(error), where=where, hint=_hint_for(error.errno))
    _explain(known)
    return known.exit_code


def _explain_runtime_error(error: RuntimeError) -> int:
    """Python before 3.13 resolves a link that leads to itself to this; everything else is a bug."""
    if str(error).startswith("Symlink loop from "):
        return _explain_os_error(OSError(errno.ELOOP, str(error)))
    _report_bug(error)
    return SpecPilotError.exit_code


def _hint_for(number: int) -> str:
    if number == errno.EFBIG:
        return "files may not become that large here: look at `ulimit -f` and the file system"
    if number in _MACHINE_ERRORS:
        return "is there space, and can it be written?"
    if number in (errno.EACCES, errno.EPERM):
        return "may this user read and write there?"
    if number == errno.ELOOP:
        return "a link in that path leads back to itself"
    if number == errno.ENAMETOOLONG:
        return "give a shorter name"
    return "does every folder in that path exist?"


def _report_bug(error: Exception) -> None:
    text = str(error) or "no message"
    _say(f"{type(error).__name__}: {text}", label="internal error", style="bold red")
    if _debugging():
        traceback.print_exception(error)
    else:
        _say("")
        _say("this is a bug; set SPECPILOT_DEBUG=1 to see where", label="hint", style="cyan")


def _debugging() -> bool:
    return os.environ.get("SPECPILOT_DEBUG", "0") not in ("", "0")


def _say(text: str, *, label: str | None = None, style: str = "") -> None:
    from rich.markup import escape

    from specpilot_cli.ui import printable, stderr_console

    prefix = f"[{style}]{label}:[/{style}] " if label else ""
    stderr_console().print(prefix + escape(printable(text)))


def _stop_displays() -> None:
    # Only a loaded ui module can have a bar on screen.
    if "specpilot_cli.ui" in sys.modules:
        from specpilot_cli.ui import stop_live_displays

        stop_live_displays()


if __name__ == "__main__":
    sys.exit(main())
