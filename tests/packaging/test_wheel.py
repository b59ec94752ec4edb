"""The wheel holds what the repository holds, under the two agreed names and no other."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

_DATA_SUFFIXES = {".yaml", ".json", ".jsonl", ".safetensors", ".cu", ".cuh", ".md", ".j2", ".css"}


@pytest.fixture(scope="module")
def wheel(repo: Path, tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """The wheel of this checkout, built without a network."""
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)],
        cwd=repo, check=True, capture_output=True, timeout=120,
    )  # fmt: skip
    (path,) = folder.glob("*.whl")
    assert path.name.endswith("-py3-none-any.whl")
    return zipfile.ZipFile(path)


@pytest.fixture(scope="module")
def installed(wheel: zipfile.ZipFile, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel's contents, as pip would lay them out."""
    folder = tmp_path_factory.mktemp("site")
    wheel.extractall(folder)
    return folder


def _in_wheel(path: Path) -> str | None:
    """Where a repository file belongs in the wheel."""
    top, *rest = path.parts
    if top in ("profiles", "recipes"):
        return "/".join(("specpilot_cli", "_data", top, *rest))
    if top == "specpilot_cli":
        return path.as_posix()
    if path.parts[:2] == ("kernels", "specpilot_kernels"):
        return "/".join(path.parts[1:])
    return None


def test_only_two_top_level_names(wheel: zipfile.ZipFile) -> None:
    tops = {name.split("/")[0] for name in wheel.namelist()}
    (info,) = {top for top in tops if top.endswith(".dist-info")}
    assert tops - {info} == {"specpilot_cli", "specpilot_kernels"}


def test_import_name_kernels_stays_free(repo: Path) -> None:
    # It belongs to a distribution that SGLang requires; see kernels/README.md.
    assert not (repo / "kernels" / "__init__.py").exists()


def test_every_data_file_is_shipped(repo: Path, wheel: zipfile.ZipFile) -> None:
    tracked = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "profiles", "recipes", "kernels",
         "specpilot_cli"],
        cwd=repo, check=True, capture_output=True, text=True,
    ).stdout.splitlines()  # fmt: skip
    wanted = {
        target
        for name in tracked
        if Path(name).suffix in _DATA_SUFFIXES | {".py"} and (target := _in_wheel(Path(name)))
    }
    shipped = {
        name
        for name in wheel.namelist()
        if Path(name).suffix in _DATA_SUFFIXES | {".py"} and ".dist-info/" not in name
    }
    assert shipped == wanted
    assert any(name.endswith(".yaml") for name in shipped)


def test_installed_copy_finds_its_own_data(installed: Path, tmp_path: Path) -> None:
    code = (
        "import specpilot_cli.paths as p; print(p.__file__); print(p.bundled('profiles'));"
        "print(p.bundled('recipes'))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env={"PYTHONPATH": str(installed)},
        check=True, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    data = installed / "specpilot_cli" / "_data"
    assert done.stdout.splitlines() == [
        str(installed / "specpilot_cli" / "paths.py"),
        str(data / "profiles"),
        str(data / "recipes"),
    ]


def test_wheel_declares_the_command_and_the_extras(wheel: zipfile.ZipFile) -> None:
    (entry,) = (n for n in wheel.namelist() if n.endswith("entry_points.txt"))
    assert "specpilot = specpilot_cli.main:main" in wheel.read(entry).decode()
    (metadata,) = (n for n in wheel.namelist() if n.endswith(".dist-info/METADATA"))
    text = wheel.read(metadata).decode()
    assert {line.split(": ")[1] for line in text.splitlines() if "Provides-Extra" in line} == {
        "gpu", "hub", "report", "sglang", "test", "torch",
    }  # fmt: skip
    assert "License-Expression: Apache-2.0" in text
