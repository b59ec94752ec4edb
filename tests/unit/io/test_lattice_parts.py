"""Lattice files read in parts, packed, hashed: the same recording, and damage named."""

from __future__ import annotations

import dataclasses
import json
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specpilot_cli.errors import InputError
from specpilot_cli.io.lattice_file import (
    LatticeFiles,
    read_lattice,
    write_lattice,
    write_packed_lattice,
)
from specpilot_cli.io.safetensors_stream import SafetensorsFile, write_safetensors
from specpilot_cli.schema.lattice import METADATA_KEY, LatticeRecording, LatticeRequest, Packing

R, L, K = 4, 3, 4
LENGTHS = (5, 1, 4, 6)
PACKING = Packing(exact_nodes=8, top_k=2)


@pytest.fixture
def recording(small_lattice: Callable[..., LatticeRecording]) -> LatticeRecording:
    return small_lattice(LENGTHS, L, K)


def same(left: LatticeRecording, right: LatticeRecording) -> None:
    assert left.metadata == right.metadata
    for name, array in left.tensors().items():
        assert np.array_equal(array, right.tensors()[name]), name


def all_kept(rec: LatticeRecording) -> Any:
    return np.ones(rec.candidate_ids.shape, dtype=np.bool_)


def written(folder: Path, rec: LatticeRecording, *, packed: bool) -> Path:
    """The recording in a new file, whole or packed."""
    path = folder / "lattice.safetensors"
    if packed:
        write_packed_lattice(path, rec, all_kept(rec), PACKING)
    else:
        write_lattice(path, rec)
    return path


def test_parts_are_whole_requests_and_together_the_recording(
    recording: LatticeRecording, tmp_path: Path
) -> None:
    path = tmp_path / "lattice.safetensors"
    write_lattice(path, recording)
    for part_steps, expected in ((1, [1, 1, 1, 1]), (4, [2, 1, 1]), (7, [3, 1]), (100, [4])):
        files = LatticeFiles(path, part_steps=part_steps)
        parts = list(files.parts())
        assert [part.n_requests for part in parts] == expected
        again = list(files.parts())  # a second pass gives the same
        for left, right in zip(parts, again, strict=True):
            same(left, right)
        assert (files.n_steps, files.n_positions, files.n_candidates) == (12, L, K)
        assert files.n_output_tokens == sum(LENGTHS)
        tokens = np.concatenate([part.output_ids for part in parts])
        assert tokens.tolist() == recording.output_ids.tolist()
        edge = np.concatenate([part.edge for part in parts])
        assert edge.tobytes() == recording.edge.tobytes()
        ids = [item.request_id for part in parts for item in part.metadata.requests]
        assert ids == ["r0", "r1", "r2", "r3"]
        for part in parts:
            assert part.step_request.min(initial=0) == 0
            assert part.output_offsets[0] == 0
    same(read_lattice(path), recording)


@pytest.mark.parametrize("packed", [False, True])
def test_one_flipped_bit_names_file_and_request(
    recording: LatticeRecording, tmp_path: Path, packed: bool
) -> None:
    path = written(tmp_path, recording, packed=packed)
    with SafetensorsFile(path) as file:
        info = file.info("edge_rows" if packed else "unary")
    whole = bytearray(path.read_bytes())
    # The last request's last score: one bit of the mantissa, still a fine score.
    whole[info.start + info.nbytes - (2 if packed else 4)] ^= 1
    path.write_bytes(whole)
    with pytest.raises(InputError, match="request `r3`: its contents have sha256") as caught:
        read_lattice(path)
    assert caught.value.where == str(path)
    assert caught.value.exit_code == 2
    parts = LatticeFiles(path, part_steps=1).parts()
    assert next(parts).metadata.requests[0].request_id == "r0"  # sound ones come first


def test_a_wrong_hash_in_the_metadata_is_refused(
    recording: LatticeRecording, tmp_path: Path
) -> None:
    path = tmp_path / "lattice.safetensors"
    write_lattice(path, recording)
    with SafetensorsFile(path) as file:
        metadata = json.loads(file.metadata[METADATA_KEY])
    assert len({item["sha256"] for item in metadata["requests"]}) == R
    metadata["requests"][2]["sha256"] = "0" * 64
    tensors = recording.tensors()
    write_safetensors(path, tensors, {METADATA_KEY: json.dumps(metadata)}, force=True)
    with pytest.raises(InputError, match=r"request `r2`.*not 000000000000"):
        read_lattice(path)
    for item in metadata["requests"]:
        item["sha256"] = None  # an exporter that hashes nothing
    write_safetensors(path, tensors, {METADATA_KEY: json.dumps(metadata)}, force=True)
    same(read_lattice(path), recording)


