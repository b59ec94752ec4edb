"""The shipped pair is what its cards, manifest and measurements say it is."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from demo_pair import shapes
from demo_pair.card import QUALITY, cards

from specpilot_cli.engines.reference.weights import load_drafter, load_target
from specpilot_cli.io.hashing import sha256_file, sha256_folder

MAX_WEIGHT_BYTES = 9_000_000
SGLANG = Path("docs/measurements/demo_pair_sglang_h200.json")


@pytest.fixture
def pair(repo: Path) -> Path:
    return repo / "recipes" / "demo-cpu"


def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def test_weights_stay_small(pair: Path) -> None:
    sizes = [(pair / n / "model.safetensors").stat().st_size for n in ("target", "drafter")]
    assert sum(sizes) <= MAX_WEIGHT_BYTES


def test_configurations_are_those_of_the_scripts(pair: Path) -> None:
    assert read(pair / "target" / "config.json") == shapes.target_json()
    assert read(pair / "drafter" / "config.json") == shapes.drafter_json()
    target = load_target(pair / "target", capture=shapes.CAPTURE)
    assert target.config == shapes.TARGET
    assert load_drafter(pair / "drafter", target).config == shapes.DRAFTER


def test_the_manifest_names_the_shipped_tokenizer(pair: Path) -> None:
    tokenizer = (pair / "target" / "tokenizer.json").read_bytes()
    named = read(pair / "corpus_manifest.json")["tokenizer_sha256"]
    assert named == hashlib.sha256(tokenizer).hexdigest()


def test_the_tokenizer_fits_the_model(pair: Path) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(pair / "target" / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == shapes.VOCAB
    names = ("<|endoftext|>", "<|mask|>", "<|pad|>")
    assert [tokenizer.token_to_id(n) for n in names] == [shapes.EOS, shapes.MASK, shapes.PAD]


def test_cards_are_what_the_script_writes(repo: Path, pair: Path) -> None:
    for path, text in cards(pair, repo / QUALITY).items():
        assert path.read_text(encoding="utf-8") == text, "run: train_demo_pair.py cards"


def test_cards_refuse_figures_of_other_weights(repo: Path, pair: Path, tmp_path: Path) -> None:
    measured = read(repo / QUALITY)
    measured["inputs"][0]["sha256"] = "0" * 64
    (tmp_path / "quality.json").write_text(json.dumps(measured))
    with pytest.raises(SystemExit, match="is of another target"):
        cards(pair, tmp_path / "quality.json")


@pytest.mark.parametrize("name", [QUALITY, SGLANG])
def test_measurements_are_of_the_shipped_files(repo: Path, name: Path) -> None:
    inputs = read(repo / name)["inputs"]
    assert {entry["path"] for entry in inputs} >= {
        "recipes/demo-cpu/target", "recipes/demo-cpu/drafter",
    }  # fmt: skip
    for entry in inputs:
        path = repo / entry["path"]
        assert entry["sha256"] == (sha256_folder(path) if path.is_dir() else sha256_file(path))


def test_every_measured_difference_is_a_near_tie(repo: Path) -> None:
    results = read(repo / QUALITY)["results"]
    for row in results["drafted"].values():
        assert row["same_as_plain"] + len(row["differences"]) == row["requests"] == 192
        for difference in row["differences"]:
            assert difference["below_argmax_nats"] <= results["near_tie_nats"] <= 0.02


def test_sglang_and_the_reference_engine_agree(repo: Path) -> None:
    """Recomputed from the rows, not read from the summary."""
    results = read(repo / SGLANG)["results"]
    rows = results["rows"]["drafted"]
    tokens = [len(row["output_ids"].split()) for row in rows]
    steps = [row["verify_steps"] for row in rows]
    served = sum(n - 1 for n in tokens) / sum(steps)
    assert results["sglang"]["tokens_per_step"] == pytest.approx(served)
    reference = results["reference"]["bfloat16"]
    assert reference["tokens_per_step"] == pytest.approx(served, rel=0.02)
    assert reference["along_sglang_outputs"]["tokens_per_step"] == pytest.approx(served, rel=0.02)
