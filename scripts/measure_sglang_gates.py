#!/usr/bin/env python3
"""Both gates of specpilot, as their commands stand, on real SGLang: stock against W12 weights.

    python scripts/measure_sglang_gates.py --output docs/measurements/sglang_gates_h200.json

The 27B shape with random weights (see `sglang_bench.server_side`), decoding plainly; the prompts of
the demo pair, whose token ids any vocabulary has. Three steps, each a command of its own:

    paired-bench   stock and W12 resident, in turns, at 1 and 8 requests; A/A sessions of stock
    token-force    the very answers that were timed, scored by stock with a float32 head, which
                   takes W12's place on the GPU; stock's second run is its own AR path
    same           stock against itself through the same command: must not be promoted

FILE is written anew after every step; a step that no longer fits the budget is left out, and the
log says so. `--cpu TARGET DRAFTER` rehearses everything with a tiny model.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import FrameType
from typing import Any

from measure_sglang_w12 import prepare_models
from sglang_bench import phases
from sglang_bench.book import Book, Clock
from sglang_bench.fleet import Fleet, ServerSpec, gpu_state, wait_memory_free
from sglang_bench.phases import Bench

from specpilot_cli.apply.recipes import take_per_benchmark
from specpilot_cli.io.jsonl import write_jsonl
from specpilot_cli.io.prompts_file import read_prompts

REPOSITORY = Path(__file__).resolve().parent.parent
PAIR = REPOSITORY / "recipes" / "demo-cpu"
KINDS = ("code", "dialogue", "lists", "stories")
# seconds that a step takes at most on an H200
NEED_S = {"paired-bench": 150.0, "token-force": 90.0, "same": 70.0}
END_S = 6.0
GOOD = (0, 1)


def specs(bench: Bench) -> tuple[ServerSpec, ServerSpec, ServerSpec]:
    """Stock, W12, and the scorer that comes when W12 has gone."""
    room = (8, 1, 8)
    return (
        bench.spec("stock", "qwen-27b", memory=phases.memory(0.45, 32768, *room)),
        bench.spec(
            "w12", "qwen-27b", *phases.W12_ARGS, plugin=phases.W12,
            memory=phases.memory(0.85, 32768, *room),
        ),
        bench.spec(
            "scorer", "qwen-27b", "--enable-fp32-lm-head",
            memory=phases.memory(0.85, 32768, *room),
        ),
    )  # fmt: skip


def prompts(bench: Bench, per_kind: int, new_tokens: int) -> Path:
    """Prompts of a few kinds, one batch of them to warm up with."""
    every = read_prompts(PAIR / "prompts" / "unseen.jsonl")
    kinds = [prompt for prompt in every if prompt.benchmark in KINDS]
    if not kinds:
        kinds = every
    taken = take_per_benchmark(kinds, per_kind + 2)
    path = bench.work / "prompts.jsonl"
    short = [prompt.model_copy(update={"max_new_tokens": new_tokens}) for prompt in taken]
    write_jsonl(path, short, force=True)
    return path


def command(bench: Bench, name: str, words: list[str], limit_s: float) -> dict[str, Any] | None:
    """Run `specpilot WORDS -o FILE` and keep its result; None if it gave none."""
    out = bench.work / f"{name}.json"
    whole = [sys.executable, "-m", "specpilot_cli", *words, "-o", str(out), "--force"]
    try:
        done = subprocess.run(
            whole, cwd=bench.work, capture_output=True, text=True, timeout=limit_s, check=False
        )
    except subprocess.TimeoutExpired as error:
        bench.book.fail(name, error)
        return None
    for line in (*done.stderr.splitlines(), *done.stdout.splitlines()):
        if line.strip():
            bench.book.note(f"{name} | {line}")
    if not out.exists():
        bench.book.fail(name, RuntimeError(f"exit {done.returncode}: {done.stderr[-500:]}"))
        return None
    document: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    bench.book.put("commands", name, {"words": words, "exit_code": done.returncode})
    bench.book.put("documents", name, document)
    if done.returncode not in GOOD:
        bench.book.fail(name, RuntimeError(f"verdict {document['verdict']}"))
    return document


def url(bench: Bench, name: str) -> str:
    """Where a server listens."""
    return bench.fleet.running[name].url


def paired_bench(bench: Bench, file: Path, args: argparse.Namespace) -> dict[str, Any] | None:
    """Stock against W12."""
    words = ["paired-bench", "--baseline", url(bench, "stock"), "--candidate", url(bench, "w12"),
             *common(file, args), "--aa", str(args.aa), "--aa-limit", "2",
             "--save-outputs", str(bench.work / "answers")]  # fmt: skip
    return command(bench, "paired-bench", words, bench.book.clock.left_s)


def same(bench: Bench, file: Path, args: argparse.Namespace) -> dict[str, Any] | None:
    """Stock against the same launch of itself, with the noise that was just measured."""
    noise = bench.work / "paired-bench.json"
    words = ["paired-bench", "--baseline", url(bench, "stock"), "--candidate", url(bench, "stock"),
             *common(file, args), "--noise", str(noise)]  # fmt: skip
    found = command(bench, "same", words, bench.book.clock.left_s)
    if found is not None and found["verdict"] == "promote":
        bench.book.fail("same", RuntimeError("stock was promoted over itself"))
    return found


def common(file: Path, args: argparse.Namespace) -> list[str]:
    """Options of both benchmarks."""
    return ["--prompts", str(file), "--tokenizer", str(PAIR / "target"), "--batch", args.batch,
            "--limit", str(args.per_kind), "--warmup", "8"]  # fmt: skip


def token_force(bench: Bench) -> dict[str, Any] | None:
    """The timed answers of W12 against those of stock, which also answers the audit's probes."""
    answers = bench.work / "answers"
    words = ["token-force", "--system", str(answers / "candidate.jsonl"), "--stock",
             str(answers / "baseline.jsonl"), "--scorer", url(bench, "scorer"), "--delta", "0.25",
             "--tokenizer", str(PAIR / "target")]  # fmt: skip
    return command(bench, "token-force", words, bench.book.clock.left_s)


