from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from specpilot_cli.errors import InputError
from specpilot_cli.io.hashing import sha256_file, sha256_folder


def _model(folder: Path, weights: bytes = b"w") -> Path:
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(weights)
    (folder / "config.json").write_bytes(b"{}")
    return folder


def test_file_hash_is_plain_sha256(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"abc")
    assert sha256_file(tmp_path / "x") == hashlib.sha256(b"abc").hexdigest()


def test_folder_hash_ignores_its_name_notes_and_hidden_files(tmp_path: Path) -> None:
    first, second = _model(tmp_path / "a"), _model(tmp_path / "b")
    (second / "README.md").write_text("note", encoding="utf-8")
    (second / ".cache").mkdir()
    (second / ".cache" / "x.json").write_text("{}", encoding="utf-8")
    assert sha256_folder(first) == sha256_folder(second)


def test_folder_hash_sees_contents_and_names(tmp_path: Path) -> None:
    base = sha256_folder(_model(tmp_path / "a"))
    assert sha256_folder(_model(tmp_path / "b", b"v")) != base
    renamed = _model(tmp_path / "c")
    (renamed / "config.json").rename(renamed / "config2.json")
    assert sha256_folder(renamed) != base


def test_missing_and_empty_inputs_are_errors(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot read"):
        sha256_file(tmp_path / "none")
    with pytest.raises(InputError, match="no such folder"):
        sha256_folder(tmp_path / "none")
    with pytest.raises(InputError, match="no model files"):
        sha256_folder(tmp_path)
