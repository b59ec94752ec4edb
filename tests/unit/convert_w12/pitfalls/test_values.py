"""Pitfalls 1 to 7: bit patterns that get lost, dtypes that get changed, sizes that get large."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

from specpilot_cli.io.safetensors_stream import TensorData, bf16_data
from specpilot_kernels.w12 import layout
from tests.unit.convert_w12.conftest import MakeCheckpoint, weights
from tests.unit.convert_w12.pitfalls.conftest import Cli, ThereAndBack, python

NAME = "layers.0.up_proj.weight"


def ordinary(seed: int = 0, rows: int = 256, cols: int = 256) -> np.ndarray:
    return np.array(weights(seed, rows, cols).data)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [(0x0000, 0x8000), (0x8000, 0x0000), (0x7FC0, 0x7FC1), (0x7FC1, 0xFFC1), (0x0000, 0x0001)],
    ids=["zero", "negative zero", "NaN payload", "NaN sign", "denormal"],
)
def test_pitfall_01_zero_signs_and_nans_are_compared_as_bits(
    ours: int, theirs: int, make_checkpoint: MakeCheckpoint, cli: Cli, tmp_path: Path
) -> None:
    """A zero changed its sign and the check said equal; a NaN came back the same and it said no."""
    bits = ordinary()
    bits[200, 3] = ours
    source = make_checkpoint({NAME: bf16_data(bits)})
    assert cli("convert-w12", source, "-o", tmp_path / "w12").code == 0
    assert cli("w12", "verify", tmp_path / "w12", "--against", source).code == 0
    bits[200, 3] = theirs
    other = make_checkpoint({NAME: bf16_data(bits)}, name="other")
    answer = cli("w12", "verify", tmp_path / "w12", "--against", other)
    assert answer.code == 1
    assert f"tensor `{NAME}`" in answer.out
    assert "[200, 3]" in answer.out


def test_pitfall_02_nan_payloads_survive_in_every_dtype(
    make_checkpoint: MakeCheckpoint, there_and_back: ThereAndBack
) -> None:
    """A tensor went through a wider float and back, and its NaNs came out as one standard NaN."""
    payloads = np.concatenate([np.arange(0x7F81, 0x8000), np.arange(0xFF81, 0x10000)])
    bits = ordinary(rows=512)
    bits[:254, 7] = payloads
    halves = np.concatenate([np.arange(0x7C01, 0x8000), np.arange(0xFC01, 0x10000)])
    singles = (np.arange(1, 4096, dtype=np.uint32) | 0x7F800000).view(np.float32)
    answer = there_and_back(
        make_checkpoint(
            {
                NAME: bf16_data(bits),
                "norm.weight": bf16_data(payloads.astype(np.uint16)),
                "half": TensorData("F16", halves.shape, halves.astype(np.uint16)),
                "single": TensorData("F32", singles.shape, singles.view(np.uint32)),
            }
        )
    )
    assert answer.tensors[NAME]["encoding"] == "w12"
    assert answer.tensors[NAME]["escapes"] >= 254


@pytest.mark.parametrize("bit", range(16))
def test_pitfall_03_test_data_converts_and_every_bit_of_it_counts(
    bit: int, make_checkpoint: MakeCheckpoint, cli: Cli, tmp_path: Path
) -> None:
    """A converter passed its test on random bytes, of which it had converted not a single one."""
    bits, noise = ordinary(), np.random.default_rng(1).integers(0, 65536, (256, 256))
    tensors = {NAME: bf16_data(bits), "noise.weight": bf16_data(noise.astype(np.uint16))}
    answer = cli("convert-w12", make_checkpoint(tensors), "-o", tmp_path / "w12", "--json")
    assert answer.tensors[NAME]["encoding"] == "w12"
    assert "outside their channel's window" in answer.tensors["noise.weight"]["reason"]
    bits[bit * 16, 255 - bit] ^= 1 << bit
    other = make_checkpoint(tensors, name="other")
    found = cli("w12", "verify", tmp_path / "w12", "--against", other, "--json")
    assert found.code == 1
    assert [problem["name"] for problem in found.results["problems"]] == [NAME]


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_pitfall_04_other_floats_are_carried_over_and_said_so(
    dtype: type, make_checkpoint: MakeCheckpoint, there_and_back: ThereAndBack, tmp_path: Path
) -> None:
    """An FP16 or FP32 checkpoint was rounded to BF16 on the way in, and called lossless."""
    values = np.random.default_rng(2).standard_normal((256, 256)).astype(dtype)
    answer = there_and_back(make_checkpoint({NAME: values}))
    row = answer.tensors[NAME]
    assert row["encoding"] == "stored"
    assert "W12 holds BF16 weights only" in row["reason"]
    with safe_open(tmp_path / "w12" / "model.safetensors", "np") as file:
        stored = file.get_tensor(NAME)
    assert (stored.dtype, stored.tobytes()) == (values.dtype, values.tobytes())


def test_pitfall_05_fp32_tensors_of_a_bf16_model_stay_fp32(
    make_checkpoint: MakeCheckpoint, there_and_back: ThereAndBack, tmp_path: Path
) -> None:
    """A router's bias or a recurrence's decay was FP32 for a reason, and came out as BF16."""
    exact = {
        "layers.0.mlp.gate.e_score_correction_bias": np.float32([1 + 2**-20, 1 - 2**-20]),
        "layers.0.linear_attn.A_log": np.linspace(0, 1, 7, dtype=np.float32),
        "layers.0.hc_scale": np.full((4, 4), 1 / 3, np.float32),
        "norm.weight": np.full(64, 0.1, np.float32),
        "layers.0.mlp.gate.weight": np.full((128, 128), 0.1, np.float32),
    }
    there_and_back(make_checkpoint({**exact, NAME: bf16_data(ordinary())}))
    with safe_open(tmp_path / "w12" / "model.safetensors", "np") as file:
        for name, values in exact.items():
            stored = file.get_tensor(name)
            assert (stored.dtype, stored.tobytes()) == (np.float32, values.tobytes()), name


_ALL_ESCAPES = """
import sys
import numpy as np
from specpilot_kernels.w12 import codec
for pattern in (0x7F80, 0x7FC1, 0x0000, 0x8000, 0x0001, 0xFFFF):
    bits = np.full((131, 257), pattern, np.uint16)
    encoded = codec.encode(bits, threads=2)
    assert np.array_equal(codec.decode(encoded, threads=2), bits), hex(pattern)
