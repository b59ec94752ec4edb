"""Convert, verify, restore: the same bytes, whatever the content and the layout."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

from specpilot_cli.convert_w12.inspect import inspect_folder, totals
from specpilot_cli.convert_w12.restore import restore_folder
from specpilot_cli.convert_w12.verify import verify_folder
from specpilot_cli.io.safetensors_stream import (
    NUMPY_DTYPES,
    SafetensorsFile,
    bf16_data,
    write_safetensors,
)
from specpilot_cli.io.w12_folder import read_folder_tensors, read_w12_tensors
from tests.unit.convert_w12.conftest import (
    MakeCheckpoint,
    all_patterns,
    convert,
    digests,
    weights,
)


@pytest.mark.parametrize("shards", [1, 3])
def test_restored_folder_is_the_source_byte_for_byte(
    shards: int, make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    source, packed, back = make_checkpoint(shards=shards), tmp_path / "w12", tmp_path / "back"
    before = digests(source)
    done = convert(source, packed)
    assert sum(outcome.converted for outcome in done.outcomes) == 4
    assert verify_folder(packed, source, threads=2).verdict == "identical"
    restoration = restore_folder(packed, back, threads=2)
    assert digests(back) == before == digests(source)
    assert {name: sha for name, sha, _ in restoration.shards}.items() <= before.items()


def test_every_pattern_survives(make_checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    source = make_checkpoint({"a.weight": all_patterns()})
    done = convert(source, tmp_path / "w12")
    assert done.outcomes[0].converted
    ((_, dtype, bits),) = read_w12_tensors(tmp_path / "w12")
    assert dtype == "BF16"
    assert np.array_equal(bits, np.asarray(all_patterns().data))
    assert np.unique(bits[:, :16]).size == 65536


@pytest.mark.parametrize("shards", [1, 2])
def test_engine_reader_gives_the_same_tensors_from_both_folders(
    shards: int, make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    source = make_checkpoint(shards=shards)
    convert(source, tmp_path / "w12")
    plain, packed = (list(read_folder_tensors(f)) for f in (source, tmp_path / "w12"))
    assert [(n, d) for n, d, _ in plain] == [(n, d) for n, d, _ in packed]
    for (_, _, a), (_, _, b) in zip(plain, packed, strict=True):
        assert (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())


def test_other_libraries_open_the_folder(make_checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    source = make_checkpoint(shards=2)
    convert(source, tmp_path / "w12")
    index = json.loads((tmp_path / "w12" / "model.safetensors.index.json").read_text())
    for shard in sorted(set(index["weight_map"].values())):
        with safe_open(tmp_path / "w12" / shard, "np") as file:
            assert file.metadata() == {"format": "pt"}
            assert {n for n, s in index["weight_map"].items() if s == shard} == set(file.keys())
    config = json.loads((tmp_path / "w12" / "config.json").read_text())
    assert config["model_type"] == "test"
    quantization = config["quantization_config"]
    assert sorted(quantization.pop("kept_tensors")) == [
        "model.embed_tokens.weight",
        "model.layers.0.linear_attn.conv1d.weight",
        "model.layers.0.linear_attn.in_proj_a.weight",
        "model.layers.0.mlp.gate.weight",
        "nothing.weight",
    ]
    assert quantization == {"quant_method": "w12", "version": 2, "layout": 1}


def test_int32_parts_are_aligned_whatever_the_windows(
    make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    source = make_checkpoint({"a.weight": weights(0, 131, 640), "b.weight": weights(1, 131, 640)})
    convert(source, tmp_path / "w12")
    with SafetensorsFile(tmp_path / "w12" / "model.safetensors") as file:
        for name in file.names:
            info = file.info(name)
            assert info.start % NUMPY_DTYPES[info.dtype].itemsize == 0, name


def test_conversion_is_deterministic(make_checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    source = make_checkpoint()
    convert(source, tmp_path / "one")
    convert(source, tmp_path / "two")
    assert digests(tmp_path / "one") == digests(tmp_path / "two")


def test_source_seen_through_links_stays_as_it_is(
    make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    """A hub cache: the folder holds links into a store of content-addressed files."""
    store = make_checkpoint(name="blobs")
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (snapshot / name).symlink_to(store / name)
    before = digests(store)
    convert(snapshot, tmp_path / "w12")
    assert not any(file.is_symlink() for file in (tmp_path / "w12").rglob("*"))
    assert digests(store) == before
    assert verify_folder(tmp_path / "w12", snapshot).verdict == "identical"


def test_foreign_header_order_and_spacing_come_back(
    make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    source = make_checkpoint({})
    raw = np.asarray(weights(5, 128, 256).data).tobytes()
    header = (
        b'{ "z.weight": {"shape":[128,256], "data_offsets":[2,65538],"dtype":"BF16"},\n'
        b' "a": {"dtype":"U8","shape":[2],"data_offsets":[0,2]}}   '
    )
    data = len(header).to_bytes(8, "little") + header + b"xy" + raw
    (source / "model.safetensors").write_bytes(data)
    convert(source, tmp_path / "w12")
    restore_folder(tmp_path / "w12", tmp_path / "back")
    assert (tmp_path / "back" / "model.safetensors").read_bytes() == data


def test_inspect_reports_what_conversion_reported(
    make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    done = convert(make_checkpoint(), tmp_path / "w12")
    assert inspect_folder(tmp_path / "w12")[0] == done.outcomes
    sums = totals(done.outcomes)
    assert sums.raw_bytes == sum(outcome.raw_bytes for outcome in done.outcomes)
    assert sums.saved_ratio is not None
    assert 0 < sums.saved_ratio < 0.25


def test_vectors_only(make_checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    source = make_checkpoint({"norm.weight": weights(0, 64)})
    done = convert(source, tmp_path / "w12")
    assert totals(done.outcomes).bits_per_weight is None
    assert verify_folder(tmp_path / "w12", source).verdict == "identical"


def test_single_shard_under_another_name(make_checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    source = make_checkpoint({})
    (source / "model.safetensors").unlink()
    write_safetensors(
        source / "drafter.safetensors",
        {"w.weight": bf16_data(np.full((128, 128), 0x3C00, np.uint16))},
    )
    convert(source, tmp_path / "w12")
    assert verify_folder(tmp_path / "w12", source).compared == 1
