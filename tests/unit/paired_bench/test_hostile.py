"""Servers that answer wrongly: an invalid run with the reason, never a verdict."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specpilot_cli.engines.http_client import HttpEngine
from specpilot_cli.main import main
from specpilot_cli.paired_bench.run import run_paired_bench
from specpilot_cli.paired_bench.types import (
    PairedBenchSettings,
    PairedBenchSummary,
    TokenPrompt,
)

TOKENS = 12
Servers = Callable[[Any], Any]
Answer = Callable[[Any, list[int]], None]


def chunk(
    exchange: Any, output: list[int], *, total: int | None = None, **meta: Any
) -> dict[str, Any]:
    """A cumulative chunk; final once all tokens are there."""
    done = len(output) >= TOKENS
    about = {
        "finish_reason": {"type": "length"} if done else None,
        "prompt_tokens": len(exchange.body["input_ids"]),
        "completion_tokens": len(output) if total is None else total,
        **meta,
    }
    return {"output_ids": output, "meta_info": about}


def honest(exchange: Any, output: list[int]) -> None:
    exchange.open_stream()
    for count in (1, TOKENS):
        exchange.event(chunk(exchange, output[:count]))
    exchange.done()


def server_of(answer: Answer, *, after: int = 20) -> Callable[[Any], None]:
    """Honest until request number `after`, then as `answer` does."""
    served = 0

    def script(exchange: Any) -> None:
        nonlocal served
        if exchange.path == "/server_info":
            exchange.reply({"version": "test"})
            return
        served += 1
        output = [(sum(exchange.body["input_ids"]) + i) % 900 for i in range(TOKENS)]
        (answer if served > after else honest)(exchange, output)

    return script


def wrong_json(exchange: Any, output: list[int]) -> None:
    exchange.open_stream()
    exchange.raw(b"data: {'output_ids': [1]}\n\n")
    exchange.done()


def nan_count(exchange: Any, output: list[int]) -> None:
    exchange.open_stream()
    exchange.event(chunk(exchange, output, spec_verify_ct=float("nan")))
    exchange.done()


def early_close(exchange: Any, output: list[int]) -> None:
    exchange.open_stream()
    exchange.event(chunk(exchange, output[:4]))
    exchange.drop()


def early_done(exchange: Any, output: list[int]) -> None:
    exchange.open_stream()
    exchange.event(chunk(exchange, output[:4]))
    exchange.done()


def slow_trickle(exchange: Any, output: list[int]) -> None:
    exchange.open_stream()
    exchange.event(chunk(exchange, output[:1]))
    for _ in range(100):
        time.sleep(0.05)
        exchange.raw(b": still here\n\n")


def wrong_count(exchange: Any, output: list[int]) -> None:
    exchange.open_stream()
    exchange.event(chunk(exchange, output, total=TOKENS + 1))
    exchange.done()


def too_many(exchange: Any, output: list[int]) -> None:
    exchange.open_stream()
    exchange.event(chunk(exchange, [*output, 7]))
    exchange.done()


def server_error(exchange: Any, output: list[int]) -> None:
    exchange.reply({"error": {"message": "out of memory"}}, status=500)


def aborted(exchange: Any, output: list[int]) -> None:
    exchange.open_stream()
    reason = {"type": "abort", "message": "preempted"}
    exchange.event(chunk(exchange, output[:3], finish_reason=reason))
    exchange.done()


def rewritten(exchange: Any, output: list[int]) -> None:
    exchange.open_stream()
    exchange.event(chunk(exchange, output[:4]))
    exchange.event(chunk(exchange, [899 - token for token in output]))
    exchange.done()


def bench(baseline: Any, candidate: Any) -> PairedBenchSummary:
    prompts = [
        TokenPrompt(f"{name}-{i}", name, (ord(name[1]), i), TOKENS)
        for name in ("chat", "code")
        for i in range(5)
    ]
    with (
        HttpEngine(baseline.url, 20.0, name="baseline server") as one,
        HttpEngine(candidate.url, 20.0, stall_timeout_s=0.4, name="candidate server") as other,
    ):
        settings = PairedBenchSettings(aa_sessions=1)
        systems = {"baseline": one, "candidate": other}
        return run_paired_bench(systems, prompts, settings=settings).summary


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (wrong_json, "is not JSON"),
        (nan_count, "spec_verify_ct` is `nan`"),
        (early_close, "connection broke"),
        (early_done, "finish reason `None`"),
        (slow_trickle, "stalled for 0.4 s"),
        (wrong_count, f"says {TOKENS + 1} completion tokens"),
        (too_many, f"{TOKENS + 1} tokens where {TOKENS} were asked for"),
        (server_error, "HTTP 500: "),
        (aborted, "aborted it: preempted"),
        (rewritten, "a chunk says"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_bad_answer_midway_leaves_no_verdict(
    make_server: Servers, answer: Answer, words: str
) -> None:
    found = bench(make_server(server_of(honest)), make_server(server_of(answer, after=9)))
    assert found.verdict == "invalid"
    assert (found.gain, found.decision, found.noise) == (None, None, None)
    assert words in found.reasons[0]
    assert found.reasons[0].startswith("comparison run 1/2, candidate: ")


def test_a_server_that_is_started_anew_midway_leaves_no_verdict(make_server: Servers) -> None:
    starts = 0

    def script(exchange: Any) -> None:
        nonlocal starts
        if exchange.path != "/server_info":
            good(exchange)
            return
        starts += 1
        exchange.reply({"version": "test", "startup_time": {"load": starts // 4}})

    good = server_of(honest)
    found = bench(make_server(server_of(honest)), make_server(script))
    assert found.verdict == "invalid"
    assert found.gain is None
    assert "candidate was started anew" in found.reasons[0]
    assert "startup_time" in found.reasons[0]


def test_a_description_that_makes_no_sense_does_no_harm(make_server: Servers) -> None:
    info = {"version": "\ud800", "internal_states": [{"specpilot": {"slowed_ratio": "much"}}],
            "size": 10**400, "speed": float("inf")}  # fmt: skip
    good = server_of(honest)

    def script(exchange: Any) -> None:
        exchange.reply(info) if exchange.path == "/server_info" else good(exchange)

    found = bench(make_server(server_of(honest)), make_server(script))
    assert found.verdict in ("promote", "no")
    assert found.environment["server_info"]["candidate"]["version"] == "?"


def test_a_server_that_samples_leaves_no_verdict(make_server: Servers) -> None:
    """Its defaults win over the temperature that was asked for: every run has other work."""
    rng = random.Random(5)

    def sampled(exchange: Any, output: list[int]) -> None:
        honest(exchange, [output[0], *(rng.randrange(900) for _ in output[1:])])

    found = bench(make_server(server_of(honest)), make_server(server_of(sampled, after=0)))
    assert found.verdict == "invalid"
    assert "candidate does not decode greedily" in found.reasons[0]


def test_rare_near_ties_are_no_sampler(make_server: Servers) -> None:
    """One request in ten that ends otherwise in the second run: stock does that too."""
    seen: set[int] = set()

    def near_tie(exchange: Any, output: list[int]) -> None:
        first = exchange.body["input_ids"][1] != 0 or output[0] in seen
        seen.add(output[0])
        honest(exchange, output if first else [*output[:-1], 899])

    found = bench(make_server(server_of(honest)), make_server(server_of(near_tie, after=2)))
    assert found.verdict in ("promote", "no")


def test_the_command_exits_with_4_and_says_why(
    make_server: Servers, tmp_path: Path, repo: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, out = tmp_path / "prompts.jsonl", tmp_path / "bench.json"
    rows = [
        {"request_id": f"r-{i}", "benchmark": "chat", "text": f"Hi {i}", "max_new_tokens": TOKENS}
        for i in range(5)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    servers = [make_server(server_of(answer, after=5)) for answer in (honest, early_close)]
    code = main(
        ["paired-bench", "--baseline", servers[0].url, "--candidate", servers[1].url, "--aa", "1",
         "--prompts", str(path), "--tokenizer", str(repo / "recipes/demo-cpu/target"),
         "-o", str(out), "--quiet"]
    )  # fmt: skip
    assert code == 4
    assert "verdict: invalid" in capsys.readouterr().out
    document = json.loads(out.read_text())
    assert document["verdict"] == "invalid"
    assert document["results"]["gain"] is None
    assert "connection broke" in document["results"]["reasons"][0]
