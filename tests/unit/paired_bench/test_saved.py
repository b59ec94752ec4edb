"""`--from` shows a saved result, and refuses one whose verdict does not follow from its numbers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from virtual_engines import FakeClock, FakeEngine, constant, prompts

from specpilot_cli.commands.bench_parts import basis_of
from specpilot_cli.errors import InputError
from specpilot_cli.io.json_file import write_json
from specpilot_cli.main import main
from specpilot_cli.paired_bench.run import run_paired_bench
from specpilot_cli.paired_bench.saved import read_saved
from specpilot_cli.paired_bench.types import PairedBenchSettings, PairedBenchSummary, PromptForm
from specpilot_cli.report.json_out import build_envelope, plain

Document = dict[str, Any]
Edit = Callable[[Document], Any]


def _summary(rate: float, *, aa: int = 3) -> PairedBenchSummary:
    clock = FakeClock()
    systems = {
        "baseline": FakeEngine(clock, constant(100.0)),
        "candidate": FakeEngine(
            clock, lambda t, request: rate * (1 + 0.01 * (int(request.request_id[-1]) % 3 - 1))
        ),
        "ar": FakeEngine(clock, constant(30.0), tokens_per_step=None),
    }
    settings = PairedBenchSettings(aa_sessions=aa)
    return run_paired_bench(systems, prompts(), settings=settings, clock=clock).summary


def _document(summary: PairedBenchSummary) -> Document:
    results = plain(summary)
    assert isinstance(results, dict)
    envelope = build_envelope("paired-bench", results, verdict=summary.verdict)
    return envelope.model_dump(mode="json")


@pytest.fixture(scope="module")
def saved() -> dict[str, Document]:
    """One document per verdict that rests on numbers."""
    return {"promote": _document(_summary(150.0)), "no": _document(_summary(100.0, aa=1))}


@pytest.mark.parametrize("said", [None, 5, {}, {"baseline": 5}])
def test_noise_of_an_unknown_baseline_is_refused(
    saved: dict[str, Document], tmp_path: Path, said: Any
) -> None:
    document = copy.deepcopy(saved["promote"])
    document["results"]["environment"]["server_info"] = said
    write_json(tmp_path / "noise.json", document)
    with pytest.raises(InputError, match="does not say which baseline"):
        basis_of(tmp_path / "noise.json", PromptForm("0" * 64), (1,))


@pytest.mark.parametrize(("rate", "aa"), [(150.0, 3), (100.0, 1), (70.0, 2)])
def test_a_saved_result_reads_back_equal(tmp_path: Path, rate: float, aa: int) -> None:
    summary = _summary(rate, aa=aa)
    write_json(tmp_path / "r.json", _document(summary))
    assert read_saved(tmp_path / "r.json")[1] == summary


def _invalid(document: Document) -> None:
    """The form of a measurement that failed."""
    results = document["results"]
    for key in ("decision", "gain", "noise", "client"):
        results[key] = None
    for key in ("benchmarks", "systems", "over_ar", "requests"):
        results[key] = []
    results["reasons"] = ["the server died"]
    results["verdict"] = document["verdict"] = "invalid"


def test_an_invalid_result_is_shown_and_exits_four(
    saved: dict[str, Document], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    document = copy.deepcopy(saved["promote"])
    _invalid(document)
    write_json(tmp_path / "r.json", document)
    assert main(["paired-bench", "--from", str(tmp_path / "r.json")]) == 4
    assert "the server died" in capsys.readouterr().out


def _promoted(document: Document) -> None:
    document["verdict"] = "promote"
    document["results"]["verdict"] = "promote"


def _decided(document: Document) -> None:
    _promoted(document)
    document["results"]["decision"]["verdict"] = "promote"


# An edit of the document, and what is said about it.
_EDITS: dict[str, tuple[str, Edit, str]] = {
    "outer verdict": ("no", lambda d: d.update(verdict="promote"), "`results.verdict` is no"),
    "no outer verdict": ("promote", lambda d: d.update(verdict=None), "document's is None"),
    "both verdicts": ("no", _promoted, "the numbers say no"),
    "verdicts and decision": ("no", _decided, "`results.decision` does not follow"),
    "reason": ("no", lambda d: d["results"].update(reasons=["fast"]), "the numbers say no"),
    "bound": (
        "no", lambda d: d["results"]["decision"].update(bound_ratio=0.5), "`results.decision`",
    ),
    "gain": ("no", lambda d: d["results"]["gain"].update(gain_ratio=2.0), "`results.gain`"),
    "lower bound": (
        "no", lambda d: d["results"]["gain"].update(lower_bound_ratio=2.0), "`results.gain`",
    ),
    "requests counted": (
        "no", lambda d: d["results"]["gain"].update(n_requests=99), "`results.gain`",
    ),
    "one request": (
        "no", lambda d: d["results"]["requests"][0].update(gain_ratio=9.0), "`results.gain`",
    ),
    "request dropped": ("no", lambda d: d["results"]["requests"].pop(), "`results.gain`"),
    "all requests dropped": ("no", lambda d: d["results"].update(requests=[]), "`results."),
    "request of no gain": (
        "no", lambda d: d["results"]["requests"][0].update(gain_ratio=0.0), "`results.",
    ),
    "tokens called equal": (
        "promote", lambda d: d["results"]["requests"][0].update(identical=False),
        "`results.decision`",
    ),
    "noise": ("promote", lambda d: d["results"]["noise"].update(nu_log=0.3), "`results.noise`"),
    "session dropped": (
        "promote", lambda d: d["results"]["noise"]["sessions"].pop(), "`results.noise`",
    ),
    "provisional": (
        "no", lambda d: d["results"]["noise"].update(provisional=False), "noise.provisional",
    ),
    "confidence": (
        "promote", lambda d: d["results"]["settings"].update(confidence=0.5), "`results.gain`",
    ),
    "settings": ("no", lambda d: d["results"]["settings"].update(runs=3), "runs must be even"),
    "no numbers": ("promote", lambda d: d["results"].update(decision=None), "without the numbers"),
    "text for a number": (
        "no", lambda d: d["results"]["gain"].update(gain_ratio="1.0"), "gain.gain_ratio",
    ),
    "number for a truth": (
        "no", lambda d: d["results"]["requests"][0].update(identical=1), "identical",
    ),
    "null for a number": ("no", lambda d: d["results"]["gain"].update(df=None), "gain.df"),
    "missing key": ("no", lambda d: d["results"].pop("reasons"), "reasons"),
    "unknown verdict": ("no", lambda d: d["results"].update(verdict="yes"), "verdict"),
    "invalid with numbers": (
        "no", lambda d: (d.update(verdict="invalid"), d["results"].update(verdict="invalid")),
        "leaves no numbers",
    ),
    "invalid without reasons": (
        "no", lambda d: (_invalid(d), d["results"].update(reasons=[])), "takes reasons",
    ),
    "system dropped": ("no", lambda d: d["results"]["systems"].pop(1), "lacks the baseline or"),
    "rate dropped": (
        "no", lambda d: d["results"]["benchmarks"][0]["rate_tok_per_s"].pop("candidate"),
        "names other systems",
    ),
    "rate of nothing": (
        "no", lambda d: d["results"]["benchmarks"][0]["rate_tok_per_s"].update(candidate=-1.0),
        "not above zero",
    ),
    "gain of one benchmark": (
        "no", lambda d: d["results"]["benchmarks"][0]["gain"].update(gain_ratio=3.0),
        "than the requests",
    ),
    "benchmark dropped": (
        "no", lambda d: d["results"]["benchmarks"].pop(), "are not those of the requests",
    ),
    "another command": ("no", lambda d: d.update(command="ceiling"), "result of `ceiling`"),
    "another version": ("no", lambda d: d.update(schema_version=2), "version 2"),
}  # fmt: skip


@pytest.mark.parametrize("name", _EDITS)
def test_an_edited_result_is_refused(saved: dict[str, Document], tmp_path: Path, name: str) -> None:
    verdict, edit, message = _EDITS[name]
    document = copy.deepcopy(saved[verdict])
    edit(document)
    path = tmp_path / "r.json"
    write_json(path, document)
    with pytest.raises(InputError) as caught:
        read_saved(path)
    assert message in caught.value.message
    assert caught.value.where == str(path)
    assert caught.value.hint
    assert main(["paired-bench", "--from", str(path)]) == 2
