from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from specpilot_cli.errors import InputError
from specpilot_cli.io.atomic import (
    atomic_folder,
    atomic_output,
    atomic_write_bytes,
    atomic_write_text,
    partial_path,
)


def test_text_is_written_with_parents_and_no_leftovers(tmp_path: Path) -> None:
    target = tmp_path / "a" / "b.txt"
    atomic_write_text(target, "τ = 4\n")
    assert target.read_text(encoding="utf-8") == "τ = 4\n"
    assert [p.name for p in target.parent.iterdir()] == ["b.txt"]


def test_existing_file_is_kept_without_force(tmp_path: Path) -> None:
    target = tmp_path / "x"
    atomic_write_bytes(target, b"old")
    with pytest.raises(InputError, match="already exists") as caught:
        atomic_write_bytes(target, b"new")
    assert "--force" in (caught.value.hint or "")
    assert target.read_bytes() == b"old"
    atomic_write_bytes(target, b"new", force=True)
    assert target.read_bytes() == b"new"


def test_failure_leaves_the_old_file_and_no_partial(tmp_path: Path) -> None:
    target = tmp_path / "x"
    target.write_bytes(b"old")

    def write_half() -> None:
        with atomic_output(target, force=True) as temporary:
            temporary.write_bytes(b"ha")
            raise RuntimeError("disk on fire")

    with pytest.raises(RuntimeError):
        write_half()
    assert target.read_bytes() == b"old"
    assert not partial_path(target).exists()


def test_target_that_appears_meanwhile_is_not_overwritten(tmp_path: Path) -> None:
    target = tmp_path / "x"

    def write_late() -> None:
        with atomic_output(target) as temporary:
            temporary.write_bytes(b"mine")
            target.write_bytes(b"theirs")

    with pytest.raises(InputError, match="already exists"):
        write_late()
    assert target.read_bytes() == b"theirs"


def test_second_writer_of_one_file_is_refused(tmp_path: Path) -> None:
    target = tmp_path / "x"
    with atomic_output(target) as temporary:
        temporary.write_bytes(b"first")
        with pytest.raises(InputError, match="another process"), atomic_output(target):
            pass
    assert target.read_bytes() == b"first"


def test_folder_is_renamed_as_a_whole(tmp_path: Path) -> None:
    target = tmp_path / "model"
    with atomic_folder(target) as temporary:
        assert temporary.name == ".model.partial"
        (temporary / "sub").mkdir()
        (temporary / "sub" / "w.bin").write_bytes(b"1")
        assert not target.exists()
    assert (target / "sub" / "w.bin").read_bytes() == b"1"
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


def test_folder_refuses_a_full_target_and_takes_an_empty_one(tmp_path: Path) -> None:
    target = tmp_path / "model"
    target.mkdir()
    with atomic_folder(target) as temporary:
        (temporary / "a").write_bytes(b"1")
    with pytest.raises(InputError, match="not empty"), atomic_folder(target):
        pass
    with atomic_folder(target, force=True) as temporary:
        (temporary / "b").write_bytes(b"2")
    assert [p.name for p in target.iterdir()] == ["b"]
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


def test_folder_over_a_file_and_file_over_a_folder_are_refused(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"")
    (tmp_path / "d").mkdir()
    with pytest.raises(InputError, match="not a folder"), atomic_folder(tmp_path / "f"):
        pass
    with pytest.raises(InputError, match="is a folder"):
        atomic_write_bytes(tmp_path / "d", b"", force=True)


@pytest.mark.parametrize("kind", ["link", "file"])
def test_what_a_replaced_folder_would_be_renamed_onto_is_refused_at_once(
    kind: str, tmp_path: Path
) -> None:
    elsewhere, in_the_way = tmp_path / "elsewhere", tmp_path / ".f.old.partial"
    elsewhere.mkdir()
    (tmp_path / "f").mkdir()
    if kind == "link":
        in_the_way.symlink_to(elsewhere)
    else:
        in_the_way.write_text("x", encoding="utf-8")
    with pytest.raises(InputError, match="in the way"), atomic_folder(tmp_path / "f", force=True):
        raise AssertionError("the work began")
    assert not (tmp_path / ".f.partial").exists()


def test_leftovers_of_an_interrupted_run_are_cleared(tmp_path: Path) -> None:
    left = tmp_path / ".model.partial"
    (left / "deep").mkdir(parents=True)
    (left / "old.safetensors").write_bytes(b"half")
    (left / "link").symlink_to(tmp_path)
    with atomic_folder(tmp_path / "model") as temporary:
        assert not list(temporary.iterdir())
    (tmp_path / ".x.partial").write_bytes(b"half a fi")
    with atomic_output(tmp_path / "x") as file:
        assert file.read_bytes() == b""
    assert tmp_path.exists()


def test_unwritable_parent_is_an_input_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(InputError, match="cannot create"):
        atomic_write_text(tmp_path / "file" / "below", "x")


def test_a_symlink_in_place_of_the_partial_is_not_followed(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(b"keep")
    (tmp_path / ".x.partial").symlink_to(victim)
    with pytest.raises(InputError, match="cannot write"):
        atomic_write_bytes(tmp_path / "x", b"data")
    assert victim.read_bytes() == b"keep"


_HOLD = """
import sys, time
from pathlib import Path
from specpilot_cli.io.atomic import atomic_folder
with atomic_folder(Path(sys.argv[1])) as temporary:
    (temporary / "half.bin").write_bytes(b"0" * 1000)
    print("writing", flush=True)
    time.sleep(60)
"""


def test_killed_writer_leaves_nothing_that_is_trusted_and_no_lock(tmp_path: Path) -> None:
    target = tmp_path / "model"
    child = subprocess.Popen(
        [sys.executable, "-c", _HOLD, str(target)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "writing\n"
        with pytest.raises(InputError, match="another process"), atomic_folder(target):
            pass
        os.kill(child.pid, signal.SIGKILL)
        child.wait(timeout=60)
    finally:
        child.kill()
        child.wait(timeout=60)
    assert not target.exists()
    assert (tmp_path / ".model.partial" / "half.bin").exists()
    started_s = time.monotonic()
    with atomic_folder(target) as temporary:
        (temporary / "whole.bin").write_bytes(b"1")
    assert time.monotonic() - started_s < 30
    assert [p.name for p in target.iterdir()] == ["whole.bin"]
