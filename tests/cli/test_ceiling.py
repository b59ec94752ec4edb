"""`specpilot ceiling` from outside: answer, JSON, page, and errors."""

from __future__ import annotations

import json
import math
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specpilot_cli.io.lattice_file import write_lattice
from specpilot_cli.schema.lattice import LatticeMetadata, LatticeRecording

Run = Callable[..., subprocess.CompletedProcess[str]]
TRUE, WRONG = 0, 1


def _class(name: str, seconds: float, n_bytes: float | None, flops: float | None) -> dict[str, Any]:
    return {"name": name, "seconds": seconds, "bytes": n_bytes, "flops": flops, "calls": 1}


def _profile(**changes: Any) -> dict[str, Any]:
    """Floors on an H100 at 90 % of 3.35 TB/s: 3.015 GB take 1 ms."""
    return {
        "schema_version": 1,
        "engine": {"name": "test", "version": "1"},
        "device": {"name": "NVIDIA H100", "kind": "gpu", "gpu_profile": "h100-sxm5"},
        "target": {"name": "t [8 layers]"},
        "drafter": {"name": "d"},
        "dtype": "bfloat16",
        "mode": "chain",
        "nodes": 3,
        "rows": 4,
        "steps": 10,
        "t_step_s": 0.0030,
        "t_prof_s": 0.0025,
        "tau": None,
        "classes": [_class("target_gemm", 0.0015, 3.015e9, 1e9), _class("rest", 5e-4, None, None)],
        "source": "made up for a test",
    } | changes


def _recording() -> LatticeRecording:
    """One request of 13 tokens; a chain commits 2 a step, a tree of 7 nodes all 4.

    The drafter ranks the true token first at positions 0 and 2 and second at position 1, so the
    first three nodes of the best-first tree follow the wrong token there.
    """
    n_steps, length = 12, 13
    ids = np.empty((n_steps, 3, 2), dtype=np.int32)
    for step in range(n_steps):
        for position in range(3):
            ids[step, position] = [step + 1 + position, 200 + position]
    likely = np.log([[0.9, 0.1], [0.4, 0.6], [0.9, 0.1]]).astype(np.float32)
    edge = np.broadcast_to(likely[None, :, None, :], (n_steps, 3, 2, 2)).copy()
    unary = np.broadcast_to(likely[None], (n_steps, 3, 2)).copy()
    choice = np.stack([ids[:, 0, TRUE], ids[:, 1, WRONG], ids[:, 2, TRUE]], axis=1)
    return LatticeRecording(
        metadata=LatticeMetadata(
            mode="dense",
            block=4,
            engine="synthetic 1",
            requests=[{"request_id": "r0", "benchmark": "b"}],
            target_sha256="a" * 64,
            drafter_sha256="b" * 64,
        ),
        prompt_ids=np.zeros(2, dtype=np.int32),
        prompt_offsets=np.array([0, 2], dtype=np.int64),
        output_ids=np.arange(length, dtype=np.int32),
        output_offsets=np.array([0, length], dtype=np.int64),
        step_request=np.zeros(n_steps, dtype=np.int32),
        step_position=np.arange(n_steps, dtype=np.int64),
        candidate_ids=ids,
        edge=edge,
        unary=unary,
        unary_logsumexp=np.zeros((n_steps, 3), dtype=np.float32),
        stock_choice=choice.astype(np.int32),
    )


@pytest.fixture
def files(tmp_path: Path) -> None:
    """`lattice.safetensors`, `curve.json` and `step.json` where the command runs."""
    write_lattice(tmp_path / "lattice.safetensors", _recording())
    curve = {
        "schema_version": 1, "name": "made-up", "engine": {"name": "test", "version": "1"},
        "device": {"name": "NVIDIA H100", "kind": "gpu"}, "target": {"name": "t [8 layers]"},
        "drafter": {"name": "d"}, "dtype": "bfloat16", "ar_step_s": 0.002,
        "includes_drafting": True, "source": "made up for a test",
        "points": [{"rows": 4, "step_s": 0.003}, {"rows": 8, "step_s": 0.004}],
    }  # fmt: skip
    (tmp_path / "curve.json").write_text(json.dumps(curve))
    (tmp_path / "step.json").write_text(json.dumps(_profile()))
    return {
        name: str(tmp_path / name) for name in ("lattice.safetensors", "curve.json", "step.json")
    }


def _results(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)["results"]


