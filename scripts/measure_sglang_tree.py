#!/usr/bin/env python3
"""Measure draft trees in SGLang on one GPU, beside stock's chain, in one run.

    python scripts/measure_sglang_tree.py --output docs/measurements/sglang_tree_h200.json
    python scripts/measure_sglang_tree.py --output FILE --phases pair --trees all --budget-s 580

No checkpoint is needed, and servers are started and timed as by `measure_sglang_w12.py`, whose
`--site` writes the package metadata that they need. Phases, in this order:

    pair       the demo pair: token-force at 1 and 8 requests; a server with the prefix cache, whose
               requests go on from each other's answers; tokens per step against a replay of
               lattices recorded by SGLang itself; paired-bench against stock's chain, and with
               `--trees all` of conditional against marginal trees
    step       27B shape with random weights, one request: a step with 32 nodes on a block of 16
               against stock's chain of 8, target in W12 and in BF16; traces of both, how much of a
               step no kernel runs, and what choosing candidates takes
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from pathlib import Path
from types import FrameType

from measure_sglang_w12 import END_S, REPOSITORY, prepare_models, run_phases
from sglang_bench import phases, tree_pair, tree_phases
from sglang_bench.book import Book, Clock
from sglang_bench.fleet import Fleet, gpu_state
from sglang_bench.phases import Bench, Phase

NAMES = ("pair", "step")
READY_S = 180.0
"""A server's time to be ready: tree kernels are compiled where no one did before."""


def chosen_phases(bench: Bench, names: list[str], trees: list[str]) -> list[Phase]:
    """Phases in the order of importance: what is wrong need not be timed."""
    found: list[Phase] = []
    if "pair" in names:
        labels = list(tree_pair.TREES) if "all" in trees else trees
        found.append(tree_pair.pair_phase(bench, labels))
    if "step" in names:
        found += tree_phases.step_phases(bench)
    return found


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--work", type=Path, default=Path("/tmp/specpilot-bench"))
    parser.add_argument("--phases", nargs="+", choices=NAMES, default=list(NAMES))
    parser.add_argument("--trees", nargs="+", choices=("all", *tree_pair.TREES),
                        default=list(tree_pair.FEW), help="of the demo pair")  # fmt: skip
    parser.add_argument("--budget-s", type=float, default=560.0)
    parser.add_argument("--port", type=int, default=9000, help="the first server is 1100 above")
    parser.add_argument("--setup", type=Path, help="a JSON object that goes into the result")
    parser.add_argument("--cpu", type=Path, nargs=2, metavar=("TARGET", "DRAFTER"),
                        help="rehearse on the CPU: every model is this one")  # fmt: skip
    return parser.parse_args()


def _give_up(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def main() -> int:
    """Run; 0 if every measurement was made."""
    args = parse()
    signal.signal(signal.SIGTERM, _give_up)
    folders = args.work / "models"
    prepare_models(folders, args.cpu)
    setup = json.loads(args.setup.read_text(encoding="utf-8")) if args.setup else {}
    book = Book(args.output, Clock(args.budget_s - END_S), {"gpu": gpu_state(), **setup},
                command="scripts/measure_sglang_tree.py")  # fmt: skip
    given = phases.CPU_ARGS if args.cpu else phases.GPU_ARGS
    common = [
        word for word in given if word != "--skip-tokenizer-init"
    ]  # the pair's prompts are text
    fleet = Fleet(args.work / "servers", common, first_port=args.port, ready_s=READY_S)
    bench = Bench(
        fleet, book, folders, args.work, REPOSITORY, cpu=bool(args.cpu), short=bool(args.cpu)
    )
    try:
        run_phases(bench, chosen_phases(bench, args.phases, args.trees))
    finally:
        fleet.close()
        book.note(f"end, {len(book.results['failures'])} failures")
    return 1 if book.results["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
