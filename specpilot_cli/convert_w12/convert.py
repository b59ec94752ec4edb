"""Convert a checkpoint folder: read, encode, decode, compare, hash and write in one pass.

Every stripe is decoded again and compared with the source as 16-bit patterns before it is
written, so a folder that exists is a folder that was checked.
"""

from __future__ import annotations

import errno
import hashlib
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from specpilot_cli.convert_w12.device import open_codec
from specpilot_cli.convert_w12.encode import SourceStream, convert_tensor, kept, survey_tensor
from specpilot_cli.convert_w12.finish import Contents, finish_folder
from specpilot_cli.convert_w12.leftovers import (
    clear,
    kept_when_interrupted,
    left_bytes,
    replaceable,
    tell_leftover,
)
from specpilot_cli.convert_w12.output import OutputShard
from specpilot_cli.convert_w12.pipeline import Crew
from specpilot_cli.convert_w12.plan import (
    Outcome,
    Selection,
    check_selection,
    refuse_name_clash,
    refuse_quantised,
)
from specpilot_cli.convert_w12.resume import finished_before
from specpilot_cli.convert_w12.shards import (
    DiskNeed,
    PlannedShard,
    PlannedTensor,
    disk_need,
    plan_shards,
)
from specpilot_cli.convert_w12.target import (
    check_disk,
    check_target,
    refuse_altered_blob,
)
from specpilot_cli.errors import InputError, MachineError
from specpilot_cli.io.atomic import atomic_folder
from specpilot_cli.io.hf_folder import HfFolder
from specpilot_cli.io.safetensors_stream import SafetensorsFile
from specpilot_cli.schema.w12_manifest import W12Manifest, W12Shard, W12Source, W12Tensor
from specpilot_cli.ui import Reporter, SilentReporter
from specpilot_kernels.w12.manifest import MANIFEST_NAME
from specpilot_kernels.w12.stripes import StripeCodec


@dataclass(frozen=True, slots=True)
class Conversion:
    """A finished conversion, or with `manifest` None what one would give.

    outcomes: one per tensor, in source order. left_out: entries of the source that were not
    carried over, see `why_left_out`. need: what must be free before a conversion begins.
    found_finished: it was there already, and was checked.
    """

    outcomes: tuple[Outcome, ...]
    left_out: tuple[str, ...]
    carried_bytes: int
    need: DiskNeed
    manifest: W12Manifest | None = None
    found_finished: bool = False

    @property
    def folder_bytes(self) -> int:
        """What the folder takes, without the headers of its files and its manifest."""
        return self.carried_bytes + sum(outcome.stored_bytes for outcome in self.outcomes)


