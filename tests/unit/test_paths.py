from __future__ import annotations

from pathlib import Path

import pytest

from specpilot_cli import paths
from specpilot_cli.errors import MachineError


def test_editable_install_falls_back_to_the_repository(repo: Path) -> None:
    assert paths.bundled("profiles") == repo / "profiles"


def test_wheel_copy_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "site" / "specpilot_cli"
    (package / "_data" / "recipes").mkdir(parents=True)
    (package.parent / "recipes").mkdir()
    monkeypatch.setattr(paths, "_PACKAGE", package)
    assert paths.bundled("recipes") == package / "_data" / "recipes"


def test_incomplete_installation_is_a_machine_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paths, "_PACKAGE", tmp_path / "specpilot_cli")
    with pytest.raises(MachineError, match="profiles are missing"):
        paths.bundled("profiles")
