#!/usr/bin/env python3
"""What the client of paired-bench adds to a request: against a server of known speed.

    python scripts/measure_bench_client.py --output docs/measurements/bench_client_cpu.json

48 streams of 200 tokens/s, 512 tokens each, twice over, in a closed loop: 9,600 tokens/s. The
server (`bench_client.fixed_rate`) sends token k at `start + k / rate` and notes when a request was
complete and when its last byte was handed over, on the clock that both processes share. Overhead of
a request: its time as paired-bench counts it, over the server's own, minus one. The goal is 1 % in
the mean; exit status 1 if a form of stream misses it. httpx's own transport is measured beside it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from specpilot_cli.engines import http_client
from specpilot_cli.engines.base import GenerateRequest, Generation
from specpilot_cli.engines.client_process import ProcessEngine
from specpilot_cli.engines.http_client import HttpEngine
from specpilot_cli.io.atomic import atomic_write_text
from specpilot_cli.report.json_out import build_envelope, render_json

GOAL_PCT = 1.0
SCRIPTS = Path(__file__).resolve().parent
# tokens in a chunk, and whether each chunk repeats all ids so far (SGLang's default)
FORMS = ((1, "cumulative"), (1, "incremental"), (4, "cumulative"))


def start_server(args: argparse.Namespace, every: int, form: str) -> subprocess.Popen[bytes]:
    """The fixed-rate server, listening."""
    words = ["--port", args.port, "--rate", args.rate, "--every", every, "--form", form]
    server = subprocess.Popen(
        [sys.executable, "-m", "bench_client.fixed_rate", *map(str, words)], cwd=SCRIPTS
    )
    for _ in range(200):
        try:
            get(args.port, "/server_info")
        except urllib.error.URLError:
            time.sleep(0.05)
        else:
            return server
    raise SystemExit("the fixed-rate server did not start")


def get(port: int, path: str) -> Any:
    """One JSON document of the server."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as reply:
        return json.load(reply)


def requests(args: argparse.Namespace, tag: str, rounds: int) -> list[GenerateRequest]:
    """`rounds` waves of streams."""
    names = [f"{tag}-{i}" for i in range(rounds * args.streams)]
    return [GenerateRequest(name, tuple(range(64)), args.tokens, rid=name) for name in names]


def overhead(
    answers: Sequence[Generation], stats: dict[str, dict[str, float]], args: argparse.Namespace
) -> dict[str, Any]:
    """Overhead in percent of a request's time, and the two delays that it is made of."""
    shares, sent, received, ideal = [], [], [], []
    for answer in answers:
        server = stats[answer.request_id]
        own_s = server["sent_s"] - server["received_s"]
        shares.append(100 * (answer.elapsed_s / own_s - 1))
        ideal.append(100 * (answer.elapsed_s * args.rate / args.tokens - 1))
        sent.append(1e3 * (server["received_s"] - answer.submit_s))
        received.append(1e3 * (answer.last_byte_s - server["sent_s"]))
    return {
        "requests": len(shares),
        "overhead_mean_pct": statistics.fmean(shares),
        "overhead_p50_pct": statistics.median(shares),
        "overhead_max_pct": max(shares),
        "over_ideal_mean_pct": statistics.fmean(ideal),
        "submit_to_server_p50_ms": statistics.median(sent),
        "submit_to_server_max_ms": max(sent),
        "server_to_client_p50_ms": statistics.median(received),
        "server_to_client_max_ms": max(received),
    }


def measure(args: argparse.Namespace, every: int, form: str, *, lean: bool) -> dict[str, Any]:
    """Serve a warm-up wave and two timed ones; `lean` False: httpx's own transport, in process."""
    server = start_server(args, every, form)
    url = f"http://127.0.0.1:{args.port}"
    try:
        if lean:
            with ProcessEngine(url) as engine:
                engine.generate_many(requests(args, "warm", 1), concurrency=args.streams)
                cpu_s, start = engine.cpu_s, time.monotonic()
                answers = engine.generate_many(
                    requests(args, "timed", args.rounds), concurrency=args.streams
                )
                extra = {
                    "client_cpu_ratio": (engine.cpu_s - cpu_s) / (time.monotonic() - start),
                    "loop_lag_p99_ms": 1e3 * (engine.loop_lag_p99_s or 0.0),
                }
        else:
            with mock.patch.object(http_client, "lean", return_value=None):
                plain = HttpEngine(url)
            with plain:
                plain.generate_many(requests(args, "warm", 1), concurrency=args.streams)
                answers = plain.generate_many(
                    requests(args, "timed", args.rounds), concurrency=args.streams
                )
                extra = {}
        stats = get(args.port, "/stats")
    finally:
        server.terminate()
        server.wait()
    name = "specpilot's transport, own process" if lean else "httpx's transport, in process"
    return {"client": name, "tokens_per_chunk": every, "stream": form,
            **overhead(answers, stats, args), **extra}  # fmt: skip


def main() -> int:
    """Every form of stream."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--streams", type=int, default=48)
    parser.add_argument("--rate", type=float, default=200.0)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--port", type=int, default=31900)
    args = parser.parse_args()
    rows = [measure(args, every, form, lean=True) for every, form in FORMS]
    rows.append(measure(args, *FORMS[0], lean=False))
    for row in rows:
        print(
            f"{row['client']}, {row['stream']}, {row['tokens_per_chunk']} per chunk: "
            f"mean {row['overhead_mean_pct']:.2f} %, max {row['overhead_max_pct']:.2f} %"
        )
    load = os.getloadavg()[0]
    setup = {"load_average_1min": load, "niceness": os.nice(0), "streams": args.streams,
             "rate_tok_per_s": args.rate, "tokens": args.tokens, "rounds": args.rounds,
             "goal_pct": GOAL_PCT}  # fmt: skip
    worst = max(row["overhead_mean_pct"] for row in rows[:-1])
    found = {"setup": setup, "worst_mean_pct": worst, "rows": rows}
    envelope = build_envelope("scripts/measure_bench_client.py", found)
    atomic_write_text(args.output, render_json(envelope), force=True)
    return 0 if worst <= GOAL_PCT else 1


if __name__ == "__main__":
    sys.exit(main())
