"""Entry point: run the application and turn exceptions into a message and an exit code."""

from __future__ import annotations

import errno
import os
import sys
import traceback
from collections.abc import Sequence

from specpilot_cli.errors import InputError, MachineError, SpecPilotError

_MACHINE_ERRORS = frozenset(
    {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.ENOMEM, errno.EMFILE, errno.EBADF}
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run `specpilot` with `argv` (default: the process arguments); returns the exit code."""
    try:
        from specpilot_cli.app import app

        app(args=None if argv is None else list(argv), prog_name="specpilot")
    except SystemExit as stop:
        return _code_of(stop)
    except KeyboardInterrupt:
        _stop_displays()
        _say("interrupted")
        return 130
    except SpecPilotError as error:
        _stop_displays()
        _explain(error)
        return error.exit_code
    except OSError as error:
        _stop_displays()
        return _explain_os_error(error)
    except Exception as error:  # noqa: BLE001 - the one place where any bug becomes a message
        _stop_displays()
        _report_bug(error)
        return SpecPilotError.exit_code
    return 0


def _code_of(stop: SystemExit) -> int:
    if stop.code is None:
        return 0
    if isinstance(stop.code, int):
        return stop.code
    _say(str(stop.code))
    return SpecPilotError.exit_code


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


def _hint_for(number: int) -> str:
    if number in _MACHINE_ERRORS:
        return "is there space, and is the disk writable?"
    if number in (errno.EACCES, errno.EPERM):
        return "may this user read and write there?"
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

    from specpilot_cli.ui import stderr_console

    prefix = f"[{style}]{label}:[/{style}] " if label else ""
    stderr_console().print(prefix + escape(text))


def _stop_displays() -> None:
    # Only a loaded ui module can have a bar on screen.
    if "specpilot_cli.ui" in sys.modules:
        from specpilot_cli.ui import stop_live_displays

        stop_live_displays()


if __name__ == "__main__":
    sys.exit(main())
