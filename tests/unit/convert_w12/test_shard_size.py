"""`--shard-size`: other shards in the W12 folder, the source's own ones when it is restored."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors import safe_open

from specpilot_cli.convert_w12 import convert as convert_module
from specpilot_cli.convert_w12.convert import convert_folder, survey_folder
from specpilot_cli.convert_w12.plan import Selection
from specpilot_cli.convert_w12.restore import restore_folder
from specpilot_cli.convert_w12.verify import verify_folder
from specpilot_cli.errors import InputError
from specpilot_cli.io import shard_writer
from specpilot_cli.io.hf_folder import open_hf_folder
from specpilot_cli.io.w12_folder import read_folder_tensors
from tests.unit.convert_w12.conftest import MakeCheckpoint, convert, digests, weights

INDEX = "model.safetensors.index.json"


@pytest.mark.parametrize(
    ("shards", "size", "count"),
    [(1, 1, 13), (3, 1, 13), (1, 200_000, 4), (3, 200_000, 5), (1, 1 << 30, 1), (3, 1 << 30, 1)],
)
def test_regrouped_folder_is_whole_and_restores_the_source(
    shards: int, size: int, count: int, make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    source, packed, back = make_checkpoint(shards=shards), tmp_path / "w12", tmp_path / "back"
    done = convert_folder(open_hf_folder(source), packed, Selection(), shard_bytes=size)
    names = sorted(file.name for file in packed.glob("*.safetensors"))
    assert len(names) == count
    assert names[0] == (
        "model.safetensors" if count == 1 else f"model-00001-of-{count:05}.safetensors"
    )
    assert (packed / INDEX).exists() == (len(names) > 1 or shards > 1)
    if (packed / INDEX).exists():
        index = json.loads((packed / INDEX).read_text())["weight_map"]
        for name in names:
            with safe_open(packed / name, "np") as file:
                assert {key for key, shard in index.items() if shard == name} == set(file.keys())
    assert verify_folder(packed, source).verdict == "identical"
    restore_folder(packed, back)
    assert digests(back) == digests(source)
    plain, ours = (list(read_folder_tensors(folder)) for folder in (source, packed))
    assert [name for name, _, _ in plain] == [name for name, _, _ in ours]
    surveyed = survey_folder(open_hf_folder(source), Selection(), shard_bytes=size)
    assert surveyed.outcomes == done.outcomes


def test_no_shard_is_larger_unless_one_tensor_is(
    make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    sizes = [(256, 128), (256, 64), (1024, 128), (128, 128), (256, 128), (384, 128)]
    tensors = {f"layers.{i}.weight": weights(i, *shape) for i, shape in enumerate(sizes)}
    limit = 160_000
    done = convert_folder(
        open_hf_folder(make_checkpoint(tensors)), tmp_path / "w12", Selection(), shard_bytes=limit
    )
    groups: dict[str, list[int]] = {}
    for outcome in done.outcomes:
        groups.setdefault(outcome.shard, []).append(outcome.raw_bytes)
    assert list(groups.values()) == [[65536, 32768], [262144], [32768, 65536], [98304]]
    assert all(sum(group) <= limit or len(group) == 1 for group in groups.values())


def test_forced_conversion_replaces_other_shards(
    make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    source = make_checkpoint(shards=2)
    convert(source, tmp_path / "w12")
    convert_folder(
        open_hf_folder(source), tmp_path / "w12", Selection(), shard_bytes=1 << 30, force=True
    )
    assert [file.name for file in (tmp_path / "w12").glob("*.safetensors")] == ["model.safetensors"]
    assert verify_folder(tmp_path / "w12", source).verdict == "identical"


def test_too_long_a_header_is_said_before_the_work_and_by_a_dry_run(
    make_checkpoint: MakeCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = make_checkpoint({f"layers.{i}.weight": weights(i, 256, 256) for i in range(4)})
    folder = open_hf_folder(source)
    monkeypatch.setattr(shard_writer, "MAX_HEADER_BYTES", 2000)
    monkeypatch.setattr(convert_module, "atomic_folder", None)  # nothing is begun
    for run in (
        lambda: survey_folder(folder, Selection()),
        lambda: convert_folder(folder, tmp_path / "w12", Selection()),
    ):
        with pytest.raises(InputError, match=r"`model\.safetensors` would need a header") as caught:
            run()
        assert "--shard-size" in (caught.value.hint or "")
    assert len(survey_folder(folder, Selection(), shard_bytes=200_000).outcomes) == 4
