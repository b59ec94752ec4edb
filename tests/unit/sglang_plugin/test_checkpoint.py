"""A folder that `convert-w12` wrote, as the loaders read it."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from specpilot_kernels.w12.manifest import W12FolderError
from tests.unit.convert_w12.conftest import convert
from tests.unit.sglang_plugin.conftest import bits, ordinary
from tests.unit.sglang_plugin.fake_sglang import stock_iterator


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """(BF16 folder, W12 folder) with two shards; some tensors are stored as they were."""
    source = tmp_path / "bf16"
    source.mkdir()
    tensors = {
        f"model.layers.{i}.mlp.{name}.weight": ordinary(256, 192, i)
        for i in range(4)
        for name in ("gate_proj", "up_proj")
    }
    tensors["model.norm.weight"] = torch.ones(192, dtype=torch.bfloat16)
    tensors["model.embed_tokens.weight"] = ordinary(64, 192)
    index = {}
    for number in range(2):
        shard = f"model-{number + 1:05}-of-00002.safetensors"
        part = {name: tensors[name] for name in list(tensors)[number::2]}
        save_file(part, source / shard, metadata={"format": "pt"})
        index |= dict.fromkeys(part, shard)
    (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    (source / "config.json").write_text('{"model_type": "qwen3"}', encoding="utf-8")
    convert(source, tmp_path / "w12")
    return source, tmp_path / "w12"


def read(plugin: Any, folder: Path) -> list[tuple[str, torch.Tensor]]:
    files = [str(path) for path in sorted(folder.glob("*.safetensors"))]
    return list(plugin.w12_checkpoint.decoding(stock_iterator, files, 8, disable_mmap=False))


def test_every_tensor_comes_back_under_its_name(plugin: Any, folders: tuple[Path, Path]) -> None:
    source, encoded = folders
    found = read(plugin, encoded)
    wanted = {k: v for path in source.glob("*.safetensors") for k, v in load_file(path).items()}
    assert len(found) == len(wanted)
    for name, tensor in found:
        assert tensor.dtype == wanted[name].dtype
        assert torch.equal(bits(tensor), bits(wanted[name]))
    assert plugin.w12_config.FACTS.decoded == len(wanted)


def test_a_folder_that_nobody_decoded_is_no_model(plugin: Any) -> None:
    facts = plugin.w12_config.FACTS
    facts.asked, facts.checkpoint = True, "w12"
    facts.add("a", plugin.w12_facts.Encoded(1, 2, 1, 0, True, "kernel", 0.0))
    assert "records were not decoded" in facts.report()
    with pytest.raises(plugin.w12_product.W12Error, match="without decoding"):
        plugin.w12_config.loaded(None, object())


def test_other_folders_go_to_the_stock_reader(plugin: Any, folders: tuple[Path, Path]) -> None:
    source, _ = folders
    shards = [str(path) for path in sorted(source.glob("*.safetensors"))]
    assert read(plugin, source) == [("stock", shards)]


@pytest.mark.parametrize("local", [True, False])
def test_the_manifest_of_a_model_on_the_hub_is_fetched(
    plugin: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, local: bool
) -> None:
    fetched: list[tuple[Any, ...]] = []

    def cached_file(name: str, file: str, **options: Any) -> None:
        fetched.append((name, file, options["revision"], options["cache_dir"]))

    monkeypatch.setattr(plugin.w12_checkpoint, "cached_file", cached_file)
    path = str(tmp_path) if local else "owner/name"
    plugin.w12_checkpoint.fetch_manifest(
        SimpleNamespace(model_path=path, revision="r"), SimpleNamespace(download_dir="/d")
    )
    assert fetched == ([] if local else [("owner/name", "w12_manifest.json", "r", "/d")])


def test_damage_is_named_and_nothing_runs_on(plugin: Any, folders: tuple[Path, Path]) -> None:
    _, encoded = folders
    shard = sorted(encoded.glob("*.safetensors"))[-1]
    raw = bytearray(shard.read_bytes())
    raw[len(raw) // 2] ^= 4
    shard.write_bytes(raw)
    with pytest.raises(W12FolderError, match=r"tensor `model\..*` in .* is damaged"):
        read(plugin, encoded)


def test_a_missing_shard_is_named(plugin: Any, folders: tuple[Path, Path]) -> None:
    _, encoded = folders
    gone = sorted(encoded.glob("*.safetensors"))[0]
    gone.unlink()
    with pytest.raises(W12FolderError, match=f"shard `{gone.name}` is missing"):
        read(plugin, encoded)


def test_a_reader_that_stops_early_leaves_no_thread(
    plugin: Any, folders: tuple[Path, Path]
) -> None:
    _, encoded = folders
    files = [str(path) for path in sorted(encoded.glob("*.safetensors"))]
    tensors = plugin.w12_checkpoint.decoding(stock_iterator, files)
    next(tensors)
    tensors.close()
    assert not [t for t in threading.enumerate() if t.name.startswith("w12-decode")]
