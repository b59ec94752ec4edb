"""Damage in each region of a converted folder: `verify` always names the tensor or the file."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specpilot_cli.convert_w12.verify import Verification, verify_folder
from specpilot_cli.errors import InputError
from specpilot_cli.io.safetensors_stream import bf16_data, write_safetensors
from specpilot_cli.io.w12_folder import W12Folder
from specpilot_kernels.w12 import layout
from tests.unit.convert_w12.conftest import convert, weights

SHARDS = [f"model-{i:05}-of-00002.safetensors" for i in (1, 2)]
INDEX = "model.safetensors.index.json"
PARTS = {
    "records": "_w12",
    "windows": "_w12_window",
    "escape pointers": "_w12_escape_ptr",
    "escape places": "_w12_escape_at",
    "escape patterns": "_w12_escape_bits",
}


@dataclass(frozen=True, slots=True)
class Region:
    """Bytes [start, end) of a file, and the tensor they belong to, if any."""

    file: str
    start: int
    end: int
    tensor: str | None = None


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A converted folder with every kind of content, in two shards."""
    source = tmp_path_factory.mktemp("regions") / "model"
    (source / "assets").mkdir(parents=True)
    (source / "config.json").write_text('{"model_type": "test"}', encoding="utf-8")
    (source / "tokenizer.json").write_text('{"version": "1.0"}', encoding="utf-8")
    (source / "assets" / "chat.jinja").write_text("{{ messages }}", encoding="utf-8")
    content = {}
    for i, name in enumerate(("a.weight", "b.weight", "experts.up", "d.weight")):
        shape = (2, 128, 128) if "experts" in name else (256, 128)
        bits = np.array(weights(i, *shape).data)
        bits.reshape(-1)[7 + i :: 997] = 0
        bits.reshape(-1)[11::1999] = 0x7FC1
        content[name] = bf16_data(bits)
    content["norm.weight"] = weights(9, 64)
    content["A_log"] = np.linspace(0, 1, 9, dtype=np.float32)
    names = list(content)
    for shard, chosen in zip(SHARDS, (names[:3], names[3:]), strict=True):
        write_safetensors(source / shard, {n: content[n] for n in chosen}, {"format": "pt"})
    weight_map = {n: SHARDS[n in names[3:]] for n in names}
    (source / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    convert(source, source.parent / "w12")
    return source.parent / "w12"


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "w12"))


def entries(path: Path) -> Iterator[tuple[str, int, int]]:
    """(name, first byte, end) of every entry of a safetensors file, by its own header."""
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    for name, entry in json.loads(raw[8 : 8 + length]).items():
        if name != "__metadata__":
            first, end = entry["data_offsets"]
            yield name, 8 + length + first, 8 + length + end


def regions(folder: Path, kind: str) -> list[Region]:
    """Where bytes of this kind lie."""

    def all_of(name: str) -> Region:
        return Region(name, 0, (folder / name).stat().st_size)

    if kind in PARTS:
        suffix = PARTS[kind]
        return [
            Region(shard, first, end, name.removesuffix(suffix))
            for shard in SHARDS
            for name, first, end in entries(folder / shard)
            if name.endswith(suffix)
        ]
    if kind == "kept tensors":
        return [
            Region(shard, first, end, name)
            for shard in SHARDS
            for name, first, end in entries(folder / shard)
            if "_w12" not in name
        ]
    if kind in ("header lengths", "headers"):
        bounds = {}
        for shard in SHARDS:
            length = int.from_bytes((folder / shard).read_bytes()[:8], "little")
            bounds[shard] = (0, 8) if kind == "header lengths" else (8, 8 + length)
        return [Region(shard, *bound) for shard, bound in bounds.items()]
    return [
        all_of(name)
        for name in {
            "manifest": ["w12_manifest.json"],
            "config": ["config.json"],
            "index": [INDEX],
            "carried files": ["tokenizer.json", "assets/chat.jinja"],
        }[kind]
    ]


KINDS = (
    *PARTS, "kept tensors", "header lengths", "headers", "manifest", "config", "index",
    "carried files",
)  # fmt: skip
# Here a flipped byte is a wrong value; elsewhere the folder's structure is in doubt.
_CONTENT = (*PARTS, "kept tensors", "config", "index", "carried files")


