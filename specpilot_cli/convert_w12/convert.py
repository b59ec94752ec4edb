"""Convert a checkpoint folder: read, encode, decode, compare and hash in one pass.

Each tensor is read once. Its encoding is decoded again and compared with the source as 16-bit
patterns before it is written, so a folder that exists is a folder that was checked.
"""

from __future__ import annotations

import errno
import hashlib
import shutil
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from specpilot_cli.convert_w12.configuration import w12_configuration
from specpilot_cli.convert_w12.journal import Journal, ShardEntry
from specpilot_cli.convert_w12.plan import (
    Outcome,
    Selection,
    check_selection,
    reason_to_keep,
    refuse_name_clash,
    refuse_quantised,
    why_not_smaller,
)
from specpilot_cli.convert_w12.target import check_disk, check_target, copy_file
from specpilot_cli.errors import MachineError
from specpilot_cli.io.atomic import atomic_folder, partial_path
from specpilot_cli.io.hashing import sha256_file
from specpilot_cli.io.hf_folder import CONFIG_NAME, INDEX_NAME, HfFolder, config_json
from specpilot_cli.io.hub import hub_origin
from specpilot_cli.io.safetensors_stream import (
    NUMPY_DTYPES,
    SafetensorsFile,
    TensorData,
    TensorInfo,
    byte_view,
)
from specpilot_cli.io.shard_writer import ShardWriter
from specpilot_cli.io.w12_folder import (
    encoded_parts,
    encoded_specs,
    parts_digest,
    stored_specs,
)
from specpilot_cli.schema.w12_manifest import (
    FORMAT_NAME,
    MANIFEST_NAME,
    W12File,
    W12Manifest,
    W12Shard,
    W12Tensor,
    sealed,
)
from specpilot_cli.ui import Reporter, SilentReporter
from specpilot_kernels.w12 import codec, layout
from specpilot_kernels.w12.encoded import EncodedW12

# Room for file headers, the manifest and the file system's own needs.
_DISK_MARGIN_BYTES = 64 << 20
_EXPECTED_ESCAPE_SHARE = 2e-3


@dataclass(frozen=True, slots=True)
class Conversion:
    """A finished conversion, or with `manifest` None what one would give.

    outcomes: one per tensor, in source order. left_out: files of the source that were not
    carried over, because they are weights in another form.
    """

    outcomes: tuple[Outcome, ...]
    left_out: tuple[str, ...]
    carried_bytes: int
    manifest: W12Manifest | None = None


