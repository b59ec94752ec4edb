"""A committed recording with a fault: `replay` and `ceiling` name the file and the place."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from specpilot_cli.io.safetensors_stream import SafetensorsFile, array_data, write_safetensors

Run = Callable[..., subprocess.CompletedProcess[str]]
ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "recipes/demo-cpu/recordings/block-8.safetensors"


def _damaged(kind: str, folder: Path) -> Path:
    """One fault; without hashes where a hash would be the first to notice it."""
    path = folder / "bad.safetensors"
    if kind == "truncated":
        path.write_bytes(SOURCE.read_bytes()[:-1000])
        return path
    with SafetensorsFile(SOURCE) as file:
        tensors = {name: file.read_array(name) for name in file.names}
        metadata = dict(file.metadata)
    if kind == "wrong hash":
        tensors["output_ids"][7] += 1
    else:
        document = json.loads(metadata["specpilot"])
        for request in document["requests"]:
            del request["sha256"]
        metadata["specpilot"] = json.dumps(document)
    if kind == "duplicate":
        tensors["candidate_ids"][5, 2, 9] = tensors["candidate_ids"][5, 2, 1]
    if kind == "nan":
        tensors["edge_rows"][int(tensors["edge_offsets"][3]), 4] = np.nan
    stored = {name: array_data(array) for name, array in tensors.items()}
    write_safetensors(path, stored, metadata)
    return path


@pytest.mark.parametrize("command", ["replay", "ceiling"])
@pytest.mark.parametrize(
    ("kind", "place"),
    [
        ("truncated", "bad.safetensors"),
        ("wrong hash", "request `unseen-code-00`"),
        ("duplicate", "tensor `candidate_ids`, step 5"),
        ("nan", "tensor `edge_rows`, step 3"),
    ],
)
def test_a_malformed_lattice_is_refused_by_name_and_place(
    command: str, kind: str, place: str, specpilot: Run, tmp_path: Path
) -> None:
    path = _damaged(kind, tmp_path)
    words: tuple[str, ...] = ("replay", str(path))
    if command == "ceiling":
        words = ("ceiling", "--target", "llama-3.1-8b", "--gpu", "h200", "--lattices", str(path))
    done = specpilot(*words)
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    assert "bad.safetensors" in done.stderr
    assert place in done.stderr
    assert "hint: " in done.stderr