def fits(bench: Bench, step: str) -> bool:
    """Whether the budget still allows a step; its absence is noted."""
    enough = bench.book.clock.left_s >= (0.0 if bench.cpu else NEED_S[step])
    if not enough:
        bench.book.note(f"{step}: {NEED_S[step]:g} s no longer fit, left out")
    return enough


def ready(bench: Bench, name: str) -> None:
    """Wait for a server and keep what it says of itself."""
    bench.book.put("servers", name, bench.fleet.wait_ready(name))
    bench.book.note(f"{name} is ready; GPU {gpu_state()}")


def run(bench: Bench, args: argparse.Namespace) -> None:
    """All steps in the order of importance."""
    stock, w12, scorer = specs(bench)
    file = prompts(bench, args.per_kind, args.new_tokens)
    bench.fleet.launch((stock, w12))
    bench.fleet.wait_parked(("stock", "w12"))
    for spec in (stock, w12):
        bench.fleet.open(spec.name)
        bench.fleet.wait_pools(spec.name)
    for spec in (stock, w12):
        ready(bench, spec.name)
    idle = float(gpu_state().get("memory.used", 0))
    if fits(bench, "paired-bench") and paired_bench(bench, file, args) is None:
        return
    bench.fleet.launch((scorer,))  # its imports go on behind the gate
    if fits(bench, "same"):
        same(bench, file, args)
    if not fits(bench, "token-force"):
        return
    bench.fleet.wait_parked(("scorer",))
    bench.fleet.stop(("w12",))
    wait_memory_free(idle - 20_000)
    bench.fleet.open("scorer")
    ready(bench, "scorer")
    token_force(bench)


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--work", type=Path, default=Path("/tmp/specpilot-gates"))
    parser.add_argument("--budget-s", type=float, default=530.0)
    parser.add_argument("--port", type=int, default=9000, help="the first server is 1100 above")
    parser.add_argument("--setup", type=Path, help="a JSON object that goes into the result")
    parser.add_argument("--batch", default="1,8", help="requests in flight")
    parser.add_argument("--aa", type=int, default=3, help="A/A sessions")
    parser.add_argument("--per-kind", type=int, default=4, help="timed prompts of each kind")
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--cpu", type=Path, nargs=2, metavar=("TARGET", "DRAFTER"),
                        help="rehearse on the CPU: every model is this one")  # fmt: skip
    return parser.parse_args()


def _give_up(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def main() -> int:
    """Run; 0 if every step gave a verdict."""
    args = parse()
    signal.signal(signal.SIGTERM, _give_up)
    args.work.mkdir(parents=True, exist_ok=True)
    folders = args.work / "models"
    prepare_models(folders, args.cpu)
    setup = json.loads(args.setup.read_text(encoding="utf-8")) if args.setup else {}
    book = Book(args.output, Clock(args.budget_s - END_S), {"gpu": gpu_state(), **setup})
    common_args = phases.CPU_ARGS if args.cpu else phases.GPU_ARGS
    fleet = Fleet(args.work / "servers", common_args, first_port=args.port)
    bench = Bench(
        fleet, book, folders, args.work, REPOSITORY, cpu=bool(args.cpu), short=bool(args.cpu)
    )
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    try:
        run(bench, args)
    except Exception as error:  # noqa: BLE001 - what was measured before stands in the file
        book.fail("run", error)
    finally:
        fleet.close()
        book.note(f"end, {len(book.results['failures'])} failures")
    return 1 if book.results["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
