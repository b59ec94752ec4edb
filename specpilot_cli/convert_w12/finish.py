"""The files around the shards: configuration, index, carried files, and last the manifest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specpilot_cli.convert_w12.configuration import w12_configuration
from specpilot_cli.convert_w12.target import copy_file, refuse_altered_blob
from specpilot_cli.io.hashing import sha256_file
from specpilot_cli.io.hf_folder import CONFIG_NAME, INDEX_NAME, HfFolder, config_json
from specpilot_cli.io.hub import hub_origin
from specpilot_cli.io.safetensors_stream import tensor_nbytes
from specpilot_cli.io.w12_folder import stored_specs
from specpilot_cli.schema.w12_manifest import (
    W12File,
    W12Manifest,
    W12Shard,
    W12Source,
    W12Tensor,
    sealed,
)
from specpilot_kernels.w12 import layout
from specpilot_kernels.w12.manifest import FORMAT_NAME, MANIFEST_NAME


@dataclass(slots=True)
class Contents:
    """What was written so far: shards, what they hold, and what it was made from."""

    sources: list[W12Source] = field(default_factory=list)
    shards: list[W12Shard] = field(default_factory=list)
    tensors: list[W12Tensor] = field(default_factory=list)

    @property
    def tensor_bytes(self) -> int:
        """Bytes of all tensors as stored."""
        return sum(
            tensor_nbytes(dtype, shape)
            for tensor in self.tensors
            for _, dtype, shape in stored_specs(tensor)
        )


def finish_folder(folder: HfFolder, out: Path, contents: Contents) -> W12Manifest:
    """Write everything but the shards into `out`; returns the manifest, written last."""
    texts = {CONFIG_NAME: folder.config_text}
    rewritten = {CONFIG_NAME: config_json(w12_configuration(folder.config, contents.tensors))}
    if folder.index is not None and folder.index_text is not None:
        texts[INDEX_NAME] = folder.index_text
    if len(contents.shards) > 1 or folder.index is not None:
        rewritten[INDEX_NAME] = config_json(_index(folder.index or {}, contents))
    for name, text in rewritten.items():
        (out / name).write_bytes(text.encode())
    files = [
        W12File(path=name, sha256=sha256_file(out / name), carried=False) for name in rewritten
    ]
    for relative in folder.carried:
        copy_file(folder.path / relative, out / relative)
        sha256 = sha256_file(out / relative)
        refuse_altered_blob(folder.path / relative, sha256)
        files.append(W12File(path=relative, sha256=sha256, carried=True))
    origin = hub_origin(folder.path)
    manifest = sealed(
        W12Manifest(
            format=FORMAT_NAME,
            version=layout.FORMAT_VERSION,
            layout=layout.LAYOUT,
            source_name=origin.repo if origin else folder.path.resolve().name,
            source_hub=origin,
            source_texts=texts,
            sources=contents.sources,
            shards=contents.shards,
            tensors=contents.tensors,
            files=files,
            self_sha256="",
        )
    )
    (out / MANIFEST_NAME).write_bytes(manifest.text().encode())
    return manifest


def _index(source: Mapping[str, Any], contents: Contents) -> dict[str, Any]:
    metadata = source.get("metadata")
    weight_map = {
        name: tensor.shard for tensor in contents.tensors for name, _, _ in stored_specs(tensor)
    }
    return {
        "metadata": {
            **(metadata if isinstance(metadata, dict) else {}),
            "total_size": contents.tensor_bytes,
        },
        "weight_map": dict(sorted(weight_map.items())),
    }
