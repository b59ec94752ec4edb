"""Kinds of checkpoints: what converts, what stays untouched, what is refused."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from specpilot_cli.convert_w12.plan import Outcome
from specpilot_cli.convert_w12.restore import restore_folder
from specpilot_cli.convert_w12.verify import verify_folder
from specpilot_cli.errors import InputError
from specpilot_cli.io.safetensors_stream import TensorData, bf16_data
from specpilot_cli.io.w12_folder import read_w12_tensors
from tests.unit.convert_w12.conftest import MakeCheckpoint, Tensors, convert, digests, weights

EMBEDDING = {"model.embed_tokens.weight": weights(0, 256, 128)}
LAYER = {"model.layers.0.mlp.up_proj.weight": weights(1, 256, 128)}


def there_and_back(source: Path, tmp_path: Path) -> dict[str, Outcome]:
    """Convert, verify against the source, restore; returns the outcomes by name."""
    done = convert(source, tmp_path / "w12")
    assert verify_folder(tmp_path / "w12", source).verdict == "identical"
    restore_folder(tmp_path / "w12", tmp_path / "back")
    assert digests(tmp_path / "back") == digests(source)
    return {outcome.name: outcome for outcome in done.outcomes}


@pytest.mark.parametrize("tied", [True, False])
def test_checkpoint_without_lm_head(
    tied: bool, make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    """The embedding table, which a tied model multiplies by, is kept and never invented twice."""
    config = json.dumps({"tie_word_embeddings": tied})
    found = there_and_back(make_checkpoint({**EMBEDDING, **LAYER}, config=config), tmp_path)
    assert set(found) == {*EMBEDDING, *LAYER}
    assert "embedding" in (found["model.embed_tokens.weight"].reason or "")
    assert {name for name, _, _ in read_w12_tensors(tmp_path / "w12")} == set(found)


@pytest.mark.parametrize("tied", [True, False])
def test_lm_head_beside_the_embedding(
    tied: bool, make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    config = json.dumps({"tie_word_embeddings": tied})
    tensors = {**EMBEDDING, **LAYER, "lm_head.weight": weights(0, 256, 128)}
    found = there_and_back(make_checkpoint(tensors, config=config, shards=2), tmp_path)
    assert found["lm_head.weight"].converted is not tied


@pytest.mark.parametrize(
    "name",
    [
        "layers.0.self_attn.qkv_proj.weight",
        "layers.0.self_attn.q_proj.weight",
        "layers.0.mlp.gate_up_proj.weight",
        "layers.0.mlp.experts.7.w1.weight",
        "layers.0.mlp.shared_expert.up_proj.weight",
        "mtp.layers.0.mlp.up_proj.weight",
    ],
)
def test_projections_convert_fused_or_split(
    name: str, make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    bias = {name.replace("weight", "bias"): weights(2, 384)}
    found = there_and_back(make_checkpoint({name: weights(1, 384, 128), **bias}), tmp_path)
    assert [outcome.converted for outcome in found.values()] == [True, False]


def test_stacked_experts(make_checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    tensors = {
        "layers.0.mlp.experts.gate_up_proj": weights(1, 5, 300, 192),
        "layers.0.mlp.experts.down_proj": weights(2, 5, 250, 190),
        "layers.0.mlp.experts.gate_up_proj_bias": weights(3, 5, 300),
        "layers.0.mlp.router.weight": weights(4, 5, 192),
    }
    found = there_and_back(make_checkpoint(tensors), tmp_path)
    assert [outcome.converted for outcome in found.values()] == [True, True, False, False]


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_other_dtypes_stay_untouched_under_any_name(
    dtype: type[np.floating], make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    """A tensor of another dtype under a Linear's name is not cast, whatever its neighbours are."""
    values = np.random.default_rng(0).standard_normal((256, 128)).astype(dtype)
    name = "model.layers.1.mlp.up_proj.weight"
    found = there_and_back(make_checkpoint({**LAYER, name: values}), tmp_path)
    assert "BF16 weights only" in (found[name].reason or "")
    stored = {n: array for n, _, array in read_w12_tensors(tmp_path / "w12")}
    assert stored[name].dtype == dtype
    assert stored[name].tobytes() == values.tobytes()


