"""Where a conversion may write, what a broken source or a full disk does, and being killed."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from specpilot_cli.convert_w12 import convert as convert_module
from specpilot_cli.convert_w12.convert import survey_folder
from specpilot_cli.convert_w12.output import OutputShard
from specpilot_cli.convert_w12.plan import Selection
from specpilot_cli.convert_w12.restore import restore_folder
from specpilot_cli.convert_w12.verify import verify_folder
from specpilot_cli.errors import InputError, MachineError
from specpilot_cli.io.hf_folder import open_hf_folder, why_left_out
from specpilot_cli.io.safetensors_stream import bf16_data, write_safetensors
from specpilot_cli.io.shard_writer import ShardWriter
from specpilot_cli.io.w12_folder import read_folder_tensors
from specpilot_kernels.w12.codec import CpuCodec
from tests.unit.convert_w12.conftest import MakeCheckpoint, convert, digests, weights


def test_symlink_target_is_refused(make_checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(InputError, match="symbolic link"):
        convert(make_checkpoint(), tmp_path / "link", force=True)
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_link_in_the_place_of_the_partial_folder_is_refused(
    make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "thesis.tex").write_text("years of work", encoding="utf-8")
    (tmp_path / ".w12.partial").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(InputError, match="cannot write"):
        convert(make_checkpoint(), tmp_path / "w12")
    assert [file.name for file in (tmp_path / "elsewhere").iterdir()] == ["thesis.tex"]


def test_overlap_with_the_source_is_refused(
    make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    source = make_checkpoint()
    before = digests(source)
    (tmp_path / "alias").symlink_to(source)
    for target in (source, source / "w12", tmp_path, tmp_path / "alias" / "w12"):
        with pytest.raises(InputError, match="overlaps"):
            convert(source, target, force=True)
    assert digests(source) == before


def test_existing_folder_needs_force_and_only_ours_is_replaced(
    make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    source, target = make_checkpoint(), tmp_path / "w12"
    convert(source, target)
    first = digests(target)
    with pytest.raises(InputError, match="not empty"):
        convert(source, target)
    convert(source, target, force=True)
    assert digests(target) == first
    (target / "thesis.tex").write_text("years of work", encoding="utf-8")
    with pytest.raises(InputError, match=r"thesis\.tex"):
        convert(source, target, force=True)
    assert (target / "thesis.tex").read_text(encoding="utf-8") == "years of work"


def test_empty_target_folder_is_fine(make_checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    (tmp_path / "w12").mkdir()
    convert(make_checkpoint(), tmp_path / "w12")
    assert verify_folder(tmp_path / "w12").verdict == "identical"


def test_restore_follows_the_same_rules(make_checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    convert(make_checkpoint(), tmp_path / "w12")
    with pytest.raises(InputError, match="overlaps"):
        restore_folder(tmp_path / "w12", tmp_path / "w12" / "back")
    restore_folder(tmp_path / "w12", tmp_path / "back")
    with pytest.raises(InputError, match="not empty"):
        restore_folder(tmp_path / "w12", tmp_path / "back")
    restore_folder(tmp_path / "w12", tmp_path / "back", force=True)


def test_small_disk_is_refused_before_anything_is_written(
    make_checkpoint: MakeCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = make_checkpoint()
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    with pytest.raises(MachineError, match="not enough room"):
        convert(source, tmp_path / "w12")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model"]


def test_disk_that_fills_up_leaves_nothing(
    make_checkpoint: MakeCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = make_checkpoint()

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(ShardWriter, "write", full)
    with pytest.raises(MachineError, match="disk is full") as caught:
        convert(source, tmp_path / "w12")
    assert caught.value.hint
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model"]


def test_a_source_that_changes_meanwhile_is_named(
    make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    source = make_checkpoint({"a.weight": weights(0, 256, 256), "b.weight": weights(1, 256, 128)})
    opened = open_hf_folder(source)
    other = {"a.weight": weights(0, 128, 256), "b.weight": weights(1, 256, 256)}
    write_safetensors(source / "model.safetensors", other, {"format": "pt"}, force=True)
    with pytest.raises(InputError, match=r"changed during the conversion: `a\.weight`") as caught:
        convert_module.convert_folder(opened, tmp_path / "w12", Selection())
    assert (caught.value.where, bool(caught.value.hint)) == (
        str(source / "model.safetensors"), True,
    )  # fmt: skip


def test_codec_error_is_caught_before_writing(
    make_checkpoint: MakeCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The comparison after encoding is a real one: a codec that flips a bit cannot convert."""
    source, encode = make_checkpoint(), CpuCodec.encode_stripe

    def faulty(*args: Any, **kwargs: Any) -> Any:
        encoded = encode(*args, **kwargs)
        assert encoded is not None
        encoded.records[0, 0, 100] ^= 0x80
        return encoded

    monkeypatch.setattr(CpuCodec, "encode_stripe", faulty)
    with pytest.raises(RuntimeError, match="does not decode"):
        convert(source, tmp_path / "w12")
    assert not (tmp_path / "w12").exists()


