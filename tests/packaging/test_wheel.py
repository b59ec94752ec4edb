"""The wheel holds what the repository holds, under the two agreed names and no other."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from specpilot_cli.errors import MachineError
from specpilot_cli.io import own_wheel

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
        "export", "gpu", "hub", "report", "sglang", "test", "torch",
    }  # fmt: skip
    assert "License-Expression: Apache-2.0" in text


def test_what_is_packed_for_an_image_is_the_wheel(wheel: zipfile.ZipFile) -> None:
    """From this checkout, byte for byte; only the description comes from the installation."""
    packed = zipfile.ZipFile(io.BytesIO(own_wheel.own_wheel()))
    assert packed.testzip() is None

    def files(of: zipfile.ZipFile) -> dict[str, bytes]:
        names = [name for name in of.namelist() if ".dist-info/" not in name]
        return {name: of.read(name) for name in names if Path(name).suffix in _DATA_SUFFIXES}

    assert files(packed) == files(wheel)
    assert own_wheel.own_wheel() == own_wheel.own_wheel()


def test_pip_installs_what_is_packed(tmp_path: Path) -> None:
    path = tmp_path / own_wheel.NAME
    path.write_bytes(own_wheel.own_wheel())
    site = tmp_path / "site"
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index",
         "--no-compile", "--target", str(site), str(path)],
        check=True, capture_output=True, timeout=120,
    )  # fmt: skip
    code = (
        "from importlib.metadata import distribution as d, entry_points as e;"
        "import specpilot_cli.paths as p; print(p.__file__, p.bundled('recipes'));"
        "print('gpu' in d('specpilot').metadata.get_all('Provides-Extra'));"
        "print(e(group='sglang.srt.plugins')['specpilot'].load().__module__)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(site)},
        check=True, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    package = site / "specpilot_cli"
    assert done.stdout.splitlines() == [
        f"{package / 'paths.py'} {package / '_data/recipes'}",
        "True",
        "specpilot_cli.engines.sglang.plugin.entry",
    ]


def test_a_version_that_is_not_installed_is_not_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specpilot_cli.__version__", "9.9.9")
    with pytest.raises(MachineError, match=r"specpilot 9\.9\.9 runs here without being installed"):
        own_wheel.own_wheel()
