"""Measure tree attention beside other people's on this GPU; print a table and write JSON.

    python scripts/bench_tree_attention.py --sglang FOLDER --output docs/measurements/FILE.json

Attention of one layer of Qwen3.8-27B (24 query heads, 4 KV heads of 256), or of another model:
trees of N nodes after a context, whose tokens lie in slots in random order. Each time is of one
layer in a CUDA graph that works through several layers' pools, more than 600 MB together, so that
L2 is cold; the median over replays in which all columns take turns. Every result is compared with
the formula before it is timed; a wrong one ends the run, or leaves a rival out. Floors: the keys,
values, queries and results moved once at the read bandwidth measured here and at the data sheet's,
and the products at the data sheet's dense rate. `--sweep` also times other tiles and splits.
Compaction is timed for the attention layers of the model, against torch's indexing per layer.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shlex
import statistics
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch
import tree_attention_rivals as rivals
from tree_attention_rivals import Problem

from specpilot_kernels.probe.measure import read_times
from specpilot_kernels.timing import in_turns
from specpilot_kernels.tree_attention import attention, compact, plan
from specpilot_kernels.tree_attention.plan import Tile
from specpilot_kernels.tree_attention.reference import tree_attention_reference
from specpilot_kernels.w12.selfcheck import cold_copies

HEADS = {
    "qwen3.8-27b": (24, 4, 256),
    "llama-3.1-8b": (32, 8, 128),
    "muse-glimmer-30b": (32, 2, 128),
    "gemma-4-12b": (16, 1, 512),
}
"""Query heads, KV heads and head dimension of the layers that see all keys."""

CONTEXTS, BATCHES, NODES = (1024, 8192, 32768, 131072), (1, 8), (8, 32, 64)
SHEET_BYTES_PER_S, SHEET_FLOPS_PER_S = 4.8e12, 989e12  # H200: HBM3e, dense BF16
TOLERANCE = 2.0**-6
LAYERS = 16

SWEPT = {
    128: (
        Tile(128, 128, 128), Tile(128, 64, 128), Tile(128, 64, 128, stages=4),
        Tile(64, 64, 128, warps=4, resident=2), Tile(64, 128, 128, warps=4), Tile(64, 64, 128),
    ),
    256: (
        Tile(128, 64, 256), Tile(128, 64, 256, stages=2), Tile(128, 32, 256),
        Tile(64, 64, 256), Tile(64, 32, 256), Tile(64, 32, 256, warps=4, resident=2),
    ),
    512: (
        Tile(128, 32, 256, stages=2), Tile(128, 32, 128), Tile(64, 32, 256), Tile(128, 16, 256),
    ),
}  # fmt: skip


def tables(batch: int, rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Random trees about as deep as real ones: ancestors, depth and mask [B, R, R]."""
    generator = torch.Generator().manual_seed(rows)
    mask = torch.zeros((batch, rows, rows), dtype=torch.bool)
    for request in range(batch):
        mask[request, 0, 0] = True
        for row in range(1, rows):
            above = int(torch.randint(max(0, row - 6), row, (), generator=generator))
            mask[request, row] = mask[request, above]
            mask[request, row, row] = True
    words = torch.zeros((batch, rows, -(-rows // 64)), dtype=torch.int64)
    for row in range(rows):
        words[..., row // 64] |= mask[..., row].long() << (row % 64)
    return words.cuda(), (mask.sum(-1, dtype=torch.int32) - 1).cuda(), mask.cuda()


def make(model: str, context: int, batch: int, nodes: int) -> Problem:
    """A problem with pools of its own."""
    heads, kv_heads, dim = HEADS[model]
    rows = nodes + 1
    slots = batch * (context + rows) + 1
    copies = cold_copies(2 * slots * kv_heads * dim * 2)

    def pool() -> torch.Tensor:
        return torch.empty((slots, kv_heads, dim), dtype=torch.bfloat16, device="cuda").normal_()

    order = torch.randperm(slots - 1, device="cuda") + 1
    ancestors, depth, mask = tables(batch, rows)
    return Problem(
        q=torch.empty((batch * rows, heads, dim), dtype=torch.bfloat16, device="cuda").normal_(),
        pools=[(pool(), pool()) for _ in range(copies)],
        kv_indptr=torch.arange(batch + 1, dtype=torch.int32, device="cuda") * context,
        kv_indices=order[: batch * context].contiguous(),
        row_slots=order[batch * context :].contiguous(),
        ancestors=ancestors,
        depth=depth,
        mask=mask,
        context=context,
        scale=dim**-0.5,
    )  # fmt: skip


def arguments(
    problem: Problem, pools: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    """Of `tree_attention`, in order."""
    return (
        problem.q, *pools, problem.kv_indptr, problem.kv_indices, problem.row_slots,
        problem.ancestors, problem.depth,
    )  # fmt: skip


def ours(problem: Problem, **choices: Any) -> list[rivals.Work]:
    """One piece for each pair of pools; choices: a tile or a number of splits."""
    if not choices:
        call = partial(attention.tree_attention, scale=problem.scale)
    else:
        kv_heads, dim = problem.pools[0][0].shape[1:]
        gpu = torch.cuda.get_device_properties(0)
        chosen = plan.choose(
            problem.rows * problem.q.shape[1] // kv_heads, kv_heads, dim,
            multiprocessors=gpu.multi_processor_count,
            shared_bytes=gpu.shared_memory_per_block_optin, **choices,
        )  # fmt: skip
        call = partial(
            attention.run_kernels, scale=problem.scale, window=None, logit_cap=None, plan=chosen
        )
    return [partial(call, *arguments(problem, pools)) for pools in problem.pools]


def error(problem: Problem, work: rivals.Work) -> float:
    """Largest difference of a piece on the first pools from the formula in float32."""
    expected = tree_attention_reference(*arguments(problem, problem.pools[0]), scale=problem.scale)
    found = work()
    worst = (found.float() - expected.float()).abs().max().item()
    return worst if found.isfinite().all() else float("inf")


def floors(problem: Problem, read_bytes_per_s: float) -> dict[str, float]:
    """Seconds below which no kernel can be."""
    keys = problem.batch * (problem.context + problem.rows)
    moved = 2 * 2 * keys * problem.pools[0][0][0].numel() + 2 * 2 * problem.q.numel()
    flops = 4 * problem.q.numel() * (problem.context + problem.rows)
    return {
        "bytes_measured_s": moved / read_bytes_per_s,
        "bytes_sheet_s": moved / SHEET_BYTES_PER_S,
        "flops_sheet_s": flops / SHEET_FLOPS_PER_S,
    }


def bench(
    problem: Problem, others: dict[str, Any], replays: int, failed: dict[str, str]
) -> dict[str, float]:
    """Seconds of every column; rivals that fail or are wrong go to `failed`, once for all."""
    works: dict[str, list[Any]] = {"ours": list(ours(problem))}
    wrong = error(problem, works["ours"][0])
    if wrong > TOLERANCE:
        sys.exit(f"off by {wrong} from the formula; times mean nothing")
    for name, rival in others.items():
        try:
            pieces = rival.works(problem)
            wrong = error(problem, pieces[0])
            if wrong > TOLERANCE:
                failed[f"{name} {problem.context} {problem.batch} {problem.rows}"] = (
                    f"off by {wrong}"
                )
                continue
            in_turns({name: pieces[:1]}, 1)  # whether it can be captured at all
            works[name] = pieces
        except Exception as refusal:  # noqa: BLE001 - whatever a foreign kernel cannot do
            shape = f"{name} {problem.context} {problem.batch} {problem.rows}"
            failed[shape] = f"{type(refusal).__name__}: {str(refusal)[:200]}"
    return in_turns(works, replays)


def sweep(problem: Problem, replays: int) -> dict[str, float]:
    """Seconds of other tiles, with the usual number of splits, half and double of it."""
    found = {}
    dim = int(problem.q.shape[2])
    for tile in SWEPT[dim]:
        usual = ours(problem, tile=tile)[0].keywords["plan"].splits  # type: ignore[attr-defined]
        for splits in sorted({max(1, usual // 2), usual, 2 * usual}):
            name = (
                f"{tile.block_m}x{tile.block_n}x{tile.value_dim} w{tile.warps} s{tile.stages} "
                f"splits {splits}"
            )
            try:
                pieces = ours(problem, tile=tile, splits=splits)
                if error(problem, pieces[0]) > TOLERANCE:
                    sys.exit(f"{name} is wrong; times mean nothing")
                found[name] = in_turns({name: list(pieces)}, replays)[name]
            except RuntimeError as refusal:  # Triton's: more shared memory than there is
                print(f"SKIPPED {name}: {str(refusal)[:100]}", file=sys.stderr)
    return found


def compaction(model: str, batch: int, replays: int) -> dict[str, float]:
    """Seconds to move paths of 12 of 33 rows in all layers: one launch, and torch per pool."""
    _, kv_heads, dim = HEADS[model]
    slots = torch.randperm(batch * 33, device="cuda").view(batch, 33)
    path = torch.tensor([[0, *range(3, 33, 3), 32, *[-1] * 5]], dtype=torch.int32, device="cuda")
    path = path.expand(batch, -1).contiguous()
    counts = torch.full((batch,), 11, dtype=torch.int32, device="cuda")
    shape = (8192, kv_heads, dim)
    pools = [torch.zeros(shape, dtype=torch.bfloat16, device="cuda") for _ in range(2 * LAYERS)]
    described = compact.KvPools.of(pools)
    source = slots.gather(1, path[:, :12].long()).flatten()
    target = slots[:, :12].reshape(-1)

    def by_indexing() -> None:
        for pool in pools:
            pool.index_copy_(0, target, pool[source])

    one_launch: Callable[[], None] = partial(compact.compact_kv, described, slots, path, counts)
    return in_turns({"ours": [one_launch] * 4, "torch": [by_indexing] * 4}, replays)


def show(row: dict[str, Any], names: list[str]) -> None:
    """One line of the table: microseconds, and how many times ours the rivals take."""
    times, floor = row["times_s"], max(row["floors_s"].values())
    cells = [f"{times['ours'] * 1e6:9.1f} {times['ours'] / floor:6.2f}x floor"]
    for name in names:
        cells.append(
            f"{times[name] * 1e6:10.1f} ({times[name] / times['ours']:5.2f}x)"
            if name in times else f"{'–':>19}"
        )  # fmt: skip
    shape = f"{row['context']:>7} {row['batch']:>3} {row['nodes']:>3} {floor * 1e6:8.1f}"
    print(shape, *cells, flush=True)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Everything that the document holds but its head."""
    others, skipped = rivals.available(options.sglang, flex=options.flex)
    times = read_times()
    read = times.bytes / statistics.median(times.seconds)
    failed: dict[str, str] = {}
    rows, swept = [], {}
    print(f"{'context':>7} {'B':>3} {'N':>3} {'floor µs':>8} {'ours µs':>9}", *others)
    for context, batch, nodes in itertools.product(
        options.contexts, options.batches, options.nodes
    ):
        problem = make(options.model, context, batch, nodes)
        row = {
            "context": context, "batch": batch, "nodes": nodes,
            "floors_s": floors(problem, read),
            "times_s": bench(problem, others, options.replays, failed),
        }  # fmt: skip
        rows.append(row)
        show(row, list(others))
        if options.sweep:
            swept[f"{context} {batch} {nodes}"] = sweep(problem, options.replays)
            for name, seconds in sorted(
                swept[f"{context} {batch} {nodes}"].items(), key=lambda x: x[1]
            ):
                print(f"    {name:40} {seconds * 1e6:9.1f} µs")
    moved = {str(batch): compaction(options.model, batch, options.replays) for batch in (1, 8)}
    for batch, found in moved.items():
        print(
            f"compaction of {LAYERS} layers, {batch} requests:",
            {k: f"{v * 1e6:.1f} µs" for k, v in found.items()},
        )
    return {"read_bytes_per_s": read, "skipped": skipped, "failed": failed, "rows": rows,
            "sweep_s": swept, "compaction_s": moved}  # fmt: skip


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path)
    parser.add_argument("--model", choices=HEADS, default="qwen3.8-27b")
    parser.add_argument("--sglang", type=Path, help="folder of the package sglang")
    parser.add_argument("--flex", action="store_true", help="also flex_attention, slow to compile")
    parser.add_argument("--sweep", action="store_true", help="also other tiles and splits")
    parser.add_argument("--contexts", type=int, nargs="+", default=CONTEXTS)
    parser.add_argument("--batches", type=int, nargs="+", default=BATCHES)
    parser.add_argument("--nodes", type=int, nargs="+", default=NODES)
    parser.add_argument("--replays", type=int, default=9)
    return parser.parse_args()


def main() -> int:
    """Run everything; about two minutes on an H200 without `--flex` and `--sweep`."""
    options = parse()
    begin = time.perf_counter()
    torch.manual_seed(0)
    found = measure(options)
    for name, reason in {**found["skipped"], **found["failed"]}.items():
        print(f"SKIPPED {name}: {reason}", file=sys.stderr)
    document = {
        "what": f"tree attention, one layer of {options.model}, seconds, medians of graph replays",
        "command": shlex.join(["python", "scripts/bench_tree_attention.py", *sys.argv[1:]]),
        "date_utc": datetime.now(UTC).strftime("%Y-%m-%d"),
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "replays": options.replays,
        **found,
        "wall_s": time.perf_counter() - begin,
    }
    if options.output is not None:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
