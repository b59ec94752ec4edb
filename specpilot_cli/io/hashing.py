"""SHA-256 of inputs, so that a result names exactly what it was computed from."""

from __future__ import annotations

import hashlib
import zlib
from pathlib import Path

from specpilot_cli.errors import InputError

Bytes = bytes | bytearray | memoryview

# What an engine reads from a model folder. Notes, licences and caches change no output.
_MODEL_SUFFIXES = {".safetensors", ".json", ".jsonl", ".jinja", ".model", ".txt"}


class Crc32:
    """CRC-32 as zlib computes it, used like a hashlib object: for damage, not against forgery."""

    def __init__(self) -> None:
        self._value = 0

    def update(self, data: Bytes) -> None:
        """Go on with `data`."""
        self._value = zlib.crc32(data, self._value)

    def hexdigest(self) -> str:
        """The value of everything so far, as eight hexadecimal digits."""
        return f"{self._value:08x}"


def sha256_file(path: Path) -> str:
    """Hex digest of the file's bytes. Raises `InputError` if it cannot be read."""
    try:
        with path.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        raise InputError(
            f"cannot read `{path}`: {error.strerror}",
            where=str(path),
            hint="may this user read it?",
        ) from error


def sha256_folder(path: Path) -> str:
    """Hex digest over the names and contents of the model files below `path`.

    Model files are weights, configuration, vocabulary and templates; hidden files, notes and
    licences do not count. Independent of file order and of the folder's own name. Raises
    `InputError` if there are none.
    """
    if not path.is_dir():
        raise InputError(f"no such folder: `{path}`", where=str(path), hint="is the path right?")
    files = sorted(
        (found.relative_to(path).as_posix(), found)
        for found in path.rglob("*")
        if found.is_file()
        and found.suffix in _MODEL_SUFFIXES
        and not any(part.startswith(".") for part in found.relative_to(path).parts)
    )
    if not files:
        raise InputError(
            f"`{path}` holds no model files",
            where=str(path),
            hint="give a folder with config.json and safetensors files",
        )
    digest = hashlib.sha256()
    for name, found in files:
        digest.update(f"{name}\0{sha256_file(found)}\n".encode())
    return digest.hexdigest()