def assert_named(folder: Path, region: Region, *, content: bool) -> None:
    """`verify` names the region's tensor or file, and blames nothing else."""
    try:
        found: Verification | InputError = verify_folder(folder)
    except InputError as error:
        found = error
    if isinstance(found, Verification):
        assert content
        expected = ("file", region.file) if region.tensor is None else ("tensor", region.tensor)
        assert [(problem.kind, problem.name) for problem in found.problems] == [expected]
    else:
        assert not content or region.tensor is None, found
        assert region.file in f"{found.where} {found.message}"


def flip(path: Path, at: int, mask: int) -> None:
    with path.open("r+b") as handle:
        handle.seek(at)
        value = handle.read(1)[0]
        handle.seek(at)
        handle.write(bytes([value ^ mask]))


def test_the_regions_cover_every_byte_of_the_folder(whole: Path) -> None:
    sizes = {
        file.relative_to(whole).as_posix(): file.stat().st_size
        for file in whole.rglob("*")
        if file.is_file()
    }
    covered = dict.fromkeys(sizes, 0)
    for kind in KINDS:
        found = regions(whole, kind)
        assert any(region.end > region.start for region in found), kind
        for region in found:
            covered[region.file] += region.end - region.start
    assert covered == sizes


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_a_flipped_byte_is_named(kind: str, whole: Path, data: st.DataObject) -> None:
    found = [region for region in regions(whole, kind) if region.end > region.start]
    region = data.draw(st.sampled_from(found))
    at = data.draw(st.integers(region.start, region.end - 1))
    mask = data.draw(st.integers(1, 255))
    flip(whole / region.file, at, mask)
    try:
        assert_named(whole, region, content=kind in _CONTENT)
    finally:
        flip(whole / region.file, at, mask)


@pytest.mark.parametrize("kind", [*PARTS, "kept tensors"])
def test_every_tensor_of_the_folder_is_named_when_its_bytes_change(kind: str, folder: Path) -> None:
    for region in regions(folder, kind):
        for at in {region.start, (region.start + region.end) // 2, region.end - 1}:
            flip(folder / region.file, at, 0x10)
            assert_named(folder, region, content=True)
            flip(folder / region.file, at, 0x10)
    assert verify_folder(folder).verdict == "identical"


def test_bits_that_no_decoder_reads_count_as_well(folder: Path) -> None:
    """The place of an escape in its record: the weights come out the same, the file is not."""
    (region,) = [r for r in regions(folder, "records") if r.tensor == "a.weight"]

    def decoded() -> npt.NDArray[np.uint16]:
        with W12Folder(folder) as opened:
            (tensor,) = [t for t in opened.manifest.tensors if t.name == "a.weight"]
            return opened.original(tensor)

    before = decoded()
    flip(folder / region.file, region.start + layout.view_offset(0, 7), 0x01)
    assert np.array_equal(decoded(), before)
    assert_named(folder, region, content=True)


@pytest.mark.parametrize("part", PARTS)
def test_parts_of_two_tensors_changed_places(part: str, folder: Path) -> None:
    """Each part is sound in itself, but not the one of its tensor."""
    first, second = [r for r in regions(folder, part) if r.tensor in ("a.weight", "b.weight")]
    raw = bytearray((folder / first.file).read_bytes())
    length = min(first.end - first.start, second.end - second.start)
    a, b = (raw[r.start : r.start + length] for r in (first, second))
    assert a != b
    raw[first.start : first.start + length], raw[second.start : second.start + length] = b, a
    (folder / first.file).write_bytes(raw)
    names = {problem.name for problem in verify_folder(folder).problems}
    assert names == {"a.weight", "b.weight"}


@pytest.mark.parametrize("name", [*SHARDS, INDEX, "config.json", "tokenizer.json"])
@pytest.mark.parametrize("how", ["removed", "empty", "cut", "longer"])
def test_a_file_of_another_length_is_named(name: str, how: str, folder: Path) -> None:
    file = folder / name
    raw = file.read_bytes()
    if how == "removed":
        file.unlink()
    else:
        file.write_bytes({"empty": b"", "cut": raw[:-1], "longer": raw + b"\n"}[how])
    assert_named(folder, Region(name, 0, 0), content=name not in SHARDS)


def test_a_shard_of_another_conversion_is_noticed(folder: Path, tmp_path: Path) -> None:
    """The same names, shapes and escapes, other weights: only the hashes can tell."""
    raw = bytearray((folder / SHARDS[1]).read_bytes())
    for name, first, end in entries(folder / SHARDS[1]):
        if name == "d.weight_w12":
            raw[first:end] = bytes(end - first)
    (folder / SHARDS[1]).write_bytes(raw)
    assert [problem.name for problem in verify_folder(folder).problems] == ["d.weight"]
