"""W12 weights whose configuration does not say so, or is only a part of the folder's."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, CLIPConfig, CLIPModel, CLIPTextModel, CLIPVisionModel

from specpilot_kernels.integrations.w12_tensors import holds_records
from specpilot_kernels.w12.manifest import LOADER_NOTICE, W12FolderError
from tests.unit.convert_w12.conftest import convert
from tests.unit.integrations.conftest import MakeFolders, bits, load

LAYERS: dict[str, Any] = {
    "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1, "num_attention_heads": 4,
}  # fmt: skip


def assert_same_bits(found: Any, expected: Any) -> None:
    ours, theirs = bits(found), bits(expected)
    assert ours.keys() == theirs.keys()
    assert [name for name in theirs if not torch.equal(ours[name], theirs[name])] == []


def test_the_bf16_models_configuration_given_by_the_caller(folders: MakeFolders) -> None:
    source, packed = folders("biased")
    config = AutoConfig.from_pretrained(str(source))
    assert_same_bits(load(packed, config=config), load(source))


@pytest.mark.parametrize("change", ["copied", "renamed"])
def test_a_config_file_that_does_not_say_w12(
    change: str, folders: MakeFolders, tmp_path: Path
) -> None:
    source, w12 = folders("biased", shard_size="200KB")
    packed = shutil.copytree(w12, tmp_path / "packed")
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    if change == "renamed":
        config["quantization_config"] = {"quant_method": "w13"}
    (packed / "config.json").write_text(json.dumps(config), encoding="utf-8")
    assert_same_bits(load(packed), load(source))
    (packed / "w12_manifest.json").unlink()
    with pytest.raises(W12FolderError, match="has no `w12_manifest"):
        load(packed)


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model of two towers, each with a class of its own: BF16 folder and W12 folder."""
    root = tmp_path_factory.mktemp("clip")
    torch.manual_seed(3)
    text = {**LAYERS, "vocab_size": 512}
    vision = {**LAYERS, "image_size": 32, "patch_size": 8}
    config = CLIPConfig(text_config=text, vision_config=vision, projection_dim=256)
    CLIPModel(config).to(torch.bfloat16).save_pretrained(root / "bf16")
    convert(root / "bf16", root / "w12")
    return root / "bf16", root / "w12"


@pytest.mark.parametrize("kind", [CLIPModel, CLIPVisionModel, CLIPTextModel])
def test_a_tower_loaded_alone_is_the_bf16_tower(kind: Any, clip: tuple[Path, Path]) -> None:
    source, packed = clip
    assert_same_bits(kind.from_pretrained(str(packed)), kind.from_pretrained(str(source)))


def test_saving_all_towers_leaves_no_mark(clip: tuple[Path, Path], tmp_path: Path) -> None:
    CLIPModel.from_pretrained(str(clip[1])).save_pretrained(tmp_path)
    text = (tmp_path / "config.json").read_text(encoding="utf-8")
    assert "w12" not in text.lower()
    assert "quant_method" not in text


@pytest.mark.parametrize("kind", ["CLIPModel", "CLIPVisionModel", "CLIPTextModel"])
def test_no_tower_loads_without_the_integration(kind: str, clip: tuple[Path, Path]) -> None:
    program = f"import sys; from transformers import {kind} as C; C.from_pretrained(sys.argv[1])"
    done = subprocess.run(
        [sys.executable, "-c", program, str(clip[1])],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert LOADER_NOTICE in done.stderr.splitlines()[-1]


def test_a_name_that_ends_like_a_part_is_not_enough(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"mlp_w12": torch.zeros(2), "a_w12_window": torch.zeros(2)}, path)
    assert not holds_records([path])
    save_file({"a_w12": torch.zeros(2), "a_w12_window": torch.zeros(2)}, path)
    assert holds_records([path])
