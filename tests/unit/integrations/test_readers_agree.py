"""The loader for engines and `specpilot w12` refuse the same folders and read the same tensors."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from specpilot_cli.errors import InputError
from specpilot_cli.io.safetensors_stream import bf16_data
from specpilot_cli.io.w12_folder import read_w12_tensors
from specpilot_cli.schema.w12_manifest import W12Manifest, sealed
from specpilot_kernels.integrations.w12_tensors import open_tensors
from specpilot_kernels.w12 import layout
from specpilot_kernels.w12.manifest import MANIFEST_NAME, W12FolderError
from tests.unit.convert_w12.conftest import MakeCheckpoint, convert, make_checkpoint, weights

__all__ = ["make_checkpoint"]

Damage = Callable[[Path], object]


def by_engine(folder: Path) -> dict[str, bytes]:
    """Every tensor's bytes, as an engine reads them."""
    tensors = open_tensors(sorted(folder.glob("*.safetensors")))
    return {
        name: tensor[...].contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        for name, tensor in tensors.items()
    }


def by_command(folder: Path) -> dict[str, bytes]:
    """Every tensor's bytes, as `specpilot` reads them."""
    return {name: array.tobytes() for name, _, array in read_w12_tensors(folder)}


def manifest(edit: Callable[[dict[str, Any]], None], *, seal: bool) -> Damage:
    """Edit the manifest's document; `seal`: and give it the right hash again."""

    def damage(folder: Path) -> None:
        path = folder / MANIFEST_NAME
        data = json.loads(path.read_text(encoding="utf-8"))
        edit(data)
        text = json.dumps(data, indent=1, ensure_ascii=False) + "\n"
        if seal:
            text = sealed(W12Manifest.model_validate(data)).text()
        path.write_bytes(text.encode())

    return damage


def entry(edit: Callable[[dict[str, torch.Tensor]], object]) -> Damage:
    """Edit the tensors of the shard."""

    def damage(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        edit(tensors)
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})

    return damage


def set_number(key: str, value: object, *, seal: bool) -> Damage:
    return manifest(lambda data: data.update({key: value}), seal=seal)


def more_escapes(data: dict[str, Any]) -> None:
    row = next(row for row in data["tensors"] if row["encoding"] == "w12")
    row["escapes"] += 1


def wider_dtype(name: str, dtype: torch.dtype) -> Damage:
    return entry(lambda tensors: tensors.update({name: tensors[name].to(dtype)}))


def flat(name: str) -> Damage:
    return entry(lambda tensors: tensors.update({name: tensors[name].reshape(-1)}))


def flipped(name: str) -> Damage:
    def edit(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name].view(torch.uint8).reshape(-1)[0] ^= 1

    return entry(edit)


DAMAGES: dict[str, Damage] = {
    "no manifest": lambda folder: (folder / MANIFEST_NAME).unlink(),
    "not JSON": lambda folder: (folder / MANIFEST_NAME).write_text("{", encoding="utf-8"),
    "another format": set_number("format", "other", seal=False),
    "another version": set_number("version", 99, seal=True),
    "another layout": set_number("layout", 2, seal=True),
    "a version that is no integer": set_number("version", True, seal=False),
    "an edit without the seal": set_number("source_name", "x", seal=False),
    "another number of escapes": manifest(more_escapes, seal=True),
    "no shard": lambda folder: (folder / "model.safetensors").rename(folder / "x.safetensors"),
    "a part is missing": entry(lambda tensors: tensors.pop("a.weight_w12_window")),
    "a tensor too many": entry(lambda tensors: tensors.update(extra=torch.zeros(2))),
    "a stored tensor is missing": entry(lambda tensors: tensors.pop("norm.weight")),
    "stored in another shape": flat("grid"),
    "stored in another dtype": wider_dtype("norm.weight", torch.float32),
    **{f"{part} in another dtype": wider_dtype("a.weight" + suffix, torch.int64)
       for part, suffix in layout.PART_SUFFIXES.items()},
    "records in another shape": flat("a.weight_w12"),
    **{f"a bit of {part}": flipped("a.weight" + suffix)
       for part, suffix in layout.PART_SUFFIXES.items()},
    "a bit of a stored tensor": flipped("norm.weight"),
}  # fmt: skip


@pytest.fixture
def packed(make_checkpoint: MakeCheckpoint, tmp_path: Path) -> Path:
    bits = np.array(weights(1, 250, 256).data)
    bits[3, 5] = 0
    tensors = {
        "a.weight": bf16_data(bits), "norm.weight": weights(2, 64),
        "grid": np.arange(6, dtype=np.float32).reshape(2, 3),
    }  # fmt: skip
    convert(make_checkpoint(tensors), tmp_path / "w12")
    return tmp_path / "w12"


def test_both_read_the_same_bytes(packed: Path) -> None:
    found = by_engine(packed)
    assert set(found) == {"a.weight", "norm.weight", "grid"}
    assert found == by_command(packed)


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_both_refuse_what_is_damaged(damage: Damage, packed: Path) -> None:
    damage(packed)
    with pytest.raises(W12FolderError):
        by_engine(packed)
    with pytest.raises(InputError) as caught:
        by_command(packed)
    assert caught.value.where
    assert caught.value.hint


@pytest.mark.parametrize("part", [part for part in layout.PART_SUFFIXES if part != "escape_at"])
def test_parts_of_another_dtype_are_found_on_opening(part: str, packed: Path) -> None:
    """An engine opens every tensor before it fills its memory with any."""
    wider_dtype("a.weight" + layout.PART_SUFFIXES[part], torch.int64)(packed)
    with pytest.raises(W12FolderError, match="I64"):
        open_tensors([packed / "model.safetensors"])
