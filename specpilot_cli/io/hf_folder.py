"""A Hugging Face checkpoint folder: configuration, safetensors shards, index and other files.

The index and the shards must agree in both directions; a folder whose weights cannot be told
apart from leftovers is refused rather than guessed at.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from specpilot_cli.errors import InputError
from specpilot_cli.io.json_file import parse_json, refuse_special_file
from specpilot_cli.io.safetensors_stream import SafetensorsFile, TensorInfo
from specpilot_kernels.w12.manifest import MANIFEST_NAME

_WHOLE = "copy the checkpoint again: its files do not belong together"

CONFIG_NAME = "config.json"
INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"

# What a conversion writes beside shards: no folder of the source may have such a name.
_WRITTEN_NAMES = {CONFIG_NAME, INDEX_NAME, MANIFEST_NAME}

# Weights in other forms, and weights that no index names: never part of the checkpoint.
_WEIGHT_SUFFIXES = {
    ".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".onnx", ".msgpack", ".h5", ".npz",
    ".partial",
}  # fmt: skip

_NUMBERED = re.compile(r"(?P<set>.+)-\d+-of-(?P<count>\d+)\.safetensors")


@dataclass(frozen=True, slots=True)
class HfFolder:
    """A checked checkpoint folder.

    tensors: (shard name, where it lies) in the order of shards and of data inside each.
    carried: relative paths of the other files that belong to the model.
    left_out: relative paths of what does not, see `why_left_out`; those of folders end in `/`.
    """

    path: Path
    config: dict[str, Any]
    config_text: str
    index: dict[str, Any] | None
    index_text: str | None
    shards: tuple[str, ...]
    tensors: tuple[tuple[str, TensorInfo], ...]
    carried: tuple[str, ...]
    left_out: tuple[str, ...]

    @property
    def tensor_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(info.nbytes for _, info in self.tensors)


def open_hf_folder(path: Path) -> HfFolder:
    """Read and check the folder at `path`.

    InputError: no folder, no config.json, no safetensors weights, an index that disagrees with
    its shards, a damaged shard, one tensor name in two shards, a file or folder whose name the
    manifest of a W12 folder cannot hold, a file that is a link to somewhere else.
    """
    if not path.is_dir():
        raise InputError(
            f"no such model folder: `{path}`",
            where=str(path),
            hint="give a folder with config.json and safetensors files",
        )
    _refuse_unwritable_name(str(path.resolve()), path)
    config_text = read_exact_text(path / CONFIG_NAME)
    config = _object(config_text, path / CONFIG_NAME)
    index_path = path / INDEX_NAME
    index_text = read_exact_text(index_path) if index_path.is_file() else None
    index = _object(index_text, index_path) if index_text is not None else None
    weight_map = _weight_map(index, index_path) if index is not None else None
    shards = _shard_names(path, weight_map)
    tensors = tuple(_tensors(path, shards))
    if weight_map is not None:
        _compare_with_index(weight_map, tensors, index_path)
        _refuse_forgotten_shards(shards, index_path)
    for shard in shards:
        _refuse_unwritable_name(shard, path)
    carried, left_out = _other_files(path, shards)
    _refuse_foreign_links(path, shards, (CONFIG_NAME, INDEX_NAME, *carried))
    return HfFolder(
        path, config, config_text, index, index_text, shards, tensors, carried, left_out
    )


def read_exact_text(path: Path) -> str:
    """Return the file's text such that encoding it as UTF-8 gives the file's bytes again."""
    refuse_special_file(path)
    try:
        return path.read_bytes().decode("utf-8")
    except FileNotFoundError:
        raise InputError(
            f"no `{path.name}` in `{path.parent}`",
            where=str(path),
            hint="give a Hugging Face folder",
        ) from None
    except OSError as error:
        raise InputError(
            f"cannot read: {error.strerror or error}",
            where=str(path),
            hint="may this user read it?",
        ) from error
    except UnicodeDecodeError as error:
        raise InputError(f"not UTF-8: {error}", where=str(path), hint=_WHOLE) from error


def _object(text: str, path: Path) -> dict[str, Any]:
    # Configurations of Mamba models hold Infinity, and transformers reads it.
    value = parse_json(text, str(path), finite=False)
    if not isinstance(value, dict):
        raise InputError("expected a JSON object", where=str(path), hint=_WHOLE)
    return value


def _weight_map(index: dict[str, Any], path: Path) -> dict[str, str]:
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise InputError("`weight_map` is missing or empty", where=str(path), hint=_WHOLE)
    for name, shard in weight_map.items():
        plain = isinstance(shard, str) and PurePosixPath(shard).name == shard
        if not plain or not shard.endswith(".safetensors") or shard.startswith("."):
            raise InputError(
                f"`{name}` points to {shard!r}, not to a safetensors file of this folder",
                where=str(path),
                hint=_WHOLE,
            )
    return weight_map


def _shard_names(path: Path, weight_map: dict[str, str] | None) -> tuple[str, ...]:
    if weight_map is not None:
        names = tuple(sorted(set(weight_map.values())))
        missing = [name for name in names if not (path / name).is_file()]
        if missing:
            raise InputError(
                f"the index names `{missing[0]}`, which is not in the folder",
                where=str(path / INDEX_NAME),
                hint="the download is incomplete: fetch the missing shards",
            )
        return names
    files = path.glob("*.safetensors")
    found = tuple(sorted(file.name for file in files if not file.name.startswith(".")))
    if SINGLE_NAME in found:
        return (SINGLE_NAME,)
    if len(found) == 1:
        return found
    what = "holds no safetensors weights" if not found else "holds several shards but no index"
    raise InputError(
        f"`{path}` {what}",
        where=str(path),
        hint=f"expected `{SINGLE_NAME}`, or shards and `{INDEX_NAME}`",
    )


def _tensors(path: Path, shards: tuple[str, ...]) -> Iterator[tuple[str, TensorInfo]]:
    seen: dict[str, str] = {}
    for shard in shards:
        with SafetensorsFile(path / shard) as file:
            for name in file.names:
                if name in seen:
                    raise InputError(
                        f"tensor `{name}` is in `{seen[name]}` and in `{shard}`",
                        where=str(path),
                        hint=_WHOLE,
                    )
                seen[name] = shard
                yield shard, file.info(name)


def _compare_with_index(
    weight_map: dict[str, str], tensors: tuple[tuple[str, TensorInfo], ...], path: Path
) -> None:
    found = {info.name: shard for shard, info in tensors}
    for name, shard in weight_map.items():
        if found.get(name) != shard:
            raise InputError(
                f"`{name}` is not in `{shard}`, where the index puts it",
                where=str(path),
                hint=_WHOLE,
            )
    extra = next((name for name in found if name not in weight_map), None)
    if extra is not None:
        raise InputError(
            f"`{extra}` in `{found[extra]}` is not in the index", where=str(path), hint=_WHOLE
        )


def _refuse_forgotten_shards(shards: tuple[str, ...], path: Path) -> None:
    """Raise InputError if a shard of a set lies in the folder and the index does not name it.

    An unlisted file of another kind of name may be a leftover; `2 of 2` beside a listed `1 of 2`
    means that the index is stale, and its tensors would be lost without a word.
    """
    sets = {match.group("set", "count") for s in shards if (match := _NUMBERED.match(s))}
    for file in sorted(path.parent.glob("*.safetensors")):
        match = _NUMBERED.match(file.name)
        if match and match.group("set", "count") in sets and file.name not in shards:
            raise InputError(
                f"`{file.name}` is one of the shards, but the index does not name it",
                where=str(path),
                hint="the index is not the one of these shards: fetch it again",
            )


def _other_files(path: Path, shards: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    handled = {CONFIG_NAME, INDEX_NAME, *shards}
    carried: list[str] = []
    left_out: list[str] = []
    for relative in sorted(_entries(path, path)):
        _refuse_unwritable_name(relative, path)
        if relative not in handled:
            (carried if why_left_out(relative) is None else left_out).append(relative)
    return tuple(carried), tuple(left_out)


def _refuse_unwritable_name(name: str, path: Path) -> None:
    """Raise InputError for a name that a W12 folder or its manifest cannot hold."""
    top, _, below = name.partition("/")
    problem = None
    try:
        name.encode()
    except UnicodeEncodeError:
        problem = "is not UTF-8"
    if "\\" in name:
        problem = "has a backslash, which is a path to other systems"
    elif below and (top in _WRITTEN_NAMES or top.endswith(".safetensors")):
        problem = f"lies in a folder named `{top}`, as a conversion names a file"
    if problem is not None:
        raise InputError(
            f"the name of `{_printable(name)}` {problem}",
            where=_printable(str(path)),
            hint="rename it",
        )


def _printable(name: str) -> str:
    return os.fsencode(name).decode(errors="backslashreplace")


def _refuse_foreign_links(path: Path, shards: tuple[str, ...], names: tuple[str, ...]) -> None:
    """Raise InputError if one of the files `names` lies neither in the folder nor with a shard.

    A Hub cache keeps all files of a snapshot in one other folder, and so do folders of links. A
    link to anywhere else would put a private file into what is published.
    """
    inside, beside = path.resolve(), {(path / shard).resolve().parent for shard in shards}
    for name in names:
        real = (path / name).resolve()
        if inside not in real.parents and real.parent not in beside:
            raise InputError(
                f"`{name}` is a link to `{real}`, where no shard of the checkpoint lies",
                where=str(path),
                hint="put a copy of the file in the place of the link, or remove it",
            )


def why_left_out(relative: str) -> str | None:
    """Return why an entry of a checkpoint folder is no part of the checkpoint, None if it is."""
    path = PurePosixPath(relative)
    if path.name.startswith("."):
        return "hidden"
    if relative.endswith("/"):
        return "a link to a folder"
    if path.suffix in _WEIGHT_SUFFIXES or relative.endswith(".safetensors.index.json"):
        return "weights that are not part of the checkpoint"
    return None


def _entries(folder: Path, root: Path) -> Iterator[str]:
    """Yield relative paths of what is below `folder`; hidden and linked folders as one entry."""
    for entry in folder.iterdir():
        relative = entry.relative_to(root).as_posix()
        if entry.is_dir():
            if entry.name.startswith(".") or entry.is_symlink():
                yield relative + "/"
            else:
                yield from _entries(entry, root)
        elif entry.is_file() or entry.name.startswith("."):
            yield relative
        else:
            raise InputError(
                f"`{entry}` is neither a file nor a folder",
                where=str(root),
                hint="remove it, or copy the checkpoint without it",
            )


def config_json(config: dict[str, Any]) -> str:
    """Return a configuration as Hugging Face writes it, NaN and Infinity included."""
    return json.dumps(config, indent=2, ensure_ascii=False) + "\n"
