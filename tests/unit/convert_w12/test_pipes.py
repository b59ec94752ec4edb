"""A pipe or device in the place of a file: reading it would wait, or go on, for ever."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from specpilot_cli.convert_w12.restore import restore_folder
from specpilot_cli.convert_w12.verify import verify_folder
from specpilot_cli.errors import InputError
from specpilot_cli.io.hf_folder import open_hf_folder
from specpilot_cli.io.w12_folder import W12Folder, is_w12_folder
from specpilot_kernels.integrations.w12_tensors import holds_records, open_tensors
from specpilot_kernels.w12.manifest import MANIFEST_NAME, W12FolderError
from tests.unit.convert_w12.conftest import MakeCheckpoint, convert, weights

Replace = Callable[[Path], object]


def by_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def by_device(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


@pytest.fixture(autouse=True)
def _ends() -> Iterator[None]:
    """A reader that waits is stopped after ten seconds."""

    def stop(*_: object) -> None:
        raise AssertionError("waited for a pipe")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(10)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture
def source(make_checkpoint: MakeCheckpoint) -> Path:
    return make_checkpoint({"a.weight": weights(0, 128, 256)})


@pytest.mark.parametrize("replace", [by_pipe, by_device])
@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_source_file(name: str, replace: Replace, source: Path) -> None:
    replace(source / name)
    with pytest.raises(InputError, match=r"not a regular file|holds no safetensors weights"):
        open_hf_folder(source)
    assert not is_w12_folder(source)


@pytest.mark.parametrize("replace", [by_pipe, by_device])
@pytest.mark.parametrize("name", ["model.safetensors", MANIFEST_NAME])
def test_a_file_of_a_w12_folder(name: str, replace: Replace, source: Path, tmp_path: Path) -> None:
    convert(source, tmp_path / "w12")
    replace(tmp_path / "w12" / name)
    with pytest.raises(InputError, match=r"not a regular file|not a finished W12 folder"):
        W12Folder(tmp_path / "w12")
    with pytest.raises(W12FolderError, match="not a regular file"):
        open_tensors([tmp_path / "w12" / "model.safetensors"])
    assert holds_records([tmp_path / "w12" / "model.safetensors"]) == (name == MANIFEST_NAME)


@pytest.mark.parametrize("replace", [by_pipe, by_device])
def test_a_carried_file(replace: Replace, source: Path, tmp_path: Path) -> None:
    convert(source, tmp_path / "w12")
    replace(tmp_path / "w12" / "tokenizer.json")
    with pytest.raises(InputError, match=r"tokenizer\.json`: it is not a regular file"):
        restore_folder(tmp_path / "w12", tmp_path / "back")
    assert not (tmp_path / "back").exists()
    found = verify_folder(tmp_path / "w12")
    assert [problem.name for problem in found.problems] == ["tokenizer.json"]
