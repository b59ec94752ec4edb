"""Checks on a folder to be written, before anything is: never the source, never by surprise."""

from __future__ import annotations

import re
import shutil
from collections.abc import Collection
from pathlib import Path

from specpilot_cli.errors import InputError, MachineError
from specpilot_cli.units import format_bytes

_SHA256_NAME = re.compile("[0-9a-f]{64}")


def check_target(target: Path, source: Path, written: Collection[str], *, force: bool) -> None:
    """Raise InputError unless `target` may be created, or with `force` replaced.

    Refused: a symlink (it may lead into a shared cache), a mount point (nothing can be renamed
    to it), a folder inside the source or around it, a non-empty folder without `force`, and with
    `force` a folder holding files other than `written` (relative paths): replacing it would lose
    them.
    """
    if target.is_symlink():
        raise InputError(
            f"`{target}` is a symbolic link", where=str(target), hint="give a real folder"
        )
    if target.is_mount():
        raise InputError(
            f"`{target}` is a mount point, which no finished folder can take the place of",
            where=str(target),
            hint="give a folder inside it",
        )
    here, there = source.resolve(), target.resolve()
    if here == there or here in there.parents or there in here.parents:
        raise InputError(
            f"`{target}` overlaps the source folder `{source}`",
            where=str(target),
            hint="write to a folder outside the source",
        )
    if not target.is_dir():
        return
    present = [file for file in target.rglob("*") if file.is_symlink() or not file.is_dir()]
    if present and not force:
        raise InputError(
            f"`{target}` exists and is not empty",
            where=str(target),
            hint="choose another folder, or use --force to replace it",
        )
    extra = [file for file in present if file.relative_to(target).as_posix() not in written]
    if extra:
        raise InputError(
            f"`{target}` holds `{extra[0].relative_to(target)}`, which replacing it would lose",
            where=str(target),
            hint="choose another folder, or remove that file first",
        )


def free_disk_bytes(target: Path) -> int:
    """Return what is free on the disk where `target` is written: beside it, see io.atomic."""
    existing = next(folder for folder in target.absolute().parents if folder.is_dir())
    return shutil.disk_usage(existing).free


def check_disk(target: Path, needed_bytes: int) -> None:
    """Raise MachineError if the disk of `target` has less than `needed_bytes` free."""
    free_bytes = free_disk_bytes(target)
    if free_bytes < needed_bytes:
        raise MachineError(
            f"not enough room: {format_bytes(needed_bytes)} needed, "
            f"{format_bytes(free_bytes)} free",
            where=str(target),
            hint="free some space or write to another disk",
        )


def copy_file(source: Path, target: Path) -> None:
    """Copy contents (of a link: what it points to), creating parent folders."""
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        shutil.copyfile(source, target)
    except FileNotFoundError as error:
        raise InputError(
            f"cannot read `{source}`",
            where=str(source),
            hint="did the file vanish while it was copied?",
        ) from error


def refuse_altered_blob(path: Path, sha256: str) -> None:
    """Raise InputError if `path` is a hub cache's blob whose name is another sha256.

    The cache names large files by their sha256, as the publisher gave it; a program that writes
    through the cache's links leaves the name and changes the content.
    """
    blob = path.resolve()
    if blob.parent.name == "blobs" and _SHA256_NAME.fullmatch(blob.name) and blob.name != sha256:
        raise InputError(
            f"`{path.name}` is not the published file: its sha256 is {sha256}, "
            f"the cache names it {blob.name}",
            where=str(path),
            hint="delete the file from the cache and download it again",
        )
