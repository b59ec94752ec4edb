#!/usr/bin/env python3
"""What paired-bench decides about servers whose difference is known: the reference engine, twice.

    python scripts/measure_paired_bench.py --output docs/measurements/paired_bench_cpu.json

Two conditions. `paced`: every step takes 100 ms, so that two launches differ by what the client and
the system add. `unpaced`: the engine as it is, on this machine. In each, K A/A sessions between two
launches of one server calibrate the noise; then a third launch of it is compared 20 times (nothing
may be promoted), and a launch that is 5 % slower 10 times (it should be found slower: the whole
interval below 1). No GPU; the demo pair is in the repository.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from specpilot_cli.apply.recipes import take_per_benchmark
from specpilot_cli.engines.client_process import ProcessEngine
from specpilot_cli.engines.process import ServerProcess
from specpilot_cli.engines.reference.launch import serve_command
from specpilot_cli.engines.reference.spec import SpecConfig
from specpilot_cli.io.atomic import atomic_write_text
from specpilot_cli.io.prompts_file import read_prompts
from specpilot_cli.io.tokenizer_file import TokenizerFile
from specpilot_cli.paired_bench.run import Basis, run_calibration, run_paired_bench
from specpilot_cli.paired_bench.tokens import tokenize
from specpilot_cli.paired_bench.types import (
    Noise,
    PairedBenchResult,
    PairedBenchSettings,
    TokenPrompt,
)
from specpilot_cli.report.json_out import build_envelope, render_json

REPOSITORY = Path(__file__).resolve().parent.parent
DEMO = REPOSITORY / "recipes" / "demo-cpu"
PACE_MS, SLOW_PCT = 100.0, 5.0
ROLES = ("baseline", "baseline_again", "same", "slow")


def serve(stack: ExitStack, folder: Path, name: str, port: int, *, paced: bool) -> ProcessEngine:
    """One launch of the stock chain; `slow` is 5 % slower."""
    command = serve_command(
        DEMO / "target", DEMO / "drafter", SpecConfig("chain", 8), port=port,
        pace_ms=PACE_MS if paced else None, slow_pct=SLOW_PCT if name == "slow" else 0.0,
    )  # fmt: skip
    process = ServerProcess(
        command, port=port, log_path=folder / f"{name}.log", name=name, ready_timeout_s=180
    )
    return stack.enter_context(ProcessEngine(stack.enter_context(process).base_url, name=name))


def prompts(per_benchmark: int, new_tokens: int) -> list[TokenPrompt]:
    """The same prompts in every comparison; one of each kind warms up."""
    texts = take_per_benchmark(read_prompts(DEMO / "prompts" / "unseen.jsonl"), per_benchmark + 1)
    short = [text.model_copy(update={"max_new_tokens": new_tokens}) for text in texts]
    return tokenize(short, TokenizerFile(DEMO / "target").encode)


def row(result: PairedBenchResult) -> dict[str, Any]:
    """What one comparison said."""
    gain = result.summary.gain
    return {
        "verdict": result.verdict,
        "reasons": list(result.summary.reasons),
        "gain": None if gain is None else dataclasses.asdict(gain),
        "load_average_1min": result.summary.environment["load_average_1min"],
    }


def condition(args: argparse.Namespace, folder: Path, *, paced: bool) -> dict[str, Any]:
    """Calibrate, then compare."""
    asked = prompts(args.per_benchmark, args.new_tokens)
    settings = PairedBenchSettings(aa_sessions=args.k, warmup=8, limit=args.per_benchmark)
    alone = dataclasses.replace(settings, aa_sessions=0)
    with ExitStack() as stack:
        engines = {
            name: serve(stack, folder, name, args.port + number, paced=paced)
            for number, name in enumerate(ROLES)
        }
        start = time.monotonic()
        pair = {name: engines[name] for name in ROLES[:2]}
        calibrated = run_calibration(pair, asked, settings=settings)
        noise = calibrated.summary.noise
        if noise is None:
            raise SystemExit(f"no calibration: {calibrated.summary.reasons}")
        noise = dataclasses.replace(noise, source="measured here")

        def compare(candidate: str, times: int) -> list[dict[str, Any]]:
            systems = {"baseline": engines["baseline"], "candidate": engines[candidate]}
            rows = []
            for number in range(times):
                found = run_paired_bench(systems, asked, settings=alone, basis=Basis(noise=noise))
                rows.append(row(found))
                print(
                    f"paced={paced} {candidate} {number + 1}/{times}: {rows[-1]['verdict']} "
                    f"{found.summary.gain and found.summary.gain.gain_ratio:.4f}",
                    flush=True,
                )
            return rows

        same, slow = compare("same", args.same), compare("slow", args.slow)
    return {"noise": noise, "same": same, "slow": slow, "wall_s": time.monotonic() - start,
            **verdicts(noise, same, slow)}  # fmt: skip


def verdicts(
    noise: Noise, same: list[dict[str, Any]], slow: list[dict[str, Any]]
) -> dict[str, Any]:
    """The counts that the goals are about."""
    gains = [one["gain"] for one in (*same, *slow)]
    return {
        "aa_comparisons": len(same),
        "aa_promoted": sum(one["verdict"] == "promote" for one in same),
        "slow_comparisons": len(slow),
        "slow_found": sum(one["gain"]["high_ratio"] < 1.0 for one in slow),
        "slow_gain_ratio": [one["gain"]["gain_ratio"] for one in slow],
        "nu_pct": 100 * noise.nu_log,
        "mean_interval_width_pct": 100
        * sum(gain["high_ratio"] - gain["low_ratio"] for gain in gains)
        / len(gains),
    }


def main() -> int:
    """Run both conditions."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--work", type=Path, default=Path("/tmp/specpilot-paired-bench"))
    parser.add_argument("--k", type=int, default=8, help="A/A sessions of the calibration")
    parser.add_argument("--same", type=int, default=20, help="comparisons of equal servers")
    parser.add_argument("--slow", type=int, default=10, help="comparisons with the slower one")
    parser.add_argument("--per-benchmark", type=int, default=2)
    parser.add_argument("--new-tokens", type=int, default=24)
    parser.add_argument("--conditions", nargs="+", default=["paced", "unpaced"])
    parser.add_argument("--port", type=int, default=31400)
    args = parser.parse_args()
    found: dict[str, Any] = {}
    if args.output.exists():  # conditions measured before stay
        found = json.loads(args.output.read_text(encoding="utf-8"))["results"]
        found.pop("settings")
    for name in args.conditions:
        found[name] = condition(args, args.work / name, paced=name == "paced")
    settings = {"pace_ms": PACE_MS, "slow_pct": SLOW_PCT, "k": args.k,
                "per_benchmark": args.per_benchmark, "new_tokens": args.new_tokens,
                "niceness": os.nice(0)}  # fmt: skip
    envelope = build_envelope(
        "scripts/measure_paired_bench.py", {"settings": settings, **found},
        inputs=[DEMO / "target", DEMO / "drafter", DEMO / "prompts" / "unseen.jsonl"],
    )  # fmt: skip
    named = [
        item.model_copy(update={"path": str(Path(item.path).relative_to(REPOSITORY))})
        for item in envelope.inputs
    ]
    envelope = envelope.model_copy(update={"inputs": named})
    atomic_write_text(args.output, render_json(envelope), force=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
