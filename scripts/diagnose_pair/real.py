"""The demo pair broken as deployments break: drafter and target folders with one fault."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from specpilot_cli.io.safetensors_stream import (
    SafetensorsFile,
    array_data,
    bf16_data,
    write_safetensors,
)

Edit = Callable[[dict[str, Any], dict[str, npt.NDArray[Any]]], None]


def copy_with(folder: Path, source: Path, edit: Edit) -> Path:
    """Copy a model folder; `edit` changes its configuration and its tensors (BF16 as uint16)."""
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    with SafetensorsFile(source / "model.safetensors") as file:
        tensors = {name: file.read_array(name).copy() for name in file.names}
        kinds = {name: file.info(name).dtype for name in file.names}
        metadata = dict(file.metadata)
    edit(config, tensors)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    stored = {
        name: bf16_data(array) if kinds[name] == "BF16" else array_data(array)
        for name, array in tensors.items()
    }
    write_safetensors(folder / "model.safetensors", stored, metadata, force=True)
    return folder


def wrong_mask_token(config: dict[str, Any], tensors: dict[str, npt.NDArray[Any]]) -> None:
    """The mask token of another tokenizer."""
    config["dflash_config"]["mask_token_id"] = 300


def swapped_layers(config: dict[str, Any], tensors: dict[str, npt.NDArray[Any]]) -> None:
    """Captured layers, each one too early, as engines that count from another end have them."""
    ids = config["dflash_config"]["target_layer_ids"]
    config["dflash_config"]["target_layer_ids"] = [layer - 1 for layer in ids]


def swapped_codebooks(config: dict[str, Any], tensors: dict[str, npt.NDArray[Any]]) -> None:
    """Predecessor and successor codebooks of the selector under each other's name."""
    first, second = (f"candidate_selector.{side}_codebook" for side in ("predecessor", "successor"))
    tensors[first], tensors[second] = tensors[second], tensors[first]


def random_selector(config: dict[str, Any], tensors: dict[str, npt.NDArray[Any]]) -> None:
    """Selector weights that were never loaded: as initialised, far too large."""
    rng = np.random.default_rng(0)
    for name in tensors:
        if name.startswith("candidate_selector."):
            values = rng.standard_normal(tensors[name].shape).astype(np.float32)
            tensors[name] = _bf16(values)


def quantised(bits: int) -> Edit:
    """Weight-only rounding to `bits` bits, one scale per row, as a crude quantisation does."""

    def edit(config: dict[str, Any], tensors: dict[str, npt.NDArray[Any]]) -> None:
        for name, array in tensors.items():
            if array.dtype != np.uint16 or array.ndim != 2 or "embed" in name:
                continue
            wide = (array.astype(np.uint32) << 16).view(np.float32)
            scale = np.abs(wide).max(axis=1, keepdims=True) / (2 ** (bits - 1) - 1)
            rounded = np.round(wide / np.where(scale > 0, scale, 1)) * scale
            tensors[name] = _bf16(rounded)
        config["quantization_config"] = {"quant_method": f"round-to-nearest-{bits}"}

    return edit


def _bf16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    tensor = torch.from_numpy(np.ascontiguousarray(values)).to(torch.bfloat16)
    return tensor.view(torch.int16).numpy().view(np.uint16)
