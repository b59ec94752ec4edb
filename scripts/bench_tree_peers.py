"""Time other projects' draft trees beside specpilot's, on the same lattices, on this CPU.

    pip install --no-deps --target PEERS angelslim==0.5.0
    OMP_NUM_THREADS=1 python scripts/bench_tree_peers.py --peers PEERS

Writes docs/measurements/tree_peers_cpu.json. Code of two published packages is timed as they ship
it: EAGLE's dynamic tree in AngelSlim (`topK_genrate`, one file of the package is loaded) and in
SGLang (`select_top_k_tokens` and `organize_draft_results`; run this where `sglang` imports). The
draft model is replaced by a look-up in the lattice, which is left on the clock: a few µs of each
level. No package on the registry ships DDTree or OPT-Tree, so their published algorithms are
written again below, in Python as theirs are; these rows say so, and are not their code.

One thread, 16 positions of 16 candidates, 32 nodes; mean processor time per tree, best and median
over repeats. What a peer builds is compared with what specpilot's builder of that method builds.
"""

from __future__ import annotations

import argparse
import datetime
import heapq
import importlib.util
import os
import statistics
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from bench_trees import make_lattices

from specpilot_cli.io.atomic import atomic_write_text
from specpilot_cli.report.json_out import build_envelope, render_json
from specpilot_kernels.trees import Lattices, best_first, build

NODES, TOP_K, LATTICES, REPEATS = 32, 4, 64, 9
POSITIONS = 16
DEFAULT_OUTPUT = Path("docs/measurements/tree_peers_cpu.json")
ANGELSLIM = "angelslim/compressor/speculative/inference/models/eagle3/draft/base_model.py"
OWN, THEIRS, AGAIN = "specpilot", "the package's own code", "the published algorithm, written again"

Paths = frozenset[tuple[int, ...]]
Case = tuple[str, str, str, Callable[[int], object], Callable[[int], Paths] | None, str]


def paths_of(token: Any, parent: Any) -> Paths:
    """A tree as the set of its root paths in candidate indices; the order of nodes is no matter."""
    paths: list[tuple[int, ...]] = []
    for index, above in zip(token, parent, strict=True):
        paths.append(((*paths[above],) if above >= 0 else ()) + (int(index),))
    return frozenset(paths)


def own_paths(name: str, edge: Any, unary: Any) -> list[Paths]:
    """What specpilot's builder makes of every lattice; candidates are their own indices."""
    ids = np.tile(np.arange(edge.shape[-1], dtype=np.int32), (*edge.shape[:2], 1))
    trees = build(name, Lattices(ids, edge, unary=unary, top_k=TOP_K), NODES)
    return [paths_of(tree.token, tree.parent) for tree in (trees[i] for i in range(len(trees)))]


def ddtree_again(unary: Any) -> tuple[list[int], list[int]]:
    """DDTree: a heap over rank tuples of independent positions; token and parent of each node."""
    order = np.argsort(-unary, axis=1, kind="stable")
    rank, log_p = order.tolist(), np.take_along_axis(unary, order, axis=1).tolist()
    token: list[int] = []
    parent: list[int] = []
    heap: list[tuple[float, tuple[int, ...], int]] = [(-log_p[0][0], (0,), -1)]
    while heap and len(token) < NODES:
        cost, ranks, above = heapq.heappop(heap)
        level, last = len(ranks) - 1, ranks[-1]
        token.append(rank[level][last])
        parent.append(above)
        if last + 1 < len(rank[level]):
            beside = cost + log_p[level][last] - log_p[level][last + 1]
            heapq.heappush(heap, (beside, (*ranks[:-1], last + 1), above))
        if level + 1 < len(rank):
            heapq.heappush(heap, (cost - log_p[level + 1][0], (*ranks, 0), len(token) - 1))
    return token, parent