def test_factors_of_a_profile_by_hand(specpilot: Run, files: None) -> None:
    found = _results(specpilot("ceiling", "step.json", "--tau", "4", "--tau-best", "6", "--json"))
    # Floors: 1 ms by bytes, 0.5 ms kept; profile 2.5 ms; step 3 ms.
    assert found["t_floor_s"] == pytest.approx(0.0015)
    assert found["tau_factor_ratio"] == pytest.approx(1.5)
    assert found["kernel_factor_ratio"] == pytest.approx(2.5 / 1.5)
    assert found["overhead_factor_ratio"] == pytest.approx(1.2)
    assert found["ceiling_ratio"] == pytest.approx(3.0)
    assert found["leading_factor"] == "kernel"
    assert found["unattributed_s"] == pytest.approx(0.0005)
    assert found["classes"][0]["bound"] == "bytes"
    assert found["peaks"]["read_bytes_per_s"]["kind"] == "datasheet"


def test_lattices_give_both_taus(specpilot: Run, files: None) -> None:
    done = specpilot(
        "ceiling",
        "step.json",
        "--lattices",
        "lattice.safetensors",
        "--nodes",
        "3,7",
        "--json",
        "-q",
    )
    found = _results(done)
    assert found["tau_tokens_per_step"] == pytest.approx(2.0)
    assert found["tau_best_tokens_per_step"] == pytest.approx(4.0)
    assert found["tau_best_nodes"] == 7
    assert "trajectory replay" in found["tau_best_source"]
    assert done.stderr == ""
    hashes = [item["path"] for item in json.loads(done.stdout)["inputs"]]
    assert hashes == ["step.json", "lattice.safetensors"]


def test_the_oracle_takes_every_candidate(specpilot: Run, files: None) -> None:
    found = _results(
        specpilot("ceiling", "step.json", "--lattices", "lattice.safetensors", "--nodes", "1",
                  "--tau", "oracle", "--json", "-q")
    )  # fmt: skip
    assert found["tau_tokens_per_step"] == pytest.approx(2.0)
    assert found["tau_best_tokens_per_step"] == pytest.approx(4.0)
    assert found["tau_best_source"].startswith("oracle over the candidates")
    assert found["tau_best_nodes"] is None


def test_a_drafter_without_a_selector_gets_marginal_trees(
    specpilot: Run, files: None, tmp_path: Path
) -> None:
    made = _recording()
    plain = replace(
        made, metadata=made.metadata.model_copy(update={"drafter_kind": "dflash"}),
        edge=made.unary[:, :, None, :],
    )  # fmt: skip
    write_lattice(tmp_path / "dflash.safetensors", plain)
    found = _results(
        specpilot("ceiling", "step.json", "--lattices", "dflash.safetensors", "--nodes", "3,7",
                  "--json", "-q")
    )  # fmt: skip
    assert found["tau_best_tokens_per_step"] == pytest.approx(4.0)
    assert found["tau_best_nodes"] == 7


def test_step_times_decide_the_budget(specpilot: Run, files: None) -> None:
    found = _results(
        specpilot(
            "ceiling", "step.json", "--lattices", "lattice.safetensors", "--nodes", "3,7",
            "--step-times", "curve.json", "--json",
        )
    )["speedup"]  # fmt: skip
    assert found["best_nodes"] == 7
    assert [point["speedup_ratio"] for point in found["points"]] == pytest.approx([4 / 3, 2.0])
    assert {point["step_basis"] for point in found["points"]} == {"recorded"}
    assert found["basis"] == "projected"
    assert "the step times do not say which target's weights ran" in found["projected_because"]
    text = specpilot(
        "ceiling", "step.json", "--lattices", "lattice.safetensors", "--step-times", "curve.json",
        "--nodes", "3,7", "-q",
    ).stdout  # fmt: skip
    assert "at the step times of made-up, projected" in text
    assert "projected: the step times do not say which target's weights ran" in text
    assert "note: the tokens factor is projected" in text


def test_a_profile_of_plain_decoding_gives_the_speedup(
    specpilot: Run, files: None, tmp_path: Path
) -> None:
    plain = _profile(mode="ar", nodes=0, rows=1, drafter=None, t_step_s=0.002)
    (tmp_path / "ar.json").write_text(json.dumps(plain))
    lattices = ("--lattices", "lattice.safetensors", "--nodes", "7", "-q")
    found = _results(specpilot("ceiling", "step.json", "--ar", "ar.json", *lattices, "--json"))
    assert found["over_plain"] == {
        "step_s": 0.003, "ar_step_s": 0.002, "ar_step_source": "profiled",
        "break_even_tokens_per_step": pytest.approx(1.5),
        "tau_tokens_per_step": pytest.approx(2.0), "speedup_ratio": pytest.approx(4 / 3),
    }  # fmt: skip
    text = specpilot("ceiling", "step.json", "--ar", "ar.json", *lattices).stdout
    assert "speculation pays from 1.50 tokens per step on; 2.000 make it 1.333×" in text
    without = specpilot("ceiling", "step.json", *lattices).stdout
    assert "over plain decoding: not known; give --ar PROFILE or --step-times" in without


