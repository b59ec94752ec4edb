"""Time the GPU tree builder and acceptance, and write the result as JSON.

    python scripts/bench_tree_builder.py --output docs/measurements/tree_builder_h200.json

Lattices are random, 15 positions of 16 candidates, about as sharp as a trained selector's. A time
is the median over replays of a CUDA graph in which one kernel follows another, each on its own
lattices, per kernel: what it adds to a step whose kernels wait for each other. Beside it the floor,
a one-element addition timed in the same way: the least that any kernel adds. A tree of 0 nodes is
everything but growing: reading, normalising, ranking, tables. Every timed tree is compared with the
CPU's, byte for byte, and the CPU's own time is there for comparison.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch

from specpilot_kernels import build, launch
from specpilot_kernels.timing import Work, samples
from specpilot_kernels.trees import modules
from specpilot_kernels.trees.gpu import DeviceTrees, accept_path, build_trees

POSITIONS, CANDIDATES = 15, 16
BATCHES = (1, 8, 32)
BUDGETS = (0, 8, 16, 32, 63, 64, 128)
TARGET_S = 20e-6  # batch 1, 32 nodes
_CHAIN = 50  # kernels of a graph
_LATTICES = 10  # different ones that they read
_COMPARED = ("token", "parent", "depth", "score", "ancestors", "tap", "position")

Lattice = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def seconds(works: dict[str, list[Work]], repeats: int) -> dict[str, dict[str, float]]:
    """Median and quartiles of one piece of each of `works`."""
    found = {}
    for name, times in samples(works, repeats).items():
        low, median, high = statistics.quantiles(times, n=4)
        found[name] = {"time_s": median, "quartile_low_s": low, "quartile_high_s": high}
    return found


def make_lattice(rng: np.random.Generator, batch: int) -> Lattice:
    """Token ids, scores and anchors of a batch, on the GPU."""
    shape = (batch, POSITIONS, CANDIDATES, CANDIDATES)
    unary = -4.5 * np.log1p(np.arange(CANDIDATES)) + 0.3 * rng.normal(size=(*shape[:2], 1, 16))
    scores = torch.from_numpy((unary + rng.normal(size=shape)).astype(np.float32))
    ids = torch.from_numpy(rng.integers(0, 248_320, size=shape[:3]))
    anchor = torch.from_numpy(rng.integers(0, 248_320, size=batch))
    return ids.cuda(), scores.cuda(), anchor.cuda()


def check(trees: DeviceTrees, lattice: Lattice) -> None:
    """Exit where a tree differs from the CPU's: its time would mean nothing."""
    wanted = build_trees(*(tensor.cpu() for tensor in lattice), trees.n_nodes)
    for name in _COMPARED:
        found, value = getattr(trees, name).cpu(), getattr(wanted, name)
        if not torch.equal(found.view(torch.uint8), value.view(torch.uint8)):
            sys.exit(f"{name} of a tree of {trees.n_nodes} nodes differs from the CPU's")


def bench(batch: int, n_nodes: int, repeats: int, seed: int) -> dict[str, Any]:
    """Times of building and accepting one size."""
    rng = np.random.default_rng(seed)
    lattices = [make_lattice(rng, batch) for _ in range(_LATTICES)]
    device = lattices[0][1].device
    room = [DeviceTrees.empty(batch, n_nodes, POSITIONS, device) for _ in lattices]
    places = [i % _LATTICES for i in range(_CHAIN)]
    builds = [lambda i=i: build_trees(*lattices[i], n_nodes, out=room[i]) for i in places]
    row: dict[str, Any] = {"batch": batch, "nodes": n_nodes, **seconds({"build": builds}, repeats)}
    for trees, lattice in zip(room, lattices, strict=True):
        check(trees, lattice)
    targets = [agreeing(trees) for trees in room]
    outs = [accept_path(trees, target) for trees, target in zip(room, targets, strict=True)]
    accepts = [lambda i=i: accept_path(room[i], targets[i], out=outs[i]) for i in places]
    row |= seconds({"accept": accepts}, repeats)
    row["accepted_nodes"] = float(torch.stack([out.n_accepted for out in outs]).float().mean())
    return row