@pytest.mark.parametrize("packed", [False, True])
def test_every_truncation_is_refused_by_name(
    recording: LatticeRecording, tmp_path: Path, packed: bool
) -> None:
    path = written(tmp_path, recording, packed=packed)
    whole = path.read_bytes()
    for keep in (0, 7, 100, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:keep])
        with pytest.raises(InputError, match="truncated") as caught:
            read_lattice(path)
        assert caught.value.where == str(path)


def test_packed_scores_are_the_kept_ones_to_float16_and_normalised(
    recording: LatticeRecording, tmp_path: Path
) -> None:
    path = tmp_path / "packed.safetensors"
    rng = np.random.default_rng(5)
    kept = rng.random(recording.candidate_ids.shape) < 0.5
    write_packed_lattice(path, recording, kept, PACKING)
    back = read_lattice(path)
    assert back.metadata.packed == PACKING
    assert back.candidate_ids.tolist() == recording.candidate_ids.tolist()
    assert back.stock_choice.tolist() == recording.stock_choice.tolist()
    kept[:, 0] = True  # the anchor's row is always there
    np.testing.assert_allclose(back.edge[kept], recording.edge[kept], atol=4e-3, rtol=1e-3)
    own = recording.unary - recording.unary_logsumexp[..., None]
    np.testing.assert_allclose(back.unary, own, atol=4e-3, rtol=1e-3)
    assert not back.unary_logsumexp.any()
    dropped = np.exp(own.astype(np.float64))  # what is gone is read as the candidates' own
    dropped /= dropped.sum(axis=-1, keepdims=True)
    step, position, row = np.argwhere(~kept)[0]
    np.testing.assert_allclose(
        np.exp(back.edge[step, position, row]), dropped[step, position], atol=5e-3
    )
    sums = np.exp(back.edge.astype(np.float64)).sum(axis=-1)
    np.testing.assert_allclose(sums, 1.0, atol=1e-5)


def test_large_vocabularies_and_probabilities_of_zero_survive_packing(
    recording: LatticeRecording, tmp_path: Path
) -> None:
    edge = recording.edge.copy()
    edge[2, 1, 3] = [0.0, -np.inf, -np.inf, -np.inf]
    large = dataclasses.replace(
        recording, edge=edge, candidate_ids=recording.candidate_ids + np.int32(200_000)
    )
    path = tmp_path / "packed.safetensors"
    write_packed_lattice(path, large, all_kept(large), PACKING)
    back = read_lattice(path)
    assert back.candidate_ids.tolist() == large.candidate_ids.tolist()
    assert back.edge[2, 1, 3].tolist() == [0.0, -np.inf, -np.inf, -np.inf]


def test_a_packed_recording_cannot_pretend_to_be_whole(
    recording: LatticeRecording, tmp_path: Path
) -> None:
    path = tmp_path / "packed.safetensors"
    write_packed_lattice(path, recording, all_kept(recording), PACKING)
    with pytest.raises(InputError, match="cannot be written unpacked"):
        write_lattice(tmp_path / "whole.safetensors", read_lattice(path))


PACKED_DAMAGE: dict[str, tuple[str, Callable[[Any], Any], str]] = {
    "a row that is not there": (
        "edge_kept", lambda a: _set(a, (4, 1, 0), 3), "edge_kept`, step 4: its rows"
    ),
    "no anchor row": ("edge_kept", lambda a: _set(a, (2, 0, 0), 2), "edge_kept`, step 2"),
    "nan": ("edge_rows", lambda a: _set(a, (9, 1), np.nan), "edge_rows`, step 1: NaN"),
    "raw scores": ("edge_rows", lambda a: _set(a, (0, 1), 3.0), "edge_rows`, step 0: .*sum to 1"),
    "offsets that fall": (
        "edge_offsets", lambda a: _set(a, 3, 0), "edge_offsets`: must rise from 0"
    ),
    "nan unary": ("unary", lambda a: _set(a, (5, 1, 1), np.nan), "unary`, step 5: .*not finite"),
    "duplicate candidate": (
        "candidate_ids", lambda a: _set(a, (7, 1, 3), a[7, 1, 0]), "candidate_ids`, step 7: .*twice"
    ),
}  # fmt: skip


