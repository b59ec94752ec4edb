"""Raw tensors to recordings: DFlash2, DSpark by Eq. 1, DFlash, EAGLE, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specpilot_cli import main as entry
from specpilot_cli.errors import InputError
from specpilot_cli.io.jsonl import write_jsonl
from specpilot_cli.io.lattice_file import read_lattice
from specpilot_cli.io.raw_tensors import read_markov_head
from specpilot_cli.io.safetensors_stream import bf16_data, write_safetensors
from specpilot_cli.io.tree_file import read_trees
from specpilot_cli.replay.convert import MarkovHead, markov_edges
from specpilot_cli.schema.outputs import OutputRecord

VOCABULARY, RANK, L, K = 60, 5, 4, 3
LENGTHS = (6, 4)
HASHES = ["--target", "a" * 64, "--drafter", "b" * 64, "--engine", "test 1"]
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def answers(tmp_path: Path) -> list[OutputRecord]:
    rng = np.random.default_rng(0)
    found = [
        OutputRecord(
            request_id=f"q{i}", benchmark="b", prompt_ids=(1, 2), finish_reason="length",
            output_ids=tuple(rng.integers(0, VOCABULARY, size=length).tolist()),
        )
        for i, length in enumerate(LENGTHS)
    ]  # fmt: skip
    write_jsonl(tmp_path / "answers.jsonl", found)
    return found


@pytest.fixture
def raw() -> dict[str, Any]:
    rng = np.random.default_rng(1)
    anchors = [(r, p) for r, length in enumerate(LENGTHS) for p in range(length - 1)]
    shape = (len(anchors), L, K)
    scores = rng.normal(size=(*shape, K)).astype(np.float32)
    scores[:, 0] = scores[:, 0, :1]
    unary = rng.normal(size=shape).astype(np.float32)
    order = np.argsort(rng.random((*shape[:2], VOCABULARY)), axis=-1)
    return {
        "step_request": np.array([r for r, _ in anchors], dtype=np.int32),
        "step_position": np.array([p for _, p in anchors], dtype=np.int64),
        "candidate_ids": order[..., :K].astype(np.int64),  # as engines give them
        "scores": scores,
        "unary": unary,
        "unary_logsumexp": np.log(np.exp(unary).sum(-1) + 2).astype(np.float32),
    }


@pytest.fixture
def convert(tmp_path: Path, answers: Any, capsys: pytest.CaptureFixture[str]) -> Run:
    def call(tensors: dict[str, Any], kind: str, *more: str) -> tuple[int, str, str]:
        write_safetensors(tmp_path / "raw.safetensors", tensors, force=True)
        code = entry.main(
            ["lattice", "convert", str(tmp_path / "raw.safetensors"), "--outputs",
             str(tmp_path / "answers.jsonl"), "--drafter-kind", kind, *HASHES, "--force",
             "-o", str(tmp_path / "out.safetensors"), *more]
        )  # fmt: skip
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


def softmax(values: Any) -> Any:
    exp = np.exp(np.asarray(values, dtype=np.float64))
    return exp / exp.sum(axis=-1, keepdims=True)


def test_dflash2_scores_become_log_probabilities(
    raw: dict[str, Any], convert: Run, tmp_path: Path, answers: list[OutputRecord]
) -> None:
    half = {**raw, "scores": raw["scores"].astype(np.float16)}
    code, out, _ = convert(half, "dflash2")
    assert code == 0
    assert "8 lattices, 4 positions, 3 candidates, 2 requests" in out
    rec = read_lattice(tmp_path / "out.safetensors")
    np.testing.assert_allclose(np.exp(rec.edge), softmax(half["scores"]), atol=1e-5)
    assert (rec.metadata.block, rec.metadata.drafter_kind) == (L + 1, "dflash2")
    assert rec.output(1).tolist() == list(answers[1].output_ids)
    for step in range(8):  # stock walks greedily over the raw scores
        before = 0
        for position in range(L):
            before = int(half["scores"][step, position, before].argmax())
            assert rec.stock_choice[step, position] == raw["candidate_ids"][step, position, before]


def test_bfloat16_scores_are_read_bit_for_bit(
    raw: dict[str, Any], convert: Run, tmp_path: Path
) -> None:
    bits = (raw["scores"].view(np.uint32) >> 16).astype(np.uint16)
    assert convert({**raw, "scores": bf16_data(bits)}, "dflash2")[0] == 0
    exact = (bits.astype(np.uint32) << 16).view(np.float32)
    rec = read_lattice(tmp_path / "out.safetensors")
    np.testing.assert_allclose(np.exp(rec.edge), softmax(exact), atol=1e-6)


def markov(tmp_path: Path, name: str = "markov_head.markov_w{}.weight", **config: Any) -> Path:
    folder = tmp_path / "dspark"
    folder.mkdir(exist_ok=True)
    rng = np.random.default_rng(9)
    factors = {
        name.format(i): rng.normal(size=(VOCABULARY, RANK)).astype(np.float32) for i in (1, 2)
    }
    write_safetensors(folder / "model.safetensors", factors, force=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def test_dspark_edges_are_equation_1(
    raw: dict[str, Any], convert: Run, tmp_path: Path, answers: list[OutputRecord]
) -> None:
    folder = markov(tmp_path, markov_head_type="vanilla")
    w1, w2 = read_markov_head(folder)
    tensors = {name: raw[name] for name in raw if name != "scores"}
    tensors["stock_choice"] = np.full((8, L), 7, dtype=np.int32)
    assert convert(tensors, "dspark", "--drafter", str(folder))[0] == 0
    rec = read_lattice(tmp_path / "out.safetensors")
    assert (rec.metadata.block, rec.metadata.drafter_kind) == (L, "dspark")
    assert rec.stock_choice.tolist() == tensors["stock_choice"].tolist()
    ids = raw["candidate_ids"]
    for step in range(8):
        request, at = raw["step_request"][step], raw["step_position"][step]
        for position in range(L):
            for row in range(K):
                before = (
                    ids[step, position - 1, row] if position else answers[request].output_ids[at]
                )
                logits = [
                    raw["unary"][step, position, c] + w1[before] @ w2[ids[step, position, c]]
                    for c in range(K)
                ]
                np.testing.assert_allclose(
                    np.exp(rec.edge[step, position, row]), softmax(logits), atol=1e-5
                )


@pytest.mark.parametrize("kind", ["gated", "rnn"])
def test_markov_heads_that_need_more_than_two_tokens_are_refused(
    raw: dict[str, Any], convert: Run, tmp_path: Path, kind: str
) -> None:
    folder = markov(tmp_path, dspark_config={"markov_head_type": kind})
    tensors = {name: raw[name] for name in raw if name != "scores"}
    tensors["stock_choice"] = np.zeros((8, L), dtype=np.int32)
    code, _, err = convert(tensors, "dspark", "--drafter", str(folder))
    assert code == 2
    assert f"`{kind}` Markov head" in err
    # Scores of the engine itself are exact whatever the head.
    assert convert({**tensors, "scores": raw["scores"]}, "dspark")[0] == 0


def test_a_folder_without_the_factors_is_no_dspark_drafter(tmp_path: Path) -> None:
    folder = markov(tmp_path, name="something_w{}.weight")
    with pytest.raises(InputError, match="no tensor `markov_w1"):
        read_markov_head(folder)


def test_a_token_beyond_the_head_names_it() -> None:
    head = MarkovHead(np.zeros((5, 2), np.float32), np.zeros((5, 2), np.float32))
    ids = np.array([[[1, 9]]], dtype=np.int32)
    with pytest.raises(InputError, match="token 9 is beyond"):
        markov_edges(ids, np.zeros((1, 1, 2), np.float32), np.array([2], np.int32), head)


def test_plain_dflash_needs_no_pair_scores(
    raw: dict[str, Any], convert: Run, tmp_path: Path
) -> None:
    tensors = {name: raw[name] for name in raw if name != "scores"}
    assert convert(tensors, "dflash")[0] == 0
    rec = read_lattice(tmp_path / "out.safetensors")
    best = raw["unary"].argmax(axis=-1)
    assert rec.stock_choice.tolist() == np.take_along_axis(
        raw["candidate_ids"], best[..., None], axis=-1
    )[..., 0].tolist()  # fmt: skip
    assert rec.edge.shape == (8, L, 1, K)


@pytest.fixture
def trees(raw: dict[str, Any]) -> dict[str, Any]:
    return {
        "step_request": raw["step_request"],
        "step_position": raw["step_position"],
        "node_offsets": np.arange(0, 33, 4, dtype=np.int64),
        "node_token": np.tile(np.array([5, 6, 7, 5], dtype=np.int32), 8),
        "node_parent": np.tile(np.array([-1, -1, 0, 2], dtype=np.int32), 8),
        "node_log_prob": np.tile(np.array([-0.5, -1.0, -0.2, -0.1], dtype=np.float32), 8),
    }


def test_eagle_trees_become_a_tree_recording(
    trees: dict[str, Any], convert: Run, tmp_path: Path
) -> None:
    code, out, _ = convert(trees, "eagle")
    assert code == 0
    assert "8 trees, 32 nodes, 2 requests" in out
    rec = read_trees(tmp_path / "out.safetensors")
    assert (rec.metadata.block, rec.metadata.drafter_kind) == (4, "eagle")


def _at(name: str, index: int, value: Any, dtype: type | None = None) -> Callable[..., None]:
    """Set one entry of a tensor, after a cast where the value needs it."""

    def change(tensors: dict[str, Any]) -> None:
        tensors[name] = tensors[name].astype(dtype or tensors[name].dtype)
        tensors[name][index] = value

    return change


def _whole(name: str, value: Any) -> Callable[..., None]:
    return lambda tensors: tensors.update({name: value})


HOSTILE: dict[str, tuple[Callable[..., None], str]] = {
    "its own parent": (_at("node_parent", 0, 0), "node_parent`, step 0: a node precedes its par"),
    "two in a circle": (_at("node_parent", 6, 3), "node_parent`, step 1: a node precedes its par"),
    "far parent": (_at("node_parent", 31, 2**31 - 1), "node_parent`, step 7"),
    "below the anchor": (_at("node_parent", 4, -2), "node_parent`, step 1"),
    "falling offsets": (_at("node_offsets", 1, 20), "node_offsets`: must rise from 0 to 32"),
    "offsets past the end": (_at("node_offsets", 8, 40), "node_offsets`: must rise"),
    "negative offsets": (_at("node_offsets", 0, -4), "node_offsets`: must rise"),
    "few offsets": (_whole("node_offsets", np.array([0, 32])), "axis S is 1, in `step_request` it"),
    "matrix": (_whole("node_token", np.zeros((8, 4), np.int32)), "does not have the axes ['N']"),
    "few scores": (_whole("node_log_prob", np.zeros(31, np.float32)), "axis N is 31"),
    "wide token": (_at("node_token", 3, 5 + 2**32, np.int64), "node 3: 4294967301 does not fit"),
    "float token": (_whole("node_token", np.full(32, 5.5)), "must hold whole numbers"),
    "float position": (_whole("step_position", np.full(8, 0.7)), "must hold whole numbers"),
    "truth values": (_whole("node_parent", np.ones(32, np.bool_)), "must hold whole numbers"),
    "whole scores": (_whole("node_log_prob", np.zeros(32, np.int64)), "must hold floats"),
    "nan": (_at("node_log_prob", 9, np.nan), "node_log_prob`, node 9: NaN"),
    "no float32": (_at("node_log_prob", 9, -1e300, np.float64), "node 9: -1e+300 does not fit"),
    "certain twice": (_at("node_log_prob", 17, -0.01), "step 4: the children of one node"),
    "wide request": (_at("step_request", 0, 2**32, np.int64), "step 0: 4294967296 does not fit"),
    "negative request": (_at("step_request", 0, -1), "step_request`, step 0: it names answer -1"),
    "unsigned": (_at("step_position", 2, 2**64 - 1, np.uint64), "step_position`, step 2: 18446744"),
}


@pytest.mark.parametrize("case", list(HOSTILE))
def test_a_hostile_tree_is_refused_by_file_and_place(
    trees: dict[str, Any], convert: Run, tmp_path: Path, case: str
) -> None:
    change, message = HOSTILE[case]
    changed = {name: array.copy() for name, array in trees.items()}
    change(changed)
    code, _, err = convert(changed, "eagle")
    told = " ".join(err.split())
    assert code == 2, told
    assert message in told
    assert f"at {tmp_path / 'raw.safetensors'}" in told
    assert not (tmp_path / "out.safetensors").exists()


def test_siblings_may_add_up_to_one_in_half_precision(trees: dict[str, Any], convert: Run) -> None:
    share = np.log(np.array([0.7, 0.3], dtype=np.float16))  # 1.0004 together
    trees["node_log_prob"] = np.tile(np.concatenate([share, share * 0]), 8)
    assert convert(trees, "eagle")[0] == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_at("candidate_ids", 0, 2**40), "candidate_ids`, step 0: 1099511627776 does not fit"),
        (_whole("candidate_ids", np.zeros((8, L, 0), np.int64)), "axis K is empty"),
        (_whole("scores", np.zeros((8, L, K), np.float32)), "does not have the axes"),
        (_whole("scores", np.zeros((8, L, K, K + 1), np.float32)), "axis K is 4"),
        (_at("unary", 3, 1e300, np.float64), "unary`, step 3: 1e+300 does not fit float32"),
        (_at("unary_logsumexp", 2, -np.inf), "`unary_logsumexp`, step 2: a value is not finite"),
        (_at("scores", 5, np.nan), "scores`, step 5: NaN"),
        (_at("stock_choice", 5, -1), "stock_choice`, step 5: negative token id"),
    ],
)
def test_a_hostile_lattice_is_refused_by_file_and_place(
    raw: dict[str, Any], convert: Run, tmp_path: Path, change: Any, message: str
) -> None:
    tensors = {name: array.copy() for name, array in raw.items()}
    tensors["stock_choice"] = np.full((8, L), 7, dtype=np.int32)
    change(tensors)
    code, _, err = convert(tensors, "dflash2")
    told = " ".join(err.split())
    assert code == 2, told
    assert message in told
    assert f"at {tmp_path / 'raw.safetensors'}" in told


def test_answers_are_named_when_they_are_at_fault(
    raw: dict[str, Any], convert: Run, tmp_path: Path, answers: list[OutputRecord]
) -> None:
    path = tmp_path / "answers.jsonl"
    write_jsonl(path, [answers[0], answers[1].model_copy(update={"request_id": "q0"})], force=True)
    code, _, err = convert(raw, "dflash2")
    assert code == 2
    assert "request id `q0` occurs twice" in err
    wide = answers[1].model_copy(update={"prompt_ids": (1, 2**31)})
    write_jsonl(path, [answers[0], wide], force=True)
    code, _, err = convert(raw, "dflash2")
    assert code == 2
    assert "request `q1`: `prompt_ids` holds 2147483648" in err
    assert str(path) in err
    assert convert(raw, "dflash2", "--engine", " ")[0] == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scores": None}, "needs the tensor `scores`"),
        ({"step_request": np.full(8, 2, dtype=np.int32)}, "step_request`, step 0: it names"),
        ({"step_position": np.full(8, 6, dtype=np.int64)}, "step 0: 6 is outside its answer"),
        ({"step_position": np.zeros(8, dtype=np.int64)}, "steps are not sorted"),
        ({"candidate_ids": np.zeros((8, L, K), dtype=np.int64)}, "appears twice"),
        ({"unary": np.full((8, L, K), np.nan, dtype=np.float32)}, "unary`, step 0: NaN"),
    ],
)
def test_raw_files_that_do_not_fit_are_refused(
    raw: dict[str, Any], convert: Run, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    tensors = {name: value for name, value in {**raw, **change}.items() if value is not None}
    code, _, err = convert(tensors, "dflash2")
    assert code == 2
    assert message in " ".join(err.split())
    assert not (tmp_path / "out.safetensors").exists()


def test_a_model_is_a_folder_or_a_hash(raw: dict[str, Any], convert: Run, tmp_path: Path) -> None:
    code, _, err = convert(raw, "dflash2", "--target", str(tmp_path / "nothing"))
    assert code == 2
    assert "no such folder" in err
    folder = markov(tmp_path)
    assert convert(raw, "dflash2", "--target", str(folder))[0] == 0
    first = read_lattice(tmp_path / "out.safetensors").metadata
    assert first.target_sha256 not in ("a" * 64, first.drafter_sha256)


def test_pack_and_inspect_commands(
    raw: dict[str, Any], convert: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert convert(raw, "dflash2")[0] == 0
    source, packed = tmp_path / "out.safetensors", tmp_path / "packed.safetensors"
    assert entry.main(["lattice", "pack", str(source), "-o", str(packed), "--nodes", "9"]) == 0
    capsys.readouterr()
    assert entry.main(["lattice", "inspect", str(packed), "--json"]) == 0
    results = json.loads(capsys.readouterr().out)["results"]
    assert results["packed"] == {"exact_nodes": 9, "top_k": 4}
    assert (results["steps"], results["drafter_kind"]) == (8, "dflash2")
    assert entry.main(["lattice", "inspect", str(packed)]) == 0
    assert "packed\texact_nodes 9, top_k 4" in capsys.readouterr().out
    packed.write_bytes(packed.read_bytes()[:-3])
    assert entry.main(["lattice", "inspect", str(packed)]) == 2
    assert str(packed) in capsys.readouterr().err