def test_floors_of_a_model_compare_with_plain_decoding(specpilot: Run, files: None) -> None:
    model = ("ceiling", "--target", "qwen3.8-27b", "--drafter", "qwen3.8-27b-dflash2", "--gpu")
    chain = _results(specpilot(*model, "h200", "--rows", "8", "--tau", "4.25", "--json"))
    plain = _results(specpilot("ceiling", "--target", "qwen3.8-27b", "--gpu", "h200", "--json"))
    c = chain["t_floor_s"] / plain["t_floor_s"]
    assert chain["over_plain"]["break_even_tokens_per_step"] == pytest.approx(c)
    assert chain["over_plain"]["speedup_ratio"] == pytest.approx(4.25 / c)
    assert plain["over_plain"] is None
    lattices = ("--lattices", "lattice.safetensors", "--nodes", "3,7", "-q")
    trees = _results(specpilot(*model, "h200", *lattices, "--json"))
    taus = [point["tau_tokens_per_step"] for point in trees["speedup"]["points"]]
    assert taus == pytest.approx([2.0, 4.0])
    assert {point["step_basis"] for point in trees["speedup"]["points"]} == {"floor"}
    assert (trees["rows"], trees["draft_block"]) == (8, 4)
    assert trees["over_plain"]["speedup_ratio"] > 3.4


@pytest.mark.parametrize(
    ("words", "where"),
    [
        (("step.json", "--rows", "4"), "--rows"),
        (("step.json", "--drafter", "d"), "--drafter"),
        (("--target", "llama-3.1-8b", "--gpu", "h200", "--step-times", "x"), "--step-times"),
        (("--target", "llama-3.1-8b", "--gpu", "h200", "--tau-best", "5"), "--tau-best"),
        (("step.json", "--target", "llama-3.1-8b", "--gpu", "h200"), "PROFILE"),
        (("--target", "llama-3.1-8b", "--gpu", "h200", "--tau", "oracle"), "--tau"),
        (
            ("--target", "llama-3.1-8b", "--gpu", "h200", "--lattices", "lattice.safetensors",
             "--rows", "8"),
            "--lattices",
        ),
    ],
)  # fmt: skip
def test_options_that_would_be_ignored_are_refused(
    words: tuple[str, ...], where: str, specpilot: Run, files: None
) -> None:
    done = specpilot("ceiling", *words)
    assert done.returncode == 2
    assert f"at {where}" in done.stderr
    assert "hint: " in done.stderr


def test_peaks_that_are_given_take_the_place_of_a_standing_gpu(
    specpilot: Run, files: None, tmp_path: Path
) -> None:
    number = {"kind": "measured", "source": "a test"}
    rates = {
        "read_bytes_per_s": [{"value": 1e12, **number}],
        "flops_per_s": {"bfloat16": [{"value": 1e14, **number}]},
    }
    (tmp_path / "peaks.json").write_text(json.dumps(rates))
    given = ("--peaks", "peaks.json", "--json")
    for words in (("step.json",), ("--target", "llama-3.1-8b")):
        found = _results(specpilot("ceiling", *words, *given, SPECPILOT_GPU="h200"))
        peaks = found["peaks"]["read_bytes_per_s"]["value"] if "peaks" in found else None
        assert (peaks or found["read_bytes_per_s"]) == 1e12
        both = specpilot("ceiling", *words, *given, "--gpu", "h200")
        assert (both.returncode, both.stderr.splitlines()[0]) == (
            2, "error: --gpu and --peaks exclude each other",
        )  # fmt: skip


def test_text_names_leader_next_step_and_keeps_brackets(specpilot: Run, files: None) -> None:
    done = specpilot("ceiling", "step.json", "--tau", "4", "--tau-best", "12")
    assert done.returncode == 0
    lines = done.stdout.splitlines()
    assert lines[0].startswith("t [8 layers] with d, test 1, NVIDIA H100, bfloat16, chain: 3 nodes")
    assert "tokens (best τ / τ)\t3.000×\tτ 4.000 → 12.000 tokens per step" in lines
    assert lines[-2] == "leading: tokens per step lead with 3.00× of 6.00×"
    assert lines[-1].startswith("next: verify a best-first tree")