def test_truncated_source_is_named(make_checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    source = make_checkpoint()
    with (source / "model.safetensors").open("r+b") as handle:
        handle.truncate(5000)
    with pytest.raises(InputError, match="truncated") as caught:
        convert(source, tmp_path / "w12")
    assert caught.value.where == str(source / "model.safetensors")


def _unlink_shard(source: Path) -> None:
    (source / "model-00002-of-00002.safetensors").unlink()


def _forget_tensor(source: Path) -> None:
    path = source / "model.safetensors.index.json"
    path.write_text(path.read_text().replace("lm_head.weight", "lm_head.other"))


def _twice(source: Path) -> None:
    shutil.copy(
        source / "model-00001-of-00002.safetensors", source / "model-00002-of-00002.safetensors"
    )


def _out_of_folder(source: Path) -> None:
    path = source / "model.safetensors.index.json"
    path.write_text(path.read_text().replace("model-00002", "../model-00002"))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_unlink_shard, "not in the folder"),
        (_forget_tensor, "lm_head"),
        (_twice, "is in `model-00001"),
        (_out_of_folder, "not to a safetensors file of this folder"),
    ],
)
def test_index_and_shards_must_agree(
    damage: Any, message: str, make_checkpoint: MakeCheckpoint
) -> None:
    source = make_checkpoint(shards=2)
    damage(source)
    with pytest.raises(InputError, match=message):
        open_hf_folder(source)


def test_tensor_missing_from_the_index(make_checkpoint: MakeCheckpoint) -> None:
    source = make_checkpoint({"a": np.zeros(2), "b": np.zeros(2)}, shards=2)
    extra = {"b": np.zeros(2), "c": np.zeros(2)}
    write_safetensors(source / "model-00002-of-00002.safetensors", extra, force=True)
    with pytest.raises(InputError, match="`c` in"):
        open_hf_folder(source)


def test_shards_without_index_are_not_guessed_at(make_checkpoint: MakeCheckpoint) -> None:
    source = make_checkpoint(shards=2)
    (source / "model.safetensors.index.json").unlink()
    with pytest.raises(InputError, match="several shards but no index"):
        open_hf_folder(source)


