"""The command with servers that it starts itself: launch files, GPU swap, sweep, export, pages."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from specpilot_cli.apply.bench_systems import FreshStage, find_plan, from_launch_file
from specpilot_cli.errors import InputError, MachineError
from specpilot_cli.main import main
from specpilot_cli.report.paired_bench_export import check_export
from specpilot_cli.schema.bench_launch import LaunchFile
from specpilot_cli.ui import SilentReporter

TOKENS = 8


@pytest.fixture
def launch_file(tmp_path: Path, repo: Path) -> Any:
    """A launch file of the fixed-rate server; returns its path."""

    def write(name: str, rate: float, **more: Any) -> Path:
        script = repo / "scripts/bench_client/fixed_rate.py"
        words = [sys.executable, str(script), "--port", "{port}", "--rate", str(rate)]
        path = tmp_path / name
        path.write_text(json.dumps({"schema_version": 1, "command": words, **more}))
        return path

    return write


@pytest.fixture
def asked(tmp_path: Path, repo: Path) -> list[str]:
    """Prompts and who tokenises them."""
    path = tmp_path / "prompts.jsonl"
    rows = [
        {"request_id": f"{name}-{i}", "benchmark": name, "text": f"{name} {i}",
         "max_new_tokens": TOKENS}
        for name in ("chat", "code")
        for i in range(4)
    ]  # fmt: skip
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return ["--prompts", str(path), "--tokenizer", str(repo / "recipes/demo-cpu/target")]


def test_fresh_launches_on_two_gpus_export_and_page(
    launch_file: Any, asked: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    slow, fast = launch_file("slow.yaml", 150.0), launch_file("fast.yaml", 300.0)
    out, table = tmp_path / "bench.json", tmp_path / "rows.csv"
    code = main(
        ["paired-bench", "--baseline", str(slow), "--candidate", str(fast), "--gpus", "0,1",
         "--aa", "1", "--limit", "2", *asked, "-o", str(out), "--export", str(table), "--quiet"]
    )  # fmt: skip
    results = json.loads(out.read_text())["results"]
    assert code == {"promote": 0, "no": 1}[results["verdict"]]
    assert results["gain"]["gain_ratio"] > 1.0  # timers of a busy machine only ever add time
    assert results["environment"]["devices"] == ["0", "1"]
    assert results["prompt_form"]["tokenizer_sha256"]
    lines = [json.loads(line) for line in out.with_suffix(".journal.jsonl").open()]
    devices = [(row["run"], row["system"], row["device"]) for row in lines
               if row["kind"] == "launch" and row["session"] == "ab"]  # fmt: skip
    assert devices == [
        (0, "baseline", "0"), (0, "candidate", "1"), (1, "baseline", "1"), (1, "candidate", "0")
    ]  # fmt: skip
    rows = list(csv.DictReader(table.open()))
    assert len(rows) == 2 * 2 * 2 * 4  # sessions, runs, systems, requests
    assert float(rows[0]["rate_tok_per_s"]) > 0
    capsys.readouterr()

    page, again = tmp_path / "again.html", tmp_path / "again.csv"
    shown = ["paired-bench", "--from", str(out)]
    assert main([*shown, "-o", str(page), "--export", str(again)]) == code
    assert again.read_text() == table.read_text()
    html = page.read_text()
    assert f"<title>{results['verdict']}: Paired benchmark" in html
    assert "<svg" in html
    capsys.readouterr()
    assert main(["paired-bench", "--from", str(out), "--from", str(out)]) == 0
    assert "1.0000 [" in capsys.readouterr().out  # the same requests: no difference


def test_a_sweep_finds_the_fastest_stock_and_becomes_the_baseline(
    launch_file: Any, asked: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stock = launch_file("stock.yaml", 100.0, sweep={"rate": [60, 240], "form": [None, "bad"]})
    out = tmp_path / "sweep.json"
    code = main(
        ["paired-bench", "--sweep", str(stock), *asked, "--limit", "2", "-o", str(out), "--quiet"]
    )
    shown = capsys.readouterr()
    assert code == 0
    results = json.loads(out.read_text())["results"]
    order = [(v["arguments"]["rate"], v["failure"] is None) for v in results["variants"]]
    assert order == [(240, True), (60, True), (60, False), (240, False)]
    assert len(results["variants"][0]["pass_rates_tok_per_s"]) == 2
    assert "ended with status" in results["variants"][-1]["failure"]
    assert results["variants"][-1]["rate_tok_per_s"] is None
    assert "rate=240" in shown.out
    plan, sweep = find_plan(str(out), "baseline", tmp_path, SilentReporter())
    assert sweep is not None
    command = plan.command(4321)
    assert command[command.index("--port") + 1] == "4321"
    assert command[-2:] == ["--rate", "240"]


def test_a_calibration_is_kept_and_used(
    launch_file: Any, asked: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stock, tuned = launch_file("stock.yaml", 200.0), launch_file("tuned.yaml", 210.0)
    noise, out = tmp_path / "noise.json", tmp_path / "bench.json"
    base = ["paired-bench", "--baseline", str(stock), *asked, "--limit", "2", "--quiet"]
    assert main([*base, "--calibrate", "2", "-o", str(noise)]) == 0
    assert "verdict: ok" in capsys.readouterr().out
    sealed = ["--sealed", "--seen", str(tmp_path / "seen.jsonl")]
    (tmp_path / "seen.jsonl").write_text(
        json.dumps({"request_id": "s", "benchmark": "b", "text": "seen", "max_new_tokens": 4})
    )
    more = ["--candidate", str(tuned), "--noise", str(noise), *sealed]
    assert main([*base, *more, "-o", str(out)]) in (0, 1)
    results = json.loads(out.read_text())["results"]
    assert results["settings"]["aa_sessions"] == 0
    assert len(results["noise"]["sessions"]) == 2
    assert results["prompt_form"]["sealed"] is True
    assert main(["paired-bench", "--from", str(out)]) in (0, 1)
    assert main([*base, *more, "-o", str(tmp_path / "second.json")]) == 2
    assert "used in a sealed final" in capsys.readouterr().err
    assert main([*base, "--candidate", str(tuned), "--noise", str(noise), "--batch", "2"]) == 2
    assert "depends on the batch size" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--baseline", "http://127.0.0.1:9", "--candidate", "http://127.0.0.1:9", "--fresh"],
         "cannot be launched for each run"),
        (["--baseline", "demo-cpu:tuned", "--candidate", "demo-cpu:stock"], "node budget"),
        (["--baseline", "demo-cpu:best", "--candidate", "demo-cpu:stock"], "names no system"),
        (["--calibrate", "2", "--noise", "x.json"], "do not go together"),
        (["--baseline", "x", "--candidate", "y", "--aa", "0"], "no noise to compare with"),
        (["--baseline", "x", "--candidate", "y", "--batch", "1,x"], "no list of batch sizes"),
        (["--baseline", "x", "--candidate", "y", "--thinking"], "--thinking needs --chat"),
        (["--baseline", "x", "--candidate", "y", "--sealed"], "--sealed needs --seen"),
        (["--baseline", "x", "--calibrate", "2", "--sealed", "--seen", "x.jsonl"],
         "a calibration takes development requests"),
        (["--redact", "--save-outputs", "answers"], "contradict each other"),
        (["--export", "table.xlsx"], "cannot export to"),
    ],
)  # fmt: skip
def test_options_that_do_not_go_together_are_refused(
    asked: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str], arguments: list[str], words: str,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    assert main(["paired-bench", *asked, *arguments]) == 2
    assert words in capsys.readouterr().err


def test_three_systems_do_not_change_places_on_two_gpus(tmp_path: Path) -> None:
    file = LaunchFile(schema_version=1, command=("x", "--port", "{port}"))
    plans = {
        name: from_launch_file(file, {}, name, tmp_path, SilentReporter())
        for name in ("baseline", "candidate", "ar")
    }
    with pytest.raises(InputError, match="cannot change places"):
        FreshStage(plans, ("0", "1"), tmp_path, SilentReporter())


def test_a_launch_file_fixes_no_port(tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text("schema_version: 1\ncommand: [server, --port, '30000']\n")
    with pytest.raises(InputError, match="must hold"):
        find_plan(str(path), "baseline", tmp_path, SilentReporter())
    path.write_text("schema_version: 1\ncommand: [server, '{port}']\nenvironment: {HF_TOKEN: x}\n")
    with pytest.raises(InputError, match="holds a secret"):
        find_plan(str(path), "baseline", tmp_path, SilentReporter())
    path.write_text(
        "schema_version: 1\ncommand: [server, --port, '{port}']\nsweep: {block: [8, 12]}\n"
    )
    with pytest.raises(InputError, match="holds a sweep"):
        find_plan(str(path), "baseline", tmp_path, SilentReporter())


def test_parquet_without_an_engine_is_refused_beforehand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specpilot_cli.io.table_file._PARQUET_ENGINES", ("no_such_engine",))
    with pytest.raises(MachineError, match="Parquet needs"):
        check_export(tmp_path / "rows.parquet")