bits = np.random.default_rng(0).integers(0, 65536, (384, 999), dtype=np.uint16)
bits[::2] = np.where(bits[::2] % 2, 0x0080, 0x7F00)
encoded = codec.encode(bits)
assert np.array_equal(codec.decode(encoded), bits)
print(encoded.escapes)
"""


def test_pitfall_06_a_tensor_may_consist_of_escapes() -> None:
    """The converter had room for one exception in ten weights; a tensor of zeros crashed it."""
    done = python(_ALL_ESCAPES)
    assert done.returncode == 0, done.stderr
    # Odd rows: 16 of 256 exponent fields fit a window. Even rows: half of the weights do.
    assert int(done.stdout) > 0.6 * 384 * 999


def test_pitfall_07_tensors_full_of_zeros_never_grow(
    make_checkpoint: MakeCheckpoint, there_and_back: ThereAndBack
) -> None:
    """A pruned or padded tensor came out larger than it went in, and nobody said so."""
    rng = np.random.default_rng(3)
    pruned, sparse, padded = ordinary(1), ordinary(2), ordinary(3)
    pruned[rng.random(pruned.shape) < 0.5] = 0
    sparse[rng.random(sparse.shape) < 0.01] = 0
    padded[192:] = 0
    tensors = {"pruned.weight": pruned, "sparse.weight": sparse, "padded.weight": padded}
    answer = there_and_back(make_checkpoint({k: bf16_data(v) for k, v in tensors.items()}))
    rows = answer.tensors
    assert all(row["stored_bytes"] <= row["raw_bytes"] for row in rows.values())
    assert rows["pruned.weight"]["encoding"] == "stored"
    assert "of the weights are zeros or lie outside" in rows["pruned.weight"]["reason"]
    assert 12.3 < rows["sparse.weight"]["bits_per_weight"] < 13
    # Whole rows of zeros have a window of their own and cost nothing.
    assert rows["padded.weight"]["escapes"] < 30
    assert rows["padded.weight"]["window_low"] == 0
    assert rows["padded.weight"]["stored_bytes"] == layout.encoded_nbytes(
        256, 256, rows["padded.weight"]["escapes"]
    )