def _set(array: Any, at: Any, value: float) -> Any:
    copy = array.copy()
    copy[at] = value
    return copy


@pytest.mark.parametrize("case", list(PACKED_DAMAGE))
def test_damage_of_a_packed_file_names_tensor_and_step(
    recording: LatticeRecording, tmp_path: Path, case: str
) -> None:
    name, change, message = PACKED_DAMAGE[case]
    path = tmp_path / "packed.safetensors"
    write_packed_lattice(path, recording, all_kept(recording), PACKING)
    with SafetensorsFile(path) as file:
        tensors = {item: file.read_array(item) for item in file.names}
        metadata = json.loads(file.metadata[METADATA_KEY])
    for item in metadata["requests"]:
        item["sha256"] = None  # the damage must be seen for itself
    tensors[name] = change(tensors[name])
    write_safetensors(path, tensors, {METADATA_KEY: json.dumps(metadata)}, force=True)
    with pytest.raises(InputError, match=message) as caught:
        read_lattice(path)
    assert caught.value.where == str(path)


def test_plain_dflash_has_no_edges_on_disk_and_one_row_in_memory(
    recording: LatticeRecording, tmp_path: Path
) -> None:
    metadata = recording.metadata.model_copy(update={"drafter_kind": "dflash"})
    own = recording.unary - recording.unary_logsumexp[..., None]
    plain = dataclasses.replace(recording, metadata=metadata, edge=own[:, :, None, :])
    path = tmp_path / "dflash.safetensors"
    write_lattice(path, plain)
    with SafetensorsFile(path) as file:
        assert "edge" not in file.names
    back = read_lattice(path)
    assert back.edge.shape == (12, L, 1, K)
    assert back.edge.tobytes() == plain.edge.tobytes()
    document = {METADATA_KEY: metadata.model_dump_json()}
    write_safetensors(path, recording.tensors(), document, force=True)
    with pytest.raises(InputError, match="unknown tensor `edge`"):
        read_lattice(path)


def test_a_lattice_file_of_an_eagle_drafter_is_refused(
    recording: LatticeRecording, tmp_path: Path
) -> None:
    metadata = recording.metadata.model_copy(update={"drafter_kind": "eagle"})
    path = tmp_path / "eagle.safetensors"
    write_safetensors(path, recording.tensors(), {METADATA_KEY: metadata.model_dump_json()})
    with pytest.raises(InputError, match="an eagle drafter has trees"):
        read_lattice(path)


def test_a_file_replaced_between_passes_is_noticed(
    recording: LatticeRecording, small_lattice: Callable[..., LatticeRecording], tmp_path: Path
) -> None:
    path = tmp_path / "lattice.safetensors"
    write_lattice(path, recording)
    files = LatticeFiles(path)
    list(files.parts())
    write_lattice(path, small_lattice((5, 4, 3), L, K), force=True)
    with pytest.raises(InputError, match="replaced while it was read"):
        list(files.parts())


def test_more_shards_than_open_files_are_read(
    small_lattice: Callable[..., LatticeRecording], tmp_path: Path
) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    shards = 40
    for index in range(shards):
        rec = small_lattice((3,), L, K)
        requests = [LatticeRequest(request_id=f"r{index}", benchmark="b")]
        update = {"requests": requests, "shard_index": index, "shard_count": shards}
        metadata = rec.metadata.model_copy(update=update)
        path = tmp_path / "folder" / f"{index:02}.safetensors"
        write_lattice(path, dataclasses.replace(rec, metadata=metadata))
    in_use = len(list(Path("/proc/self/fd").iterdir())) if Path("/proc/self/fd").exists() else 64
    resource.setrlimit(resource.RLIMIT_NOFILE, (in_use + 20, limits[1]))
    try:
        assert read_lattice(tmp_path / "folder").n_requests == shards
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
