"""`specpilot diagnose` from the terminal: words, JSON, page, exit codes, bad input."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from specpilot_cli.io.lattice_file import write_lattice
from specpilot_cli.main import main
from specpilot_cli.schema.lattice import LatticeRecording

Recorded = Callable[..., LatticeRecording]


@pytest.fixture
def lattice(tmp_path: Path, recorded: Recorded) -> Callable[..., Path]:
    def write(name: str = "lattice", **changes: object) -> Path:
        path = tmp_path / f"{name}.safetensors"
        write_lattice(path, recorded(**changes))
        return path

    return write


def test_a_healthy_recording_exits_0_and_says_what_is_left(
    lattice: Callable[..., Path], capsys: pytest.CaptureFixture[str]
):
    assert main(["diagnose", str(lattice())]) == 0
    out = capsys.readouterr().out
    assert "best-first tree of 32 nodes" in out
    assert "nothing wrong found" in out
    assert "recall\tclear" in out


def test_a_fault_exits_1_and_leads_with_the_next_step(
    lattice: Callable[..., Path], capsys: pytest.CaptureFixture[str]
):
    path = lattice(shift=1)
    assert main(["diagnose", str(path)]) == 1
    last = capsys.readouterr().out.strip().splitlines()[-1]
    assert last.startswith("found: Drafts are read 1 position off; next: check the block semantics")
    assert main(["diagnose", str(path), "--exit-zero"]) == 0


def test_too_few_requests_exit_4(lattice: Callable[..., Path]):
    assert main(["diagnose", str(lattice(n_requests=3))]) == 4


def test_json_lists_findings_and_every_check(
    lattice: Callable[..., Path], capsys: pytest.CaptureFixture[str]
):
    assert main(["diagnose", str(lattice(random_selector=True)), "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert document["verdict"] == "fail"
    results = document["results"]
    assert [item["code"] for item in results["findings"]][:2] == ["collapse", "selector"]
    codes = [item["code"] for item in results["checks"]]
    assert len(codes) == len(set(codes)) == 19
    assert results["positions"][0]["accepted_ratio"] > results["positions"][1]["accepted_ratio"]
    assert (
        results["oracle_tau_tokens_per_step"]["value"]
        > (results["chain_tau_tokens_per_step"]["value"])
    )


def test_the_page_has_the_findings_and_the_figure(lattice: Callable[..., Path], tmp_path: Path):
    pytest.importorskip("matplotlib")
    page = tmp_path / "why.html"
    assert main(["diagnose", str(lattice(broken_from=1)), "-q", "-o", str(page)]) == 1
    text = page.read_text(encoding="utf-8")
    assert "Acceptance collapses after position 0" in text
    assert 'id="acceptance-by-position' in text
    assert "drafting is at fault" in text
    assert main(["diagnose", str(lattice("b")), "-q", "-o", str(page)]) == 2  # exists


def test_folders_are_hashed_and_compared(
    lattice: Callable[..., Path],
    target_folder: Callable[..., Path],
    drafter_folder: Callable[..., Path],
    capsys: pytest.CaptureFixture[str],
):
    folders = ["--target", str(target_folder()), "--drafter", str(drafter_folder())]
    for folder in (folders[1], folders[3]):
        (Path(folder) / "model.safetensors").write_bytes(b"weights")
    assert main(["diagnose", str(lattice()), *folders]) == 1
    assert "made with another target and another drafter" in capsys.readouterr().out
    assert main(["diagnose", str(lattice("b")), *folders, "--no-hash", "--json"]) == 1
    findings = json.loads(capsys.readouterr().out)["results"]["findings"]
    assert "hashes" not in [item["code"] for item in findings]
    assert "chat-template" in [item["code"] for item in findings]


def test_against_a_good_recording(lattice: Callable[..., Path], capsys: pytest.CaptureFixture[str]):
    good, worse = lattice("good"), lattice("worse", mixed=0.3)
    assert main(["diagnose", str(worse), "--against", str(good)]) == 1
    assert "Less is accepted than in the other recording" in capsys.readouterr().out
    assert main(["diagnose", str(good), "--against", str(worse)]) == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["missing.safetensors"], "no such lattice file"),
        (["{lattice}", "--target", "missing"], "missing"),
        (["{lattice}", "--against", "missing"], "no such lattice file"),
        (["{lattice}", "--expect", "0.5"], "no accept length"),
        (["{lattice}", "-o", "why.pdf"], "unknown format"),
    ],
)
def test_bad_input_exits_2(
    arguments: list[str],
    words: str,
    lattice: Callable[..., Path],
    capsys: pytest.CaptureFixture[str],
):
    path = str(lattice())
    assert main(["diagnose", *(item.format(lattice=path) for item in arguments)]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("config.json", '{"text_config": 5}'), ("config.json", '{"text_config": [1]}'),
        ("config.json", "[1]"), ("config.json", "5"), ("tokenizer.json", "[1]"),
    ],
)  # fmt: skip
def test_a_target_folder_with_another_document_is_refused_by_file(
    lattice: Callable[..., Path], target_folder: Callable[..., Path], name: str, text: str,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    folder = target_folder()
    (folder / name).write_text(text)
    assert main(["diagnose", str(lattice()), "--target", str(folder), "--no-hash"]) == 2
    told = capsys.readouterr().err
    assert str(folder / name) in told
    assert "hint:" in told


@pytest.mark.parametrize("tokens", ["5", '{"a": 1}', '[5, {"content": "x", "id": 1e40}]'])
def test_added_tokens_of_another_form_are_none(
    lattice: Callable[..., Path], target_folder: Callable[..., Path], tokens: str
) -> None:
    folder = target_folder()
    (folder / "tokenizer.json").write_text(f'{{"added_tokens": {tokens}}}')
    command = ["diagnose", str(lattice()), "--target", str(folder), "--no-hash"]
    assert main([*command, "--exit-zero"]) == 0
