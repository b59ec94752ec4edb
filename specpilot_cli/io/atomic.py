"""Writes that are either complete or absent, whatever kills the process.

Everything is written to `.NAME.partial` in the target's own folder, flushed to disk, and then
renamed. A `.partial` is never read; the next writer of the same name clears it. The lock on it
keeps two processes from writing one target at once.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from specpilot_cli.errors import InputError


def partial_path(path: Path) -> Path:
    """The temporary name used while `path` is being written."""
    return path.with_name(f".{path.name}.partial")


def retired_path(path: Path) -> Path:
    """The name that an existing folder `path` has for the moment in which it is replaced."""
    return path.with_name(f".{path.name}.old.partial")


def check_can_write(path: Path, *, where: str) -> None:
    """Raise `InputError` naming the option `where` if `path` could not be written later.

    For a check before hours of work, so it creates nothing. Missing parent folders are fine:
    writing creates them.
    """
    if path.exists() and not path.is_file():
        raise InputError(f"`{path}` is not a regular file", where=where, hint="choose another name")
    folder, names = path.absolute().parent, [partial_path(path).name]
    while not folder.exists():
        names.append(folder.name)
        folder = folder.parent
    if not folder.is_dir():
        raise InputError(
            f"cannot write `{path}`: `{folder}` is not a folder",
            where=where,
            hint="choose another folder",
        )
    if not os.access(folder, os.W_OK | os.X_OK):
        raise InputError(
            f"cannot write `{path}`: no permission to write in `{folder}`",
            where=where,
            hint="choose another folder",
        )
    longest = os.pathconf(folder, "PC_NAME_MAX")
    if any(len(os.fsencode(name)) > longest for name in names):
        raise InputError(
            f"cannot write `{path}`: the name is too long", where=where, hint="give a shorter one"
        )


def atomic_write_text(path: Path, text: str, *, force: bool = False) -> None:
    """Write UTF-8 `text`; see `atomic_output`."""
    atomic_write_bytes(path, text.encode(), force=force)


def atomic_write_bytes(path: Path, data: bytes, *, force: bool = False) -> None:
    """Write `data`; see `atomic_output`."""
    with atomic_output(path, force=force) as temporary:
        temporary.write_bytes(data)


@contextmanager
def atomic_output(path: Path, *, force: bool = False) -> Iterator[Path]:
    """Give a temporary file path to write; at the end it becomes `path`.

    Missing parent folders are created. On an exception the temporary file is removed and `path`
    is untouched. Raises `InputError` if `path` exists and `force` is false, if it is a folder,
    or if another process is writing it.
    """
    _refuse_existing_file(path, force)
    _make_parent(path)
    temporary = partial_path(path)
    lock = _lock_file(temporary, path)
    try:
        yield temporary
        # The caller may have replaced the file: sync whatever is there now.
        _fsync(temporary)
        if not force and path.exists():
            _refuse_existing_file(path, force)
        temporary.replace(path)
        _fsync(path.parent)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    finally:
        os.close(lock)


@contextmanager
def atomic_folder(
    path: Path, *, force: bool = False, keep: bool = False, keep_interrupted: bool = False
) -> Iterator[Path]:
    """Give an empty temporary folder to fill; at the end it becomes `path`.

    With `keep` the folder is not emptied first, and stays after an exception: the caller
    continues from what an earlier run left there, and must check all of it. With
    `keep_interrupted` it stays after a KeyboardInterrupt only, and only if something is in it.

    Every file in it is flushed to disk before the rename. With `force`, an existing folder is
    replaced after the new one is complete. Raises `InputError` if `path` is a file, if it is a
    non-empty folder and `force` is false, if something else has the name that a replaced folder
    gets, or if another process is writing it.
    """
    _refuse_existing_folder(path, force)
    _make_parent(path)
    temporary = partial_path(path)
    lock = _lock_folder(temporary, path, empty=not keep)
    try:
        yield temporary
        for found in temporary.rglob("*"):
            if found.is_file() and not found.is_symlink():
                _fsync(found)
        for folder in [temporary, *(f for f in temporary.rglob("*") if f.is_dir())]:
            _fsync(folder)
        _refuse_existing_folder(path, force)
        _swap_in(temporary, path)
    except BaseException as error:
        wanted = keep_interrupted and isinstance(error, KeyboardInterrupt)
        if not keep and not (wanted and any(temporary.iterdir())):
            shutil.rmtree(temporary, ignore_errors=True)
        raise
    finally:
        os.close(lock)


def _swap_in(temporary: Path, path: Path) -> None:
    retired = retired_path(path)
    shutil.rmtree(retired, ignore_errors=True)
    if path.exists():
        path.rename(retired)
    try:
        temporary.rename(path)
    except OSError:
        if retired.exists() and not path.exists():
            retired.rename(path)
        raise
    _fsync(path.parent)
    shutil.rmtree(retired, ignore_errors=True)


def _refuse_existing_file(path: Path, force: bool) -> None:
    if path.is_dir():
        raise InputError(f"`{path}` is a folder", where=str(path), hint="give a file name")
    if path.exists() and not force:
        raise InputError(
            f"`{path}` already exists", where=str(path), hint="use --force to overwrite it"
        )


def _refuse_existing_folder(path: Path, force: bool) -> None:
    if path.exists() and not path.is_dir():
        raise InputError(f"`{path}` is not a folder", where=str(path), hint="choose another name")
    if path.is_dir() and not force and any(path.iterdir()):
        raise InputError(
            f"`{path}` exists and is not empty",
            where=str(path),
            hint="choose another folder, or use --force to replace it",
        )
    retired = retired_path(path)
    if retired.is_symlink() or (retired.exists() and not retired.is_dir()):
        raise InputError(
            f"`{retired}` is in the way of writing `{path}`", where=str(path), hint="remove it"
        )


def _make_parent(path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            f"cannot create the folder `{path.parent}`: {error.strerror}",
            where=str(path),
            hint="choose another folder",
        ) from error


def _lock_file(temporary: Path, path: Path) -> int:
    """Create an empty `temporary` that this process alone holds; returns its descriptor."""
    try:
        descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    except OSError as error:
        raise InputError(
            f"cannot write `{path}`: {error.strerror}",
            where=str(path),
            hint="may this user write there?",
        ) from error
    _take(descriptor, temporary, path)
    os.ftruncate(descriptor, 0)
    return descriptor


def _lock_folder(temporary: Path, path: Path, *, empty: bool) -> int:
    """Create a folder `temporary` that this process alone holds; returns its descriptor."""
    try:
        temporary.mkdir(exist_ok=True)
        descriptor = os.open(temporary, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError as error:
        raise InputError(
            f"cannot write `{path}`: {error.strerror}",
            where=str(path),
            hint="may this user write there?",
        ) from error
    _take(descriptor, temporary, path)
    for leftover in temporary.iterdir() if empty else ():
        if leftover.is_dir() and not leftover.is_symlink():
            shutil.rmtree(leftover)
        else:
            leftover.unlink()
    return descriptor


def _take(descriptor: int, temporary: Path, path: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # The holder may have renamed or removed it between our open and our lock.
        ours, now = os.fstat(descriptor), temporary.stat()
        held = (ours.st_dev, ours.st_ino) == (now.st_dev, now.st_ino)
    except OSError:
        held = False
    if not held:
        os.close(descriptor)
        raise InputError(
            f"another process is writing `{path}`", where=str(path), hint="wait until it is done"
        )


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
