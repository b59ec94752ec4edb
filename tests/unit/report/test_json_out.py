from __future__ import annotations

import json
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import numpy as np
import pytest

from specpilot_cli.io.hashing import sha256_file, sha256_folder
from specpilot_cli.report.json_out import build_envelope, plain, render_json


@dataclass(frozen=True, slots=True)
class Point:
    nodes: int
    tau_tokens: float


class Word(Enum):
    YES = "yes"


def test_results_become_plain_finite_values() -> None:
    value = {
        "point": Point(8, float("nan")),
        "array_s": np.array([1.5, np.inf]),
        "count": np.int32(3),
        "flag": np.bool_(True),
        "half": np.float16(0.5),
        "path": Path("a/b"),
        "word": Word.YES,
        "set": {3, 1},
        2: (1, None),
    }
    assert plain(value) == {
        "point": {"nodes": 8, "tau_tokens": None},
        "array_s": [1.5, None],
        "count": 3,
        "flag": True,
        "half": 0.5,
        "path": "a/b",
        "word": "yes",
        "set": [1, 3],
        "2": [1, None],
    }


def test_values_without_a_json_form_are_refused() -> None:
    with pytest.raises(TypeError, match="object has no JSON form"):
        plain({"x": object()})


def test_envelope_hashes_files_and_folders(tmp_path: Path) -> None:
    file, folder = tmp_path / "x.json", tmp_path / "model"
    file.write_text("{}", encoding="utf-8")
    folder.mkdir()
    (folder / "config.json").write_text("{}", encoding="utf-8")
    envelope = build_envelope(
        "replay", {"tau_tokens": np.float64(4.5)}, inputs=[file, folder], seed=3, verdict="accept",
        environment={"gpu": None},
    )  # fmt: skip
    document = json.loads(render_json(envelope))
    assert document["inputs"] == [
        {"path": str(file), "sha256": sha256_file(file)},
        {"path": str(folder), "sha256": sha256_folder(folder)},
    ]
    assert document["results"] == {"tau_tokens": 4.5}
    assert (document["schema_version"], document["command"], document["seed"]) == (1, "replay", 3)
    assert document["environment"]["gpu"] is None
    assert document["environment"]["numpy"] == np.__version__
