"""The command against servers that answer at a fixed rate in SGLang's shape."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specpilot_cli.io.jsonl import read_jsonl
from specpilot_cli.main import main
from specpilot_cli.schema.outputs import OutputRecord

TOKENS = 16
Servers = Callable[[Any], Any]


def fixed_rate(tokens_per_s: float, *, fail_on: int | None = None, last_token: int = 7) -> Any:
    """A script for one server; `fail_on`: the n-th timed answer is cut off."""
    timed = 0

    def script(exchange: Any) -> None:
        nonlocal timed
        if exchange.path == "/server_info":
            exchange.reply({"version": "test", "specpilot": {"rate": "fixed"}})
            return
        ids = exchange.body.get("input_ids") or [ord(c) for c in exchange.body["text"]]
        n = exchange.body["sampling_params"]["max_new_tokens"]
        start_s = time.monotonic()
        exchange.open_stream()
        output: list[int] = []
        timed += n > 1
        for size in [1] + [5] * ((n - 1) // 5):
            output += [(sum(ids) + len(output) + i) % 900 for i in range(size)]
            if len(output) == n and n > 1:
                output[-1] = last_token
            rest_s = start_s + len(output) / tokens_per_s - time.monotonic()
            time.sleep(max(0.0, rest_s))
            if fail_on == timed and len(output) > 1:
                exchange.drop()
                return
            exchange.event(_chunk(exchange, ids, output, final=len(output) == n))
        exchange.done()

    return script


def _chunk(exchange: Any, ids: list[int], output: list[int], *, final: bool) -> dict[str, Any]:
    meta = {
        "finish_reason": {"type": "length", "length": len(output)} if final else None,
        "prompt_tokens": len(ids),
        "completion_tokens": len(output),
        "cached_tokens": 0,
        "spec_verify_ct": (len(output) - 1) // 5,
    }
    chunk = {"text": "", "output_ids": list(output), "meta_info": meta}
    if exchange.body.get("return_prompt_token_ids"):
        chunk["prompt_token_ids"] = ids
    return chunk


@pytest.fixture
def prompts_file(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    rows = [
        {"request_id": f"{name}-{i}", "benchmark": name, "text": f"{name} {i}",
         "max_new_tokens": TOKENS}
        for name in ("chat", "code")
        for i in range(6)
    ]  # fmt: skip
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def bench(prompts: Path, baseline: Any, candidate: Any, *more: str) -> int:
    return main(
        ["paired-bench", "--baseline", baseline.url, "--candidate", candidate.url,
         "--prompts", str(prompts), "--aa", "1", *more]
    )  # fmt: skip


def test_a_faster_server_gains_and_its_result_is_shown_again(
    make_server: Servers, prompts_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    servers = [make_server(fixed_rate(rate)) for rate in (400.0, 1600.0, 200.0)]
    out = tmp_path / "bench.json"
    ar = ("--ar", servers[2].url)
    code = bench(
        prompts_file, *servers[:2], *ar, "-o", str(out), "--save-outputs", str(tmp_path / "answers")
    )
    first, notes = capsys.readouterr()
    results = json.loads(out.read_text())["results"]
    # Timers on a busy machine add time, to the faster server more: the noise may outweigh the gain.
    assert code == {"promote": 0, "no": 1}[results["verdict"]]
    assert 1.0 < results["gain"]["gain_ratio"] < 4.2
    assert results["decision"]["identical"] is True
    assert {s["name"]: s["tau"] for s in results["systems"]}["candidate"] == pytest.approx(5.0)
    assert {s["system"] for s in results["over_ar"]} == {"baseline", "candidate"}
    assert f"verdict: {results['verdict']}" in first
    assert "smallest gain found" in notes
    assert "expected time" in notes
    answers = read_jsonl(tmp_path / "answers" / "candidate.jsonl", OutputRecord)
    assert len(answers) == len(results["requests"])
    assert bytes(answers[0].prompt_ids).decode() in ("chat 0", "code 0")
    assert main(["paired-bench", "--from", str(out)]) == code
    assert capsys.readouterr().out == first
    again = bench(prompts_file, *servers[:2], "--save-outputs", str(tmp_path / "answers"))
    assert again == 2  # refused before anything is measured, not after
    assert "baseline.jsonl` already exists" in capsys.readouterr().err


def test_a_slower_server_is_not_promoted(
    make_server: Servers, prompts_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    servers = [make_server(fixed_rate(rate)) for rate in (1200.0, 400.0)]
    assert bench(prompts_file, *servers, "--json", "--quiet") == 1
    out, err = capsys.readouterr()
    document = json.loads(out)
    assert document["verdict"] == "no"
    assert document["results"]["environment"]["urls"]["baseline"] == servers[0].url
    assert err.splitlines()[0].startswith("warning: ")  # quiet drops notes, not warnings


def test_a_broken_answer_gives_no_verdict_and_cannot_be_resumed(
    make_server: Servers, prompts_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    baseline = make_server(fixed_rate(3000.0))
    candidate = make_server(fixed_rate(6000.0, fail_on=9))
    out = tmp_path / "bench.json"
    assert bench(prompts_file, baseline, candidate, "-o", str(out)) == 4
    assert "verdict: invalid" in capsys.readouterr().out
    sent = len(candidate.seen)
    assert json.loads(out.read_text())["results"]["gain"] is None
    out.unlink()
    assert bench(prompts_file, baseline, candidate, "-o", str(out), "--resume") == 4
    assert "already invalid" in capsys.readouterr().err
    assert len(candidate.seen) == sent + 1  # the server was described, nothing was served


def test_other_tokens_are_seen_over_http(
    make_server: Servers, prompts_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    servers = [make_server(fixed_rate(4000.0, last_token=token)) for token in (7, 8)]
    bench(prompts_file, *servers, "--json")
    decision = json.loads(capsys.readouterr().out)["results"]["decision"]
    assert decision["identical"] is False
    assert decision["base_ratio"] == pytest.approx(0.03)


def test_requests_in_flight_reach_the_server_together(
    make_server: Servers, prompts_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    servers = [make_server(fixed_rate(rate)) for rate in (400.0, 800.0)]
    bench(prompts_file, *servers, "--batch", "3", "--limit", "4", "--json")
    client = json.loads(capsys.readouterr().out)["results"]["client"]
    assert [server.peak_in_flight for server in servers] == [3, 3]
    assert client["refill_gap_p50_s"] < 0.02


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--candidate", "http://127.0.0.1:9"], 2, "--baseline is missing"),
        (["--baseline", "nonsense", "--candidate", "http://127.0.0.1:9"], 2, "names no system"),
        (["--baseline", "http://127.0.0.1:9", "--candidate", "http://127.0.0.1:9"], 3,
         "does not answer"),
        (["--baseline", "http://127.0.0.1:9", "--candidate", "http://127.0.0.1:9", "--runs", "3"],
         2, "runs must be even"),
        (["--resume"], 2, "--resume needs --output"),
        (["--from", "absent.json"], 2, "takes no server and no prompts"),
    ],
)  # fmt: skip
def test_what_cannot_be_measured_exits_with_its_code(
    prompts_file: Path, arguments: list[str], code: int, words: str,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    assert main(["paired-bench", "--prompts", str(prompts_file), *arguments]) == code
    assert words in capsys.readouterr().err
