"""Pitfalls 23 to 26: links into a cache, the source, the target, and config.json."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from specpilot_cli.io.safetensors_stream import write_safetensors
from tests.unit.convert_w12.conftest import CONFIG, MakeCheckpoint, digests, weights
from tests.unit.convert_w12.pitfalls.conftest import Cli, ThereAndBack


@pytest.fixture
def snapshot(tmp_path: Path) -> Path:
    """A hub cache: links to blobs that are named by the sha256 of what they hold."""
    folder = tmp_path / "models--x--y" / "snapshots" / "0123abcd"
    blobs = tmp_path / "models--x--y" / "blobs"
    folder.mkdir(parents=True)
    blobs.mkdir()
    write_safetensors(tmp_path / "model.safetensors", {"a.weight": weights(0, 256, 256)})
    (tmp_path / "config.json").write_text(CONFIG, encoding="utf-8")
    for name in ("model.safetensors", "config.json"):
        blob = blobs / hashlib.sha256((tmp_path / name).read_bytes()).hexdigest()
        (tmp_path / name).rename(blob)
        (folder / name).symlink_to(Path("..", "..", "blobs", blob.name))
    return folder


def assert_blobs_are_what_their_names_say(snapshot: Path) -> None:
    blobs = list((snapshot.parents[1] / "blobs").iterdir())
    assert len(blobs) == 2
    assert all(hashlib.sha256(blob.read_bytes()).hexdigest() == blob.name for blob in blobs)


def test_pitfall_23_a_cache_is_read_through_its_links_and_never_written(
    snapshot: Path, cli: Cli, tmp_path: Path
) -> None:
    """A write to the hub cache went through a link, and every model that shared the file broke."""
    packed = tmp_path / "w12"
    assert cli("convert-w12", snapshot, "-o", packed).code == 0
    assert not any(path.is_symlink() for path in packed.rglob("*"))
    assert cli("w12", "verify", packed, "--against", snapshot).code == 0
    for target in (snapshot, snapshot / "w12"):
        answer = cli("convert-w12", snapshot, "-o", target, "--force")
        assert (answer.code, "lie inside an input" in answer.err) == (2, True)
    assert_blobs_are_what_their_names_say(snapshot)


def test_pitfall_23_a_target_with_links_is_replaced_not_written_through(
    snapshot: Path, cli: Cli, tmp_path: Path
) -> None:
    """The earlier result was a link as well, and `--force` overwrote what it pointed to."""
    packed = tmp_path / "w12"
    assert cli("convert-w12", snapshot, "-o", packed).code == 0
    (packed / "model.safetensors").unlink()
    (packed / "model.safetensors").symlink_to((snapshot / "model.safetensors").resolve())
    assert cli("convert-w12", snapshot, "-o", packed, "--force").code == 0
    assert not (packed / "model.safetensors").is_symlink()
    assert_blobs_are_what_their_names_say(snapshot)
    (tmp_path / "link").symlink_to(packed)
    before = digests(packed)
    assert cli("convert-w12", snapshot, "-o", tmp_path / "link", "--force").code == 2
    assert cli("w12", "restore", packed, "-o", tmp_path / "link", "--force").code == 2
    assert digests(packed) == before


@pytest.mark.parametrize("shards", [1, 3])
def test_pitfall_24_the_source_is_not_touched(
    shards: int, make_checkpoint: MakeCheckpoint, there_and_back: ThereAndBack
) -> None:
    """The converter rewrote the source's index, deleted its files, or changed its tensors."""
    source = make_checkpoint(shards=shards)
    before = {
        path: (path.stat().st_ino, path.stat().st_mtime_ns, path.stat().st_mode)
        for path in (source, *source.rglob("*"))
    }
    there_and_back(source)
    after = {
        path: (path.stat().st_ino, path.stat().st_mtime_ns, path.stat().st_mode)
        for path in (source, *source.rglob("*"))
    }
    assert after == before


def test_pitfall_25_a_folder_with_anything_else_in_it_is_not_replaced(
    make_checkpoint: MakeCheckpoint, cli: Cli, tmp_path: Path
) -> None:
    """The target held somebody's work; the converter emptied it first."""
    source, packed = make_checkpoint(), tmp_path / "w12"
    packed.mkdir()
    (packed / "thesis.tex").write_text("years of work", encoding="utf-8")
    for words in ((), ("--force",), ("--resume",), ("--force", "--resume")):
        answer = cli("convert-w12", source, "-o", packed, *words)
        assert answer.code == 2
        assert "hint:" in answer.err
    assert digests(tmp_path / "w12").keys() == {"thesis.tex"}
    (packed / "thesis.tex").unlink()
    assert cli("convert-w12", source, "-o", packed).code == 0
    back = tmp_path / "back"
    back.mkdir()
    (back / "notes").mkdir()
    (back / "notes" / "a.txt").write_text("x", encoding="utf-8")
    assert cli("w12", "restore", packed, "-o", back).code == 2
    assert cli("w12", "restore", packed, "-o", back, "--force").code == 2
    assert (back / "notes" / "a.txt").read_text(encoding="utf-8") == "x"


def test_pitfall_26_config_gains_two_keys_and_loses_them_again(
    make_checkpoint: MakeCheckpoint, there_and_back: ThereAndBack, cli: Cli, tmp_path: Path
) -> None:
    """The restored model was still called quantised, or its config.json had other bytes."""
    config = '{"torch_dtype":"bfloat16",\n\t"z": 1e5, "a": [1,2], "name": "mod\\u00e8le"}  \n'
    source = make_checkpoint(config=config)
    there_and_back(source)
    ours = json.loads((tmp_path / "w12" / "config.json").read_text(encoding="utf-8"))
    quantization = ours.pop("quantization_config")
    assert "import specpilot_kernels" in ours.pop("transformers_weights")
    assert ours == json.loads(config)
    assert quantization["quant_method"] == "w12"
    assert (tmp_path / "back" / "config.json").read_bytes() == config.encode()
    answer = cli("convert-w12", tmp_path / "w12", "-o", tmp_path / "again")
    assert answer.code == 2
    assert "w12 restore" in answer.err


@pytest.mark.parametrize("method", ["fp8", "awq", "compressed-tensors"])
def test_pitfall_26_a_quantised_source_is_refused_with_its_method(
    method: str, make_checkpoint: MakeCheckpoint, cli: Cli, tmp_path: Path
) -> None:
    """A quantised checkpoint was converted once more, and no engine could load the result."""
    config = json.dumps({"model_type": "x", "quantization_config": {"quant_method": method}})
    answer = cli("convert-w12", make_checkpoint(config=config), "-o", tmp_path / "w12")
    assert answer.code == 2
    assert method in answer.err
    assert not (tmp_path / "w12").exists()
