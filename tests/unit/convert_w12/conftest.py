"""Small checkpoints of every kind of content."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from specpilot_cli.convert_w12.convert import Conversion, convert_folder
from specpilot_cli.convert_w12.plan import Selection
from specpilot_cli.io.hf_folder import open_hf_folder
from specpilot_cli.io.safetensors_stream import TensorData, bf16_data, write_safetensors

Tensors = Mapping[str, npt.NDArray[Any] | TensorData]
MakeCheckpoint = Callable[..., Path]

CONFIG = '{\r\n  "model_type": "test",\r\n  "tie_word_embeddings": false\r\n}'


def weights(seed: int, *shape: int) -> TensorData:
    """BF16 weights of N(0, 0.02)."""
    values = np.random.default_rng(seed).standard_normal(shape).astype(np.float32) * 0.02
    return bf16_data((np.asarray(values).view(np.uint32) >> 16).astype(np.uint16))


def odd_weights() -> TensorData:
    """Weights with zeros of both signs, denormals, infinities and NaN payloads among them."""
    bits = np.array(weights(1, 380, 250).data)
    odd = [0x0000, 0x8000, 0x0001, 0x807F, 0x7F80, 0xFF80, 0x7FC0, 0xFFC1, 0x7F81]
    rng = np.random.default_rng(2)
    bits[rng.integers(0, 380, 90), rng.integers(0, 250, 90)] = np.resize(odd, 90)
    bits[17] = 0
    return bf16_data(bits)


def all_patterns() -> TensorData:
    """Each of the 65,536 patterns once, among weights that W12 shrinks."""
    ordinary = np.array(weights(3, 4096, 320).data)
    ordinary[:, :16] = np.random.default_rng(4).permutation(65536).reshape(4096, 16)
    return bf16_data(ordinary)


def model_tensors() -> dict[str, npt.NDArray[Any] | TensorData]:
    """One tensor of each kind, small."""
    return {
        "model.embed_tokens.weight": weights(10, 256, 128),
        "model.layers.0.self_attn.q_proj.weight": odd_weights(),
        "model.layers.0.mlp.experts.gate_up_proj": weights(11, 3, 256, 192),
        "model.layers.0.mlp.gate.weight": weights(12, 128, 128),
        "model.layers.0.linear_attn.in_proj_a.weight": weights(13, 4, 128),
        "model.layers.0.linear_attn.A_log": np.linspace(0, 1, 4, dtype=np.float32),
        "model.layers.0.input_layernorm.weight": weights(14, 128),
        "model.layers.0.linear_attn.conv1d.weight": weights(15, 64, 1, 4),
        "half": np.arange(5, dtype=np.float16),
        "model.layers.1.mlp.up_proj.weight": weights(16, 384, 128),
        "lm_head.weight": weights(17, 256, 128),
        "counter": np.array(7, dtype=np.int64),
        "nothing.weight": bf16_data(np.empty((0, 64), np.uint16)),
    }


@pytest.fixture
def make_checkpoint(tmp_path: Path) -> MakeCheckpoint:
    """Write a folder: `shards` > 1 spreads the tensors and adds an index."""

    def make(
        tensors: Tensors | None = None,
        *,
        name: str = "model",
        shards: int = 1,
        config: str = CONFIG,
    ) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        chosen = model_tensors() if tensors is None else tensors
        (folder / "config.json").write_bytes(config.encode())
        (folder / "tokenizer.json").write_text('{"version": "1.0"}', encoding="utf-8")
        (folder / "templates").mkdir()
        (folder / "templates" / "chat.jinja").write_text("{{ x }}", encoding="utf-8")
        if shards == 1:
            write_safetensors(folder / "model.safetensors", chosen, {"format": "pt"})
            return folder
        weight_map = {}
        for number in range(shards):
            file = f"model-{number + 1:05}-of-{shards:05}.safetensors"
            part = {n: t for i, (n, t) in enumerate(chosen.items()) if i % shards == number}
            write_safetensors(folder / file, part, {"format": "pt"})
            weight_map.update(dict.fromkeys(part, file))
        index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
        return folder

    return make


def convert(
    source: Path,
    target: Path,
    *,
    include: tuple[str, ...] = (),
    exclude: tuple[str, ...] = (),
    force: bool = False,
) -> Conversion:
    """Convert with a selection."""
    selection = Selection(include, exclude)
    return convert_folder(open_hf_folder(source), target, selection, force=force)


def digests(folder: Path) -> dict[str, str]:
    """Relative path → sha256 of every file below `folder`."""
    return {
        file.relative_to(folder).as_posix(): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in folder.rglob("*")
        if file.is_file()
    }
