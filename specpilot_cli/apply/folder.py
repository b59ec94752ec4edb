"""The folder of one run: claimed before any work, marked as unfinished until the last file is in.

A folder with the marker in it is not a result, whatever else it holds. Nothing ever reads it
again: a later run takes a folder of its own.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from itertools import count
from pathlib import Path

from specpilot_cli.errors import InputError, MachineError, SpecPilotError
from specpilot_cli.ui import Reporter

RESULT_FILE, REPORT_FILE = "result.json", "report.html"
MARKER = "UNFINISHED"
LOGS = "logs"
_PARENT = Path("specpilot-runs")

# What a full, read-only or vanished disk answers; anything else is a bug and looks like one.
_DISK_ERRORS = frozenset(
    {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM,
     errno.EIO, errno.ENOENT, errno.ENOTDIR}
)  # fmt: skip


@contextmanager
def run_folder(out: Path | None, name: str, reporter: Reporter) -> Iterator[Path]:
    """Claim `out`, or a new folder under `specpilot-runs/`, for a run of recipe `name`.

    Gives its absolute path. The marker is removed when the block ends; if it ends with an error,
    the folder stays as it is and the reader is told so. Raises `InputError` for a folder that is
    in use or cannot be made, `MachineError` when the disk fails the run.
    """
    folder = _claim_new(name) if out is None else _claim(out.resolve(), name)
    try:
        yield folder
        (folder / MARKER).unlink(missing_ok=True)
    except OSError as error:
        _say_unfinished(folder, "no result", reporter)
        if error.errno not in _DISK_ERRORS:
            raise
        raise MachineError(
            f"{error.strerror}: `{error.filename or folder}`",
            hint=f"is there space, and may this user write, in `{folder}`?",
        ) from error
    except SpecPilotError:
        _say_unfinished(folder, "no result", reporter)
        raise
    except KeyboardInterrupt:
        _say_unfinished(folder, "interrupted, no result", reporter)
        raise


def serving_folder(out: Path | None, name: str) -> Path:
    """A new folder for a server that stays: its logs and its plugin's configuration, no result.

    Raises `InputError` for an `out` that is in use.
    """
    folder = (out or default_folder(name)).resolve()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError(f"`{folder}` is in use", where="--out", hint="name a new folder")
    return folder


def default_folder(name: str) -> Path:
    """Where a run that starts now goes without `--out`."""
    return _PARENT / f"{name}-{datetime.now(UTC):%Y%m%d-%H%M%S}"


def _say_unfinished(folder: Path, what: str, reporter: Reporter) -> None:
    reporter.warn(f"{what}: `{folder}` holds an unfinished run; server logs go to its `{LOGS}/`")


def _claim_new(name: str) -> Path:
    """A folder that no other run has, even one started in the same second."""
    stem = default_folder(name).resolve()
    for number in count(1):
        folder = stem if number == 1 else stem.with_name(f"{stem.name}-{number}")
        if _try_claim(folder, name):
            return folder
    raise AssertionError("count() does not end")


def _claim(folder: Path, name: str) -> Path:
    if _try_claim(folder, name):
        return folder
    problem = "is in use" if folder.is_dir() else "is not a folder"
    if (folder / MARKER).exists():
        problem += ": it holds an unfinished run"
    raise InputError(
        f"`{folder}` {problem}",
        where="--out",
        hint="name a new folder; runs are neither continued nor overwritten",
    )


def _try_claim(folder: Path, name: str) -> bool:
    """Whether `folder` was new or empty and now belongs to this run alone."""
    text = (
        f"A run of `specpilot apply recipe {name}` started here at "
        f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC and has not finished.\n"
        f"If it is no longer running, this folder is not a result and can be deleted.\n"
    )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            return False
        # exclusive: of two runs that both saw an empty folder, one gets it
        with (folder / MARKER).open("x", encoding="utf-8") as marker:
            marker.write(text)
        # a run that began and ended since the look above took its marker away, not its files
        if [path.name for path in folder.iterdir()] != [MARKER]:
            (folder / MARKER).unlink()
            return False
    except FileExistsError:
        return False
    except OSError as error:
        raise InputError(
            f"cannot write to `{folder}`: {error.strerror}",
            where="--out",
            hint="name a folder that this user may write to with --out",
        ) from error
    return True
