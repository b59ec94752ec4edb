"""A damaged W12 folder never passes, never crashes a reader, and the damage is named."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import threading
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specpilot_cli.convert_w12.compare import Comparison, Reference
from specpilot_cli.convert_w12.inspect import inspect_folder
from specpilot_cli.convert_w12.restore import restore_folder
from specpilot_cli.convert_w12.verify import Verification, verify_folder
from specpilot_cli.errors import InputError
from specpilot_cli.io.safetensors_stream import SafetensorsFile, bf16_data, write_safetensors
from specpilot_cli.io.w12_folder import (
    W12Folder,
    parts_crc32,
    read_folder_tensors,
    read_w12_tensors,
)
from specpilot_cli.schema.w12_manifest import W12Manifest, W12Tensor, sealed
from specpilot_kernels.w12 import layout
from specpilot_kernels.w12.manifest import MANIFEST_NAME
from tests.unit.convert_w12.conftest import MakeCheckpoint, convert, weights


@pytest.fixture
def packed(make_checkpoint: MakeCheckpoint, tmp_path: Path) -> Path:
    convert(make_checkpoint(), tmp_path / "w12")
    return tmp_path / "w12"


def owner(name: str) -> str:
    """The source tensor that a tensor of the W12 folder belongs to."""
    for suffix in sorted(layout.PART_SUFFIXES.values(), key=len, reverse=True):
        if name.endswith(suffix):
            return name.removesuffix(suffix)
    return name


def outcome(folder: Path) -> Verification | InputError:
    """What `verify` says; any other exception is a failure."""
    try:
        return verify_folder(folder)
    except InputError as error:
        return error


def flip(path: Path, position: int, bits: int) -> None:
    with path.open("r+b") as handle:
        handle.seek(position)
        value = handle.read(1)[0]
        handle.seek(position)
        handle.write(bytes([value ^ bits]))


def test_one_flipped_bit_in_each_stored_tensor_names_it(packed: Path) -> None:
    shard = packed / "model.safetensors"
    with SafetensorsFile(shard) as file:
        infos = [file.info(name) for name in file.names]
    rng = np.random.default_rng(0)
    for info in infos:
        if info.nbytes == 0:
            continue
        position, bit = info.start + int(rng.integers(info.nbytes)), 1 << int(rng.integers(8))
        flip(shard, position, bit)
        found = outcome(packed)
        assert isinstance(found, Verification)
        assert [(p.kind, p.name) for p in found.problems] == [("tensor", owner(info.name))]
        with pytest.raises(InputError, match="damaged"):
            list(read_w12_tensors(packed))
        flip(shard, position, bit)
    assert verify_folder(packed).verdict == "identical"


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_file_cut_grown_or_removed_anywhere(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory, template: Path
) -> None:
    folder = tmp_path_factory.mktemp("fuzz") / "w12"
    shutil.copytree(template, folder)
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    path = data.draw(st.sampled_from(files))
    raw = path.read_bytes()
    kind = data.draw(st.sampled_from(["cut", "grow", "remove"]))
    if kind == "remove":
        path.unlink()
    elif kind == "cut":
        path.write_bytes(raw[: data.draw(st.integers(0, len(raw) - 1))])
    else:
        path.write_bytes(raw + data.draw(st.binary(min_size=1, max_size=9)))
    found = outcome(folder)
    if isinstance(found, Verification):
        assert found.verdict == "mismatch"
        assert all(problem.name for problem in found.problems)
    for read in (lambda: list(read_folder_tensors(folder)), lambda: inspect_folder(folder)):
        with contextlib.suppress(InputError):
            read()
    shutil.rmtree(folder.parent)


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = tmp_path_factory.mktemp("template") / "model"
    source.mkdir()
    (source / "config.json").write_text('{"model_type": "test"}', encoding="utf-8")
    bits = np.array(weights(1, 128, 256).data)
    bits[3, 5] = 0
    tensors = {"a.weight": bf16_data(bits), "norm.weight": weights(2, 64)}
    write_safetensors(source / "model.safetensors", tensors)
    target = source.parent / "w12"
    convert(source, target)
    return target


def test_changed_source_is_found_and_located(
    make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    bits = np.array(weights(0, 256, 256).data)
    source = make_checkpoint({"a.weight": bf16_data(bits), "b.weight": weights(1, 256, 256)})
    convert(source, tmp_path / "w12")
    bits[200, 3] = 0x8000 if bits[200, 3] != 0x8000 else 0
    other = make_checkpoint(
        {"a.weight": bf16_data(bits), "c.weight": weights(1, 256, 256)}, name="other"
    )
    found = verify_folder(tmp_path / "w12", other)
    assert found.verdict == "mismatch"
    what = {problem.name: problem.what for problem in found.problems}
    assert "1 of 65536 elements differ from the source, the first at [200, 3]" in what["a.weight"]
    assert what["b.weight"] == "not in the source"
    assert what["c.weight"] == "in the source, not in the W12 folder"


def test_the_source_is_read_beside_the_decoding(
    make_checkpoint: MakeCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not on the thread that finishes the pieces: everything would wait for it."""
    tensors = {f"layers.{i}.weight": weights(i, 1024, 2048) for i in range(4)}
    source = make_checkpoint(tensors, shards=2)
    convert(source, tmp_path / "w12")
    read, threads = SafetensorsFile.read_into, set()

    def watched(self: SafetensorsFile, *args: Any) -> None:
        if self.path.parent == source:
            threads.add(threading.current_thread())
        read(self, *args)

    monkeypatch.setattr(SafetensorsFile, "read_into", watched)
    assert verify_folder(tmp_path / "w12", source).verdict == "identical"
    (thread,) = threads
    assert thread is not threading.main_thread()


