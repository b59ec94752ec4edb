"""What a conversion finds in its way: an earlier folder, or what an interrupted run left."""

from __future__ import annotations

import shutil
import stat
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from specpilot_cli.convert_w12.shards import PlannedShard
from specpilot_cli.convert_w12.target import check_target
from specpilot_cli.errors import InputError
from specpilot_cli.io.append_file import only_name
from specpilot_cli.io.atomic import partial_path
from specpilot_cli.io.hf_folder import CONFIG_NAME, INDEX_NAME, HfFolder
from specpilot_cli.io.w12_folder import read_manifest
from specpilot_cli.ui import Reporter
from specpilot_cli.units import format_bytes
from specpilot_kernels.w12.manifest import MANIFEST_NAME


@contextmanager
def kept_when_interrupted(target: Path, reporter: Reporter) -> Iterator[None]:
    """Say what an interruption left, and how to go on from there."""
    try:
        yield
    except KeyboardInterrupt:
        left = left_bytes(target)
        if left:
            kept = f"`{partial_path(target)}` ({format_bytes(left)})"
            reporter.warn(f"interrupted; {kept} kept: continue with --resume")
        raise


def foreseen(
    folder: HfFolder, target: Path, shards: Sequence[PlannedShard], *, force: bool, resume: bool
) -> list[str]:
    """Return what stands in the way of a conversion to `target`, and what it would do about it."""
    found: list[str] = []
    if resume and (target / MANIFEST_NAME).is_file() and not force:
        return [f"`{target}` is finished: a run would check it"]
    try:
        check_target(target, folder.path, replaceable(folder, shards, target), force=force)
    except InputError as error:
        found.append(f"a run would be refused: {error.message}; {error.hint}")
    left = left_bytes(target)
    if left:
        what = "continue from" if resume else "remove (without --resume)"
        found.append(
            f"a run would {what} `{partial_path(target)}` ({format_bytes(left)}), "
            "left by an interrupted conversion"
        )
    return found


def replaceable(folder: HfFolder, shards: Sequence[PlannedShard], target: Path) -> Collection[str]:
    """Return the files that a conversion to `target` may replace: its own, old and new."""
    written = {*(shard.name for shard in shards), *folder.carried}
    written |= {CONFIG_NAME, MANIFEST_NAME, INDEX_NAME}
    try:
        manifest = read_manifest(target)
    except InputError:
        return written
    return written.union(
        (shard.name for shard in manifest.shards), (file.path for file in manifest.files)
    )


def left_bytes(target: Path) -> int:
    """Bytes an interrupted run left: they are used again or removed."""
    files = partial_path(target).rglob("*")
    return sum(file.lstat().st_size for file in files if not file.is_dir())


def tell_leftover(target: Path, nbytes: int, resume: bool, reporter: Reporter) -> None:
    if not nbytes:
        return
    what = f"`{partial_path(target)}` ({format_bytes(nbytes)}), left by an interrupted conversion"
    if resume:
        reporter.note(f"continuing from {what}")
    else:
        reporter.warn(f"removed {what}; --resume would have continued from it")


def clear(temporary: Path, names: Collection[str]) -> None:
    """Remove all leftovers but files that may be shards of this conversion.

    A file with a second name is removed too: it may be a file of the source, copied by links,
    and what is kept is written to.
    """
    for leftover in list(temporary.iterdir()):
        found = leftover.lstat()
        if stat.S_ISDIR(found.st_mode):
            shutil.rmtree(leftover)
        elif leftover.name not in names or not only_name(found):
            leftover.unlink()
