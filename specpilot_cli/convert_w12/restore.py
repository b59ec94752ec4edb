"""Give the source checkpoint back: the same shards, byte for byte, and the same other files."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

from specpilot_cli.convert_w12.target import check_disk, check_target, copy_file
from specpilot_cli.errors import InputError
from specpilot_cli.io.atomic import atomic_folder
from specpilot_cli.io.hashing import sha256_file
from specpilot_cli.io.safetensors_stream import byte_view
from specpilot_cli.io.w12_folder import W12Folder
from specpilot_cli.schema.w12_manifest import W12File, W12Shard, W12Tensor
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
    InputError: a malformed folder, a damaged tensor or file (named), a bad target.
    MachineError: the disk is too small. On any error `target` does not appear.
    """
    with W12Folder(path) as opened:
        manifest = opened.manifest
        carried = [file for file in manifest.files if file.path not in manifest.source_texts]
        written = {
            *(shard.name for shard in manifest.shards),
            *(file.path for file in carried),
            *manifest.source_texts,
        }
        check_target(target, path, written, force=force)
        shard_bytes = sum(shard.source_bytes for shard in manifest.shards)
        check_disk(target, shard_bytes + _DISK_MARGIN_BYTES)
        with atomic_folder(target, force=force) as temporary:
            job = _Job(opened, temporary, threads, reporter, len(manifest.tensors))
            shards = tuple(job.restore_shard(shard) for shard in manifest.shards)
            for name, text in manifest.source_texts.items():
                (temporary / name).write_bytes(text.encode())
            for file in carried:
                _copy_checked(path, temporary, file)
    return Restoration(shards, len(manifest.tensors), len(carried) + len(manifest.source_texts))


@dataclass(slots=True)
class _Job:
    opened: W12Folder
    out: Path
    threads: int
    reporter: Reporter
    total: int
    done: int = 0

    def restore_shard(self, shard: W12Shard) -> tuple[str, str, int]:
        """Write one shard; returns (name, sha256, bytes)."""
        header = shard.source_header.encode()
        digest = hashlib.sha256()
        with (self.out / shard.name).open("xb") as handle:
            for chunk in (len(header).to_bytes(8, "little"), header):
                digest.update(chunk)
                handle.write(chunk)
            for tensor in self.opened.manifest.tensors:
                if tensor.shard == shard.name:
                    raw = self._original_bytes(tensor)
                    digest.update(raw)
                    handle.write(raw)
            size = handle.tell()
            handle.flush()
            os.fsync(handle.fileno())
        if digest.hexdigest() != shard.source_sha256:
            raise InputError(
                f"`{shard.name}` cannot be restored: its sha256 is not the source's",
                where=str(self.opened.path),
                hint="run `specpilot w12 verify` on the folder",
            )
        return shard.name, digest.hexdigest(), size

    def _original_bytes(self, tensor: W12Tensor) -> memoryview:
        raw = byte_view(self.opened.original(tensor, threads=self.threads))
        if hashlib.sha256(raw).hexdigest() != tensor.sha256:
            raise self.opened.damaged(tensor, "its bytes are not the source's")
        self.done += 1
        self.reporter.progress("tensors", self.done, self.total)
        return raw


def _copy_checked(path: Path, out: Path, file: W12File) -> None:
    copy_file(path / file.path, out / file.path)
    if sha256_file(out / file.path) != file.sha256:
        raise InputError(
            f"`{file.path}` was altered since the conversion",
            where=str(path),
            hint="run `specpilot w12 verify` on the folder",
        )