def test_a_source_that_cannot_be_read_is_an_error_of_the_input(
    make_checkpoint: MakeCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = make_checkpoint({f"layers.{i}.weight": weights(i, 1024, 2048) for i in range(4)})
    convert(source, tmp_path / "w12")
    compare = Reference.compare

    def cut(self: Reference, tensor: W12Tensor) -> Comparison:
        found = compare(self, tensor)
        if tensor.name == "layers.2.weight":
            os.truncate(source / "model.safetensors", 10_000_000)
        return found

    monkeypatch.setattr(Reference, "compare", cut)
    with pytest.raises(InputError, match="truncated while reading") as caught:
        verify_folder(tmp_path / "w12", source)
    assert caught.value.where == str(source / "model.safetensors")


def test_equal_nan_is_equal_and_zero_signs_are_not(
    make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    bits = np.array(weights(0, 256, 256).data)
    bits[0, :3] = [0x7FC1, 0x0000, 0xFF81]
    source = make_checkpoint({"a.weight": bf16_data(bits)})
    convert(source, tmp_path / "w12")
    assert verify_folder(tmp_path / "w12", source).verdict == "identical"
    bits[0, 1] = 0x8000
    other = make_checkpoint({"a.weight": bf16_data(bits)}, name="other")
    assert verify_folder(tmp_path / "w12", other).verdict == "mismatch"


def test_other_shape_or_dtype_in_the_source(
    make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    source = make_checkpoint({"a.weight": weights(0, 256, 256), "x": np.zeros(4, np.float32)})
    convert(source, tmp_path / "w12")
    other = make_checkpoint(
        {"a.weight": weights(0, 128, 512), "x": np.zeros(4, np.int32)}, name="other"
    )
    what = {p.name: p.what for p in verify_folder(tmp_path / "w12", other).problems}
    assert what["a.weight"] == "the source has BF16 [128, 512]"
    assert what["x"] == "the source has I32 [4]"


def test_folder_without_manifest_is_refused_by_every_reader(packed: Path, tmp_path: Path) -> None:
    (packed / MANIFEST_NAME).unlink()
    for read in (
        lambda: list(read_w12_tensors(packed)),
        lambda: list(read_folder_tensors(packed)),
        lambda: verify_folder(packed),
        lambda: inspect_folder(packed),
        lambda: restore_folder(packed, tmp_path / "back"),
    ):
        with pytest.raises(InputError, match="not a finished W12 folder"):
            read()
    assert not (tmp_path / "back").exists()


def test_damaged_folder_restores_nothing(packed: Path, tmp_path: Path) -> None:
    with SafetensorsFile(packed / "model.safetensors") as file:
        flip(packed / "model.safetensors", file.info("lm_head.weight_w12").start, 1)
    with pytest.raises(InputError, match=r"`lm_head\.weight` is damaged"):
        restore_folder(packed, tmp_path / "back")
    assert not (tmp_path / "back").exists()


def test_altered_tokenizer_is_named_and_not_restored(packed: Path, tmp_path: Path) -> None:
    (packed / "tokenizer.json").write_text("{}", encoding="utf-8")
    found = verify_folder(packed)
    assert [(p.kind, p.name, p.what) for p in found.problems] == [
        ("file", "tokenizer.json", "altered")
    ]
    with pytest.raises(InputError, match=r"tokenizer\.json"):
        restore_folder(packed, tmp_path / "back")


def test_stray_safetensors_is_refused_and_other_files_are_noted(packed: Path) -> None:
    (packed / "NOTES.md").write_text("mine", encoding="utf-8")
    found = verify_folder(packed)
    assert (found.verdict, found.unknown_files) == ("identical", ("NOTES.md",))
    shutil.copy(packed / "model.safetensors", packed / "consolidated.safetensors")
    with pytest.raises(InputError, match="consolidated"):
        verify_folder(packed)


@pytest.mark.parametrize("key", ["version", "layout"])
def test_unknown_format_number_is_named(key: str, packed: Path) -> None:
    data = json.loads((packed / MANIFEST_NAME).read_text(encoding="utf-8"))
    data[key] = 99
    (packed / MANIFEST_NAME).write_text(json.dumps(data), encoding="utf-8")
    with pytest.raises(InputError, match=f"W12 {key} 99 is unknown"):
        verify_folder(packed)


@pytest.mark.parametrize("name", ["../x", "/etc/x", "a/../../x", "a//b"])
def test_manifest_cannot_lead_out_of_the_folder(name: str, packed: Path) -> None:
    manifest = W12Manifest.model_validate_json((packed / MANIFEST_NAME).read_bytes())
    files = [manifest.files[0].model_copy(update={"path": name})]
    text = sealed(manifest.model_copy(update={"files": files})).text()
    (packed / MANIFEST_NAME).write_text(text, encoding="utf-8")
    with pytest.raises(InputError, match="not a path inside the folder"):
        verify_folder(packed)


def test_well_formed_lie_about_escapes_is_refused(packed: Path) -> None:
    """A consistent manifest that claims another number of escapes than the shard holds."""
    manifest = W12Manifest.model_validate_json((packed / MANIFEST_NAME).read_bytes())
    tensors = [
        t.model_copy(update={"escapes": (t.escapes or 0) + 1}) if t.encoding == "w12" else t
        for t in manifest.tensors
    ]
    text = sealed(manifest.model_copy(update={"tensors": tensors})).text()
    (packed / MANIFEST_NAME).write_text(text, encoding="utf-8")
    with pytest.raises(InputError, match="the manifest says"):
        verify_folder(packed)


def reseal(folder: Path, **changes: object) -> None:
    """Change a manifest and give it the right hash of itself."""
    manifest = W12Manifest.model_validate_json((folder / MANIFEST_NAME).read_bytes())
    text = sealed(manifest.model_copy(update=changes)).text()
    (folder / MANIFEST_NAME).write_bytes(text.encode())


def read(folder: Path) -> W12Manifest:
    return W12Manifest.model_validate_json((folder / MANIFEST_NAME).read_bytes())


def test_every_damaged_tensor_is_named(packed: Path) -> None:
    names = ["model.layers.0.self_attn.q_proj.weight", "half", "lm_head.weight"]
    with SafetensorsFile(packed / "model.safetensors") as file:
        stored = {owner(name): file.info(name) for name in file.names if "_w12_" not in name}
    for name in names:
        flip(packed / "model.safetensors", stored[name].start + 3, 1)
    found = verify_folder(packed)
    assert {problem.name for problem in found.problems} == set(names)


@pytest.mark.parametrize("name", ["model.layers.1.mlp.up_proj.weight", "model.embed_tokens.weight"])
def test_wrong_weight_with_a_matching_crc_is_named(name: str, packed: Path, tmp_path: Path) -> None:
    """Whoever changes a weight and its CRC-32 still meets the source's sha256."""
    shard = packed / "model.safetensors"
    manifest = read(packed)
    tensor = next(tensor for tensor in manifest.tensors if tensor.name == name)
    stored = name + "_w12" if tensor.encoding == "w12" else name
    with SafetensorsFile(shard) as file:
        flip(shard, file.info(stored).start, 0x80)
    with W12Folder(packed) as opened:
        if tensor.encoding == "w12":
            crc32 = parts_crc32(opened.parts(tensor))
        else:
            crc32 = f"{zlib.crc32(opened.stored(tensor).tobytes()):08x}"
    changed = [
        t.model_copy(update={"stored_crc32": crc32}) if t is tensor else t for t in manifest.tensors
    ]
    reseal(packed, tensors=changed)
    (problem,) = verify_folder(packed).problems
    assert (problem.name, problem.what) == (name, "its bytes are not the source's")
    with pytest.raises(InputError, match=f"`{name}` is damaged"):
        restore_folder(packed, tmp_path / "back")


def test_damaged_padding_is_named_though_the_weights_are_right(packed: Path) -> None:
    """The last byte of 380 x 250 weights' records belongs to no weight."""
    name = "model.layers.0.self_attn.q_proj.weight"
    with SafetensorsFile(packed / "model.safetensors") as file:
        info = file.info(name + "_w12")
    flip(packed / "model.safetensors", info.start + info.nbytes - 1, 1)
    (problem,) = verify_folder(packed).problems
    assert (problem.name, problem.what) == (name, "the stored parts were altered")


@pytest.mark.parametrize("what", ["sha256", "size_bytes", "header", "last prefix", "order"])
def test_what_restore_relies_on_is_verified(what: str, packed: Path, tmp_path: Path) -> None:
    """Each change is consistent with itself, so only decoding everything can find it."""
    manifest = read(packed)
    (source,), tensors = manifest.sources, list(manifest.tensors)
    if what == "sha256":
        source = source.model_copy(update={"sha256": "0" * 64})
    elif what == "size_bytes":
        source = source.model_copy(update={"size_bytes": source.size_bytes + 8})
    elif what == "header":
        source = source.model_copy(update={"header": source.header.replace('"pt"', '"tf"')})
    elif what == "last prefix":
        tensors[-1] = tensors[-1].model_copy(update={"source_prefix_sha256": "0" * 64})
    else:
        tensors[0], tensors[1] = tensors[1], tensors[0]
    reseal(packed, sources=[source], tensors=tensors)
    found = outcome(packed)
    assert isinstance(found, InputError) or found.verdict == "mismatch"
    with pytest.raises(InputError):
        restore_folder(packed, tmp_path / "back")
    assert not (tmp_path / "back").exists()
