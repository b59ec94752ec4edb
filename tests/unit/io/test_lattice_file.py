"""Lattice files: what is written is read back, and what is wrong is named."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from specpilot_cli.errors import InputError
from specpilot_cli.io.lattice_file import lattice_files, read_lattice, write_lattice
from specpilot_cli.io.safetensors_stream import write_safetensors
from specpilot_cli.schema.lattice import METADATA_KEY, LatticeMetadata, LatticeRecording
from specpilot_kernels.trees import edge_log_probs

R, L, K = 3, 3, 4
LENGTHS = (5, 1, 4)


def small(**metadata: Any) -> LatticeRecording:
    """A dense recording of three requests, the second without a step; 7 steps in all."""
    rng = np.random.default_rng(0)
    anchors = [(r, p) for r, length in enumerate(LENGTHS) for p in range(length - 1)]
    n_steps = len(anchors)
    scores = rng.normal(size=(n_steps, L, K, K))
    scores[:, 0] = scores[:, 0, :1]
    unary = rng.normal(size=(n_steps, L, K)).astype(np.float32)
    fields = {
        "mode": "dense",
        "block": L + 1,
        "engine": "test 1",
        "requests": [{"request_id": f"r{i}", "benchmark": "b"} for i in range(R)],
        "target_sha256": "0" * 64,
        "drafter_sha256": "1" * 64,
    }
    return LatticeRecording(
        metadata=LatticeMetadata.model_validate({**fields, **metadata}),
        prompt_ids=np.arange(6, dtype=np.int32),
        prompt_offsets=np.array([0, 1, 3, 6], dtype=np.int64),
        output_ids=np.arange(10, dtype=np.int32),
        output_offsets=np.array([0, 5, 6, 10], dtype=np.int64),
        step_request=np.array([r for r, _ in anchors], dtype=np.int32),
        step_position=np.array([p for _, p in anchors], dtype=np.int64),
        candidate_ids=np.argsort(rng.random((n_steps, L, 50)), -1)[..., :K].astype(np.int32),
        edge=edge_log_probs(scores),
        unary=unary,
        unary_logsumexp=np.log(np.exp(unary.astype(float)).sum(-1) + 1).astype(np.float32),
        stock_choice=np.zeros((n_steps, L), dtype=np.int32),
    )


def write_raw(path: Path, rec: LatticeRecording, **replaced: Any) -> None:
    """Write without the checks of `write_lattice`; None drops a tensor."""
    tensors = {**rec.tensors(), **replaced}
    write_safetensors(
        path,
        {name: array for name, array in tensors.items() if array is not None},
        {METADATA_KEY: rec.metadata.model_dump_json()},
        force=True,
    )


def edited(array: npt.NDArray[Any], at: Any, value: float) -> npt.NDArray[Any]:
    copy = array.copy()
    copy[at] = value
    return copy


def test_round_trip_keeps_every_bit(tmp_path: Path) -> None:
    rec = small()
    path = tmp_path / "a" / "lattice.safetensors"
    write_lattice(path, rec)
    back = read_lattice(path)
    assert back.metadata == rec.metadata
    for name, array in rec.tensors().items():
        stored = back.tensors()[name]
        assert stored.dtype == array.dtype, name
        assert stored.tobytes() == array.tobytes(), name
    assert back.prompt(1).tolist() == [1, 2]
    assert back.output(2).tolist() == [6, 7, 8, 9]
    assert (back.n_requests, back.n_steps, back.n_positions, back.n_candidates) == (R, 7, L, K)


def test_existing_file_is_kept_without_force(tmp_path: Path) -> None:
    path = tmp_path / "lattice.safetensors"
    write_lattice(path, small())
    before = path.read_bytes()
    with pytest.raises(InputError, match="exists"):
        write_lattice(path, small(engine="other 2"))
    assert path.read_bytes() == before
    write_lattice(path, small(engine="other 2"), force=True)
    assert read_lattice(path).metadata.engine == "other 2"


def test_minus_infinity_is_a_probability_of_zero(tmp_path: Path) -> None:
    rec = small()
    edge = rec.edge.copy()
    edge[2, 1, 3] = [0.0, -np.inf, -np.inf, -np.inf]
    path = tmp_path / "lattice.safetensors"
    write_lattice(path, dataclasses.replace(rec, edge=edge))
    assert read_lattice(path).edge[2, 1, 3, 1] == -np.inf


BAD: dict[str, tuple[str, Callable[[LatticeRecording], Any], str]] = {
    "nan edge": ("edge", lambda r: edited(r.edge, (4, 1, 0, 2), np.nan), "step 4: NaN"),
    "positive edge": ("edge", lambda r: edited(r.edge, (2, 2, 1, 1), 0.5), "step 2: .*above 0"),
    "raw scores": ("edge", lambda r: edited(r.edge, (6, 1, 1), -3.0), "step 6: .*sum to 1"),
    "all -inf row": ("edge", lambda r: edited(r.edge, (1, 1, 1), -np.inf), "step 1: .*sum to 1"),
    "anchor rows differ": (
        "edge", lambda r: edited(r.edge, (3, 0, 2), [0, -99, -99, -99]), "step 3: rows differ"
    ),
    "duplicate candidate": (
        "candidate_ids",
        lambda r: edited(r.candidate_ids, (5, 1, 3), r.candidate_ids[5, 1, 0]),
        "step 5: the same token appears twice",
    ),
    "negative candidate": (
        "candidate_ids", lambda r: edited(r.candidate_ids, (5, 1, 3), -1), "step 5: negative"
    ),
    "negative stock token": (
        "stock_choice", lambda r: edited(r.stock_choice, (0, 1), -1), "step 0: negative"
    ),
    "nan unary": ("unary", lambda r: edited(r.unary, (1, 0, 0), np.nan), "step 1: .*not finite"),
    "inf logsumexp": (
        "unary_logsumexp", lambda r: edited(r.unary_logsumexp, (1, 0), np.inf), "step 1: .*finite"
    ),
    "logsumexp of less than the candidates": (
        "unary_logsumexp", lambda r: edited(r.unary_logsumexp, (6, 2), -9), "step 6: .*smaller"
    ),
    "logsumexp that no vocabulary has": (
        "unary_logsumexp", lambda r: edited(r.unary_logsumexp, (6, 2), 90), "step 6: larger"
    ),
    "prompt without tokens": (
        "prompt_offsets", lambda r: np.array([0, 1, 1, 6]), "request `r1` has no prompt token"
    ),
    "unknown request": (
        "step_request", lambda r: edited(r.step_request, 6, 3), "step 6: request 3 does not exist"
    ),
    "position outside": (
        "step_position", lambda r: edited(r.step_position, 3, 5), "step 3: 5 is outside"
    ),
    "unsorted steps": (
        "step_position", lambda r: edited(r.step_position, 1, 0), "step 1: steps are not sorted"
    ),
    "gap in a dense recording": (
        "step_position", lambda r: edited(r.step_position, 3, 4), "request `r0` lacks a lattice"
    ),
    "offsets that fall": (
        "output_offsets", lambda r: np.array([0, 6, 5, 10]), "rise from 0 to 10"
    ),
    "offsets short of the end": (
        "prompt_offsets", lambda r: np.array([0, 1, 3, 5]), "rise from 0 to 6"
    ),
    "negative output token": (
        "output_ids", lambda r: edited(r.output_ids, 9, -5), "negative token id"
    ),
    "wrong number of axes": ("unary", lambda r: r.unary[..., 0], "does not have the axes"),
    "wrong size": ("unary", lambda r: r.unary[:, :, :3].copy(), "axis K is 3, but 4"),
    "requests and offsets disagree": (
        "prompt_offsets", lambda r: np.array([0, 3, 6]), "axis R . 1 is 3, but 4"
    ),
    "wrong dtype": ("edge", lambda r: r.edge.astype(np.float64), "dtype is F64, not F32"),
    "missing tensor": ("edge", lambda r: None, "no tensor `edge`"),
}  # fmt: skip


@pytest.mark.parametrize("case", list(BAD))
def test_bad_content_names_file_tensor_and_step(tmp_path: Path, case: str) -> None:
    tensor, change, message = BAD[case]
    rec, path = small(), tmp_path / "bad.safetensors"
    write_raw(path, rec, **{tensor: change(rec)})
    with pytest.raises(InputError, match=message) as caught:
        read_lattice(path)
    assert caught.value.where == str(path)
    assert f"`{tensor}`" in caught.value.message
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("case", ["nan edge", "duplicate candidate", "gap in a dense recording"])
def test_writer_refuses_what_the_reader_would(tmp_path: Path, case: str) -> None:
    tensor, change, message = BAD[case]
    rec, path = small(), tmp_path / "bad.safetensors"
    with pytest.raises(InputError, match=message):
        write_lattice(path, dataclasses.replace(rec, **{tensor: change(rec)}))
    assert list(tmp_path.iterdir()) == []


def test_unknown_tensor_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "bad.safetensors"
    write_raw(path, small(), extra=np.zeros(3))
    with pytest.raises(InputError, match="unknown tensor `extra`"):
        read_lattice(path)


@pytest.mark.parametrize("keep", [0, 7, 300, 0.5, -1])
def test_truncated_file_is_named(tmp_path: Path, keep: float) -> None:
    path = tmp_path / "lattice.safetensors"
    write_lattice(path, small())
    data = path.read_bytes()
    path.write_bytes(data[: int(keep * len(data)) if isinstance(keep, float) else keep])
    with pytest.raises(InputError, match="truncated") as caught:
        read_lattice(path)
    assert caught.value.where == str(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mode": "sparse"}, "key `mode`"),
        ({"block": 9}, "do not fit block 9"),
        ({"schema_version": 2}, "key `schema_version`"),
        ({"decoding": "sampled"}, "key `decoding`"),
        ({"surprise": 1}, "key `surprise`"),
        ({"target_sha256": "xyz"}, "key `target_sha256`"),
        ({"requests": [{"request_id": "r0", "benchmark": "b"}] * 3}, "appears twice"),
        ({"shard_index": 1}, "shard_index 1 of 1"),
    ],
)
def test_bad_metadata_names_the_key(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    rec, path = small(), tmp_path / "bad.safetensors"
    document = {**rec.metadata.model_dump(), **change}
    write_safetensors(path, rec.tensors(), {METADATA_KEY: json.dumps(document)})
    with pytest.raises(InputError, match=message):
        read_lattice(path)


@pytest.mark.parametrize("metadata", [{}, {METADATA_KEY: "{not json"}, {METADATA_KEY: "[]"}])
def test_other_files_are_not_taken_for_lattices(tmp_path: Path, metadata: dict[str, str]) -> None:
    path = tmp_path / "model.safetensors"
    write_safetensors(path, small().tensors(), metadata)
    with pytest.raises(InputError, match="lattice file"):
        read_lattice(path)


def test_missing_file_and_empty_folder_have_a_hint(tmp_path: Path) -> None:
    for path in (tmp_path / "none.safetensors", tmp_path):
        with pytest.raises(InputError, match=r"no .*lattice") as caught:
            read_lattice(path)
        assert "specpilot record" in str(caught.value.hint)


def shard(rec: LatticeRecording, requests: slice, index: int, count: int) -> LatticeRecording:
    """The part of a recording that holds `requests`."""
    keep = np.isin(rec.step_request, np.arange(R)[requests])
    start, stop = requests.start, requests.stop
    parts: dict[str, Any] = {
        name: array[keep] for name, array in rec.tensors().items() if len(array) == 7
    }
    for kind in ("prompt", "output"):
        offsets = getattr(rec, f"{kind}_offsets")
        parts[f"{kind}_ids"] = getattr(rec, f"{kind}_ids")[offsets[start] : offsets[stop]]
        parts[f"{kind}_offsets"] = offsets[start : stop + 1] - offsets[start]
    parts["step_request"] = parts["step_request"] - np.int32(start)
    metadata = rec.metadata.model_copy(
        update={
            "requests": rec.metadata.requests[requests],
            "shard_index": index,
            "shard_count": count,
        }
    )
    return dataclasses.replace(rec, metadata=metadata, **parts)


def test_shards_join_to_the_whole(tmp_path: Path) -> None:
    rec = small()
    # Names sort against the shard order on purpose: the metadata decides.
    write_lattice(tmp_path / "b.safetensors", shard(rec, slice(0, 2), 0, 2))
    write_lattice(tmp_path / "a.safetensors", shard(rec, slice(2, 3), 1, 2))
    whole = read_lattice(tmp_path)
    assert whole.metadata == rec.metadata
    for name, array in rec.tensors().items():
        assert np.array_equal(whole.tensors()[name], array), name
        assert whole.tensors()[name].dtype == array.dtype, name
    assert [path.name for path in lattice_files(tmp_path)] == ["a.safetensors", "b.safetensors"]


def test_half_written_shards_are_ignored_and_missing_ones_noticed(tmp_path: Path) -> None:
    rec = small()
    write_lattice(tmp_path / "a.safetensors", shard(rec, slice(0, 2), 0, 2))
    (tmp_path / ".b.safetensors.partial").write_bytes(b"half")
    with pytest.raises(InputError, match=r"has 2 shards, found \[0\]"):
        read_lattice(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"drafter_sha256": "2" * 64}, "`drafter_sha256` differs"),
        ({"requests": [{"request_id": "r0", "benchmark": "b"}]}, "appears twice"),
    ],
)
def test_shards_of_different_recordings_do_not_join(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    rec = small()
    other = shard(rec, slice(2, 3), 1, 2)
    document = {**other.metadata.model_dump(), **change}
    other = dataclasses.replace(other, metadata=LatticeMetadata.model_validate(document))
    write_lattice(tmp_path / "a.safetensors", shard(rec, slice(0, 2), 0, 2))
    write_lattice(tmp_path / "b.safetensors", other)
    with pytest.raises(InputError, match=message):
        read_lattice(tmp_path)


def test_recording_without_steps_is_well_formed(tmp_path: Path) -> None:
    """Every request may end with its first token; that is a fact about the run, not damage."""
    rec = small()
    empty = {name: array[:0] for name, array in rec.tensors().items() if len(array) == 7}
    rec = dataclasses.replace(
        rec, **empty, output_ids=rec.output_ids[:3], output_offsets=np.arange(4, dtype=np.int64)
    )
    path = tmp_path / "lattice.safetensors"
    write_lattice(path, rec)
    assert read_lattice(path).n_steps == 0
