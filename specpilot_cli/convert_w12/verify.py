"""Check a W12 folder: every byte against its manifest, and on request every bit against the source.

Two kinds of fault differ: a *problem* is content that is not what was converted (verdict
mismatch); a folder whose structure cannot be trusted at all is an InputError.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from specpilot_cli.convert_w12.compare import Problem, Reference
from specpilot_cli.convert_w12.decode import Raw, decode_tensor, source_head
from specpilot_cli.convert_w12.device import open_codec
from specpilot_cli.convert_w12.pipeline import Crew, HashChain, Piece, Slot
from specpilot_cli.errors import InputError
from specpilot_cli.io.hashing import sha256_file
from specpilot_cli.io.safetensors_stream import tensor_nbytes
from specpilot_cli.io.w12_folder import W12Folder
from specpilot_cli.schema.w12_manifest import W12Source, W12Tensor
from specpilot_cli.ui import Reporter, SilentReporter
from specpilot_kernels.w12.manifest import MANIFEST_NAME
from specpilot_kernels.w12.stripes import StripeCodec


@dataclass(frozen=True, slots=True)
class Verification:
    """What was checked and what was wrong.

    compared: tensors compared bit for bit with the source checkpoint; 0 without one.
    unknown_files: files the manifest does not list; they are not part of the model.
    """

    tensors: int
    converted: int
    files: int
    compared: int
    problems: tuple[Problem, ...]
    unknown_files: tuple[str, ...]

    @property
    def verdict(self) -> str:
        """`identical` or `mismatch`."""
        return "mismatch" if self.problems else "identical"


def verify_folder(
    path: Path,
    against: Path | None = None,
    *,
    threads: int = 1,
    codec: StripeCodec | None = None,
    reporter: Reporter = SilentReporter(),
) -> Verification:
    """Check the W12 folder at `path`, and with `against` compare it with that checkpoint.

    Everything is decoded and the sha256 of every source file is computed again, so that what
    passes can be restored. InputError: an unfinished or malformed folder, a safetensors file the
    manifest does not know, or a source that cannot be read.
    """
    problems: list[Problem] = []
    with ExitStack() as stack:
        opened = stack.enter_context(W12Folder(path))
        unknown = _unknown_files(opened)
        tensors = opened.manifest.tensors
        source = stack.enter_context(Reference(against)) if against is not None else None
        if source is not None:
            problems += source.missing({tensor.name for tensor in tensors})
        crew = stack.enter_context(Crew(codec or open_codec("cpu"), threads))
        opened.read_once()
        job = _Job(opened, source, crew, reporter)
        for file in opened.manifest.sources:
            problems += job.check_source(file)
        for other in opened.manifest.files:
            what = _check_file(path / other.path, other.sha256)
            if what is not None:
                problems.append(Problem("file", other.path, what))
    return Verification(
        tensors=len(tensors),
        converted=sum(tensor.encoding == "w12" for tensor in tensors),
        files=len(opened.manifest.files),
        compared=source.compared if source is not None else 0,
        problems=tuple(problems),
        unknown_files=unknown,
    )


@dataclass(slots=True)
class _Checked:
    """One decoded tensor: hashes under way, and what was found on the way."""

    tensor: W12Tensor
    malformed: str | None
    difference: str | None
    stored_crc32: Future[str]
    prefix_sha256: Future[str]


@dataclass(slots=True)
class _Job:
    opened: W12Folder
    reference: Reference | None
    crew: Crew
    reporter: Reporter
    done: int = 0

    def check_source(self, source: W12Source) -> Iterator[Problem]:
        """Yield what is wrong with the tensors of one source file, and with the file as a whole."""
        chain = self.crew.source_chain()
        chain.update(source_head(source))
        checked = []
        for tensor in self.opened.tensors_of(source):
            checked.append(self._check_tensor(tensor, chain))
            self.done += 1
            self.reporter.progress("tensors", self.done, len(self.opened.manifest.tensors))
        # After the first wrong bit the hash of the file says nothing about later tensors.
        sound = True
        for found in checked:
            right = found.prefix_sha256.result() == found.tensor.source_prefix_sha256
            what = _what_is_wrong(found, right or not sound)
            sound = sound and right
            if what is not None:
                yield Problem("tensor", found.tensor.name, what, found.tensor.shard)
        size = len(source_head(source)) + sum(
            tensor_nbytes(found.tensor.dtype, found.tensor.shape) for found in checked
        )
        if sound and (chain.hexdigest().result(), size) != (source.sha256, source.size_bytes):
            yield Problem("source", source.name, "its sha256 cannot be reproduced")

    def _check_tensor(self, tensor: W12Tensor, chain: HashChain) -> _Checked:
        stored = self.crew.stored_chain()
        comparison = self.reference.compare(tensor) if self.reference is not None else None

        def take(piece: Piece, raw: Raw, slot: Slot) -> None:
            chain.update(raw, slot)
            if comparison is not None:
                comparison.add(piece.start, raw)

        malformed = decode_tensor(self.crew, self.opened, tensor, take, stored=stored)
        difference = comparison.result() if comparison is not None else None
        return _Checked(tensor, malformed, difference, stored.hexdigest(), chain.hexdigest())


def _what_is_wrong(found: _Checked, right: bool) -> str | None:
    """Return what is wrong with a tensor; right: nothing speaks against its decoded bytes."""
    if found.malformed is not None:
        return f"the stored parts were altered: {found.malformed}"
    intact = found.stored_crc32.result() == found.tensor.stored_crc32
    if intact and right:
        return found.difference
    altered = "the stored parts were altered"
    if found.tensor.encoding == "stored" or intact:
        altered = "its bytes are not the source's"
    return altered if found.difference is None else f"{altered}: {found.difference}"


def _check_file(path: Path, sha256: str) -> str | None:
    if not path.is_file():
        return "missing"
    return None if sha256_file(path) == sha256 else "altered"


def _unknown_files(opened: W12Folder) -> tuple[str, ...]:
    manifest = opened.manifest
    shards = {shard.name for shard in manifest.shards}
    known = {*shards, *(file.path for file in manifest.files), MANIFEST_NAME}
    found = (
        file.relative_to(opened.path).as_posix()
        for file in opened.path.rglob("*")
        if not file.is_dir()
    )
    unknown = tuple(sorted(name for name in found if name not in known))
    stray = next((name for name in unknown if name.endswith(".safetensors")), None)
    if stray is not None:
        raise InputError(
            f"`{stray}` is not part of the conversion, but an engine may load it",
            where=str(opened.path),
            hint="move it out of the folder",
        )
    return unknown
