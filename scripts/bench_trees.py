"""Time the draft-tree builders on this CPU and write docs/measurements/tree_builders_cpu.json.

Usage: python scripts/bench_trees.py [--output FILE] [--seed N]

One thread. Lattices are random, 16 positions of 16 candidates, with scores about as sharp as a
trained selector's; a builder's time depends on their shape and sharpness, not on their meaning.
Best-first is timed as well on the demo pair's recording, whose scores are flatter (15 positions).
Each figure is the best and the median over repeats of the mean processor time per tree, which is
the wall time on an idle machine and does not count what other processes of a busy one take. The
heap in plain Python is timed beside them in the same run.
"""

from __future__ import annotations

import argparse
import datetime
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from specpilot_cli.io.atomic import atomic_write_text
from specpilot_cli.io.lattice_file import read_lattice
from specpilot_cli.report.json_out import build_envelope, render_json
from specpilot_kernels.trees import (
    BUILDERS,
    Lattices,
    best_first,
    best_first_reference,
    build,
    edge_log_probs,
    marginal,
)
from specpilot_kernels.trees.trace import truth_pop_index

POSITIONS, CANDIDATES, LATTICES, REPEATS = 16, 16, 1000, 15
BUDGETS = (16, 32, 64)
RECORDING = Path("recipes/demo-cpu/recordings/block-16.safetensors")
DEFAULT_OUTPUT = Path("docs/measurements/tree_builders_cpu.json")


def make_lattices(
    seed: int, lattices: int = LATTICES, positions: int = POSITIONS
) -> tuple[Any, Any, Any]:
    """Candidate ids [s, L, K], edges [s, L, K, K] and unary log-probabilities [s, L, K]."""
    rng = np.random.default_rng(seed)
    unary = -4.5 * np.log1p(np.arange(CANDIDATES)) + 0.3 * rng.normal(
        size=(lattices, positions, CANDIDATES)
    )
    edge = np.empty((lattices, positions, CANDIDATES, CANDIDATES), dtype=np.float32)
    for start in range(0, lattices, LATTICES):
        part = unary[start : start + LATTICES, :, None, :]
        pair = rng.normal(size=(part.shape[0], positions, CANDIDATES, CANDIDATES))
        edge[start : start + LATTICES] = edge_log_probs(part + pair)
    edge[:, 0] = edge[:, 0, :1]
    ids = np.argsort(rng.random((lattices, positions, 256)), axis=-1)[..., :CANDIDATES]
    return ids.astype(np.int32), edge, edge_log_probs(unary)


def per_tree_us(function: Callable[[], object], trees: int, repeats: int) -> dict[str, float]:
    """Best and median processor microseconds per tree of a `function` that builds `trees`."""
    function()  # compile and warm up
    taken: list[float] = []
    for _ in range(repeats):
        start_s = time.thread_time()
        function()
        taken.append((time.thread_time() - start_s) / trees * 1e6)
    return {"best_us": min(taken), "median_us": statistics.median(taken)}


def measure(seed: int) -> list[dict[str, Any]]:
    """One record per builder and budget."""
    ids, edge, unary = make_lattices(seed)
    zeros = np.zeros((LATTICES, POSITIONS), dtype=np.float32)
    some, few = range(200), range(40)
    truth = np.ascontiguousarray(ids[:, :, 0])
    accept = 0.6 * 0.4 ** np.arange(CANDIDATES)
    cost = 1.0 + 0.01 * np.arange(max(BUDGETS) + 1)
    batch = Lattices(ids, edge, unary=unary, accept=accept, step_cost=cost, truth=truth)
    records: list[dict[str, Any]] = []
    for nodes in BUDGETS:
        cases: dict[str, tuple[Callable[[], object], int, int]] = {
            **{
                f"{name}, batch": (
                    lambda n=nodes, name=name: build(name, batch, n), LATTICES, REPEATS,
                )
                for name in BUILDERS
            },
            "best-first, one call per tree": (
                lambda n=nodes: [best_first(ids[s], edge[s], n) for s in some], 200, REPEATS,
            ),
            "marginal, one call per tree": (
                lambda n=nodes: [marginal(ids[s], unary[s], zeros[s], n) for s in some],
                200, REPEATS,
            ),
            "best-first in plain Python (heapq)": (
                lambda n=nodes: [best_first_reference(ids[s], edge[s], n) for s in few], 40, 5,
            ),
            "whole curve up to the budget": (
                lambda n=nodes: truth_pop_index(ids, edge, truth, np.arange(1, n + 1)),
                LATTICES, REPEATS,
            ),
        }  # fmt: skip
        for name, (function, trees, repeats) in cases.items():
            records.append(
                {"builder": name, "nodes": nodes, **per_tree_us(function, trees, repeats)}
            )
    return records


def measure_recording() -> list[dict[str, Any]]:
    """Best-first on what a trained drafter offered, in a batch and by single calls."""
    found = read_lattice(RECORDING)
    ids, edge = found.candidate_ids, np.ascontiguousarray(found.edge)
    batch, some = Lattices(ids, edge), range(200)
    records: list[dict[str, Any]] = []
    for nodes in BUDGETS:
        for name, function, trees in (
            ("batch", lambda n=nodes: build("best-first", batch, n), len(ids)),
            ("one call per tree", lambda n=nodes: [best_first(ids[s], edge[s], n) for s in some],
             len(some)),
        ):  # fmt: skip
            times = per_tree_us(function, trees, REPEATS)
            records.append(
                {"builder": f"best-first, demo recording, {name}", "nodes": nodes, **times}
            )
    return records


def main() -> None:
    """Measure, print a table, write the JSON file."""
    parser = argparse.ArgumentParser(description="Time the draft-tree builders on this CPU.")
    parser.add_argument("--output", type=Path, default=DEFAULT_OUTPUT)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    records = measure(arguments.seed) + measure_recording()
    for record in records:
        print(
            f"{record['builder']:48} {record['nodes']:3} nodes  best {record['best_us']:8.2f} µs  "
            f"median {record['median_us']:8.2f} µs"
        )
    document = {
        "measured_at_utc": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "positions": POSITIONS,
        "candidates": CANDIDATES,
        "lattices": LATTICES,
        "records": records,
    }
    envelope = build_envelope("scripts/bench_trees.py", document, seed=arguments.seed)
    atomic_write_text(arguments.output, render_json(envelope), force=True)


if __name__ == "__main__":
    main()