def opt_tree_again(edge: Any) -> tuple[Any, Any]:
    """OPT-Tree: per level the best NODES children of the last level; then the best NODES of all."""
    n_positions, n_candidates = edge.shape[0], edge.shape[-1]
    tokens, parents, scores = [np.argsort(-edge[0, 0])], [np.full(n_candidates, -1)], []
    scores.append(edge[0, 0][tokens[0]].astype(np.float64))
    first = 0
    for level in range(1, n_positions):
        joint = scores[-1][:, None] + edge[level, tokens[-1]]
        best = np.argsort(-joint, axis=None, kind="stable")[:NODES]
        above = best // n_candidates
        tokens.append(best % n_candidates)
        parents.append(first + above)
        first += len(scores[-1])
        scores.append(joint.ravel()[best])
    every = np.concatenate(scores)
    kept = np.sort(np.argsort(-every, kind="stable")[:NODES])
    place = np.full(len(every) + 1, -1)
    place[kept] = np.arange(len(kept))
    return np.concatenate(tokens)[kept], place[np.concatenate(parents)[kept]]


def angelslim_cases(folder: Path | None, edge: Any) -> list[Case]:
    """EAGLE-3's tree of AngelSlim over a draft model that reads the lattice."""
    if folder is None or not (folder / ANGELSLIM).is_file():
        return []
    import torch

    spec = importlib.util.spec_from_file_location("angelslim_base_model", folder / ANGELSLIM)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    n_candidates = edge.shape[-1]
    rows = torch.from_numpy(edge)

    class Drafter(module.BaseEagle3Drafter):  # type: ignore[name-defined, misc]
        """Its hidden state is a row of the lattice, which its head passes on."""

        def __init__(self) -> None:
            sizes = SimpleNamespace(
                pad_token_id=0, vocab_size=n_candidates, draft_vocab_size=n_candidates,
                hidden_size=n_candidates,
            )  # fmt: skip
            super().__init__(sizes, total_tokens=NODES + 1, depth=POSITIONS - 1, top_k=TOP_K)
            self.norm = self.lm_head = torch.nn.Identity()
            self.init_tree()

        def start(self, lattice: int) -> None:
            self.lattice, self.level = lattice, 0
            self.reset_kv()

        def forward(self, hidden: Any, *, input_ids: Any, **_: Any) -> Any:
            found = rows[self.lattice, self.level][input_ids]
            self.level += 1
            return found, None, None

    drafter, root = Drafter(), torch.zeros((1, 2), dtype=torch.long)
    state = torch.zeros((1, 1, n_candidates))

    def run(lattice: int) -> Any:
        drafter.start(lattice)
        return drafter.topK_genrate(state, root)

    def paths(lattice: int) -> Paths:
        tokens, _, mask, _, _ = run(lattice)
        above = [int(row[:i].nonzero()[-1]) for i, row in enumerate(mask[0, 0]) if i]
        return paths_of(tokens[0, 1:].tolist(), [parent - 1 for parent in above])

    version = next(folder.glob("angelslim-*.dist-info")).name.split("-")[1].removesuffix(".dist")
    return [("EAGLE-3, AngelSlim topK_genrate", f"angelslim {version}", THEIRS, run, paths,
             "eagle-2")]  # fmt: skip


