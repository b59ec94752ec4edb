"""Read a W12 folder: manifest, shards, and each tensor as its original bit patterns.

Engines that hold BF16 weights load such a folder with `read_w12_tensors`. A folder whose
manifest is missing, altered or in disagreement with its shards is refused.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from specpilot_cli.errors import InputError
from specpilot_cli.io.hf_folder import CONFIG_NAME, open_hf_folder, read_exact_text
from specpilot_cli.io.json_file import parse_json
from specpilot_cli.io.safetensors_stream import SafetensorsFile, TensorData, array_data, byte_view
from specpilot_cli.io.validation import validate
from specpilot_cli.schema.w12_manifest import (
    FORMAT_NAME,
    MANIFEST_NAME,
    W12Manifest,
    W12Tensor,
    self_digest,
)
from specpilot_kernels.w12 import codec, layout
from specpilot_kernels.w12.encoded import EncodedW12, MalformedW12

QUANT_METHOD = "w12"
_PART_DTYPES = {
    "records": "U8",
    "window": "U8",
    "escape_ptr": "I32",
    "escape_col": "I32",
    "escape_bits": "U16",
}
_CONVERT_AGAIN = "the conversion did not finish or was edited: run `specpilot convert-w12` again"


def is_w12_folder(path: Path) -> bool:
    """Return whether `path` is, or claims to be, a W12 folder (it may still be damaged)."""
    if (path / MANIFEST_NAME).is_file():
        return True
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
            f"no such model folder: `{path}`",
            where=str(path),
            hint="give a folder with config.json and safetensors files",
        )
    file = path / MANIFEST_NAME
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
    if manifest.text() != text or self_digest(manifest) != manifest.self_sha256:
        raise InputError(
            "the manifest does not match its own hash", where=str(file), hint=_CONVERT_AGAIN
        )
    return manifest


def _check_versions(data: Any, file: Path) -> None:
    found = data if isinstance(data, dict) else {}
    if found.get("format") != FORMAT_NAME:
        raise InputError(f"not a {FORMAT_NAME} manifest", where=str(file), hint=_CONVERT_AGAIN)
    for key, known in (("version", layout.FORMAT_VERSION), ("layout", layout.LAYOUT)):
        if found.get(key) != known:
            raise InputError(
                f"W12 {key} {found.get(key)!r} is unknown, this version reads {known}",
                where=str(file),
                hint="update specpilot, or convert the checkpoint again with this version",
            )


class W12Folder:
    """An open W12 folder whose shards hold exactly the tensors its manifest lists.

    A context manager. Contents are not hashed on opening: `original` returns what the
    files hold; comparing its sha256 with the manifest's is the caller's choice.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.manifest = read_manifest(path)
        self._stack = ExitStack()
        self._shards: dict[str, SafetensorsFile] = {}
        try:
            for shard in self.manifest.shards:
                file = self._stack.enter_context(SafetensorsFile(path / shard.name))
                self._shards[shard.name] = file
                prefix = len(file.header_bytes).to_bytes(8, "little")
                digest = hashlib.sha256(prefix + file.header_bytes).hexdigest()
                if digest != shard.header_sha256:
                    raise InputError(
                        "the safetensors header is not the one that was converted",
                        where=str(path / shard.name),
                        hint=_CONVERT_AGAIN,
                    )
            self._check_names()
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

    def encoded(self, tensor: W12Tensor) -> EncodedW12:
        """Return the five parts of a converted tensor, not yet checked against each other."""
        file = self._shards[tensor.shard]
        parts = {
            part: file.read_array(tensor.name + suffix)
            for part, suffix in layout.PART_SUFFIXES.items()
        }
        return EncodedW12(shape=tuple(tensor.shape), **parts)

    def window(self, tensor: W12Tensor) -> npt.NDArray[np.uint8]:
        """Return only the windows of a converted tensor, uint8 [channels]."""
        suffix = layout.PART_SUFFIXES["window"]
        return self._shards[tensor.shard].read_array(tensor.name + suffix)

    def original(self, tensor: W12Tensor, *, threads: int = 1) -> npt.NDArray[Any]:
        """Return a tensor as it was before the conversion, [shape], BF16 as uint16.

        InputError names the tensor when its parts contradict each other.
        """
        if tensor.encoding == "stored":
            return self.stored(tensor)
        try:
            return codec.decode(self.encoded(tensor), threads=threads)
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
        expected = {shard.name: set[str]() for shard in self.manifest.shards}
        for tensor in self.manifest.tensors:
            for name, dtype, shape in stored_specs(tensor):
                file = self._shards[tensor.shard]
                if name not in file.names:
                    raise InputError(f"no tensor named `{name}`", where=str(file.path))
                info = file.info(name)
                if (info.dtype, info.shape) != (dtype, shape):
                    raise InputError(
                        f"`{name}` is {info.dtype} {list(info.shape)}, "
                        f"the manifest says {dtype} {list(shape)}",
                        where=str(file.path),
                    )
                expected[tensor.shard].add(name)
        for shard_name, file in self._shards.items():
            extra = set(file.names) - expected[shard_name]
            if extra:
                raise InputError(
                    f"`{min(extra)}` is not in the manifest", where=str(self.path / shard_name)
                )