@dataclass(slots=True)
class _Progress:
    reporter: Reporter
    total: int
    done: int = 0
    outcomes: list[Outcome] = field(default_factory=list)

    def add(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)
        self.done += outcome.raw_bytes
        self.reporter.progress("MB", self.done // 1_000_000, self.total // 1_000_000)


def survey_folder(
    folder: HfFolder,
    selection: Selection,
    *,
    threads: int = 1,
    shard_bytes: int | None = None,
    codec: StripeCodec | None = None,
    reporter: Reporter = SilentReporter(),
) -> Conversion:
    """Read every tensor and return what a conversion would give; write nothing.

    InputError as in `convert_folder`.
    """
    _check_source(folder, selection)
    progress = _Progress(reporter, folder.tensor_bytes)
    sources = _Sources(folder)
    shards = plan_shards(folder, selection, shard_bytes)
    with Crew(codec or open_codec("cpu"), threads) as crew, sources:
        for shard in shards:
            for tensor in shard.tensors:
                if tensor.reason is not None:
                    progress.add(kept(tensor.info, shard.name, tensor.reason))
                    continue
                file = sources.open(tensor)
                progress.add(survey_tensor(crew, file, tensor.info, shard.name))
    carried = _carried_bytes(folder)
    need = disk_need(shards, carried)
    return Conversion(tuple(progress.outcomes), folder.left_out, carried, need)


def convert_folder(
    folder: HfFolder,
    target: Path,
    selection: Selection,
    *,
    threads: int = 1,
    force: bool = False,
    resume: bool = False,
    shard_bytes: int | None = None,
    codec: StripeCodec | None = None,
    reporter: Reporter = SilentReporter(),
) -> Conversion:
    """Write the W12 form of `folder` to `target`; the manifest comes last, then the rename.

    shard_bytes: divide the tensors anew, see `plan_shards`. codec: the CPU's by default.
    With `resume`, what an interrupted run left is compared with what would be written and kept
    as far as it is the same, and what is done stays for the next try on an error; a target that
    is finished and right is only checked.

    InputError: a quantised source, a target that exists, is a symlink or overlaps the source,
    a pattern without a match, a damaged shard. MachineError: the disk may be too small. On any
    error, and on a kill, `target` does not appear; what an interrupted run wrote stays.
    """
    _check_source(folder, selection)
    shards = plan_shards(folder, selection, shard_bytes)
    carried = _carried_bytes(folder)
    need = disk_need(shards, carried)
    if resume and (target / MANIFEST_NAME).is_file() and not force:
        found = finished_before(
            folder, target, shards, threads=threads, codec=codec, reporter=reporter
        )
        return Conversion(
            found.outcomes, folder.left_out, carried, need, found.manifest, found_finished=True
        )
    check_target(target, folder.path, replaceable(folder, shards, target), force=force)
    left = left_bytes(target)
    check_disk(target, max(need.reserve_bytes, need.total_bytes - left))
    progress = _Progress(reporter, folder.tensor_bytes)
    with (
        _disk_full_is_said(target, resume),
        kept_when_interrupted(target, reporter),
        atomic_folder(target, force=force, keep=resume, keep_interrupted=True) as temporary,
        Crew(codec or open_codec("cpu"), threads) as crew,
    ):
        tell_leftover(target, left, resume, reporter)
        clear(temporary, {shard.name for shard in shards})
        job = _Job(folder, temporary, crew, progress, resume)
        job.convert(shards)
        manifest = finish_folder(folder, temporary, job.contents)
    return Conversion(tuple(progress.outcomes), folder.left_out, carried, need, manifest)


@contextmanager
def _disk_full_is_said(target: Path, resume: bool) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        done = "--resume continues from what is done" if resume else "nothing was kept"
        raise MachineError(
            f"the disk is full; {done}",
            where=str(target),
            hint="free some space or write to another disk",
        ) from error


class _Sources:
    """The source files, opened one after the other; a context manager."""

    def __init__(self, folder: HfFolder) -> None:
        self._folder = folder
        self._stack = ExitStack()
        self._file: SafetensorsFile | None = None

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def open(self, tensor: PlannedTensor) -> SafetensorsFile:
        """Return the file that holds `tensor`, which must still be where it was."""
        file = self.open_file(tensor.source)
        if file.info(tensor.info.name) != tensor.info:
            raise InputError(
                f"the file changed during the conversion: `{tensor.info.name}` lies elsewhere",
                where=str(file.path),
                hint="convert again when nothing writes to the source",
            )
        return file

    def open_file(self, name: str) -> SafetensorsFile:
        """Return a source file; the one before it is closed."""
        path = self._folder.path / name
        if self._file is None or self._file.path != path:
            self._stack.close()
            self._file = self._stack.enter_context(SafetensorsFile(path))
            self._file.read_once()
        return self._file


@dataclass(slots=True)
class _Job:
    folder: HfFolder
    out: Path
    crew: Crew
    progress: _Progress
    resume: bool
    contents: Contents = field(default_factory=Contents)
    written: list[tuple[PlannedTensor, Outcome, Future[str], Future[str]]] = field(
        default_factory=list
    )

    def convert(self, shards: Sequence[PlannedShard]) -> None:
        """Write every shard. Sources and shards divide the same sequence of tensors."""
        waiting = list(self.folder.shards)
        sources = _Sources(self.folder)
        stream: SourceStream | None = None
        with sources:
            for shard in shards:
                with self._open_shard(shard) as out:
                    for tensor in shard.tensors:
                        while stream is None or stream.file.path.name != tensor.source:
                            self._close_source(stream)
                            stream = self._open_source(sources, waiting.pop(0))
                        sources.open(tensor)
                        self._convert_tensor(stream, tensor, out)
                self._close_shard(out)
            self._close_source(stream)
            # Files without a tensor at the end.
            for name in waiting:
                self._close_source(self._open_source(sources, name))
        self.contents.tensors = self._entries()

    def _open_source(self, sources: _Sources, name: str) -> SourceStream:
        file = sources.open_file(name)
        chain = self.crew.source_chain()
        chain.update(len(file.header_bytes).to_bytes(8, "little") + file.header_bytes)
        return SourceStream(file, chain)

    def _close_source(self, stream: SourceStream | None) -> None:
        if stream is None:
            return
        sha256 = stream.chain.hexdigest().result()
        refuse_altered_blob(stream.file.path, sha256)
        self.contents.sources.append(
            W12Source(
                name=stream.file.path.name,
                sha256=sha256,
                size_bytes=stream.file.size_bytes,
                header=stream.file.header_bytes.decode(),
            )
        )

    def _open_shard(self, shard: PlannedShard) -> OutputShard:
        longest = [spec for tensor in shard.tensors for spec in tensor.longest()]
        first = shard.tensors[0].source if shard.tensors else self.folder.shards[0]
        if shard.name in self.folder.shards and not shard.tensors:
            first = shard.name
        with SafetensorsFile(self.folder.path / first) as file:
            metadata = file.metadata
        return OutputShard(self.out / shard.name, longest, metadata, resume=self.resume)

    def _close_shard(self, out: OutputShard) -> None:
        self.contents.shards.append(
            W12Shard(
                name=out.name,
                size_bytes=out.writer.size_bytes,
                header_sha256=hashlib.sha256(out.writer.header).hexdigest(),
            )
        )
        if out.writer.kept:
            self.progress.reporter.note(f"kept, compared byte for byte: `{out.name}`")

    def _convert_tensor(
        self, stream: SourceStream, tensor: PlannedTensor, out: OutputShard
    ) -> None:
        info = tensor.info
        outcome, stored_crc32 = convert_tensor(self.crew, stream, info, out, tensor.reason)
        # Nobody waits for the hashes here: the next tensor is read meanwhile.
        prefix_sha256 = stream.chain.hexdigest()
        self.written.append((tensor, outcome, stored_crc32, prefix_sha256))
        self.progress.add(outcome)

    def _entries(self) -> list[W12Tensor]:
        return [
            W12Tensor(
                name=tensor.info.name,
                encoding="w12" if outcome.converted else "stored",
                dtype=outcome.dtype,
                shape=list(outcome.shape),
                source=tensor.source,
                shard=outcome.shard,
                stored_crc32=stored_crc32.result(),
                source_prefix_sha256=prefix_sha256.result(),
                escapes=outcome.escapes,
                reason=outcome.reason,
            )
            for tensor, outcome, stored_crc32, prefix_sha256 in self.written
        ]


def _check_source(folder: HfFolder, selection: Selection) -> None:
    refuse_quantised(folder)
    refuse_name_clash(folder)
    check_selection(selection, folder)


def _carried_bytes(folder: HfFolder) -> int:
    return sum((folder.path / relative).stat().st_size for relative in folder.carried)
