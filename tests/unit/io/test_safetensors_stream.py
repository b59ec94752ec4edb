"""Strict safetensors reading, and files that the safetensors library agrees with."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from specpilot_cli.errors import InputError
from specpilot_cli.io import shard_writer
from specpilot_cli.io.page_cache import cached_share
from specpilot_cli.io.safetensors_stream import (
    MAX_HEADER_BYTES,
    SafetensorsFile,
    array_data,
    bf16_data,
    write_safetensors,
)
from specpilot_cli.io.shard_writer import ShardWriter


def raw_file(path: Path, header: Any, data: bytes = b"") -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def entry(dtype: str, shape: list[Any], begin: Any, end: Any) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def test_round_trip_agrees_with_the_library(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    arrays = {
        "f": rng.standard_normal((3, 5)).astype(np.float32),
        "h": rng.standard_normal(7).astype(np.float16),
        "i": np.arange(-3, 3, dtype=np.int64),
        "scalar": np.array(4, dtype=np.int32),
        "empty": np.empty((0, 4), dtype=np.float32),
        "flag": np.array([True, False]),
        "u": rng.integers(0, 65536, (2, 2), dtype=np.uint16),
        "transposed": rng.standard_normal((4, 6)).T,
    }
    path = tmp_path / "x.safetensors"
    write_safetensors(path, arrays, {"note": "a – b"})
    with safe_open(path, "np") as library, SafetensorsFile(path) as ours:
        assert library.metadata() == ours.metadata == {"note": "a – b"}
        assert set(library.keys()) == set(ours.names) == set(arrays)
        for name, array in arrays.items():
            for found in (library.get_tensor(name), ours.read_array(name)):
                assert (found.dtype, found.shape) == (array.dtype, array.shape)
                assert np.array_equal(found, array)
            assert ours.read_array(name).tobytes() == np.ascontiguousarray(array).tobytes()


def test_bf16_is_uint16_and_keeps_every_pattern(tmp_path: Path) -> None:
    bits = np.arange(65536, dtype=np.uint16).reshape(256, 256)
    path = tmp_path / "x.safetensors"
    write_safetensors(path, {"w": bf16_data(bits)})
    with SafetensorsFile(path) as file:
        assert file.info("w").dtype == "BF16"
        assert np.array_equal(file.read_array("w"), bits)


def test_reads_what_the_library_writes(tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    path = tmp_path / "x.safetensors"
    save_file({"b": np.ones(3, np.float32), "a": np.zeros((2, 2), np.int8)}, path)
    with SafetensorsFile(path) as file:
        assert file.read_array("b").tolist() == [1, 1, 1]


def test_existing_file_is_refused_without_force(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    write_safetensors(path, {"a": np.zeros(1)})
    with pytest.raises(InputError, match="exists"):
        write_safetensors(path, {"a": np.ones(1)})
    write_safetensors(path, {"a": np.ones(1)}, force=True)
    with SafetensorsFile(path) as file:
        assert file.read_array("a").tolist() == [1]


GOOD = entry("U8", [4], 0, 4)
BAD_FILES: dict[str, tuple[Any, bytes, str]] = {
    "not json": (b"{nope", b"", "not JSON"),
    "not utf-8": (b'{"\xff": 1}', b"", "not JSON"),
    "an array": ([], b"", "not a JSON object"),
    "deep nesting": (b"[" * 100_000, b"", "not JSON"),
    "duplicate name": (
        b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},'
        b'"a":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}}',
        b"ab",
        "duplicate name",
    ),
    "unknown dtype": ({"a": entry("Q9", [4], 0, 4)}, b"abcd", "unknown dtype"),
    "extra key": ({"a": {**GOOD, "x": 1}}, b"abcd", "exactly"),
    "missing key": ({"a": {"dtype": "U8"}}, b"abcd", "exactly"),
    "entry is a list": ({"a": []}, b"abcd", "exactly"),
    "negative shape": ({"a": entry("U8", [-4], 0, 4)}, b"abcd", "non-negative"),
    "float shape": ({"a": entry("U8", [4.0], 0, 4)}, b"abcd", "non-negative"),
    "boolean shape": ({"a": entry("U8", [True], 0, 1)}, b"a", "non-negative"),
    "string offset": ({"a": entry("U8", [4], 0, "4")}, b"abcd", "non-negative"),
    "dtype and length disagree": ({"a": entry("F32", [4], 0, 4)}, b"abcd", "needs 16 bytes"),
    "offsets fall": ({"a": entry("U8", [4], 4, 0)}, b"abcd", "needs 4 bytes"),
    "shape overflows": ({"a": entry("U8", [2**40, 2**40], 0, 4)}, b"abcd", "needs"),
    "overlap": ({"a": GOOD, "b": entry("U8", [4], 2, 6)}, b"abcdef", "overlaps"),
    "gap": ({"a": GOOD, "b": entry("U8", [4], 6, 10)}, b"a" * 10, "gap"),
    "first tensor not at 0": ({"a": entry("U8", [4], 1, 5)}, b"abcde", "gap"),
    "data cut": ({"a": GOOD}, b"abc", "truncated"),
    "data too long": ({"a": GOOD}, b"abcde", "after the last tensor"),
    "too many dimensions": ({"a": entry("U8", [1] * 33, 0, 1)}, b"a", "33 dimensions"),
    "huge size beside a zero": (
        {"a": entry("U8", [0, 2**48 + 1], 0, 0), "b": GOOD},
        b"abcd",
        "impossible shape",
    ),
    "half a surrogate pair as name": (
        b'{"\\uD800":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}',
        b"a",
        "not JSON",
    ),
    "half a surrogate pair as metadata": (
        b'{"__metadata__":{"a":"\\udfff"},"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}',
        b"a",
        "not JSON",
    ),
    "bad metadata": ({"__metadata__": {"a": 1}, "a": GOOD}, b"abcd", "strings to strings"),
}


@pytest.mark.parametrize("case", BAD_FILES, ids=str)
def test_bad_file_is_named(case: str, tmp_path: Path) -> None:
    header, data, message = BAD_FILES[case]
    path = raw_file(tmp_path / "model.safetensors", header, data)
    with pytest.raises(InputError, match=message) as caught:
        SafetensorsFile(path)
    assert caught.value.where == str(path)


@pytest.mark.parametrize("size", range(8))
def test_file_shorter_than_its_length_field(size: int, tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(bytes(size))
    with pytest.raises(InputError, match="truncated"):
        SafetensorsFile(path)


def test_header_longer_than_file_and_than_the_limit(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes((100).to_bytes(8, "little") + b"{}")
    with pytest.raises(InputError, match="truncated"):
        SafetensorsFile(path)
    path.write_bytes((MAX_HEADER_BYTES + 1).to_bytes(8, "little"))
    with pytest.raises(InputError, match="header too large"):
        SafetensorsFile(path)


def test_file_that_shrinks_after_opening(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    write_safetensors(path, {"a": np.zeros(1000)})
    with SafetensorsFile(path) as file:
        with path.open("r+b") as handle:
            handle.truncate(path.stat().st_size - 1)
        with pytest.raises(InputError, match="truncated while reading"):
            file.read_array("a")


def test_missing_file_and_missing_tensor(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot open"):
        SafetensorsFile(tmp_path / "none.safetensors")
    path = tmp_path / "x.safetensors"
    write_safetensors(path, {"a": np.zeros(1)})
    with SafetensorsFile(path) as file, pytest.raises(InputError, match="no tensor named `b`"):
        file.read_array("b")


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_any_damage_is_an_input_error_or_harmless(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("fuzz") / "x.safetensors"
    write_safetensors(path, {"a": np.arange(6, dtype=np.int16), "b": np.zeros((2, 3))})
    raw = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(raw[: data.draw(st.integers(len(raw) - 3, len(raw)))])
    with contextlib.suppress(InputError), SafetensorsFile(path) as file:
        for name in file.names:
            assert file.read_array(name).nbytes == file.info(name).nbytes


def test_shard_writer_header_written_last(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    longest = [("a", "F64", (1000,)), ("b", "U8", (77,))]
    small = np.arange(3, dtype=np.float64)
    with ShardWriter(path, longest, {"format": "pt"}) as writer:
        for name, tensor in (
            ("b", array_data(np.arange(5, dtype=np.uint8))),
            ("a", array_data(small)),
        ):
            writer.write(tensor.memory())
            writer.end_tensor(name, tensor.dtype, tensor.shape)
    with SafetensorsFile(path) as file:
        assert file.names == ("b", "a")
        assert file.metadata == {"format": "pt"}
        assert np.array_equal(file.read_array("a"), small)
        assert writer.header[8:] == file.header_bytes


def test_a_header_beyond_the_limit_is_an_error_of_the_input(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shard_writer, "MAX_HEADER_BYTES", 1000)
    longest = [(f"layers.{i}.weight", "U8", (5,)) for i in range(30)]
    with pytest.raises(InputError, match="the limit is 1000") as caught:
        ShardWriter(tmp_path / "x.safetensors", longest, {})
    assert caught.value.where == "x.safetensors"
    assert "--shard-size" in str(caught.value.hint)
    assert list(tmp_path.iterdir()) == []


def test_a_tensor_that_is_not_there(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    write_safetensors(path, {"a": np.zeros(2)})
    with SafetensorsFile(path) as file, pytest.raises(InputError, match="no tensor") as caught:
        file.read_array("b")
    assert (caught.value.where, bool(caught.value.hint)) == (str(path), True)


def test_shard_writer_without_tensors(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    with ShardWriter(path, [("a", "U8", (5,))], {}):
        pass
    with SafetensorsFile(path) as file:
        assert file.names == ()


def test_shard_writer_leaves_no_valid_file_after_an_error(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    with pytest.raises(RuntimeError), ShardWriter(path, [("a", "U8", (5,))], {}):
        raise RuntimeError
    with pytest.raises(InputError):
        SafetensorsFile(path)


@pytest.mark.parametrize("cached", [True, False])
def test_reading_once_leaves_the_cache_as_it_was(tmp_path: Path, cached: bool) -> None:
    """Pages that reading brought in are dropped; pages that were there stay."""
    path = tmp_path / "x.safetensors"
    data = np.random.default_rng(0).integers(0, 256, 8 << 20, dtype=np.uint8)
    write_safetensors(path, {"a": data})
    with path.open("rb") as handle:
        os.fsync(handle.fileno())
        os.posix_fadvise(handle.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        if cached_share(handle.fileno(), 8 << 20) > 0.1:
            pytest.skip("this file system keeps files in memory")
        os.posix_fadvise(handle.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        if cached:
            handle.read()
        with SafetensorsFile(path) as file:
            file.read_once()
            found = np.empty_like(data)
            for start in range(0, data.size, 1 << 20):
                file.read_into(file.info("a"), start, found[start : start + (1 << 20)].data)
        assert np.array_equal(found, data)
        share = cached_share(handle.fileno(), 8 << 20)
        assert share > 0.9 if cached else share < 0.5


def test_reading_outside_a_tensor_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    write_safetensors(path, {"a": np.zeros(8, np.uint8), "b": np.zeros(8, np.uint8)})
    with SafetensorsFile(path) as file:
        for offset, size in ((-1, 2), (0, 9), (8, 1)):
            with pytest.raises(ValueError, match="has no bytes"):
                file.read_into(file.info("a"), offset, memoryview(bytearray(size)))