def stored_specs(tensor: W12Tensor) -> list[tuple[str, str, tuple[int, ...]]]:
    """Return (name, dtype, shape) of every safetensors entry that holds `tensor`."""
    shape = tuple(tensor.shape)
    if tensor.encoding == "stored":
        return [(tensor.name, tensor.dtype, shape)]
    return encoded_specs(tensor.name, shape, tensor.escapes or 0)


def encoded_specs(
    name: str, shape: tuple[int, ...], escapes: int
) -> list[tuple[str, str, tuple[int, ...]]]:
    """Return (name, dtype, shape) of an encoded tensor's five parts, as hashed."""
    matrices = shape[0] if len(shape) == 3 else 1
    row_blocks, col_blocks = layout.grid(*shape[-2:])
    channels = matrices * shape[-2]
    shapes: dict[str, tuple[int, ...]] = {
        "records": (matrices * row_blocks, col_blocks, layout.RECORD_BYTES),
        "window": (channels,),
        "escape_ptr": (channels + 1,),
        "escape_col": (escapes,),
        "escape_bits": (escapes,),
    }
    return [
        (name + suffix, _PART_DTYPES[part], shapes[part])
        for part, suffix in layout.PART_SUFFIXES.items()
    ]


def encoded_parts(name: str, encoded: EncodedW12) -> Iterator[tuple[str, TensorData]]:
    """Yield (tensor name, data) of the five parts, in the order they are hashed."""
    for part, suffix in layout.PART_SUFFIXES.items():
        yield name + suffix, array_data(getattr(encoded, part))


def parts_digest(encoded: EncodedW12) -> str:
    """Return the sha256 over the five parts' bytes in the order they are hashed."""
    digest = hashlib.sha256()
    for part in layout.PART_SUFFIXES:
        digest.update(byte_view(getattr(encoded, part)))
    return digest.hexdigest()


def read_w12_tensors(
    folder: Path, *, check: bool = True, threads: int = 1
) -> Iterator[tuple[str, str, npt.NDArray[Any]]]:
    """Yield (name, safetensors dtype, array [shape]) of the original checkpoint, tensor by tensor.

    BF16 arrives as uint16 bit patterns; other dtypes as their numpy dtype. With `check`, each
    tensor's sha256 is compared with the source's before it is handed out. InputError: see
    `read_manifest`; a damaged tensor is named.
    """
    with W12Folder(folder) as opened:
        for tensor in opened.manifest.tensors:
            array = opened.original(tensor, threads=threads)
            if check and hashlib.sha256(byte_view(array)).hexdigest() != tensor.sha256:
                raise opened.damaged(tensor, "its bytes are not the source's")
            yield tensor.name, tensor.dtype, array


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