def sglang_cases(edge: Any) -> list[Case]:
    """EAGLE-2's tree of SGLang over the best children of every row."""
    try:
        import torch
        from sglang.srt.speculative.eagle_utils import organize_draft_results
        from sglang.srt.speculative.spec_utils import select_top_k_tokens
    except ImportError as error:
        print(f"SGLang skipped: {error}")
        return []
    chosen = torch.topk(torch.from_numpy(edge).exp(), TOP_K, dim=-1)

    def run(lattice: int) -> Any:
        scores, lists = None, ([], [], [])
        tokens = torch.zeros(1, dtype=torch.long)
        for level in range(POSITIONS):
            probability = chosen.values[lattice, level, tokens]
            index = chosen.indices[lattice, level, tokens]
            tokens, _, scores, info = select_top_k_tokens(
                level, probability, index, None, scores, TOP_K
            )
            for kept, item in zip(lists, info, strict=True):
                kept.append(item)
        found: tuple[list[Any], list[Any], list[Any]] = lists
        return organize_draft_results(found[0], found[1], found[2], NODES + 1)

    def paths(lattice: int) -> Paths:
        # Entries are k of the root, then k * k per level; parents name entries of the level before.
        parents, index, tokens = (item[0].tolist() for item in run(lattice))
        place = {entry: node for node, entry in enumerate(index)}
        above = [-1 if (p := parents[entry // TOP_K]) < 0 else place[p] for entry in index]
        return paths_of(tokens, above)

    version = f"sglang {metadata.version('sglang')}"
    name = "EAGLE-2, SGLang select_top_k_tokens + organize_draft_results"
    return [(name, version, THEIRS, run, paths, "eagle-2")]


def own_cases(ids: Any, edge: Any, unary: Any) -> list[Case]:
    """Specpilot's builders, and the two algorithms that are written again."""
    one = [Lattices(ids[i : i + 1], edge[i : i + 1], top_k=TOP_K) for i in range(LATTICES)]
    return [
        ("DDTree", "arXiv 2604.12989", AGAIN, lambda i: ddtree_again(unary[i]),
         lambda i: paths_of(*ddtree_again(unary[i])), "marginal"),
        ("OPT-Tree", "arXiv 2406.17276", AGAIN, lambda i: opt_tree_again(edge[i]),
         lambda i: paths_of(*opt_tree_again(edge[i])), "opt-tree"),
        ("best-first, one call", OWN, OWN, lambda i: best_first(ids[i], edge[i], NODES), None, ""),
        ("EAGLE-2, one call", OWN, OWN, lambda i: build("eagle-2", one[i], NODES), None, ""),
    ]  # fmt: skip


def timed(case: Case, repeats: int) -> dict[str, Any]:
    """Best and median processor microseconds per tree."""
    name, source, whose, run, _, _ = case
    for lattice in range(2):
        run(lattice)  # compile and warm up
    taken = []
    for _ in range(repeats):
        start_s = time.thread_time()
        for lattice in range(LATTICES):
            run(lattice)
        taken.append((time.thread_time() - start_s) / LATTICES * 1e6)
    return {"tree": name, "source": source, "code": whose, "best_us": min(taken),
            "median_us": statistics.median(taken)}  # fmt: skip


def main() -> None:
    """Measure, compare, print a table, write the JSON file."""
    parser = argparse.ArgumentParser(description="Time other projects' draft trees beside ours.")
    parser.add_argument("--peers", type=Path, help="folder with angelslim")
    parser.add_argument("--output", type=Path, default=DEFAULT_OUTPUT)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    ids, edge, unary = make_lattices(arguments.seed, LATTICES, POSITIONS)
    cases = own_cases(ids, edge, unary)
    cases += angelslim_cases(arguments.peers, edge)
    cases += sglang_cases(edge)
    own = {name: own_paths(name, edge, unary) for name in ("marginal", "opt-tree", "eagle-2")}
    records = []
    for case in cases:
        record = timed(case, REPEATS)
        if case[4] is not None:
            same = sum(case[4](i) == own[case[5]][i] for i in range(LATTICES))
            record |= {"compared_with": case[5], "identical_trees": same, "trees": LATTICES}
        records.append(record)
        print(
            f"{record['tree']:58} {record['code']:38} best {record['best_us']:8.1f} µs  median "
            f"{record['median_us']:8.1f} µs  same trees {record.get('identical_trees', '-')}"
        )
    document = {
        "measured_at_utc": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "nodes": NODES, "positions": POSITIONS, "candidates": int(edge.shape[-1]),
        "eagle_top_k": TOP_K, "load_average": os.getloadavg()[0], "records": records,
    }  # fmt: skip
    envelope = build_envelope("scripts/bench_tree_peers.py", document, seed=arguments.seed)
    atomic_write_text(arguments.output, render_json(envelope), force=True)


if __name__ == "__main__":
    main()