def test_measured_peaks_stand_beside_the_data_sheet(specpilot: Run, files: None) -> None:
    found = _results(specpilot("ceiling", "step.json", "--gpu", "h200", "--json"))
    beside = found["with_measured_peaks"]
    assert found["peaks"]["read_bytes_per_s"]["value"] == 4.8e12
    assert beside["peaks"]["read_bytes_per_s"]["value"] == 4.204e12
    assert beside["kernel_factor_ratio"] < found["kernel_factor_ratio"]
    assert found["tau_factor_ratio"] is None


def test_full_peak_uses_whole_rates(specpilot: Run, files: None) -> None:
    found = _results(specpilot("ceiling", "step.json", "--floors", "full-peak", "--json"))
    assert found["t_floor_s"] == pytest.approx(0.0009 + 0.0005)


def test_page_is_written_and_not_overwritten(specpilot: Run, files: None, tmp_path: Path) -> None:
    args = ("ceiling", "step.json", "--lattices", "lattice.safetensors", "--step-times",
            "curve.json", "--nodes", "3,7", "-o", "page.html")  # fmt: skip
    assert specpilot(*args).returncode == 0
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert page.count("<svg") == 4
    assert "t [8 layers]" in page
    again = specpilot(*args)
    assert again.returncode == 2
    assert "already exists" in again.stderr


@pytest.mark.parametrize(
    ("args", "message", "hint"),
    [
        ((), "no step profile given", "specpilot profile"),
        (("none.json",), "no such file", ""),
        (("step.json", "--gpu", "h300"), "unknown GPU `h300`", "did you mean `h200`?"),
        (("step.json", "--gpu", "h200", "--peaks", "x.yaml"), "exclude each other", "one of them"),
        (("step.json", "--tau-best", "5"), "needs the measured tau", "--tau"),
        (("step.json", "--step-times", "h200"), "neither a file nor a bundled", "h200-qwen"),
        (("step.json", "--step-times", "curve.json"), "several node budgets", "--lattices"),
        (("step.json", "--lattices", "lattice.safetensors", "--tau-best", "3"), "given twice", ""),
        (("step.json", "--lattices", "lattice.safetensors", "--nodes", "x"), "node budget", ""),
        (("step.json", "--tau", "x"), "not tokens per step: `x`", "`oracle`"),
        (("step.json", "--tau", "oracle"), "needs recorded candidates", "--lattices"),
        (("step.json", "--floors", "half"), "", ""),
        (("step.json", "-o", "x.pdf"), "unknown format `.pdf`", ".html"),
    ],
)
def test_bad_input_exits_two_with_a_hint(
    specpilot: Run, files: None, args: tuple[str, ...], message: str, hint: str
) -> None:
    done = specpilot("ceiling", *args)
    assert done.returncode == 2
    assert done.stdout == ""
    assert message in done.stderr
    assert hint in done.stderr.partition("hint:")[2]


def test_a_faulty_profile_names_the_key(specpilot: Run, files: None, tmp_path: Path) -> None:
    (tmp_path / "step.json").write_text(json.dumps(_profile(classs=[])))
    done = specpilot("ceiling", "step.json")
    assert done.returncode == 2
    assert "unknown key `classs`" in done.stderr
    assert "did you mean `classes`?" in done.stderr


def test_tokens_that_no_step_commits_are_refused(specpilot: Run, files: None) -> None:
    done = specpilot("ceiling", "step.json", "--tau", "0.5", "--tau-best", "2")
    assert done.returncode == 2
    assert "every step commits at least one" in done.stderr
    assert "at --tau\n" in done.stderr


def test_list_shows_devices_and_step_times_with_sources(specpilot: Run) -> None:
    done = specpilot("ceiling", "--list")
    assert done.returncode == 0
    assert "h100-sxm5\tNVIDIA H100 SXM5 80 GB\t3.35 TB/s" in done.stdout
    assert "h200-qwen3.8-27b-dflash2-bf16\tmeasured on one H200" in done.stdout
    listed = _results(specpilot("ceiling", "--list", "--json"))
    assert {device["name"] for device in listed["devices"]} >= {"h100-sxm5", "h200"}
    assert all(math.isfinite(curve["ar_step_s"]) for curve in listed["step_times"])
