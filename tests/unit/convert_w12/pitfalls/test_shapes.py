"""Pitfalls 8 to 12: matrices of odd size, views, very large counts, and fused projections."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from specpilot_cli.io.hf_folder import open_hf_folder
from specpilot_cli.io.safetensors_stream import SafetensorsFile, bf16_data
from specpilot_kernels.w12 import codec, layout
from tests.unit.convert_w12.conftest import MakeCheckpoint, weights
from tests.unit.convert_w12.pitfalls.conftest import Cli, ThereAndBack


def test_pitfall_08_odd_shapes_and_slices_of_them_convert(
    make_checkpoint: MakeCheckpoint, there_and_back: ThereAndBack
) -> None:
    """An inner size of 10,944, or a slice of it, was refused, or read past its end."""
    shapes = [(10944, 128), (128, 3696), (1848, 190), (381, 1025), (255, 961), (640, 191)]
    tensors = {f"layers.{i}.down_proj.weight": weights(i, *s) for i, s in enumerate(shapes)}
    rows = there_and_back(make_checkpoint(tensors, shards=2)).tensors
    for name, shape in zip(tensors, shapes, strict=True):
        row = rows[name]
        assert row["encoding"] == "w12"
        assert row["stored_bytes"] == layout.encoded_nbytes(*shape, row["escapes"])


@pytest.mark.parametrize("parts", [2, 4, 8])
def test_pitfall_08_a_slice_of_channels_encodes_alone(parts: int) -> None:
    """Each rank took its slice of the packed tensor, and the slices did not begin with a record."""
    bits = np.array(weights(5, 1848, 130).data)
    for part in np.array_split(bits, parts, axis=0):
        assert np.array_equal(codec.decode(codec.encode(part)), part)
    for part in np.array_split(bits, parts, axis=1):
        assert np.array_equal(codec.decode(codec.encode(part)), part)


def test_pitfall_09_matrices_that_padding_would_inflate_stay(
    make_checkpoint: MakeCheckpoint, there_and_back: ThereAndBack
) -> None:
    """A matrix of two rows was padded to a whole record and became sixty times as large."""
    shapes = {"one": (1, 512), "two": (2, 384), "thin": (4096, 8), "dot": (1, 1), "row": (96, 64)}
    tensors = {f"{n}.weight": weights(i, *s) for i, (n, s) in enumerate(shapes.items())}
    tensors["k384.weight"] = weights(9, 512, 384)
    rows = there_and_back(make_checkpoint(tensors)).tensors
    for name, (n_rows, n_cols) in shapes.items():
        row = rows[f"{name}.weight"]
        assert row["encoding"] == "stored"
        assert f"{n_rows} × {n_cols} pads to " in row["reason"]
        assert row["stored_bytes"] == row["raw_bytes"]
    assert 12 + 8.25 / 384 < rows["k384.weight"]["bits_per_weight"] < 12.03


@pytest.mark.parametrize(
    "view",
    [
        lambda a: a.T,
        lambda a: a[:, ::2],
        lambda a: a[::-1, ::-1],
        lambda a: np.asfortranarray(a),
        lambda a: np.broadcast_to(a[3], (140, a.shape[1])),
        lambda a: a.reshape(10, 15, 140)[:, 2],
    ],
    ids=["transposed", "every second column", "reversed", "column order", "repeated", "sliced"],
)
def test_pitfall_10_views_are_read_by_what_they_show(
    view: Callable[[np.ndarray], np.ndarray],
) -> None:
    """A transposed view was packed as the memory behind it, or came back with other strides."""
    bits = view(np.random.default_rng(3).integers(0, 65536, (150, 140), dtype=np.uint16))
    plain = np.ascontiguousarray(bits)
    encoded, expected = codec.encode(bits), codec.encode(plain)
    assert encoded.records.tobytes() == expected.records.tobytes()
    assert codec.matches(bits, encoded)
    decoded = codec.decode(encoded)
    assert decoded.flags.c_contiguous
    assert np.array_equal(decoded, plain)


def test_pitfall_11_counts_beyond_two_to_the_31_do_not_wrap(tmp_path: Path) -> None:
    """A tensor with more than 2^31 elements had a negative size, and half of it was dropped."""
    rows, cols = 1 << 16, (1 << 15) + 64
    assert rows * cols > 1 << 31
    records = (rows // 128) * (cols // 64)
    assert layout.encoded_nbytes(rows, cols, 5) == (
        records * 12288 + rows + 4 * (-(-rows // 128) + 1) + 30
    )
    counts = np.full(rows, cols, dtype=np.int64)
    found = codec.Survey((rows, cols), np.zeros(rows, np.uint8), counts)
    assert found.escapes == rows * cols
    assert found.nbytes == layout.encoded_nbytes(rows, cols, rows * cols)
    # More escapes than a pointer can count are refused, not cut off.
    with pytest.raises(ValueError, match="escapes, the format holds"):
        codec.encode(np.zeros((1, 1), np.uint16), surveyed=found)


def test_pitfall_11_files_beyond_four_gigabytes_are_addressed(tmp_path: Path) -> None:
    """A tensor behind the first 4 GB of its file was read from the wrong place."""
    rows, cols = 1 << 16, (1 << 15) + 64
    folder = tmp_path / "large"
    folder.mkdir()
    (folder / "config.json").write_text("{}", encoding="utf-8")
    end, offset = 2 * rows * cols, (1 << 32) + 1000
    header = (
        f'{{"a.weight":{{"dtype":"BF16","shape":[{rows},{cols}],"data_offsets":[0,{end}]}},'
        f'"b":{{"dtype":"U8","shape":[3],"data_offsets":[{end},{end + 3}]}}}}'
    ).encode()
    with (folder / "model.safetensors").open("wb") as handle:
        handle.write(len(header).to_bytes(8, "little") + header)
        # Holes take no room on the disk.
        for place, data in ((offset, b"mark"), (end, b"xyz")):
            handle.seek(8 + len(header) + place)
            handle.write(data)
    opened = open_hf_folder(folder)
    assert opened.tensor_bytes == end + 3
    assert [info.nbytes for _, info in opened.tensors] == [end, 3]
    assert opened.tensors[1][1].start == 8 + len(header) + end
    with SafetensorsFile(folder / "model.safetensors") as file:
        assert file.read_array("b").tobytes() == b"xyz"
        found = bytearray(12)
        for way in ("at random", "from front to back"):
            file.read_into(file.info("a.weight"), offset - 4, memoryview(found))
            assert found == bytes(4) + b"mark" + bytes(4), way
            file.read_once()
        large = bytearray(1 << 17)  # large enough to be read ahead
        file.read_into(file.info("a.weight"), offset, memoryview(large))
        assert large == b"mark".ljust(1 << 17, b"\0")


def test_pitfall_12_fused_projections_convert_like_their_parts(
    make_checkpoint: MakeCheckpoint, there_and_back: ThereAndBack
) -> None:
    """The parts of a fused projection lay in different shards, and conversion failed."""
    names = ("q_proj", "k_proj", "v_proj")
    parts = [np.array(weights(i, n, 192).data) for i, n in enumerate((256, 128, 128))]
    tensors = {
        **{f"layers.0.attn.{n}.weight": bf16_data(p) for n, p in zip(names, parts, strict=True)},
        "layers.1.attn.qkv_proj.weight": bf16_data(np.concatenate(parts)),
        "layers.1.mlp.gate_up_proj.weight": weights(7, 512, 192),
    }
    rows = there_and_back(make_checkpoint(tensors, shards=4)).tensors
    assert {row["encoding"] for row in rows.values()} == {"w12"}
    assert len({rows[f"layers.0.attn.{name}.weight"]["shard"] for name in names}) == 3
    # Windows belong to channels: joining the encoded parts gives the encoded whole.
    whole, alone = codec.encode(np.concatenate(parts)), [codec.encode(part) for part in parts]
    for part in ("records", "window", "escape_col", "escape_bits"):
        joined = np.concatenate([getattr(encoded, part) for encoded in alone])
        assert np.array_equal(joined, getattr(whole, part)), part


def test_pitfall_12_dry_run_does_not_need_the_other_parts(
    make_checkpoint: MakeCheckpoint, cli: Cli
) -> None:
    """One projection without its siblings stopped the conversion."""
    source = make_checkpoint({"layers.0.attn.k_proj.weight": weights(0, 256, 256)})
    answer = cli("convert-w12", source, "--dry-run", "--json")
    assert answer.tensors["layers.0.attn.k_proj.weight"]["encoding"] == "w12"
