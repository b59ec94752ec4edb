"""Read a W12 folder: manifest, shards, and each tensor as its original bit patterns.

Engines that hold BF16 weights load such a folder with `read_w12_tensors`. A folder whose
manifest is missing, altered or in disagreement with its shards is refused.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from specpilot_cli.errors import InputError
from specpilot_cli.io.hashing import Crc32
from specpilot_cli.io.hf_folder import CONFIG_NAME, open_hf_folder, read_exact_text
from specpilot_cli.io.json_file import parse_json
from specpilot_cli.io.safetensors_stream import (
    SafetensorsFile,
    TensorInfo,
    byte_view,
    parse_header,
)
from specpilot_cli.io.validation import validate
from specpilot_cli.schema.w12_manifest import W12Manifest, W12Source, W12Tensor
from specpilot_kernels.w12 import codec, layout
from specpilot_kernels.w12.encoded import MalformedW12
from specpilot_kernels.w12.manifest import (
    FORMAT_NAME,
    MANIFEST_NAME,
    OTHER_VERSION,
    QUANT_METHOD,
    seal_holds,
    unknown_number,
)
from specpilot_kernels.w12.stored import Parts, encoded_specs, from_stored
from specpilot_kernels.w12.stripes import Stripe

_CHUNK_BYTES = 1 << 20
_CONVERT_AGAIN = "the conversion did not finish or was edited: run `specpilot convert-w12` again"


def is_w12_folder(path: Path) -> bool:
    """Return whether `path` is, or claims to be, a W12 folder (it may still be damaged)."""
    if (path / MANIFEST_NAME).is_file():
        return True
    if not (path / CONFIG_NAME).is_file():  # a pipe would keep the reader waiting
        return False
    try:
        config = json.loads((path / CONFIG_NAME).read_bytes())
    except (OSError, ValueError, RecursionError):
        return False
    quantization = config.get("quantization_config") if isinstance(config, dict) else None
    return isinstance(quantization, dict) and quantization.get("quant_method") == QUANT_METHOD


def read_manifest(path: Path) -> W12Manifest:
    """Return the checked manifest of the W12 folder at `path`.

    InputError: no folder, no manifest (an unfinished conversion), a format or layout this
    version does not read, or a manifest that differs from what was written.
    """
    if not path.is_dir():
        raise InputError(
            f"no such W12 folder: `{path}`",
            where=str(path),
            hint="give a folder made by `specpilot convert-w12`",
        )
    file = path / MANIFEST_NAME
    if not file.is_file() and path.name.endswith(".partial"):
        name = path.name.removeprefix(".").removesuffix(".partial")
        raise InputError(
            f"`{path}` is what an interrupted conversion left, not a finished W12 folder",
            where=str(path),
            hint=f"continue it: `specpilot convert-w12 SRC -o {path.with_name(name)} --resume`",
        )
    if not file.is_file():
        raise InputError(
            f"`{path}` is not a finished W12 folder: it has no `{MANIFEST_NAME}`",
            where=str(path),
            hint="convert a BF16 checkpoint with `specpilot convert-w12 SRC -o DST`",
        )
    text = read_exact_text(file)
    data = parse_json(text, str(file))
    _check_versions(data, file)
    manifest = validate(data, W12Manifest, lambda _: str(file))
    if manifest.text() != text or not seal_holds(text):
        raise InputError(
            "the manifest does not match its own hash", where=str(file), hint=_CONVERT_AGAIN
        )
    return manifest


def _check_versions(data: Any, file: Path) -> None:
    found = data if isinstance(data, dict) else {}
    if found.get("format") != FORMAT_NAME:
        raise InputError(f"not a {FORMAT_NAME} manifest", where=str(file), hint=_CONVERT_AGAIN)
    unknown = unknown_number(found.get("version"), found.get("layout"))
    if unknown is not None:
        raise InputError(unknown, where=str(file), hint=OTHER_VERSION)


class W12Folder:
    """An open W12 folder whose shards hold exactly the tensors its manifest lists.

    A context manager. Contents are not hashed on opening: hashing what is read is the caller's
    choice.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.manifest = read_manifest(path)
        self._of_source: dict[str, list[W12Tensor]] = {s.name: [] for s in self.manifest.sources}
        for tensor in self.manifest.tensors:
            self._of_source[tensor.source].append(tensor)
        self._stack = ExitStack()
        self._shards: dict[str, SafetensorsFile] = {}
        try:
            for shard in self.manifest.shards:
                file = self._stack.enter_context(SafetensorsFile(path / shard.name))
                self._shards[shard.name] = file
                prefix = len(file.header_bytes).to_bytes(8, "little")
                digest = hashlib.sha256(prefix + file.header_bytes).hexdigest()
                if (digest, file.size_bytes) != (shard.header_sha256, shard.size_bytes):
                    raise InputError(
                        "the safetensors header is not the one that was converted",
                        where=str(path / shard.name),
                        hint=_CONVERT_AGAIN,
                    )
            self._check_names()
            self._check_sources()
        except BaseException:
            self._stack.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stack.close()

    def stored(self, tensor: W12Tensor) -> npt.NDArray[Any]:
        """Return a tensor that was not converted, [shape], BF16 as uint16."""
        return self._shards[tensor.shard].read_array(tensor.name)

    def parts(self, tensor: W12Tensor) -> Parts:
        """Return the five parts of a converted tensor, not yet checked against each other."""
        file = self._shards[tensor.shard]
        return {
            part: file.read_array(tensor.name + suffix)
            for part, suffix in layout.PART_SUFFIXES.items()
        }

    def tensors_of(self, source: W12Source) -> list[W12Tensor]:
        """Return the tensors of one source file, in the order of its data."""
        return self._of_source[source.name]

    def read_once(self) -> None:
        """Say that every shard will be read once, see `SafetensorsFile.read_once`."""
        for file in self._shards.values():
            file.read_once()

    def shard(self, tensor: W12Tensor) -> SafetensorsFile:
        """Return the open file that holds `tensor`."""
        return self._shards[tensor.shard]

    def part(self, tensor: W12Tensor, part: str = "") -> TensorInfo:
        """Return where one part of a converted tensor lies; without a part, a stored tensor."""
        suffix = layout.PART_SUFFIXES[part] if part else ""
        return self._shards[tensor.shard].info(tensor.name + suffix)

    def window_counts(self, tensor: W12Tensor) -> npt.NDArray[np.int64]:
        """Return how many channels of a converted tensor have each window, int64 [256]."""
        info, counts = self.part(tensor, "window"), np.zeros(256, np.int64)
        for start in range(0, info.nbytes, _CHUNK_BYTES):
            window = np.empty(min(_CHUNK_BYTES, info.nbytes - start), np.uint8)
            self._shards[tensor.shard].read_into(info, start, window.data)
            counts += np.bincount(window, minlength=256)
        return counts

    def read_stripe(
        self, tensor: W12Tensor, stripe: Stripe, records: npt.NDArray[np.uint8]
    ) -> Parts:
        """Return the parts of one stripe of a converted tensor; only its own bytes are read.

        records: uint8 [row blocks, column blocks, 12288] to read into. MalformedW12 where the
        escape pointers cannot be followed; the rest is not yet checked.
        """
        self._read(tensor, "records", stripe.block, records)
        window = np.empty(stripe.rows, np.uint8)
        self._read(tensor, "window", stripe.channel, window)
        ptr = np.empty(stripe.blocks + 1, "<i4")
        self._read(tensor, "escape_ptr", stripe.block, ptr)
        first, last, escapes = int(ptr[0]), int(ptr[-1]), tensor.escapes or 0
        most = first + stripe.rows * tensor.shape[-1]
        if not 0 <= first <= last <= min(most, escapes):
            raise MalformedW12(
                f"escape_ptr runs from {first} to {last} in record rows {stripe.block} to "
                f"{stripe.block + stripe.blocks - 1}, the escape list from 0 to {escapes}"
            )
        channels = self.part(tensor, "window").nbytes
        if (stripe.channel == 0 and first != 0) or (
            stripe.channel + stripe.rows == channels and last != escapes
        ):
            raise MalformedW12("escape_ptr does not cover the escape list")
        at, bits = np.empty(last - first, "<i4"), np.empty(last - first, "<u2")
        self._read(tensor, "escape_at", first, at)
        self._read(tensor, "escape_bits", first, bits)
        return {
            "records": records, "window": window, "escape_ptr": ptr - ptr[0],
            "escape_at": at, "escape_bits": bits,
        }  # fmt: skip

    def _read(self, tensor: W12Tensor, part: str, start: int, target: npt.NDArray[Any]) -> None:
        """Fill `target` with the part from index `start` of its first dimension on."""
        info = self.part(tensor, part)
        step = target.itemsize * math.prod(target.shape[1:])
        self._shards[tensor.shard].read_into(info, start * step, byte_view(target))

    def original(
        self, tensor: W12Tensor, *, check: bool = False, threads: int = 1
    ) -> npt.NDArray[Any]:
        """Return a tensor as it was before the conversion, [shape], BF16 as uint16.

        InputError names the tensor when its parts contradict each other, and with `check` when
        what is stored has not the manifest's CRC-32.
        """
        if tensor.encoding == "stored":
            array = self.stored(tensor)
            digest = Crc32()
            if check:
                digest.update(byte_view(array))
            if check and digest.hexdigest() != tensor.stored_crc32:
                raise self.damaged(tensor, "its bytes are not the source's")
            return array
        parts = self.parts(tensor)
        if check and parts_crc32(parts) != tensor.stored_crc32:
            raise self.damaged(tensor, "its stored parts were altered")
        try:
            return codec.decode(from_stored(tuple(tensor.shape), parts), threads=threads)
        except MalformedW12 as error:
            raise self.damaged(tensor, str(error)) from error

    def damaged(self, tensor: W12Tensor, what: str) -> InputError:
        """Return the error for a tensor that is not what was converted."""
        return InputError(
            f"tensor `{tensor.name}` is damaged: {what}",
            where=str(self.path / tensor.shard),
            hint="copy the folder again, or convert the checkpoint again",
        )

    def _check_names(self) -> None:
        left_over = {shard: set(file.names) for shard, file in self._shards.items()}
        for tensor in self.manifest.tensors:
            for name, dtype, shape in stored_specs(tensor):
                file = self._shards[tensor.shard]
                if name not in left_over[tensor.shard]:
                    raise InputError(
                        f"no tensor named `{name}`", where=str(file.path), hint=_CONVERT_AGAIN
                    )
                info = file.info(name)
                if (info.dtype, info.shape) != (dtype, shape):
                    raise InputError(
                        f"`{name}` is {info.dtype} {list(info.shape)}, "
                        f"the manifest says {dtype} {list(shape)}",
                        where=str(file.path),
                        hint=_CONVERT_AGAIN,
                    )
                left_over[tensor.shard].remove(name)
        for shard_name, extra in left_over.items():
            if extra:
                raise InputError(
                    f"`{min(extra)}` is not in the manifest",
                    where=str(self.path / shard_name),
                    hint=_CONVERT_AGAIN,
                )

    def _check_sources(self) -> None:
        """Refuse source headers that do not list exactly the manifest's tensors, in order."""
        for source in self.manifest.sources:
            where = self.path / MANIFEST_NAME
            _, infos = parse_header(where, source.header.encode(), source.size_bytes)
            listed = [(info.name, info.dtype, info.shape) for info in infos.values()]
            ours = [
                (tensor.name, tensor.dtype, tuple(tensor.shape))
                for tensor in self.tensors_of(source)
            ]
            if listed != ours:
                raise InputError(
                    f"the source header of `{source.name}` lists other tensors than the manifest",
                    where=str(where),
                    hint=_CONVERT_AGAIN,
                )


