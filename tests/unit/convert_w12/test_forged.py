"""Manifests that somebody wrote to do harm: sealed again, so only their content gives them away."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specpilot_cli.convert_w12.restore import restore_folder
from specpilot_cli.errors import InputError
from specpilot_cli.io.safetensors_stream import SafetensorsFile
from specpilot_cli.io.w12_folder import W12Folder, read_manifest
from specpilot_cli.schema.w12_manifest import document_text
from specpilot_kernels.integrations.w12_tensors import open_tensors
from specpilot_kernels.w12 import layout
from specpilot_kernels.w12.manifest import MANIFEST_NAME, W12FolderError
from tests.unit.convert_w12.conftest import MakeCheckpoint, convert, digests, weights

Edit = Callable[[dict[str, Any]], object]


@pytest.fixture
def packed(make_checkpoint: MakeCheckpoint, tmp_path: Path) -> Path:
    """A W12 folder with an index and two carried files, tokenizer.json and templates/chat.jinja."""
    tensors = {f"{name}.weight": weights(i, 128, 128) for i, name in enumerate("ab")}
    convert(make_checkpoint(tensors, shards=2), tmp_path / "w12")
    return tmp_path / "w12"


def forge(folder: Path, edit: Edit) -> None:
    """Edit the manifest's document and seal it, whatever it says now."""
    path = folder / MANIFEST_NAME
    data = json.loads(path.read_text(encoding="utf-8"))
    edit(data)
    data["self_sha256"] = ""
    data["self_sha256"] = hashlib.sha256(document_text(data).encode()).hexdigest()
    path.write_text(document_text(data), encoding="utf-8")


def carry(*paths: str) -> Edit:
    """List further carried files."""

    def edit(data: dict[str, Any]) -> None:
        data["files"] += [{"path": path, "sha256": "0" * 64, "carried": True} for path in paths]

    return edit


def rename_source(name: str) -> Edit:
    """Give the first source file another name."""

    def edit(data: dict[str, Any]) -> None:
        old = data["sources"][0]["name"]
        data["sources"][0]["name"] = name
        for tensor in data["tensors"]:
            tensor["source"] = name if tensor["source"] == old else tensor["source"]

    return edit


def text(name: str) -> Edit:
    return lambda data: data["source_texts"].update({name: "x"})


FORGERIES: dict[str, tuple[Edit, str]] = {
    "a carried source": (carry("model-00001-of-00002.safetensors"), "twice"),
    "a carried config.json": (
        lambda data: data["files"][0].update(carried=True, path="config.json"), "twice",
    ),
    "a carried manifest": (carry(MANIFEST_NAME), "twice"),
    "a file below a file": (carry("tokenizer.json/x"), "both as a file and as a folder"),
    "a file below a shard": (
        carry("model-00002-of-00002.safetensors/a/b"), "both as a file and as a folder",
    ),
    "a folder's name": (carry("templates"), "both as a file and as a folder"),
    "a hook": (carry(".git/hooks/pre-commit"), "hidden"),
    "a hidden file in a folder": (carry("templates/.env"), "hidden"),
    "a way out": (carry("../x"), "not a path inside"),
    "a long name": (carry("n" * 300), "too long"),
    "a long name in UTF-8": (carry("é" * 128), "too long"),
    "a deep path": (carry("a/" * 4000 + "a"), "too long"),
    "a source that is no safetensors file": (rename_source("Makefile"), "not the name"),
    "a source named like a text": (
        rename_source("model.safetensors.index.json"), "not the name",
    ),
    "a further text": (text("setup.py"), "source_texts"),
    "no configuration": (lambda data: data["source_texts"].pop("config.json"), "source_texts"),
}  # fmt: skip


@pytest.mark.parametrize(("edit", "what"), FORGERIES.values(), ids=FORGERIES)
def test_a_forged_manifest_is_refused_before_anything_is_written(
    edit: Edit, what: str, packed: Path, tmp_path: Path
) -> None:
    read_manifest(packed)
    forge(packed, edit)
    with pytest.raises(InputError, match=what):
        restore_folder(packed, tmp_path / "back")
    assert not (tmp_path / "back").exists()


def test_names_up_to_the_limit_are_read(packed: Path) -> None:
    forge(packed, carry("n" * 255, "é" * 127, "/".join(["d" * 100] * 20)))
    assert len(read_manifest(packed).files) == 7


def test_a_manifest_does_not_decide_what_force_may_delete(packed: Path, tmp_path: Path) -> None:
    """It lists the user's files as its own, so no file there is one that it does not write."""
    (packed / "thesis.tex").write_text("theirs", encoding="utf-8")
    sha256 = hashlib.sha256(b"theirs").hexdigest()
    forge(
        packed,
        lambda data: data["files"].append(
            {"path": "thesis.tex", "sha256": sha256, "carried": True}
        ),
    )
    home = tmp_path / "home"
    home.mkdir()
    (home / "thesis.tex").write_text("years of work", encoding="utf-8")
    with pytest.raises(InputError, match="is no checkpoint"):
        restore_folder(packed, home, force=True)
    (home / "config.json").write_text("{}", encoding="utf-8")
    (home / "model-00001-of-00002.safetensors").write_bytes(b"old")
    with pytest.raises(InputError, match=r"another `thesis\.tex`"):
        restore_folder(packed, home, force=True)
    assert (home / "thesis.tex").read_text(encoding="utf-8") == "years of work"
    (home / "thesis.tex").unlink()
    restore_folder(packed, home, force=True)
    before = digests(home)
    restore_folder(packed, home, force=True)
    assert digests(home) == before
    assert (home / "thesis.tex").read_text(encoding="utf-8") == "theirs"


def test_opening_lists_the_names_of_a_shard_once(
    packed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Listing them for every tensor took minutes where there were many."""
    listed: list[Path] = []

    def names(file: SafetensorsFile) -> tuple[str, ...]:
        listed.append(file.path)
        return tuple(file._infos)

    monkeypatch.setattr(SafetensorsFile, "names", property(names))
    with W12Folder(packed) as opened:
        assert len(opened.manifest.tensors) == 2
        assert len(listed) == len(set(listed)) == len(opened.manifest.shards)


@pytest.mark.parametrize("shape", [[128, layout.MAX_INPUTS + 1], [2, 128, layout.MAX_COLS]])
def test_rows_that_no_conversion_writes_are_refused_on_opening(
    shape: list[int], packed: Path
) -> None:
    """Readers hold 128 rows at once: with 2^24 inputs that is 4 GiB and the records besides."""
    forge(packed, lambda data: data["tensors"][0].update(shape=shape))
    with pytest.raises(InputError, match=f"at most {layout.MAX_INPUTS} inputs"):
        read_manifest(packed)
    with pytest.raises(W12FolderError, match="no W12 tensor has the shape"):
        open_tensors(sorted(packed.glob("*.safetensors")))
