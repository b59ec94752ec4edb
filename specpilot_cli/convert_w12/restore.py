"""Give the source checkpoint back: the same shards, byte for byte, and the same other files."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

from specpilot_cli.convert_w12.decode import Raw, decode_tensor, source_head
from specpilot_cli.convert_w12.device import open_codec
from specpilot_cli.convert_w12.pipeline import Crew, Piece, Slot
from specpilot_cli.convert_w12.target import check_disk, check_target, copy_file
from specpilot_cli.errors import InputError
from specpilot_cli.io.append_file import AppendFile
from specpilot_cli.io.atomic import atomic_folder
from specpilot_cli.io.hashing import sha256_file
from specpilot_cli.io.hf_folder import CONFIG_NAME
from specpilot_cli.io.json_file import refuse_special_file
from specpilot_cli.io.w12_folder import W12Folder
from specpilot_cli.schema.w12_manifest import W12File, W12Source, W12Tensor
from specpilot_cli.ui import Reporter, SilentReporter

_DISK_MARGIN_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class Restoration:
    """What was written: (shard name, sha256, bytes) and how many tensors and other files."""

    shards: tuple[tuple[str, str, int], ...]
    tensors: int
    files: int


def restore_folder(
    path: Path,
    target: Path,
    *,
    threads: int = 1,
    force: bool = False,
    reporter: Reporter = SilentReporter(),
) -> Restoration:
    """Write the checkpoint that the W12 folder at `path` was made from to `target`.

    Every shard has the source's sha256; config.json and the index are the source's texts.
    With `force` a checkpoint of the same files is replaced, its weights whatever they are.
    InputError: a malformed folder, a damaged tensor or file (named), a bad target.
    MachineError: the disk is too small. On any error `target` does not appear.
    """
    with W12Folder(path) as opened:
        manifest = opened.manifest
        carried = [file for file in manifest.files if file.carried]
        written = {
            *(source.name for source in manifest.sources),
            *(file.path for file in carried),
            *manifest.source_texts,
        }
        check_target(target, path, written, force=force)
        if force:
            _refuse_losses(target, carried)
        source_bytes = sum(source.size_bytes for source in manifest.sources)
        check_disk(target, source_bytes + _DISK_MARGIN_BYTES)
        opened.read_once()
        with (
            atomic_folder(target, force=force) as temporary,
            Crew(open_codec("cpu"), threads) as crew,
        ):
            job = _Job(opened, temporary, crew, reporter, source_bytes)
            shards = tuple(job.restore(source) for source in manifest.sources)
            for name, text in manifest.source_texts.items():
                (temporary / name).write_bytes(text.encode())
            for file in carried:
                _copy_checked(path, temporary, file)
    return Restoration(shards, len(manifest.tensors), len(carried) + len(manifest.source_texts))


@dataclass(slots=True)
class _Job:
    opened: W12Folder
    out: Path
    crew: Crew
    reporter: Reporter
    total_bytes: int
    done_bytes: int = 0

    def restore(self, source: W12Source) -> tuple[str, str, int]:
        """Write one source file; returns (name, sha256, bytes)."""
        head = source_head(source)
        chain = self.crew.source_chain()
        chain.update(head)
        # The header is written last: without it the file is not one.
        file = AppendFile(self.out / source.name, len(head))

        def take(_: Piece, raw: Raw, slot: Slot) -> None:
            chain.update(raw, slot)
            file.append(raw.data)
            self.done_bytes += raw.size
            self.reporter.progress(
                "MB", self.done_bytes // 1_000_000, self.total_bytes // 1_000_000
            )

        hashes: list[tuple[W12Tensor, Future[str]]] = []
        try:
            for tensor in self.opened.tensors_of(source):
                malformed = decode_tensor(self.crew, self.opened, tensor, take)
                if malformed is not None:
                    self._compare(hashes)
                    raise self.opened.damaged(tensor, malformed)
                hashes.append((tensor, chain.hexdigest()))
            self._compare(hashes)
            sha256, size = chain.hexdigest().result(), file.position
            if (sha256, size) != (source.sha256, source.size_bytes):
                raise InputError(
                    f"`{source.name}` cannot be restored: its sha256 is not the source's",
                    where=str(self.opened.path),
                    hint="run `specpilot w12 verify` on the folder",
                )
            file.finish(head)
        finally:
            file.close()
        return source.name, sha256, size

    def _compare(self, hashes: list[tuple[W12Tensor, Future[str]]]) -> None:
        """Raise InputError for the first tensor up to which the file is not the source's."""
        for tensor, prefix in hashes:
            if prefix.result() != tensor.source_prefix_sha256:
                raise self.opened.damaged(tensor, "its bytes are not the source's")


def _refuse_losses(target: Path, carried: Sequence[W12File]) -> None:
    """Raise InputError if replacing the folder `target` could lose more than a checkpoint.

    The names that the manifest lists prove nothing: whoever wrote it chose them. So the folder
    must be a checkpoint, and its other files must be the very ones that are written again.
    """
    if not target.is_dir() or not any(target.iterdir()):
        return
    if not (target / CONFIG_NAME).is_file() or not any(target.glob("*.safetensors")):
        raise InputError(
            f"`{target}` is no checkpoint, and replacing it would lose what it holds",
            where=str(target),
            hint="choose another folder",
        )
    for file in carried:
        present = target / file.path
        is_lost = present.is_symlink() or (present.exists() and not present.is_file())
        if is_lost or (present.is_file() and sha256_file(present) != file.sha256):
            raise InputError(
                f"`{target}` holds another `{file.path}`, which replacing it would lose",
                where=str(target),
                hint="choose another folder, or remove that file first",
            )


def _copy_checked(path: Path, out: Path, file: W12File) -> None:
    refuse_special_file(path / file.path)
    copy_file(path / file.path, out / file.path)
    if sha256_file(out / file.path) != file.sha256:
        raise InputError(
            f"`{file.path}` was altered since the conversion",
            where=str(path),
            hint="run `specpilot w12 verify` on the folder",
        )
