"""What a loader needs from `w12_manifest.json`: which tensors a W12 folder holds, and where.

`specpilot w12` keeps more in that file (see docs/w12-format.md); loaders read this part of it and
refuse a folder whose manifest is missing, altered or of a form they do not know. The names, the
numbers and the seal are decided here, for `specpilot w12` too.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from specpilot_kernels.w12 import layout
from specpilot_kernels.w12.stored import encoded_specs

MANIFEST_NAME: Final = "w12_manifest.json"
FORMAT_NAME: Final = "specpilot-w12"
QUANT_METHOD: Final = "w12"

LOADER_NOTICE: Final = (
    "these are W12 weights. Run `import specpilot_kernels.integrations.transformers` before "
    "`from_pretrained`, or give the BF16 checkpoint back with `specpilot w12 restore`"
)
"""Value of `transformers_weights` in a W12 folder's config.json.

transformers takes an unknown `quant_method` for a reason to warn and then initialises every
weight it did not find at random. A `transformers_weights` that is no file name makes it stop
and print this text instead.
"""

OTHER_VERSION: Final = "update specpilot, or convert the checkpoint again with this version"
"""What to do about a number that `unknown_number` names."""

_AGAIN = "the conversion did not finish or was edited: run `specpilot convert-w12` again"
_SEAL = re.compile(r'"self_sha256": "([0-9a-f]{64})"')


class W12FolderError(ValueError):
    """A W12 folder that cannot be loaded: unfinished, damaged or of an unknown version."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of the source checkpoint.

    encoding: "w12" or "stored". dtype: safetensors name. shard: file name in the folder.
    stored_crc32: of what the folder stores, the five parts in order or the source's own bytes.
    escapes: in the lists of a w12 tensor, else 0.
    """

    name: str
    encoding: str
    dtype: str
    shape: tuple[int, ...]
    shard: str
    stored_crc32: str
    escapes: int

    def stored_specs(self) -> list[tuple[str, str, tuple[int, ...]]]:
        """(name, safetensors dtype, shape) of the safetensors entries that hold this tensor."""
        if self.encoding == "stored":
            return [(self.name, self.dtype, self.shape)]
        return encoded_specs(self.name, self.shape, self.escapes)


def read_entries(folder: Path) -> tuple[TensorEntry, ...]:
    """Return the tensors of the W12 folder, in the source's order.

    W12FolderError: no manifest, one that differs from what was written, or a format version or
    layout that this code does not read.
    """
    path = folder / MANIFEST_NAME
    if path.exists() and not path.is_file():
        raise W12FolderError(f"`{path}` is not a regular file: {_AGAIN}")
    try:
        text = path.read_bytes().decode()
        data = json.loads(text)
    except FileNotFoundError:
        raise W12FolderError(f"`{folder}` has no `{MANIFEST_NAME}`: {_AGAIN}") from None
    except ValueError as error:
        raise W12FolderError(f"`{path}` is not JSON ({error}): {_AGAIN}") from error
    if not isinstance(data, dict) or data.get("format") != FORMAT_NAME:
        raise W12FolderError(f"`{path}` is not a {FORMAT_NAME} manifest: {_AGAIN}")
    check_versions(data.get("version"), data.get("layout"), where=str(path))
    if not seal_holds(text):
        raise W12FolderError(f"`{path}` does not match its own hash: {_AGAIN}")
    return tuple(_entry(tensor) for tensor in data["tensors"])


def check_versions(version: Any, layout_number: Any, *, where: str) -> None:
    """Raise W12FolderError unless both numbers are ones that this code reads."""
    unknown = unknown_number(version, layout_number)
    if unknown is not None:
        raise W12FolderError(f"{where}: {unknown}; {OTHER_VERSION}")


def unknown_number(version: Any, layout_number: Any) -> str | None:
    """Return which of the two numbers this code does not read, or None if it reads both."""
    known = (("version", version, layout.FORMAT_VERSION), ("layout", layout_number, layout.LAYOUT))
    for key, found, read in known:
        if type(found) is not int or found != read:
            return f"W12 {key} {found!r} is unknown, this version of specpilot reads {read}"
    return None


def seal_holds(text: str) -> bool:
    """Whether `self_sha256` is the hash of the text with that value empty."""
    seals = _SEAL.findall(text)
    if not seals:
        return False
    start = text.rindex(seals[-1])
    blank = text[:start] + text[start + len(seals[-1]) :]
    return hashlib.sha256(blank.encode()).hexdigest() == seals[-1]


def _entry(tensor: dict[str, Any]) -> TensorEntry:
    return TensorEntry(
        name=tensor["name"],
        encoding=tensor["encoding"],
        dtype=tensor["dtype"],
        shape=tuple(tensor["shape"]),
        shard=tensor["shard"],
        stored_crc32=tensor["stored_crc32"],
        escapes=tensor["escapes"] or 0,
    )
