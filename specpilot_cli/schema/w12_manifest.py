"""`w12_manifest.json`: what a W12 folder holds, and the hash of every part of it.

Written last: a folder without it is not a finished conversion. It also keeps the source's own
safetensors headers and configuration texts, so that `w12 restore` gives the source's bytes back.
"""

from __future__ import annotations

import hashlib
import json
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, Field, model_validator

from specpilot_cli.schema.base import FileModel

MANIFEST_NAME = "w12_manifest.json"
FORMAT_NAME: Final = "specpilot-w12"


def _inside(path: str) -> str:
    parts = path.split("/")
    if not all(parts) or ".." in parts or "." in parts or "\\" in path or "\0" in path:
        raise ValueError("not a path inside the folder")
    return path


def _file_name(name: str) -> str:
    if "/" in name or name.startswith("."):
        raise ValueError("not a plain file name")
    return _inside(name)


Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
InsidePath = Annotated[str, AfterValidator(_inside)]
FileName = Annotated[str, AfterValidator(_file_name)]
Natural = Annotated[int, Field(ge=0)]


class W12Tensor(FileModel):
    """One tensor of the source checkpoint and how this folder stores it.

    `encoding`: `w12` = the five parts NAME_w12, NAME_w12_window, NAME_w12_escape_ptr, _col and
    _bits; `stored` = the source's own bytes under the source's name. `sha256` is of the source's
    bytes; `parts_sha256` of the five parts' bytes in the order above.
    """

    name: str
    encoding: Literal["w12", "stored"]
    dtype: str
    shape: list[Natural]
    shard: FileName
    sha256: Sha256
    parts_sha256: Sha256 | None = None
    escapes: Natural | None = None
    reason: str | None = None

    @model_validator(mode="after")
    def _parts_and_reason(self) -> W12Tensor:
        if self.encoding == "w12":
            if self.parts_sha256 is None or self.escapes is None:
                raise ValueError("a w12 tensor needs parts_sha256 and escapes")
            if self.dtype != "BF16" or len(self.shape) not in (2, 3):
                raise ValueError("a w12 tensor is a BF16 matrix or a stack of them")
        elif self.reason is None:
            raise ValueError("a stored tensor needs the reason")
        return self


class W12Shard(FileModel):
    """One safetensors file, under the same name in the source and in this folder.

    `source_header` is the source's JSON header text, byte for byte; `source_sha256` is of the
    whole source file; `header_sha256` is of this folder's header (length prefix and JSON).
    """

    name: FileName
    source_sha256: Sha256
    source_bytes: Natural
    source_header: str
    header_sha256: Sha256


class W12File(FileModel):
    """A file of this folder that holds no tensors."""

    path: InsidePath
    sha256: Sha256


class HubSource(FileModel):
    """A model repository on the Hugging Face Hub at one commit."""

    repo: str
    revision: Annotated[str, Field(pattern=r"^[0-9a-f]{40}$")]


class W12Manifest(FileModel):
    """The whole manifest. `self_sha256` is of the document itself with that value empty.

    `source_texts` are the files that conversion rewrites (config.json and the index), as they
    were. `files` are the others of this folder, the rewritten ones included. `source_hub` is
    left out where the source was no snapshot of a hub repository.
    """

    format: Literal["specpilot-w12"]
    version: int
    layout: int
    source_name: str
    source_hub: HubSource | None = None
    source_texts: dict[FileName, str]
    shards: list[W12Shard]
    tensors: list[W12Tensor]
    files: list[W12File]
    self_sha256: str

    @model_validator(mode="after")
    def _names_are_unique(self) -> W12Manifest:
        for kind, names in (
            ("tensor", [tensor.name for tensor in self.tensors]),
            ("shard", [shard.name for shard in self.shards]),
            ("file", [file.path for file in self.files]),
        ):
            if len(set(names)) != len(names):
                raise ValueError(f"a {kind} is listed twice")
        unknown = {t.shard for t in self.tensors} - {shard.name for shard in self.shards}
        if unknown:
            raise ValueError(f"tensors lie in a shard that is not listed: {sorted(unknown)[0]}")
        return self

    def text(self) -> str:
        """The document as it is written, in the one form that `self_sha256` is computed over."""
        without = {"source_hub"} if self.source_hub is None else None
        return document_text(self.model_dump(mode="json", exclude=without))


def document_text(data: dict[str, Any]) -> str:
    """Return the manifest's text: indented JSON, keys in the order of the model."""
    return json.dumps(data, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def self_digest(manifest: W12Manifest) -> str:
    """Return the value that `self_sha256` of `manifest` must have."""
    blank = manifest.model_copy(update={"self_sha256": ""})
    return hashlib.sha256(blank.text().encode()).hexdigest()


def sealed(manifest: W12Manifest) -> W12Manifest:
    """Return `manifest` with its own digest filled in."""
    return manifest.model_copy(update={"self_sha256": self_digest(manifest)})
