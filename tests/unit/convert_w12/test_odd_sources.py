"""Sources that are unusual but right, and sources that change while or after they are read."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from specpilot_cli.convert_w12 import convert as convert_module
from specpilot_cli.convert_w12.convert import convert_folder
from specpilot_cli.convert_w12.plan import Selection
from specpilot_cli.convert_w12.restore import restore_folder
from specpilot_cli.convert_w12.verify import verify_folder
from specpilot_cli.errors import InputError
from specpilot_cli.io.hf_folder import open_hf_folder
from specpilot_cli.io.safetensors_stream import write_safetensors
from tests.unit.convert_w12.conftest import MakeCheckpoint, convert, digests, weights

NOT_FINITE = '{"model_type": "m", "limit": [0.0, Infinity], "low": -Infinity, "x": NaN, "y": 1e999}'


def test_config_with_infinity_converts_and_comes_back(
    make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    """Mamba configurations hold `time_step_limit: [0.0, Infinity]`."""
    source = make_checkpoint({"a.weight": weights(0, 256, 256)}, config=NOT_FINITE, shards=1)
    convert(source, tmp_path / "w12")
    text = (tmp_path / "w12" / "config.json").read_text(encoding="utf-8")
    assert "Infinity" in text
    written = json.loads(text)
    assert written["limit"] == [0.0, float("inf")]
    assert written["x"] != written["x"]
    assert verify_folder(tmp_path / "w12", source).verdict == "identical"
    restore_folder(tmp_path / "w12", tmp_path / "back")
    assert digests(tmp_path / "back") == digests(source)


CHANGES = {
    "config.json": lambda s: (s / "config.json").write_text('{"model_type": "y"}', "utf-8"),
    "tokenizer.json": lambda s: (s / "tokenizer.json").write_text("{}", "utf-8"),
    "new.txt": lambda s: (s / "new.txt").write_text("x", "utf-8"),
    "templates/chat.jinja": lambda s: (s / "templates" / "chat.jinja").unlink(),
    "model.safetensors": lambda s: write_safetensors(
        s / "model.safetensors", {"a.weight": weights(0, 256, 256)}, {"format": "np"}, force=True
    ),
}


@pytest.mark.parametrize("changed", CHANGES)
def test_every_change_of_the_source_is_named(
    changed: str, make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    source, target = make_checkpoint({"a.weight": weights(0, 256, 256)}), tmp_path / "w12"
    convert(source, target)
    CHANGES[changed](source)
    found = verify_folder(target, source)
    assert [problem.name for problem in found.problems] == [changed]
    with pytest.raises(InputError, match=f"not a conversion of this source: .*`{changed}`"):
        convert_folder(open_hf_folder(source), target, Selection(), resume=True)


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        (b"\xff\xfe.txt", "is not UTF-8"),
        (b".hidden\xff", "is not UTF-8"),
        (b"a\\b.txt", "has a backslash"),
        (b"w12_manifest.json/x", "a folder named `w12_manifest.json`"),
        (b"model.safetensors.index.json/x", "a folder named"),
        (b"model-00001-of-00002.safetensors/x", "a folder named"),
    ],
)
def test_names_no_manifest_can_hold_are_refused_before_the_work(
    name: bytes, problem: str, make_checkpoint: MakeCheckpoint
) -> None:
    source = make_checkpoint({"a.weight": weights(0, 256, 256)})
    file = source / os.fsdecode(name)
    file.parent.mkdir(exist_ok=True)
    file.write_text("x", encoding="utf-8")
    with pytest.raises(InputError, match=problem) as caught:
        open_hf_folder(source)
    str(caught.value).encode()  # it can be printed


@pytest.mark.parametrize("shard", [b"a\\b.safetensors", b"\xff.safetensors"])
def test_shard_names_no_manifest_can_hold_are_refused(
    shard: bytes, make_checkpoint: MakeCheckpoint
) -> None:
    source = make_checkpoint({"a.weight": weights(0, 256, 256)})
    (source / "model.safetensors").rename(source / os.fsdecode(shard))
    with pytest.raises(InputError, match="the name of"):
        open_hf_folder(source)


def test_a_source_folder_whose_name_is_not_utf8_is_refused(
    make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    source = make_checkpoint({"a.weight": weights(0, 256, 256)})
    renamed = source.rename(tmp_path / os.fsdecode(b"\xff"))
    with pytest.raises(InputError, match="is not UTF-8"):
        open_hf_folder(renamed)


def test_a_hidden_shard_is_not_the_checkpoint(make_checkpoint: MakeCheckpoint) -> None:
    source = make_checkpoint({"a.weight": weights(0, 256, 256)})
    (source / "model.safetensors").rename(source / ".hid.safetensors")
    with pytest.raises(InputError, match="holds no safetensors weights"):
        open_hf_folder(source)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_a_pipe_in_the_source_is_refused_at_once(
    name: str, make_checkpoint: MakeCheckpoint
) -> None:
    """Without the check the call waits for ever, so it runs where it can be stopped."""
    source = make_checkpoint({"a.weight": weights(0, 256, 256)})
    (source / name).unlink()
    os.mkfifo(source / name)
    command = [sys.executable, "-m", "specpilot_cli", "convert-w12", str(source), "--dry-run"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "not a regular file" in done.stderr


def test_a_source_that_is_written_to_meanwhile_is_refused(
    make_checkpoint: MakeCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tensor that does not shrink is read twice; its second reading is not hashed."""
    source = make_checkpoint({"a.weight": weights(0, 256, 256)})
    plain = convert_module.convert_tensor

    def edited(*args: Any) -> Any:
        done = plain(*args)
        shard = source / "model.safetensors"
        raw = bytearray(shard.read_bytes())
        raw[-1] ^= 1
        shard.write_bytes(raw)
        return done

    monkeypatch.setattr(convert_module, "convert_tensor", edited)
    with pytest.raises(InputError, match="changed during the conversion"):
        convert(source, tmp_path / "w12")
    assert not (tmp_path / "w12").exists()
