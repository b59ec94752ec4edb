"""Model folders that are wrong in one place: refused by name, before memory is taken."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specpilot_cli.engines.reference.config import DrafterConfig, TargetConfig
from specpilot_cli.engines.reference.weights import load_drafter, load_target
from specpilot_cli.errors import InputError
from specpilot_cli.io.safetensors_stream import SafetensorsFile, bf16_data, write_safetensors

# What JSON can hold where a whole number belongs.
_NO_COUNT = [0, -1, 1.5, True, "64", None, [64], {"a": 1}, 2**24 + 1, 10**30]
_NO_REAL = [0, -1.0, True, "1e-6", [1.0], {"a": 1}, 1e12]
_TARGET_COUNTS = [
    "vocab_size", "hidden_size", "intermediate_size", "max_position_embeddings", "head_dim",
    "num_attention_heads", "num_key_value_heads", "linear_num_key_heads",
    "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim",
    "linear_conv_kernel_dim", "num_hidden_layers", "full_attention_interval",
]  # fmt: skip
_DRAFTER_COUNTS = [
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "head_dim",
    "num_attention_heads", "num_key_value_heads",
]  # fmt: skip
_FLASH_COUNTS = [
    "block_size", "selector_rank", "selector_top_k", "conv_group_size", "conv_kernel_size",
]  # fmt: skip


def _copy(pair: Any, tmp_path: Path, which: str, *, section: str | None = None, **new: Any) -> Path:
    """A copy of one folder with other values in its config.json."""
    folder = tmp_path / which
    shutil.copytree(getattr(pair, which), folder)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (config if section is None else config[section]).update(new)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def _refused(reader: Any, folder: Path, *parts: str) -> None:
    with pytest.raises(InputError) as caught:
        reader(folder)
    assert str(folder / "config.json") in str(caught.value)
    assert len(caught.value.message) < 200
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize("value", _NO_COUNT, ids=repr)
@pytest.mark.parametrize("key", _TARGET_COUNTS)
def test_target_counts_are_whole_and_bounded(
    pair: Any, tmp_path: Path, key: str, value: Any
) -> None:
    _refused(TargetConfig.from_folder, _copy(pair, tmp_path, "target", **{key: value}), key)


@pytest.mark.parametrize("value", _NO_COUNT, ids=repr)
@pytest.mark.parametrize("key", [*_DRAFTER_COUNTS, *_FLASH_COUNTS])
def test_drafter_counts_are_whole_and_bounded(
    pair: Any, tmp_path: Path, key: str, value: Any
) -> None:
    section = "dflash_config" if key in _FLASH_COUNTS else None
    folder = _copy(pair, tmp_path, "drafter", section=section, **{key: value})
    _refused(DrafterConfig.from_folder, folder, key)


@pytest.mark.parametrize("value", _NO_REAL, ids=repr)
@pytest.mark.parametrize("key", ["rms_norm_eps", "rope_theta", "partial_rotary_factor"])
def test_real_numbers_are_positive_and_finite(
    pair: Any, tmp_path: Path, key: str, value: Any
) -> None:
    _refused(TargetConfig.from_folder, _copy(pair, tmp_path, "target", **{key: value}), key)


@pytest.mark.parametrize(
    "new",
    [
        {"layer_types": "full_attention"},
        {"layer_types": []},
        {"layer_types": [["linear_attention"]]},
        {"layer_types": ["linear_attention", 3]},
        {"layer_types": ["linear_attention"] * 5000},
        {"layer_types": ["sliding_attention"]},
        {"num_hidden_layers": 2**20},
        {"rope_parameters": [1]},
        {"rope_parameters": {"rope_theta": "big"}},
        {"text_config": "qwen3_5"},
        {"model_type": ["qwen3_5"]},
        {"model_type": "llama"},
        {"partial_rotary_factor": 0.2},
        {"partial_rotary_factor": 1.5},
        {"partial_rotary_factor": 0.001},
        {"linear_num_value_heads": 3},
        {"num_attention_heads": 3},
        {"eos_token_id": -1},
    ],
    ids=lambda new: json.dumps(new)[:50],
)
def test_a_target_that_makes_no_sense_is_refused(
    pair: Any, tmp_path: Path, new: dict[str, Any]
) -> None:
    _refused(TargetConfig.from_folder, _copy(pair, tmp_path, "target", **new))


@pytest.mark.parametrize(
    ("section", "new"),
    [
        (None, {"dflash_config": [1]}),
        (None, {"num_hidden_layers": 2**20}),
        (None, {"num_attention_heads": 3}),
        (None, {"head_dim": 15}),
        ("dflash_config", {"conv_group_size": 7}),
        ("dflash_config", {"mask_token_id": 320}),
        ("dflash_config", {"mask_token_id": -1}),
        ("dflash_config", {"selector_top_k": 321}),
        ("dflash_config", {"target_layer_ids": []}),
        ("dflash_config", {"target_layer_ids": [0, -1]}),
        ("dflash_config", {"target_layer_ids": [True]}),
        ("dflash_config", {"target_layer_ids": "036"}),
        ("dflash_config", {"target_layer_ids": [0, 2**40]}),
    ],
    ids=lambda value: json.dumps(value)[:50],
)
def test_a_drafter_that_makes_no_sense_is_refused(
    pair: Any, tmp_path: Path, section: str | None, new: dict[str, Any]
) -> None:
    folder = _copy(pair, tmp_path, "drafter", section=section, **new)
    _refused(DrafterConfig.from_folder, folder)


@pytest.mark.parametrize(
    "text",
    ["", "[]", "null", "[" * 100_000, '{"vocab_size": NaN}', '{"a": 1, "a": 2}',
     '{"a": "\\ud800"}'],
    ids=lambda text: text[:20],
)  # fmt: skip
def test_a_config_that_is_no_strict_json_object_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text, encoding="utf-8")
    for reader in (TargetConfig.from_folder, DrafterConfig.from_folder):
        _refused(reader, tmp_path)


@pytest.mark.parametrize("key", ["vocab_size", "hidden_size", "intermediate_size"])
def test_a_config_far_larger_than_its_weights_takes_no_memory(
    pair: Any, tmp_path: Path, key: str
) -> None:
    folder = _copy(pair, tmp_path, "target", **{key: 2**22})
    with pytest.raises(InputError, match=r"describes [\d,]+ parameters, the files hold"):
        load_target(folder)
    if key == "intermediate_size":
        target = load_target(pair.target, capture=(0, 3, 6))
        drafter = _copy(pair, tmp_path, "drafter", **{key: 2**22})
        with pytest.raises(InputError, match="parameters, the files hold"):
            load_drafter(drafter, target)


@pytest.mark.parametrize("bits", [0x7FC0, 0xFFC1, 0x7F80, 0xFF80], ids=hex)
def test_weights_that_are_not_finite_are_refused(pair: Any, tmp_path: Path, bits: int) -> None:
    folder = _copy(pair, tmp_path, "target")
    path = folder / "model.safetensors"
    with SafetensorsFile(path) as file:
        tensors = {name: np.array(file.read_array(name)) for name in file.names}
    name = next(name for name in tensors if name.endswith("up_proj.weight"))
    tensors[name].flat[7] = bits
    stored = {key: bf16_data(array) for key, array in tensors.items()}
    write_safetensors(path, stored, force=True)
    with pytest.raises(InputError, match="holds NaN or infinity") as caught:
        load_target(folder)
    assert name.removeprefix("model.") in caught.value.message


def test_loading_leaves_torchs_compiler_alone(pair: Any) -> None:
    """Importing it takes longer than everything else about a small model."""
    program = (
        "import sys, torch; from pathlib import Path\n"
        "from specpilot_cli.engines.reference.engine import ReferenceEngine\n"
        "before = set(sys.modules)\n"
        f"ReferenceEngine(Path({str(pair.target)!r}), Path({str(pair.drafter)!r}))\n"
        "print(sorted({'sympy', 'torch._dynamo'} & set(sys.modules) - before))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout == "[]\n"
