"""Whole runs of a recipe on the demo pair: a lossless one is accepted, a faulty one rejected."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specpilot_cli.io.hashing import sha256_file, sha256_folder
from specpilot_cli.io.jsonl import read_jsonl
from specpilot_cli.io.lattice_file import read_lattice
from specpilot_cli.schema.outputs import OutputRecord

pytestmark = pytest.mark.slow

Start = Callable[..., Any]
EXIT_CODES = {"promote": 0, "no": 1}
FIGURES = {
    "forest", "mismatch", "tau-curve", "speedup-curve", "step-waterfall", "ceiling-factors"
}  # fmt: skip


def test_a_lossless_run_is_accepted(start: Start) -> None:
    """With `--json`, progress shown: every promised field, every file, nothing left behind."""
    run = start("--json", timed=2, new_tokens=64)
    code, out, said = run.end(within_s=480)
    assert out.count("\n{") == 0, "one document"
    envelope = json.loads(out)
    assert "5/5 is it lossless?" in said
    assert code == EXIT_CODES[envelope["verdict"]], said
    results = envelope["results"]
    assert results["token_force"]["verdict"] == "accept"
    assert results["paired_bench"]["verdict"] == envelope["verdict"]
    assert results["fault"] is None
    _check_numbers(results)
    _check_envelope(envelope, run.recipe)
    _check_files(run.out, envelope, results)
    _check_page((run.out / "report.html").read_text(encoding="utf-8"), fault=False)
    assert run.survivors(within_s=1) == []


def _check_numbers(results: dict[str, Any]) -> None:
    """Numbers that belong together do so."""
    budgets = {point["nodes"]: point for point in results["budgets"]}
    assert list(budgets) == [8, 16]
    assert results["chosen"] == max(budgets.values(), key=lambda point: point["speedup_ratio"])
    for point in (*budgets.values(), results["stock_point"]):
        assert point["rows"] == point["nodes"] + 1
        expected = point["tau_tokens_per_step"] / point["c_ratio"]
        assert point["speedup_ratio"] == pytest.approx(expected)
    assert results["predicted_gain_ratio"] == pytest.approx(
        results["chosen"]["speedup_ratio"] / results["stock_point"]["speedup_ratio"]
    )
    assert budgets[16]["tau_tokens_per_step"] >= budgets[8]["tau_tokens_per_step"]
    ceiling = results["ceiling"]
    assert ceiling["product_ratio"] == pytest.approx(
        ceiling["tau_ratio"] * ceiling["kernel_ratio"] * ceiling["overhead_ratio"]
    )
    assert results["projection"]["projected"] is True
    assert [p["nodes"] for p in results["projection"]["budgets"]] == [8, 16]
    w12 = results["w12"]
    assert 12 <= w12["bits_per_weight"] < 13
    assert w12["stored_bytes"] < w12["raw_bytes"]
    stock, tuned, plain = results["systems"]
    assert [s["name"] for s in (stock, tuned, plain)] == ["baseline", "candidate", "ar"]
    assert (stock["mode"], stock["block"], stock["weight_format"]) == ("chain", 8, "bf16")
    assert (tuned["mode"], tuned["block"], tuned["weight_format"]) == ("tree", 16, "w12")
    assert tuned["nodes"] == results["chosen"]["nodes"]
    assert (plain["mode"], plain["nodes"]) == ("ar", 0)
    bench = results["paired_bench"]
    assert bench["gain"]["low_ratio"] < bench["gain"]["gain_ratio"] < bench["gain"]["high_ratio"]
    assert bench["gain"]["n_requests"] == 8
    assert {speedup["system"] for speedup in bench["over_ar"]} == {"baseline", "candidate"}
    assert bench["noise"]["provisional"] is True
    phases = results["phases_s"]
    assert list(phases) == ["weights", "measure", "serve", "paired_bench", "token_force"]
    assert results["wall_s"] == pytest.approx(sum(phases.values()))


def _check_envelope(envelope: dict[str, Any], recipe: Path) -> None:
    assert envelope["command"] == "apply recipe"
    assert envelope["schema_version"] == 1
    inputs = {Path(item["path"]).name: item["sha256"] for item in envelope["inputs"]}
    assert inputs == {
        "recipe.yaml": sha256_file(recipe / "recipe.yaml"),
        "target": sha256_folder(recipe / "target"),
        "drafter": sha256_folder(recipe / "drafter"),
        "dev.jsonl": sha256_file(recipe / "dev.jsonl"),
        "unseen.jsonl": sha256_file(recipe / "unseen.jsonl"),
    }
    assert envelope["environment"]["torch"]


def _check_files(folder: Path, envelope: dict[str, Any], results: dict[str, Any]) -> None:
    """result.json is what was printed; the raw data under it give its numbers again."""
    assert json.loads((folder / "result.json").read_text(encoding="utf-8")) == envelope
    assert sorted(path.name for path in folder.iterdir()) == [
        "bench.journal.jsonl", "lattices-stock.safetensors", "lattices-tree.safetensors", "logs",
        "outputs", "report.html", "result.json", "step-profile.json", "step-times.json",
        "target-w12",
    ]  # fmt: skip
    assert results["folder"] == str(folder)
    for name, positions in (("stock", 7), ("tree", 15)):
        recording = read_lattice(folder / f"lattices-{name}.safetensors")
        assert recording.candidate_ids.shape[1] == positions
        assert recording.n_requests == 4
    steps = {s["name"]: s for s in results["paired_bench"]["systems"]}
    for system in ("baseline", "candidate", "ar"):
        answers = read_jsonl(folder / "outputs" / f"{system}.jsonl", OutputRecord)
        assert len(answers) == 8
        tokens = sum(len(answer.output_ids) - 1 for answer in answers)
        taken = sum(answer.verify_steps or 0 for answer in answers)
        if system == "ar":
            assert taken == 0
        else:  # both runs decode the same tokens in the same steps
            assert steps[system]["tau"] == pytest.approx(tokens / taken)
        assert (folder / "logs" / f"{system}.log").stat().st_size > 0


def _check_page(page: str, *, fault: bool) -> None:
    """Six figures, nothing from elsewhere, and a fault that cannot be overlooked."""
    figures = re.findall(r'<figure id="figure-([a-z-]+)">', page)
    assert set(figures) == FIGURES
    assert page.count("<svg") == len(FIGURES)
    references = re.findall(r'(?:src|href|action|data)="([^"]*)"', page)
    references += re.findall(r"url\(([^)]*)\)", page)
    assert references
    outside = [ref for ref in references if not ref.strip("'\"").startswith(("#", "data:"))]
    assert outside == []
    assert "<script src" not in page
    assert "@import" not in page
    assert ("deliberate fault" in page) == fault


def test_a_faulty_run_is_rejected(start: Start) -> None:
    """The fault of the paper (§6.2), in text and quiet: labelled, rejected, always exit code 1."""
    run = start("--fault-after", "48", "--quiet", "--exit-zero", timed=3, new_tokens=96, nodes="8")
    code, out, said = run.end(within_s=480)
    assert code == 1, said
    assert all(line.startswith("warning: ") for line in said.splitlines()), said
    result = json.loads((run.out / "result.json").read_text(encoding="utf-8"))
    assert result["verdict"] == "reject"
    audit = result["results"]["token_force"]
    assert audit["verdict"] == "reject"
    assert audit["rate_rule"]["rejects"] or audit["event_rule"]["rejects"]
    rates = {test["stratum"]: test for test in audit["rate_rule"]["tests"]}
    assert rates["late"]["rejects"]
    assert rates["late"]["system_rate_pct"] > 10 * max(rates["late"]["stock_rate_pct"], 0.1)
    assert not rates["early"]["rejects"], "the fault starts where it was told to"
    assert result["results"]["reasons"] == audit["reasons"]
    _check_fault_labels(result["results"])
    lines = out.splitlines()
    assert lines[-1] == f"report: {run.out / 'report.html'}"
    assert lines[-2].startswith("verdict: reject, token forcing rejects")
    assert any(line.startswith("gain over stock: ") and "not claimed" in line for line in lines)
    assert (
        sum(line.startswith("deliberate fault in the tuned system: +2 on") for line in lines) == 1
    )
    _check_page((run.out / "report.html").read_text(encoding="utf-8"), fault=True)
    assert run.survivors(within_s=1) == []


def _check_fault_labels(results: dict[str, Any]) -> None:
    fault = {
        "kind": "logit_bias", "after_output_position": 48, "every_token_ids": 7, "bias": 2.0
    }  # fmt: skip
    assert results["fault"] == fault
    assert {s["name"]: s["fault"] for s in results["systems"]} == {
        "baseline": None, "candidate": fault, "ar": None
    }  # fmt: skip
    assert "candidate runs with an injected fault" in results["paired_bench"]["warnings"]
    assert math.isfinite(results["paired_bench"]["gain"]["gain_ratio"])
