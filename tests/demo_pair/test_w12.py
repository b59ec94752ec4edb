"""The shipped pair in 12 bits per weight: the same bits, the same tokens, the same files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from specpilot_cli.engines.reference.engine import ReferenceEngine
from specpilot_cli.engines.reference.spec import SpecConfig
from specpilot_cli.io.hashing import sha256_file
from specpilot_cli.io.safetensors_stream import SafetensorsFile
from specpilot_kernels.w12 import codec, reference

Json = Callable[..., tuple[int, dict[str, Any]]]
SPECS = [SpecConfig(), SpecConfig("chain", 8), SpecConfig("tree", 16, 32)]


def _matrices(folder: Path) -> list[tuple[str, npt.NDArray[np.uint16]]]:
    """Every tensor of a folder as a BF16 matrix: leading axes joined, vectors as one row."""
    with SafetensorsFile(folder / "model.safetensors") as file:
        assert {file.info(name).dtype for name in file.names} == {"BF16"}
        arrays = [(name, file.read_array(name)) for name in file.names]
    return [(name, a.reshape(-1, a.shape[-1]) if a.ndim > 1 else a[None]) for name, a in arrays]


@pytest.mark.parametrize("model", ["target", "drafter"])
def test_every_tensor_survives_encoding(demo: Any, model: str) -> None:
    """Also those that conversion leaves as they are; the compiled codec and the plain one."""
    matrices = _matrices(demo.root / model)
    assert len(matrices) > 25
    for name, bits in matrices:
        encoded = codec.encode(bits)
        assert np.array_equal(codec.decode(encoded), bits), name
        if bits.size < 20_000:  # the plain one is slow
            assert np.array_equal(reference.decode(reference.encode(bits)), bits), name


def test_verify_compares_every_tensor(w12_target: Path, demo: Any, specpilot_json: Json) -> None:
    code, answer = specpilot_json("w12", "verify", w12_target, "--against", demo.target)
    assert (code, answer["verdict"]) == (0, "identical")
    n_tensors = len(_matrices(demo.target))
    assert answer["results"]["compared_tensors"] == n_tensors

    code, answer = specpilot_json("w12", "inspect", w12_target)
    assert code == 0
    totals = answer["results"]["totals"]
    assert totals["tensors"] == n_tensors
    assert 12 < totals["bits_per_weight"] < 12.5
    assert totals["converted_raw_bytes"] > 0.6 * totals["raw_bytes"]
    size = (w12_target / "model.safetensors").stat().st_size
    assert size < 0.85 * (demo.target / "model.safetensors").stat().st_size


def test_verify_names_a_flipped_bit(
    w12_target: Path, demo: Any, specpilot_json: Json, tmp_path: Path
) -> None:
    """The check that says `identical` above is able to say no."""
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    for file in w12_target.iterdir():
        (damaged / file.name).write_bytes(file.read_bytes())
    weights = bytearray((damaged / "model.safetensors").read_bytes())
    weights[len(weights) // 2] ^= 1
    (damaged / "model.safetensors").write_bytes(weights)
    code, answer = specpilot_json("w12", "verify", damaged, "--against", demo.target)
    assert (code, answer["verdict"]) == (1, "mismatch")


def test_restore_gives_the_same_files(
    w12_target: Path, demo: Any, specpilot_json: Json, tmp_path: Path
) -> None:
    code, _ = specpilot_json("w12", "restore", w12_target, "-o", tmp_path / "back")
    assert code == 0
    names = {file.name for file in demo.target.iterdir()}
    assert {file.name for file in (tmp_path / "back").iterdir()} == names
    for name in names:
        assert sha256_file(tmp_path / "back" / name) == sha256_file(demo.target / name), name


def test_engine_holds_the_same_weights(
    engine: ReferenceEngine, w12_target: Path, demo: Any
) -> None:
    compressed = ReferenceEngine(w12_target, demo.drafter)
    ours, theirs = engine.model.state_dict(), compressed.model.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert compressed.describe()["weight_format"] == "w12"


def test_engine_gives_the_same_tokens_and_accepts_alike(
    engine: ReferenceEngine, w12_target: Path, demo: Any, requests_for: Any
) -> None:
    requests = requests_for(demo.prompts("unseen", 8))
    compressed = ReferenceEngine(w12_target, demo.drafter)
    for spec in SPECS:
        expected = engine.generate(requests, spec=spec)
        found = compressed.generate(requests, spec=spec)
        assert [r.output_ids for r in found] == [r.output_ids for r in expected]
        assert [r.accept_lengths for r in found] == [r.accept_lengths for r in expected]