@dataclass(slots=True)
class _Progress:
    reporter: Reporter
    total: int
    done: int = 0
    outcomes: list[Outcome] = field(default_factory=list)

    def add(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)
        self.done += outcome.raw_bytes
        self.reporter.progress("tensor MB", self.done // 1_000_000, self.total // 1_000_000)


def survey_folder(
    folder: HfFolder,
    selection: Selection,
    *,
    threads: int = 1,
    reporter: Reporter = SilentReporter(),
) -> Conversion:
    """Read every tensor and return what a conversion would give; write nothing.

    InputError as in `convert_folder`.
    """
    _check_source(folder, selection)
    progress = _Progress(reporter, folder.tensor_bytes)
    for shard in folder.shards:
        with SafetensorsFile(folder.path / shard) as file:
            for name in file.names:
                info = file.info(name)
                reason = reason_to_keep(info, folder.config, selection)
                if reason is not None:
                    progress.add(_kept(info, shard, reason))
                else:
                    found = codec.survey(file.read_array(name), threads=threads)
                    progress.add(_surveyed(info, shard, found))
    return Conversion(tuple(progress.outcomes), folder.left_out, _carried_bytes(folder))


def convert_folder(
    folder: HfFolder,
    target: Path,
    selection: Selection,
    *,
    threads: int = 1,
    force: bool = False,
    resume: bool = False,
    reporter: Reporter = SilentReporter(),
) -> Conversion:
    """Write the W12 form of `folder` to `target`; the manifest comes last, then the rename.

    With `resume`, shards that an interrupted run finished are kept if they and their sources
    still have the hashes it noted, and what is done stays for the next try on an error.

    InputError: a quantised source, a target that exists, is a symlink or overlaps the source,
    a pattern without a match, a damaged shard. MachineError: the disk is too small. On any
    error, and on a kill, `target` does not appear.
    """
    _check_source(folder, selection)
    written = {*folder.shards, *folder.carried, CONFIG_NAME, MANIFEST_NAME, INDEX_NAME}
    check_target(target, folder.path, written, force=force)
    left = _bytes_left(target) if resume else 0
    check_disk(target, max(_DISK_MARGIN_BYTES, _bytes_needed(folder, selection) - left))
    progress = _Progress(reporter, folder.tensor_bytes)
    try:
        with (
            atomic_folder(target, force=force, keep=resume) as temporary,
            _journal(target, selection, resume) as journal,
            ThreadPoolExecutor(2) as hashers,
        ):
            job = _Job(folder, temporary, selection, threads, hashers, progress, journal)
            for shard in job.left_to_do():
                job.convert_shard(shard)
            manifest = _finish(job)
            (temporary / MANIFEST_NAME).write_bytes(manifest.text().encode())
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        kept = "--resume continues from what is done" if resume else "nothing was kept"
        raise MachineError(f"the disk is full; {kept}", where=str(target)) from error
    journal.clear()
    return Conversion(tuple(progress.outcomes), folder.left_out, _carried_bytes(folder), manifest)


@contextmanager
def _journal(target: Path, selection: Selection, resume: bool) -> Iterator[Journal]:
    journal = Journal(target, selection, resume=resume)
    try:
        yield journal
    except BaseException:
        if not resume:
            journal.clear()
        raise


def _bytes_left(target: Path) -> int:
    """Bytes an interrupted run left: they are used again or removed."""
    files = partial_path(target).rglob("*")
    return sum(file.lstat().st_size for file in files if not file.is_dir())


@dataclass(slots=True)
class _Job:
    folder: HfFolder
    out: Path
    selection: Selection
    threads: int
    hashers: ThreadPoolExecutor
    progress: _Progress
    journal: Journal
    tensors: list[W12Tensor] = field(default_factory=list)
    shards: list[W12Shard] = field(default_factory=list)
    weight_map: dict[str, str] = field(default_factory=dict)
    total_bytes: int = 0

    def left_to_do(self) -> Iterator[str]:
        """Yield the shards to convert; take over the finished ones, remove all other leftovers."""
        for leftover in list(self.out.iterdir()):
            if leftover.is_dir() and not leftover.is_symlink():
                shutil.rmtree(leftover)
            elif leftover.name not in self.folder.shards:
                leftover.unlink()
        for shard in self.folder.shards:
            entry = self.journal.finished(shard, self.folder.path / shard, self.out / shard)
            if entry is not None:
                self._take_over(entry)
                self.progress.reporter.note(f"kept, checked by its hashes: `{shard}`")
            else:
                (self.out / shard).unlink(missing_ok=True)
                yield shard

    def _take_over(self, entry: ShardEntry) -> None:
        self.shards.append(entry.shard)
        self.tensors += entry.tensors
        for tensor in entry.tensors:
            self.weight_map.update((name, tensor.shard) for name, _, _ in stored_specs(tensor))
        for outcome in entry.outcomes:
            self.total_bytes += outcome.stored_bytes
            self.progress.add(outcome)

    def convert_shard(self, shard: str) -> None:
        first = len(self.tensors)
        with SafetensorsFile(self.folder.path / shard) as file:
            prefix = len(file.header_bytes).to_bytes(8, "little")
            digest = hashlib.sha256(prefix + file.header_bytes)
            longest = [spec for name in file.names for spec in self._longest(file.info(name))]
            with ShardWriter(self.out / shard, longest, file.metadata) as writer:
                late: list[tuple[str, TensorData]] = []
                for name in file.names:
                    late += self._convert_tensor(file, name, shard, digest, writer)
                # Wide elements first: a window of odd length must not shift what follows it.
                late.sort(key=lambda part: -NUMPY_DTYPES[part[1].dtype].itemsize)
                for part, data in late:
                    writer.add(part, data)
            self.shards.append(
                W12Shard(
                    name=shard,
                    source_sha256=digest.hexdigest(),
                    source_bytes=file.size_bytes,
                    source_header=file.header_bytes.decode(),
                    header_sha256=hashlib.sha256(writer.header).hexdigest(),
                )
            )
        self.journal.write(self.shards[-1], self.tensors[first:], self.progress.outcomes[first:])

    def _longest(self, info: TensorInfo) -> list[tuple[str, str, tuple[int, ...]]]:
        stored = [(info.name, info.dtype, info.shape)]
        if self._reason(info) is not None:
            return stored
        weights = info.nbytes // 2
        return encoded_specs(info.name, info.shape, weights)

    def _reason(self, info: TensorInfo) -> str | None:
        return reason_to_keep(info, self.folder.config, self.selection)

    def _convert_tensor(
        self, file: SafetensorsFile, name: str, shard: str, digest: Any, writer: ShardWriter
    ) -> list[tuple[str, TensorData]]:
        """Write the tensor, or its records; return its small parts, to be written later."""
        info = file.info(name)
        array = file.read_array(name)
        raw = byte_view(array)
        sha256 = self.hashers.submit(lambda: hashlib.sha256(raw).hexdigest())
        whole = self.hashers.submit(digest.update, raw)
        reason = self._reason(info)
        if reason is None:
            found = codec.survey(array, threads=self.threads)
            outcome = _surveyed(info, shard, found)
        else:
            outcome = _kept(info, shard, reason)
        if outcome.converted:
            encoded = _encode_checked(name, array, found, self.threads)
            entries = list(encoded_parts(name, encoded))
            parts_sha256 = self.hashers.submit(parts_digest, encoded)
        else:
            entries, parts_sha256 = [(name, TensorData(info.dtype, info.shape, array))], None
        writer.add(*entries[0])
        self.weight_map.update((part, shard) for part, _ in entries)
        self.total_bytes += outcome.stored_bytes
        whole.result()
        self.tensors.append(_entry(outcome, sha256.result(), parts_sha256))
        self.progress.add(outcome)
        return entries[1:]


def _encode_checked(
    name: str, bits: npt.NDArray[np.uint16], found: codec.Survey, threads: int
) -> EncodedW12:
    encoded = codec.encode(bits, threads=threads, surveyed=found)
    if not codec.matches(bits, encoded, threads=threads):
        raise RuntimeError(f"W12 codec error: `{name}` does not decode to its own bits")
    return encoded


def _entry(outcome: Outcome, sha256: str, parts_sha256: Future[str] | None) -> W12Tensor:
    return W12Tensor(
        name=outcome.name,
        encoding="w12" if outcome.converted else "stored",
        dtype=outcome.dtype,
        shape=list(outcome.shape),
        shard=outcome.shard,
        sha256=sha256,
        parts_sha256=parts_sha256.result() if parts_sha256 is not None else None,
        escapes=outcome.escapes,
        reason=outcome.reason,
    )


def _finish(job: _Job) -> W12Manifest:
    """Write configuration, index and the other files; return the manifest."""
    folder, texts = job.folder, {CONFIG_NAME: job.folder.config_text}
    rewritten = {CONFIG_NAME: config_json(w12_configuration(folder.config, job.tensors))}
    if folder.index is not None and folder.index_text is not None:
        texts[INDEX_NAME] = folder.index_text
        metadata = folder.index.get("metadata")
        metadata = metadata if isinstance(metadata, dict) else {}
        index = {
            "metadata": {**metadata, "total_size": job.total_bytes},
            "weight_map": dict(sorted(job.weight_map.items())),
        }
        rewritten[INDEX_NAME] = config_json(index)
    for name, text in rewritten.items():
        (job.out / name).write_bytes(text.encode())
    for relative in folder.carried:
        copy_file(folder.path / relative, job.out / relative)
    origin = hub_origin(folder.path)
    return sealed(
        W12Manifest(
            format=FORMAT_NAME,
            version=layout.FORMAT_VERSION,
            layout=layout.LAYOUT,
            source_name=origin.repo if origin else folder.path.resolve().name,
            source_hub=origin,
            source_texts=texts,
            shards=job.shards,
            tensors=job.tensors,
            files=[
                W12File(path=name, sha256=sha256_file(job.out / name))
                for name in (*rewritten, *folder.carried)
            ],
            self_sha256="",
        )
    )


def _check_source(folder: HfFolder, selection: Selection) -> None:
    refuse_quantised(folder)
    refuse_name_clash(folder)
    check_selection(selection, folder)


def _kept(info: TensorInfo, shard: str, reason: str) -> Outcome:
    return Outcome(
        info.name, info.dtype, info.shape, shard, info.nbytes, info.nbytes, reason=reason
    )


def _surveyed(info: TensorInfo, shard: str, found: codec.Survey) -> Outcome:
    if not found.shrinks:
        return _kept(info, shard, why_not_smaller(info.shape, found.nbytes, found.escapes))
    return Outcome(
        info.name, info.dtype, info.shape, shard, info.nbytes, found.nbytes,
        escapes=found.escapes,
        window_low=int(found.window.min()),
        window_high=int(found.window.max()),
    )  # fmt: skip


def _bytes_needed(folder: HfFolder, selection: Selection) -> int:
    def stored(info: TensorInfo) -> int:
        if reason_to_keep(info, folder.config, selection) is not None:
            return info.nbytes
        matrices = info.shape[0] if len(info.shape) == 3 else 1
        escapes = int(info.nbytes // 2 * _EXPECTED_ESCAPE_SHARE)
        rows, cols = info.shape[-2:]
        encoded = layout.encoded_nbytes(rows, cols, escapes, matrices=matrices)
        return min(info.nbytes, encoded)

    tensors = sum(stored(info) for _, info in folder.tensors)
    return tensors + _carried_bytes(folder) + _DISK_MARGIN_BYTES


def _carried_bytes(folder: HfFolder) -> int:
    return sum((folder.path / relative).stat().st_size for relative in folder.carried)
