"""`w12_manifest.json`: what a W12 folder holds, and the hash of every part of it.

Written last: a folder without it is not a finished conversion. It also keeps the source's own
safetensors headers and configuration texts, so that `w12 restore` gives the source's bytes back.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from itertools import pairwise
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from specpilot_cli.schema.base import FileModel
from specpilot_kernels.w12 import layout
from specpilot_kernels.w12.manifest import MANIFEST_NAME

_CONFIG_NAME = "config.json"
_TEXTS = {_CONFIG_NAME, "model.safetensors.index.json"}
# What Linux allows a name, and half of what it allows a path: the folder's own needs the rest.
_NAME_BYTES = 255
_PATH_BYTES = 2048


def path_problem(path: str) -> str | None:
    """Return why a manifest may not list `path`, relative to the folder, or None if it may."""
    parts = path.split("/")
    if not all(parts) or {".", ".."} & set(parts) or "\\" in path or "\0" in path:
        return "not a path inside the folder"
    if any(part.startswith(".") for part in parts):
        return "hidden"
    sizes = [len(part.encode(errors="replace")) for part in parts]
    if max(sizes) > _NAME_BYTES or sum(sizes) + len(sizes) > _PATH_BYTES:
        return "too long"
    return None


def _inside(path: str) -> str:
    problem = path_problem(path)
    if problem is not None:
        raise ValueError(problem)
    return path


def _file_name(name: str) -> str:
    if "/" in name:
        raise ValueError("not a plain file name")
    return _inside(name)


def _weights_name(name: str) -> str:
    if not name.endswith(".safetensors"):
        raise ValueError("not the name of a safetensors file")
    return _file_name(name)


def _refuse_collisions(kind: str, paths: Iterable[str]) -> None:
    """Raise ValueError if two of `paths` are the same or one lies below another."""
    files: set[str] = set()
    for path in paths:
        if path in files:
            raise ValueError(f"{kind} hold `{path}` twice")
        files.add(path)
    for path in files:
        parts = path.split("/")
        for depth in range(1, len(parts)):
            above = "/".join(parts[:depth])
            if above in files:
                raise ValueError(f"{kind} hold `{above}` both as a file and as a folder")


Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Crc32 = Annotated[str, Field(pattern=r"^[0-9a-f]{8}$")]
InsidePath = Annotated[str, AfterValidator(_inside)]
FileName = Annotated[str, AfterValidator(_file_name)]
WeightsName = Annotated[str, AfterValidator(_weights_name)]
Natural = Annotated[int, Field(ge=0)]


class W12Tensor(FileModel):
    """One tensor of the source checkpoint and how this folder stores it.

    `encoding`: `w12` = the five parts NAME_w12, NAME_w12_window, NAME_w12_escape_ptr, _at and
    _bits; `stored` = the source's own bytes under the source's name. `source` and `shard` are
    the safetensors files of the source and of this folder that hold it.

    `source_prefix_sha256` is of the source file from its first byte to this tensor's last: the
    first tensor where it differs is the one with a wrong bit. `stored_crc32` is of what this
    folder stores, the five parts' bytes in the order above or the source's own: a quick check
    of one tensor alone.
    """

    name: str
    encoding: Literal["w12", "stored"]
    dtype: str
    shape: list[Natural]
    source: WeightsName
    shard: WeightsName
    source_prefix_sha256: Sha256
    stored_crc32: Crc32
    escapes: Natural | None = None
    reason: str | None = None

    @model_validator(mode="after")
    def _escapes_and_reason(self) -> W12Tensor:
        if self.encoding == "w12":
            if self.escapes is None:
                raise ValueError("a w12 tensor needs the number of its escapes")
            if self.dtype != "BF16" or len(self.shape) not in (2, 3):
                raise ValueError("a w12 tensor is a BF16 matrix or a stack of them")
            if 0 in self.shape:
                raise ValueError("a w12 tensor has elements")
            if self.shape[-1] > layout.MAX_INPUTS:
                raise ValueError(f"a w12 tensor has at most {layout.MAX_INPUTS} inputs")
        elif self.reason is None:
            raise ValueError("a stored tensor needs the reason")
        return self


class W12Source(FileModel):
    """A safetensors file of the source checkpoint: what is needed to write it again.

    `header` is its JSON header text, byte for byte; `sha256` is of the whole file.
    """

    name: WeightsName
    sha256: Sha256
    size_bytes: Natural
    header: str


class W12Shard(FileModel):
    """A safetensors file of this folder; `header_sha256` is of length prefix and JSON header."""

    name: WeightsName
    size_bytes: Natural
    header_sha256: Sha256


class W12File(FileModel):
    """A file of this folder that holds no tensors; `carried`: as it is in the source."""

    path: InsidePath
    sha256: Sha256
    carried: bool


class HubSource(FileModel):
    """A model repository on the Hugging Face Hub at one commit."""

    repo: str
    revision: Annotated[str, Field(pattern=r"^[0-9a-f]{40}$")]


class W12Manifest(FileModel):
    """The whole manifest. `self_sha256` is of the document itself with that value empty.

    `source_texts` are the files that conversion rewrites (config.json and the index), as they
    were. `source_hub` is left out where the source was no snapshot of a hub repository.
    `tensors` are in the order of `sources` and, in each, of its data; `shards` divide the same
    sequence. `files` are the other files of this folder.
    """

    format: Literal["specpilot-w12"]
    version: int
    layout: int
    source_name: str
    source_hub: HubSource | None = None
    source_texts: dict[FileName, str]
    sources: list[W12Source]
    shards: list[W12Shard]
    tensors: list[W12Tensor]
    files: list[W12File]
    self_sha256: str

    @model_validator(mode="after")
    def _names_are_consistent(self) -> W12Manifest:
        for kind, names in (
            ("tensor", [tensor.name for tensor in self.tensors]),
            ("source", [source.name for source in self.sources]),
            ("shard", [shard.name for shard in self.shards]),
            ("file", [file.path for file in self.files]),
        ):
            if len(set(names)) != len(names):
                raise ValueError(f"a {kind} is listed twice")
        for kind, used, listed in (
            ("source", [t.source for t in self.tensors], [s.name for s in self.sources]),
            ("shard", [t.shard for t in self.tensors], [s.name for s in self.shards]),
        ):
            place = {name: number for number, name in enumerate(listed)}
            unknown = next((name for name in used if name not in place), None)
            if unknown is not None:
                raise ValueError(f"tensors lie in a {kind} that is not listed: {unknown}")
            if any(place[one] > place[next_] for one, next_ in pairwise(used)):
                raise ValueError(f"the tensors are not in the order of the {kind}s")
        return self

    @model_validator(mode="after")
    def _files_do_not_collide(self) -> W12Manifest:
        """In this folder and in a restored one, every path is of one file."""
        if not {_CONFIG_NAME} <= self.source_texts.keys() <= _TEXTS:
            raise ValueError(f"source_texts are not {_CONFIG_NAME} and, if any, the index")
        carried = [file.path for file in self.files if file.carried]
        shards = [shard.name for shard in self.shards]
        sources = [source.name for source in self.sources]
        _refuse_collisions("the files", [MANIFEST_NAME, *shards, *(f.path for f in self.files)])
        _refuse_collisions("the source's files", [*sources, *self.source_texts, *carried])
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