@pytest.mark.parametrize("dtype", ["F8_E4M3", "F8_E5M2", "F8_E8M0"])
def test_fp8_is_refused_with_the_reason(
    dtype: str, make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    data = TensorData(dtype, (128, 128), np.zeros((128, 128), np.uint8))
    with pytest.raises(InputError, match=f"already quantised: `a.weight` is {dtype}") as caught:
        convert(make_checkpoint({"a.weight": data}), tmp_path / "w12")
    assert "original BF16" in (caught.value.hint or "")


def _content(kind: str) -> TensorData:
    bits = np.array(weights(9, 384, 192).data)
    if kind == "zero rows":
        bits[100:170] = 0
    elif kind == "minus zero rows":
        bits[5] = 0x8000
    elif kind == "denormals":
        bits[::3] = np.random.default_rng(1).integers(0, 0x80, (128, 192))
    elif kind == "infinities":
        bits[::9, 7] = 0xFF80
    elif kind == "nan payloads":
        bits[17] = np.random.default_rng(1).integers(0x7F81, 0x8000, 192)
    elif kind == "random bytes":
        bits = np.random.default_rng(1).integers(0, 65536, (384, 192), dtype=np.uint16)
    elif kind == "all zero":
        bits[:] = 0
    elif kind == "one row":
        bits = bits[:1]
    elif kind == "one column":
        bits = np.ascontiguousarray(bits[:, :1])
    elif kind == "empty":
        bits = bits[:0]
    return bf16_data(bits)


@pytest.mark.parametrize(
    ("kind", "converts"),
    [
        ("zero rows", True),
        ("minus zero rows", True),
        ("denormals", True),
        ("infinities", True),
        ("nan payloads", True),
        ("all zero", True),
        ("random bytes", False),
        ("one row", False),
        ("one column", False),
        ("empty", False),
    ],
)
def test_contents(
    kind: str, converts: bool, make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    found = there_and_back(make_checkpoint({"a.weight": _content(kind)}), tmp_path)
    assert found["a.weight"].converted is converts


def cache_of(source: Path, tmp_path: Path) -> Path:
    """Lay a folder out as the hub's cache does: links to blobs named by their sha256."""
    snapshot, blobs = tmp_path / "cache" / "snapshots" / "1", tmp_path / "cache" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for file in (file for file in source.iterdir() if file.is_file()):
        blob = blobs / hashlib.sha256(file.read_bytes()).hexdigest()
        shutil.copy(file, blob)
        (snapshot / file.name).symlink_to(blob)
    return snapshot


def test_hub_cache_is_read_through_its_links_only(
    make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    snapshot = cache_of(make_checkpoint(LAYER), tmp_path)
    before = digests(tmp_path / "cache")
    convert(snapshot, tmp_path / "w12")
    restore_folder(tmp_path / "w12", tmp_path / "back")
    assert digests(tmp_path / "cache") == before
    assert not any(file.is_symlink() for file in (tmp_path / "w12").rglob("*"))
    assert digests(tmp_path / "back") == digests(snapshot)


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json"])
def test_altered_blob_is_named(name: str, make_checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    """Something wrote through a link: the blob kept the name that its old content had."""
    snapshot = cache_of(make_checkpoint(LAYER), tmp_path)
    raw = bytearray((snapshot / name).read_bytes())
    raw[-1] ^= 1
    (snapshot / name).write_bytes(raw)
    with pytest.raises(InputError, match=f"`{name}` is not the published file") as caught:
        convert(snapshot, tmp_path / "w12")
    assert caught.value.where == str(snapshot / name)
    assert not (tmp_path / "w12").exists()


@pytest.mark.parametrize("pattern", ["lm_head", "lm_head.weight", "*lm_hea?"])
def test_patterns_name_tensors_or_modules(
    pattern: str, make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    tensors: Tensors = {"lm_head.weight": weights(0, 256, 128), **LAYER}
    done = convert(make_checkpoint(tensors), tmp_path / "w12", exclude=(pattern,))
    assert [outcome.converted for outcome in done.outcomes] == [False, True]


@pytest.mark.parametrize("pattern", ["lm_hea", "up_proj", "up_proj.weight", "model.layers.0"])
def test_patterns_never_match_a_part_of_a_name(
    pattern: str, make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    tensors: Tensors = {"lm_head.weight": weights(0, 256, 128), **LAYER}
    with pytest.raises(InputError, match="matches no tensor"):
        convert(make_checkpoint(tensors), tmp_path / "w12", exclude=(pattern,))
