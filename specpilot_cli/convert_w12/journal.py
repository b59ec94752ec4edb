"""What a conversion has finished so far, so that `--resume` continues after a kill.

Beside `.DST.partial` lies `.DST.journal.partial` with one entry per finished shard. An entry is
written after its shard is on the disk; it is believed only after both shards, the source's and
ours, were read again and have the hashes it names. Neither folder can be loaded as a model.
"""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

from pydantic import ValidationError

from specpilot_cli.convert_w12.plan import Outcome, Selection
from specpilot_cli.errors import InputError
from specpilot_cli.io.atomic import atomic_write_text
from specpilot_cli.io.hashing import sha256_file
from specpilot_cli.io.safetensors_stream import SafetensorsFile, byte_view
from specpilot_cli.io.w12_folder import stored_specs
from specpilot_cli.schema.base import FileModel
from specpilot_cli.schema.w12_manifest import W12Shard, W12Tensor
from specpilot_kernels.w12 import layout


class ShardEntry(FileModel):
    """One finished shard: what the manifest will say of it, and under which choices."""

    layout: int
    include: list[str]
    exclude: list[str]
    shard: W12Shard
    tensors: list[W12Tensor]
    outcomes: list[Outcome]
    self_sha256: str = ""

    def digest(self) -> str:
        """SHA-256 over everything but the digest: an edited or torn entry is not believed."""
        return hashlib.sha256(self.model_dump_json(exclude={"self_sha256"}).encode()).hexdigest()


class Journal:
    """The entries of one conversion to `target`; made inside the lock on its partial folder."""

    def __init__(self, target: Path, selection: Selection, *, resume: bool) -> None:
        self._folder = journal_path(target)
        self._selection = selection
        if not resume:
            self.clear()
        self._folder.mkdir(exist_ok=True)

    def clear(self) -> None:
        """Remove all entries."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def write(self, shard: W12Shard, tensors: list[W12Tensor], outcomes: list[Outcome]) -> None:
        """Record a shard that was flushed to the disk."""
        entry = ShardEntry(
            layout=layout.LAYOUT,
            include=list(self._selection.include),
            exclude=list(self._selection.exclude),
            shard=shard,
            tensors=tensors,
            outcomes=outcomes,
        )
        entry = entry.model_copy(update={"self_sha256": entry.digest()})
        atomic_write_text(self._path(shard.name), entry.model_dump_json(), force=True)

    def finished(self, name: str, source: Path, out: Path) -> ShardEntry | None:
        """Return the entry of shard `name` if the two files have exactly the hashes it names.

        source, out: the shard in the source checkpoint and in the partial folder. None where
        anything differs: the shard must then be converted again.
        """
        try:
            entry = ShardEntry.model_validate_json(self._path(name).read_bytes())
        except (OSError, ValidationError):
            return None
        asked = (list(self._selection.include), list(self._selection.exclude))
        if entry.self_sha256 != entry.digest():
            return None
        if entry.layout != layout.LAYOUT or (entry.include, entry.exclude) != asked:
            return None
        if entry.shard.name != name or not _intact(entry, out):
            return None
        return entry if sha256_file(source) == entry.shard.source_sha256 else None

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}.json"


def journal_path(target: Path) -> Path:
    """The journal's folder while `target` is being written."""
    return target.with_name(f".{target.name}.journal.partial")


def _intact(entry: ShardEntry, path: Path) -> bool:
    if path.is_symlink():
        return False
    try:
        with SafetensorsFile(path) as file:
            prefix = len(file.header_bytes).to_bytes(8, "little")
            header_sha256 = hashlib.sha256(prefix + file.header_bytes).hexdigest()
            if header_sha256 != entry.shard.header_sha256:
                return False
            return all(
                _stored_digest(file, tensor) == _expected(tensor) for tensor in entry.tensors
            )
    except InputError:
        return False


def _stored_digest(file: SafetensorsFile, tensor: W12Tensor) -> str:
    digest = hashlib.sha256()
    for name, _, _ in stored_specs(tensor):
        digest.update(byte_view(file.read_array(name)))
    return digest.hexdigest()


def _expected(tensor: W12Tensor) -> str | None:
    return tensor.sha256 if tensor.encoding == "stored" else tensor.parts_sha256