def test_leftover_weights_are_left_out_and_named(
    make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    source = make_checkpoint()
    shutil.copy(source / "model.safetensors", source / "consolidated.safetensors")
    (source / "pytorch_model.bin").write_bytes(b"x")
    (source / ".cache").mkdir()
    (source / ".cache" / "x.lock").write_bytes(b"")
    done = convert(source, tmp_path / "w12")
    assert done.left_out == (".cache/", "consolidated.safetensors", "pytorch_model.bin")
    assert sorted(digests(tmp_path / "w12")) == [
        "config.json",
        "model.safetensors",
        "templates/chat.jinja",
        "tokenizer.json",
        "w12_manifest.json",
    ]


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors"])
def test_incomplete_source(missing: str, make_checkpoint: MakeCheckpoint) -> None:
    source = make_checkpoint()
    (source / missing).unlink()
    with pytest.raises(InputError):
        open_hf_folder(source)


@pytest.mark.parametrize("shards_written", [0, 1, 3])
def test_killed_conversion_leaves_nothing_to_trust(
    shards_written: int, make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    tensors = {f"layers.{i}.weight": weights(i, 1024, 1024) for i in range(16)}
    source, target = make_checkpoint(tensors, shards=4), tmp_path / "w12"
    before = digests(source)
    partial = tmp_path / ".w12.partial"
    command = [sys.executable, "-m", "specpilot_cli", "convert-w12", str(source), "--workers", "1"]
    child = subprocess.Popen(
        [*command, "-o", str(target)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        deadline = time.monotonic() + 60
        while len(list(partial.glob("*.safetensors"))) <= shards_written:
            assert child.poll() is None, "finished before it could be killed"
            assert time.monotonic() < deadline
            time.sleep(0.0005)
        os.kill(child.pid, signal.SIGKILL)
    finally:
        child.kill()
        child.wait()
    assert not target.exists()
    assert partial.is_dir()
    with pytest.raises(InputError):
        verify_folder(partial)
    with pytest.raises(InputError):
        list(read_folder_tensors(partial))
    assert digests(source) == before
    convert(source, target)
    assert not partial.exists()
    assert verify_folder(target, source).verdict == "identical"


@pytest.mark.parametrize("place", ["clear", "finish_folder"])
def test_interrupted_conversion_keeps_only_what_it_wrote(
    place: str, make_checkpoint: MakeCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = make_checkpoint({"a.weight": bf16_data(np.full((128, 128), 0x3C00, np.uint16))})

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(convert_module, place, interrupt)
    with pytest.raises(KeyboardInterrupt):
        convert(source, tmp_path / "w12")
    left = [] if place == "clear" else [".w12.partial"]
    assert sorted(p.name for p in tmp_path.iterdir()) == [*left, "model"]


def test_an_error_of_the_input_keeps_nothing(
    make_checkpoint: MakeCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = make_checkpoint()

    def fail(*_: Any) -> None:
        raise InputError("altered")

    monkeypatch.setattr(convert_module, "finish_folder", fail)
    with pytest.raises(InputError, match="altered"):
        convert(source, tmp_path / "w12")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model"]


def test_hidden_entries_and_linked_folders_are_left_out_and_named(
    make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    source = make_checkpoint()
    (source / ".git" / "objects").mkdir(parents=True)
    (source / ".git" / "objects" / "aa").write_bytes(b"x")
    (source / ".gitattributes").write_text("*.safetensors filter=lfs", encoding="utf-8")
    (source / "templates" / ".hidden").write_text("x", encoding="utf-8")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "adapter.json").write_text("{}", encoding="utf-8")
    (source / "adapter").symlink_to(tmp_path / "elsewhere")
    done = convert(source, tmp_path / "w12")
    reasons = {name: why_left_out(name) for name in done.left_out}
    assert reasons == {
        ".git/": "hidden", ".gitattributes": "hidden", "templates/.hidden": "hidden",
        "adapter/": "a link to a folder",
    }  # fmt: skip
    assert not {name.removesuffix("/") for name in done.left_out} & set(digests(tmp_path / "w12"))


def test_room_for_the_worst_weights_is_asked_for(
    make_checkpoint: MakeCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """5 % zeros take 14.4 bits per weight; a disk with room for 12.1 would have filled up."""
    bits = np.array(weights(0, 1024, 1024).data)
    bits[np.random.default_rng(0).random(bits.shape) < 0.05] = 0
    source = make_checkpoint({"a.weight": bf16_data(bits)})
    opened = open_hf_folder(source)
    found = survey_folder(opened, Selection())
    assert found.outcomes[0].bits_per_weight == pytest.approx(14.4, abs=0.1)
    reserve = found.need.reserve_bytes
    # The file at its longest, and beside it the lists, which wait until the records are written.
    records = 64 * 2 * 12288
    assert found.need.content_bytes == 2 * bits.nbytes - records + found.carried_bytes
    assert found.folder_bytes + reserve < found.need.total_bytes
    for missing, fits in ((1, False), (0, True)):
        free = found.need.total_bytes - missing
        assert free > bits.size * 12.1 / 8 + reserve
        monkeypatch.setattr(shutil, "disk_usage", lambda _, n=free: SimpleNamespace(free=n))
        if fits:
            convert(source, tmp_path / "w12")
        else:
            with pytest.raises(MachineError, match="not enough room"):
                convert(source, tmp_path / "w12")


def test_no_moment_takes_more_disk_than_was_asked_for(
    make_checkpoint: MakeCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All lists of a zero-rich shard wait in temporary files while its file grows."""
    bits = np.array(weights(0, 2048, 1024).data)
    bits[np.random.default_rng(0).random(bits.shape) < 0.08] = 0
    odd = np.arange(5_000_003, dtype=np.uint32).astype(np.uint8)
    source = make_checkpoint({"a.weight": bf16_data(bits), "odd": odd, "b.weight": bf16_data(bits)})
    taken: list[int] = []
    finish = ShardWriter._finish

    def watched(self: ShardWriter) -> None:
        files = [f for f in tmp_path.rglob("*") if ".w12.partial" in f.as_posix() and f.is_file()]
        taken.append(waiting[-1] + sum(f.stat().st_size for f in files))
        finish(self)

    waiting: list[int] = []
    write_late = OutputShard._write_late

    def noted(self: OutputShard) -> None:
        waiting.append(sum(late.spool.size_bytes for late in self._late.values()))
        write_late(self)

    monkeypatch.setattr(OutputShard, "_write_late", noted)
    monkeypatch.setattr(ShardWriter, "_finish", watched)
    need = convert(source, tmp_path / "w12").need
    assert 6_000_000 < waiting[0] < taken[0]
    assert taken[0] <= need.total_bytes
