"""The folder of a run: claimed once, unfinished until the end, and honest about a full disk."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from specpilot_cli.apply.folder import MARKER, default_folder, run_folder
from specpilot_cli.errors import InputError, MachineError, MeasurementInvalid


class _Heard:
    """A reporter that keeps what it is told."""

    def __init__(self) -> None:
        self.warnings: list[str] = []

    def note(self, msg: str) -> None:
        """Not used here."""

    def warn(self, msg: str) -> None:
        """Keep it."""
        self.warnings.append(msg)

    def progress(self, label: str, done: int, total: int) -> None:
        """Not used here."""


@pytest.mark.parametrize("exists", [True, False])
def test_unfinished_until_the_block_ends(tmp_path: Path, exists: bool) -> None:
    out, heard = tmp_path / "a" / "run", _Heard()
    if exists:
        out.mkdir(parents=True)
    with run_folder(out, "demo", heard) as folder:
        assert folder == out
        text = (folder / MARKER).read_text(encoding="utf-8")
        assert "specpilot apply recipe demo" in text
        assert "not a result" in text
        (folder / "result.json").touch()
    assert [path.name for path in out.iterdir()] == ["result.json"]
    assert heard.warnings == []


@pytest.mark.parametrize("error", [MeasurementInvalid("x"), KeyboardInterrupt()], ids=repr)
def test_a_run_that_ends_early_stays_marked(tmp_path: Path, error: BaseException) -> None:
    heard = _Heard()
    with pytest.raises(type(error)), run_folder(tmp_path / "run", "demo", heard) as folder:
        raise error
    assert (folder / MARKER).is_file()
    assert len(heard.warnings) == 1
    assert f"`{folder}` holds an unfinished run" in heard.warnings[0]
    assert heard.warnings[0].startswith("interrupted") == isinstance(error, KeyboardInterrupt)
    again = run_folder(tmp_path / "run", "demo", heard)
    with pytest.raises(InputError, match="is in use: it holds an unfinished run"):
        again.__enter__()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.ENOENT])
def test_a_failing_disk_is_the_machines_fault(tmp_path: Path, number: int) -> None:
    run = run_folder(tmp_path / "run", "demo", _Heard())
    with pytest.raises(MachineError, match=r": `.*lattices`") as error, run as folder:
        raise OSError(number, "Disk trouble", str(folder / "lattices"))
    assert error.value.message.startswith("Disk trouble: ")
    assert error.value.hint is not None
    assert str(tmp_path / "run") in error.value.hint


def test_another_system_error_is_a_bug_and_looks_like_one(tmp_path: Path) -> None:
    with pytest.raises(ConnectionResetError), run_folder(tmp_path / "run", "demo", _Heard()):
        raise ConnectionResetError(errno.ECONNRESET, "reset")


def test_relative_folders_are_made_absolute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with run_folder(Path("run"), "demo", _Heard()) as folder:
        monkeypatch.chdir("/")
        assert (folder / MARKER).is_file()


def test_default_folders_name_recipe_and_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert str(default_folder("demo")).startswith("specpilot-runs/demo-2")
    with run_folder(None, "demo", _Heard()) as first:
        monkeypatch.setattr("specpilot_cli.apply.folder.default_folder", lambda _: first)
        with run_folder(None, "demo", _Heard()) as second:
            assert second == first.with_name(f"{first.name}-2")


def test_a_folder_that_a_quick_run_used_meanwhile_is_not_shared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another run claims, fills and leaves the folder between our look and our marker."""
    look = Path.iterdir

    def late(path: Path) -> object:
        seen = list(look(path))
        if path == tmp_path / "run" and not seen:
            (path / "result.json").touch()
        return iter(seen)

    monkeypatch.setattr(Path, "iterdir", late)
    with pytest.raises(InputError, match="is in use"):
        run_folder(tmp_path / "run", "demo", _Heard()).__enter__()
    assert [path.name for path in look(tmp_path / "run")] == ["result.json"]