def stored_specs(tensor: W12Tensor) -> list[tuple[str, str, tuple[int, ...]]]:
    """Return (name, dtype, shape) of every safetensors entry that holds `tensor`."""
    shape = tuple(tensor.shape)
    if tensor.encoding == "stored":
        return [(tensor.name, tensor.dtype, shape)]
    return encoded_specs(tensor.name, shape, tensor.escapes or 0)


def parts_crc32(parts: Parts) -> str:
    """Return the CRC-32 over the five parts' bytes in the order they are hashed."""
    digest = Crc32()
    for part in layout.PART_SUFFIXES:
        digest.update(byte_view(parts[part]))
    return digest.hexdigest()


def read_w12_tensors(
    folder: Path, *, check: bool = True, threads: int = 1
) -> Iterator[tuple[str, str, npt.NDArray[Any]]]:
    """Yield (name, safetensors dtype, array [shape]) of the original checkpoint, tensor by tensor.

    BF16 arrives as uint16 bit patterns; other dtypes as their numpy dtype. With `check`, what is
    stored of each tensor is compared with its CRC-32 before it is decoded. InputError: see
    `read_manifest`; a damaged tensor is named.
    """
    with W12Folder(folder) as opened:
        for tensor in opened.manifest.tensors:
            yield tensor.name, tensor.dtype, opened.original(tensor, check=check, threads=threads)


def read_folder_tensors(folder: Path) -> Iterator[tuple[str, str, npt.NDArray[Any]]]:
    """Yield (name, safetensors dtype, array [shape]) of a checkpoint, plain or W12.

    BF16 arrives as uint16 bit patterns, the same ones from either kind of folder. InputError:
    see `open_hf_folder` and `read_w12_tensors`.
    """
    if is_w12_folder(folder):
        yield from read_w12_tensors(folder)
        return
    opened = open_hf_folder(folder)
    for shard in opened.shards:
        with SafetensorsFile(folder / shard) as file:
            for name in file.names:
                yield name, file.info(name).dtype, file.read_array(name)
