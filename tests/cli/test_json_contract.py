"""`--json`: one document in the agreed envelope, numbers with their unit in the key."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specpilot_cli import __version__
from specpilot_cli.io.hashing import sha256_file
from specpilot_cli.io.lattice_file import write_lattice
from specpilot_cli.io.safetensors_stream import array_data, bf16_data, write_safetensors
from specpilot_cli.schema.lattice import LatticeMetadata, LatticeRecording, LatticeRequest

Run = Callable[..., subprocess.CompletedProcess[str]]

_ENVELOPE = {
    "schema_version", "command", "specpilot_version", "inputs", "seed", "environment", "verdict",
    "results",
}  # fmt: skip
# A fraction is a ratio; tau is tokens per step by definition; alpha and power are probabilities.
_UNITS = (
    "_s", "_ms", "_bytes", "_bytes_per_s", "_flops_per_s", "_flop_per_s", "_tok_per_s", "_ratio",
    "_nats", "_pct", "_tokens", "_flops", "_per_step",
)  # fmt: skip
_UNITLESS = ("tau", "alpha", "power", "temperature", "bits_per_weight", "confidence")


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a lattice, a step profile and a BF16 checkpoint, all tiny."""
    folder = tmp_path_factory.mktemp("inputs")
    write_lattice(folder / "lattices.safetensors", _recording())
    (folder / "step.json").write_text(json.dumps(_PROFILE), encoding="utf-8")
    model = folder / "model"
    model.mkdir()
    (model / "config.json").write_text('{"model_type": "qwen3_5"}', encoding="utf-8")
    rng = np.random.default_rng(0)
    weights = rng.normal(0, 0.02, (128, 128)).astype(np.float32)
    write_safetensors(
        model / "model.safetensors",
        {
            "model.layers.0.mlp.up_proj.weight": bf16_data(
                (weights.view(np.uint32) >> 16).astype(np.uint16)
            ),
            "model.norm.weight": array_data(np.ones(128, np.float32)),
        },
        {},
    )
    return folder


def _recording() -> LatticeRecording:
    """Two requests of nine tokens with a random lattice at each position."""
    rng = np.random.default_rng(1)
    lengths, drafted, top_k = [9, 9], 7, 16
    steps = sum(n - 1 for n in lengths)
    edge = rng.normal(size=(steps, drafted, top_k, top_k))
    edge[:, 0] = edge[:, 0, :1]
    edge -= np.log(np.exp(edge).sum(-1, keepdims=True))
    unary = rng.normal(size=(steps, drafted, top_k)).astype(np.float32)
    ids = np.stack(
        [rng.permutation(64)[:top_k] for _ in range(steps * drafted)], dtype=np.int32
    ).reshape(steps, drafted, top_k)
    offsets = np.array([0, 9, 18], np.int64)
    return LatticeRecording(
        metadata=LatticeMetadata(
            mode="dense",
            block=drafted + 1,
            engine="test",
            requests=[LatticeRequest(request_id=r, benchmark=r) for r in ("a", "b")],
            target_sha256="0" * 64,
            drafter_sha256="1" * 64,
        ),
        prompt_ids=np.arange(4, dtype=np.int32),
        prompt_offsets=np.array([0, 2, 4], np.int64),
        output_ids=rng.integers(0, 64, 18).astype(np.int32),
        output_offsets=offsets,
        step_request=np.repeat(np.arange(2, dtype=np.int32), 8),
        step_position=np.tile(np.arange(8, dtype=np.int64), 2),
        candidate_ids=ids,
        edge=edge.astype(np.float32),
        unary=unary,
        unary_logsumexp=np.full((steps, drafted), 5.0, np.float32),
        stock_choice=ids[:, :, 0].copy(),
    )


_PROFILE = {
    "schema_version": 1,
    "engine": {"name": "test", "version": "1"},
    "device": {"name": "NVIDIA H200", "kind": "gpu", "gpu_profile": "h200"},
    "target": {"name": "target"},
    "drafter": {"name": "drafter"},
    "dtype": "bfloat16",
    "mode": "chain",
    "nodes": 7,
    "rows": 8,
    "draft_block": 8,
    "steps": 10,
    "t_step_s": 0.020,
    "t_prof_s": 0.018,
    "tau": 3.0,
    "classes": [
        {"name": "target_gemm", "seconds": 0.015, "bytes": 5e10, "flops": 4e11, "calls": 300}
    ],
    "source": "made for a test",
}

_COMMANDS: dict[str, tuple[list[str], list[str]]] = {
    "doctor": (["doctor"], []),
    "replay": (["replay", "lattices.safetensors", "--nodes", "8"], ["lattices.safetensors"]),
    "ceiling": (
        ["ceiling", "step.json", "--lattices", "lattices.safetensors", "--nodes", "8"],
        ["step.json", "lattices.safetensors"],
    ),
    "convert-w12": (["convert-w12", "model", "--dry-run"], ["config.json"]),
}


@pytest.mark.parametrize("command", _COMMANDS)
def test_document_is_alone_on_stdout_and_follows_the_contract(
    specpilot: Run, inputs: Path, command: str
) -> None:
    words, files = _COMMANDS[command]
    document = _document(specpilot(*words, "--json", cwd=inputs))
    assert document["command"] == command
    assert [Path(entry["path"]).name for entry in document["inputs"]] == files
    for entry in document["inputs"]:
        assert entry["sha256"] == sha256_file(inputs / entry["path"])


def test_w12_commands_follow_the_contract(specpilot: Run, inputs: Path, tmp_path: Path) -> None:
    packed, restored = tmp_path / "w12", tmp_path / "back"
    convert = _document(
        specpilot("convert-w12", str(inputs / "model"), "-o", str(packed), "--json")
    )
    assert convert["command"] == "convert-w12"
    for words in (
        ["w12", "inspect", str(packed)],
        ["w12", "verify", str(packed), "--against", str(inputs / "model")],
        ["w12", "restore", str(packed), "-o", str(restored)],
    ):
        document = _document(specpilot(*words, "--json"))
        assert document["command"] == " ".join(words[:2])


def test_output_file_equals_stdout(specpilot: Run, inputs: Path, tmp_path: Path) -> None:
    words = ["replay", "lattices.safetensors", "--nodes", "8"]
    done = specpilot(*words, "--json", "-o", str(tmp_path / "r.json"), cwd=inputs)
    assert (tmp_path / "r.json").read_text(encoding="utf-8") == done.stdout
    again = specpilot(*words, "-o", str(tmp_path / "r.json"), cwd=inputs)
    assert again.returncode == 2
    assert "use --force" in again.stderr
    assert again.stdout == ""


def _document(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """The one document of a run that exited 0, checked against the contract."""
    assert done.returncode == 0, done.stderr

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} in the document")

    document: dict[str, Any] = json.loads(done.stdout, parse_constant=refuse)
    assert set(document) == _ENVELOPE
    assert document["schema_version"] == 1
    assert document["specpilot_version"] == __version__
    bare = [path for path, value in _numbers(document["results"]) if not _has_unit(path)]
    assert bare == [], "numbers without a unit in their key"
    return document


def _numbers(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], float]]:
    """Every fraction in a document with its keys; whole numbers are counts."""
    if isinstance(value, float):
        yield path, value
    elif isinstance(value, list):
        for item in value:
            yield from _numbers(item, path)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _numbers(item, (*path, key))


def _has_unit(path: tuple[str, ...]) -> bool:
    """A key above may carry the unit of what is below it: `tau: {low, high}`."""
    return any(key.endswith(_UNITS) or key.startswith(_UNITLESS) for key in path)