def agreeing(trees: DeviceTrees) -> torch.Tensor:
    """What a target says that follows the best path of each tree as far as it goes."""
    target = torch.full_like(trees.token, -1)
    for row in range(trees.n_nodes, 0, -1):  # a row's first child is its best
        target.scatter_(1, trees.parent[:, row : row + 1].long(), trees.token[:, row : row + 1])
    return target


def cpu_us(n_nodes: int, seed: int) -> float:
    """Best host time of one tree by the CPU's builder, scores to tables, in microseconds."""
    lattice = tuple(tensor.cpu() for tensor in make_lattice(np.random.default_rng(seed), 1))
    times = []
    for _ in range(50):
        start = time.perf_counter()
        build_trees(*lattice, n_nodes)
        times.append(time.perf_counter() - start)
    return min(times) * 1e6


def registers() -> dict[str, int]:
    """Registers per thread of both kernels on this GPU."""
    found = {}
    for module in (modules.build_trees(CANDIDATES), modules.ACCEPT_PATH):
        architecture = build.architecture_for(module, launch.capability())
        for name, usage in build.build(module, architecture).usage.items():
            found[name] = usage.registers
    return found


def show(document: dict[str, Any]) -> None:
    """Print the table and whether the target is met."""
    floor = document["floor_s"]
    print(f"{document['gpu']}: an empty kernel adds {floor * 1e6:.2f} us; microseconds each")
    print(f"{'batch':>5}{'nodes':>7}{'build':>9}{'- floor':>9}{'accept':>9}{'accepted':>10}")
    for row in document["rows"]:
        build_s, accept_s = row["build"]["time_s"], row["accept"]["time_s"]
        print(f"{row['batch']:>5}{row['nodes']:>7}{build_s * 1e6:>9.2f}"
              f"{(build_s - floor) * 1e6:>9.2f}{accept_s * 1e6:>9.2f}"
              f"{row['accepted_nodes']:>10.1f}")  # fmt: skip
    target = next(r for r in document["rows"] if (r["batch"], r["nodes"]) == (1, 32))
    met = target["build"]["time_s"] <= TARGET_S
    print(f"32 nodes, batch 1: {target['build']['time_s'] * 1e6:.2f} us, "
          f"{'within' if met else 'ABOVE'} {TARGET_S * 1e6:.0f} us; "
          f"the CPU's builder takes {document['cpu_us']['32']:.0f} us")  # fmt: skip
    print(f"one node more costs {document['per_node_s'] * 1e9:.0f} ns; "
          f"registers {document['registers']}")  # fmt: skip


def main() -> int:
    """Run everything; well under a minute."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--repeats", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    one = torch.zeros(1, device="cuda")
    adds: list[Work] = [lambda: one.add_(1.0)] * _CHAIN
    floor = seconds({"add": adds}, options.repeats)["add"]["time_s"]
    rows = [
        bench(batch, n_nodes, options.repeats, options.seed)
        for batch in BATCHES
        for n_nodes in BUDGETS
    ]
    alone = {row["nodes"]: row["build"]["time_s"] for row in rows if row["batch"] == 1}
    document: dict[str, Any] = {
        "what": "GPU tree builder and acceptance, per kernel of a CUDA graph, medians of replays",
        "command": "python scripts/bench_tree_builder.py --output FILE",
        "date_utc": datetime.now(UTC).strftime("%Y-%m-%d"),
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "positions": POSITIONS,
        "candidates": CANDIDATES,
        "repeats": options.repeats,
        "seed": options.seed,
        "floor_s": floor,
        "rows": rows,
        "per_node_s": (alone[32] - alone[0]) / 32,
        "cpu_us": {str(n): cpu_us(n, options.seed) for n in BUDGETS},
        "registers": registers(),
    }
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    show(document)
    return 0


if __name__ == "__main__":
    sys.exit(main())
