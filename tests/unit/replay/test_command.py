"""`specpilot replay`: streams, the JSON document, options and exit codes."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specpilot_cli import main as entry
from specpilot_cli.io.lattice_file import write_lattice
from specpilot_cli.replay.run import replay
from specpilot_cli.schema.lattice import LatticeRecording

Make = Callable[..., LatticeRecording]


@pytest.fixture
def lattice(random_recording: Make, tmp_path: Path) -> Path:
    path = tmp_path / "lattice.safetensors"
    write_lattice(path, random_recording(1))
    return path


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    def call(*args: Any) -> tuple[int, str, str]:
        code = entry.main(["replay", *map(str, args)])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


def test_table_shows_nodes_rows_tau_interval_and_mode(lattice: Path, run: Any) -> None:
    code, out, _ = run(lattice, "--nodes", "8,16")
    assert code == 0
    lines = [line.split("\t") for line in out.splitlines()]
    body = {(line[0], line[1]): line for line in lines if len(line) == 9}
    assert {("chain", "7"), ("best-first", "8"), ("best-first", "16"), ("marginal", "8"),
            ("oracle", "-")} <= set(body)  # fmt: skip
    assert body["best-first", "16"][2] == "17"
    assert body["best-first", "16"][4].startswith("[")
    assert "trajectory: each policy judged at the anchors it lands on itself: unbiased" in out
    assert "clustered by request" in out
    assert any(line[:1] == ["policy"] and "bench0" in line for line in lines)


def test_json_is_one_document_with_the_numbers_of_the_library(
    lattice: Path, run: Any, random_recording: Make
) -> None:
    code, out, err = run(lattice, "--policy", "best-first", "--nodes", "1-4", "--json", "--quiet")
    assert (code, err) == (0, "")
    document = json.loads(out)
    assert document["command"] == "replay"
    assert document["inputs"][0]["path"] == str(lattice)
    assert len(document["inputs"][0]["sha256"]) == 64
    results = document["results"]
    expected = replay(random_recording(1), ["best-first"], nodes=[1, 2, 3, 4])
    assert [row["nodes"] for row in results["rows"]] == [1, 2, 3, 4]
    for row, wanted in zip(results["rows"], expected.rows, strict=True):
        assert row["tau_tokens_per_step"]["value"] == wanted.tau.value
        assert row["tau_tokens_per_step"]["low"] == wanted.tau.low
        assert row["expected_tokens_per_step"] == wanted.expected_tau
        assert row["tokens"] / row["steps"] == wanted.tau.value
        assert set(row["by_benchmark_tokens_per_step"]) == {"bench0", "bench1"}
    assert results["mode"] == "trajectory"
    assert results["recording"]["block"] == 8
    assert len(results["recall_by_position_ratio"]) == 7


def test_output_file_is_written_and_not_overwritten(
    lattice: Path, run: Any, tmp_path: Path
) -> None:
    target = tmp_path / "result.json"
    code, out, _ = run(lattice, "--nodes", "4", "-o", target)
    assert code == 0
    assert "best-first" in out
    assert (
        json.loads(target.read_text(encoding="utf-8"))["results"]["anchors"]
        == 29 + 24 + 1 + 39 + 27
    )
    assert run(lattice, "--nodes", "4", "-o", target)[0] == 2
    assert run(lattice, "--nodes", "4", "-o", target, "--force")[0] == 0


def test_list_needs_no_lattice(run: Any) -> None:
    code, out, _ = run("--list")
    assert code == 0
    assert [line.split("\t")[0] for line in out.splitlines()[1:]] == [
        "chain", "best-first", "marginal", "eagle-2", "opt-tree", "sequoia", "cost-aware", "oracle",
    ]  # fmt: skip
    document = json.loads(run("--list", "--json")[1])
    assert document["results"]["policies"][1]["name"] == "best-first"


def test_position_and_temperature_options_reach_the_replay(
    lattice: Path, run: Any, random_recording: Make
) -> None:
    code, out, _ = run(lattice, "--positions", "3", "--temperature", "2", "--json")
    assert code == 0
    results = json.loads(out)["results"]
    assert (results["positions"], results["temperature"]) == (3, 2.0)
    assert max(row["tau_tokens_per_step"]["value"] for row in results["rows"]) <= 4


def test_single_request_says_why_there_is_no_interval(
    random_recording: Make, tmp_path: Path, run: Any
) -> None:
    path = tmp_path / "one.safetensors"
    write_lattice(path, random_recording(1, lengths=[20]))
    code, out, _ = run(path, "--policy", "chain")
    assert code == 0
    assert "needs 2 requests" in out
    low = json.loads(run(path, "--policy", "chain", "--json")[1])
    assert low["results"]["rows"][-1]["tau_tokens_per_step"]["low"] is None


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "no lattice given"),
        (["missing.safetensors"], "no such lattice file"),
        (["LATTICE", "--nodes", "8,x"], "not a node budget: `x`"),
        (["LATTICE", "--nodes", ""], "not a node budget"),
        (["LATTICE", "--nodes", "9-3"], "whole numbers from 1"),
        (["LATTICE", "--nodes", "0"], "whole numbers from 1"),
        (["LATTICE", "--nodes", "99999999"], "not a node budget"),
        (["LATTICE", "--policy", "besst-first"], "unknown policy: `besst-first`"),
        (["LATTICE", "--positions", "8"], "outside 1 to 7"),
        (["LATTICE", "--temperature", "-1"], "not a positive number"),
        (["LATTICE", "-o", "x.pdf"], "unknown format"),
    ],
)
def test_bad_usage_exits_2_with_a_hint_and_no_output(
    lattice: Path, run: Any, args: list[str], message: str
) -> None:
    code, out, err = run(*[str(lattice) if arg == "LATTICE" else arg for arg in args])
    assert (code, out) == (2, "")
    assert message in err


def test_damaged_lattice_exits_2_and_names_the_file(lattice: Path, run: Any) -> None:
    lattice.write_bytes(lattice.read_bytes()[:-100])
    code, out, err = run(lattice)
    assert (code, out) == (2, "")
    assert "truncated" in err
    assert lattice.name in err
    assert "hint:" in err


def test_anchored_recording_defaults_to_its_mode_and_refuses_others(
    random_recording: Make, tmp_path: Path, run: Any
) -> None:
    dense = random_recording(1)
    path = tmp_path / "anchored.safetensors"
    metadata = dense.metadata.model_copy(update={"mode": "anchored"})
    write_lattice(path, dataclasses.replace(dense, metadata=metadata))
    assert "biased for any policy" in run(path)[1]
    code, _, err = run(path, "--mode", "trajectory")
    assert code == 2
    assert "this recording is anchored" in err


def test_long_recordings_are_replayed_in_chunks(
    random_recording: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    rec = random_recording(2)
    whole = replay(rec, nodes=[9])
    monkeypatch.setattr("specpilot_cli.replay.anchors._CHUNK_ANCHORS", 10)
    parts = replay(rec, nodes=[9])
    assert [row.tau for row in whole.rows] == [row.tau for row in parts.rows]
    assert np.array_equal(whole.recall_by_position, parts.recall_by_position)


def test_step_times_add_speedups_and_the_cost_aware_policy(lattice: Path, run: Any) -> None:
    curve = {
        "schema_version": 1, "name": "made-up", "engine": {"name": "test", "version": "1"},
        "device": {"name": "NVIDIA H100", "kind": "gpu"}, "target": {"name": "t"},
        "drafter": {"name": "d"}, "dtype": "bfloat16", "ar_step_s": 0.002,
        "includes_drafting": True, "source": "made up for a test",
        "points": [{"rows": 2, "step_s": 0.002}, {"rows": 32, "step_s": 0.008}],
    }  # fmt: skip
    path = lattice.parent / "curve.json"
    path.write_text(json.dumps(curve))
    code, out, _ = run(lattice, "--nodes", "9,31", "--step-times", path, "--json", "-q")
    assert code == 0
    rows = {(r["policy"], r["nodes"]): r for r in json.loads(out)["results"]["rows"]}
    best, aware = rows["best-first", 31], rows["cost-aware", 31]
    assert best["step_s"] == pytest.approx(0.008)
    tau = best["tau_tokens_per_step"]["value"]
    assert best["speedup_over_ar_ratio"] == pytest.approx(tau * 0.002 / 0.008)
    assert aware["mean_nodes_per_step"] < 31
    assert rows["oracle", None]["speedup_over_ar_ratio"] is None
    assert best["step_basis"] == "recorded"
    assert rows["best-first", 9]["step_basis"] == "interpolated"
    # the recording is of another engine, and the curve does not say whose weights were timed
    said = json.loads(out)["results"]["speedups"]
    assert said["basis"] == "projected"
    assert said["projected_because"] == [
        "τ is of synthetic, the step times of test",
        "the step times do not say which target's weights ran",
        "the step times do not say which drafter's weights ran",
    ]
    _, text, _ = run(lattice, "--nodes", "9,31,40", "--step-times", path, "-q")
    assert "speedup at the given step times, projected" in text
    assert "projected: τ is of synthetic, the step times of test" in text
    table = text.partition("speedup at the given")[2]
    assert re.search(r"^best-first\t31\t31.0\t8.000 ms\t[0-9.]+\trecorded$", table, re.MULTILINE)
    assert re.search(r"^best-first\t40\t.*\textrapolated$", table, re.MULTILINE)


def test_step_times_of_the_recorded_deployment_are_no_projection(lattice: Path, run: Any) -> None:
    curve = {
        "schema_version": 1, "name": "own", "engine": {"name": "synthetic", "version": "1"},
        "device": {"name": "NVIDIA H100", "kind": "gpu"},
        "target": {"name": "t", "sha256": "a" * 64}, "drafter": {"name": "d", "sha256": "b" * 64},
        "dtype": "bfloat16", "ar_step_s": 0.002, "includes_drafting": True, "source": "a test",
        "points": [{"rows": 10, "step_s": 0.002, "draft_block": 8}],
    }  # fmt: skip
    path = lattice.parent / "own.json"
    path.write_text(json.dumps(curve))
    code, out, err = run(lattice, "--nodes", "9", "--step-times", path)
    assert code == 0
    assert "projected" not in out
    assert "warning" not in err  # the recording is of block 8
    curve["points"][0]["draft_block"] = 16
    curve["drafter"]["sha256"] = "c" * 64
    path.write_text(json.dumps(curve))
    code, out, err = run(lattice, "--nodes", "9", "--step-times", path)
    assert code == 0
    assert "projected: the step times are of another drafter" in out
    assert "warning: the lattices are of block 8, the step times of block 16: drafting" in err


def test_cost_aware_needs_step_times(lattice: Path, run: Any) -> None:
    code, _, err = run(lattice, "--policy", "cost-aware")
    assert code == 2
    assert "hint: give step times with --step-times" in err


def test_the_page_holds_both_figures_and_their_numbers(
    lattice: Path, run: Any, tmp_path: Path
) -> None:
    page = tmp_path / "replay.html"
    code, out, _ = run(lattice, "--nodes", "4,16,32", "-o", page, "-q")
    assert code == 0
    assert "tokens per step, trajectory replay" in out
    html = page.read_text(encoding="utf-8")
    assert 'id="tau-curve' in html
    assert 'id="accepted-lengths' in html
    assert "A best-first tree of 32 nodes accepts" in html
    assert "End of output: an end-of-sequence token is predicted like any other" in html
    for name in ("bench0", "bench1", "oracle", "eagle-2", "sequoia"):
        assert name in html
    code, _, err = run(lattice, "--calibrate", "-o", tmp_path / "fit.html")
    assert code == 2
    assert "unknown format" in err


@pytest.mark.parametrize("top_k", [0, 4097, 1_000_000])
def test_paths_per_level_are_bounded(lattice: Path, run: Any, top_k: int) -> None:
    code, _, err = run(lattice, "--policy", "eagle-2", "--top-k", top_k)
    assert code == 2
    assert f"--top-k {top_k} is outside 1 to 4096" in err


def test_times_of_another_command_are_told_apart(lattice: Path, run: Any) -> None:
    code, _, err = run(lattice, "--step-times", "demo-gpu")
    assert code == 2
    assert "at --step-times" in err
    assert "did you mean `demo-cpu`?" in err
    assert "those of `simulate batch` have another form" in " ".join(err.split())


def test_an_empty_recording_is_not_called_one_request(
    random_recording: Make, tmp_path: Path, run: Any
) -> None:
    rec = random_recording(1)
    ones = dataclasses.replace(
        rec,
        output_ids=rec.output_ids[: rec.n_requests],
        output_offsets=np.arange(rec.n_requests + 1, dtype=np.int64),
        step_request=rec.step_request[:0],
        **{
            name: getattr(rec, name)[:0]
            for name in ("step_position", "candidate_ids", "edge", "unary", "unary_logsumexp",
                         "stock_choice")
        },
    )  # fmt: skip
    write_lattice(tmp_path / "ones.safetensors", ones)
    code, _, err = run(tmp_path / "ones.safetensors", "--policy", "sequoia")
    assert code == 2
    assert "nothing to replay" in err
    assert "one request only" not in err


def test_a_name_with_a_tab_cannot_shift_a_table(random_recording: Make, tmp_path: Path) -> None:
    rec = random_recording(1)
    first = rec.metadata.requests[0].model_dump() | {"benchmark": "a\tb"}
    with pytest.raises(ValueError, match="holds a tab"):
        type(rec.metadata.requests[0]).model_validate(first)
