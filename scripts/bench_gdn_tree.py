"""Measure tree verify and commit of Gated DeltaNet layers on this GPU; print a table, write JSON.

    SPECPILOT_SGLANG_SOURCE=.../sglang python scripts/bench_gdn_tree.py \\
        --output docs/measurements/gdn_tree_h200.json --rows 9 17 33 65 --requests 1 8

A time is that of one layer in a CUDA graph of 48 layers with states of their own, together larger
than L2 by far; the median over replays in which all columns take turns. Columns, per layer:

    wy, path     verify by either method: convolution, norms, gates, recurrence
    rows         its first kernel alone: convolution, norms, gates
    wy_alone     its second kernel alone
    wy_plain     verify with WY, without programmatic dependent launch
    chain_stock  SGLang's convolution and verify of a chain, with a snapshot per row
    tree_stock   the same on the tree
    floor        one read of the states at the measured bandwidth

and of one commit of all layers: a path of 12 tokens, and its floor, a read and a write of all
states. Stock columns need SGLang's sources. Results are checked before they are timed: WY against
path, and where there are sources path and commit on chains against stock, bit by bit. The file is
written anew after every line. Most of the time Triton compiles stock's convolution, which it
unrolls over rows, so the default is short: one request of 9 and of 33 rows, less than a minute.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch

from specpilot_kernels import build, launch
from specpilot_kernels.probe import measure as probe
from specpilot_kernels.timing import Work, in_turns
from specpilot_kernels.tree_verify import conv, gdn_reference, modules, stock, verify, wy
from specpilot_kernels.tree_verify.commit import GdnCommit
from specpilot_kernels.tree_verify.conv import LayerWeights
from specpilot_kernels.tree_verify.records import GdnShape, ReplayRecord, TreeTables, tables

SHAPE = GdnShape(16, 48, 128, 128)
LAYERS = 48
ROWS = (9, 33)
BATCHES = (1,)
DEPTH = 15
PATH_ROWS = 12
BAR_ROWS = 33
BARS = {f"wy_{BAR_ROWS}_rows_s": 12e-6, "commit_s": 300e-6}
"""Of batch 1: seconds per layer of WY verify at 33 rows, and of a commit of 12 tokens."""


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer with its own pools and this step's rows."""

    weights: LayerWeights
    mixed: torch.Tensor
    a: torch.Tensor
    b: torch.Tensor
    states: torch.Tensor
    windows: torch.Tensor
    record: ReplayRecord


def make_layers(requests: int, rows: int) -> list[Layer]:
    """48 layers with random contents."""

    def normal(*size: int, std: float = 1.0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device="cuda").normal_(0, std)

    total, wide = requests * rows, torch.float32
    heads = SHAPE.value_heads
    return [
        Layer(
            LayerWeights(normal(SHAPE.channels, 4, std=0.5), None, normal(heads, dtype=wide),
                         normal(heads, dtype=wide)),
            normal(total, SHAPE.channels), normal(total, heads), normal(total, heads),
            normal(requests, heads, SHAPE.value_dim, SHAPE.key_dim, std=0.3, dtype=wide),
            normal(requests, SHAPE.channels, 3),
            ReplayRecord.allocate(SHAPE, requests, rows, "cuda"),
        )
        for _ in range(LAYERS)
    ]  # fmt: skip


def make_trees(requests: int, rows: int) -> TreeTables:
    """Trees with long and short branches, at most 15 deep."""
    generator = torch.Generator().manual_seed(1)
    trees = []
    for _ in range(requests):
        parents, depth = [-1], [0]
        while len(parents) < rows:
            deep = torch.rand((), generator=generator).item() < 0.6
            at = int(torch.randint(len(parents), (), generator=generator))
            at = len(parents) - 1 if deep else at
            if depth[at] < DEPTH:
                parents.append(at)
                depth.append(depth[at] + 1)
        trees.append(parents)
    found = tables(torch.tensor(trees))
    return TreeTables(found.parent.cuda(), found.tap.cuda())


def run(layer: Layer, slot: torch.Tensor, trees: TreeTables, **options: Any) -> torch.Tensor:
    """Verify one layer."""
    return verify.gdn_tree_verify(
        layer.mixed, layer.a, layer.b, layer.weights, layer.states, layer.windows, slot, trees,
        layer.record, **options,
    )  # fmt: skip


def check(layer: Layer, slot: torch.Tensor, trees: TreeTables, rival: stock.Stock | None) -> Any:
    """Stop if something is wrong; return what was compared."""
    wy_out, path_out = (run(layer, slot, trees, method=m) for m in ("wy", "path"))
    far = int(gdn_reference.far_apart(wy_out, path_out).sum())
    if far or not wy_out.isfinite().all():
        sys.exit(f"{far} outputs of WY are not those of path; times mean nothing")
    found = {"wy_differs_ratio": (wy_out != path_out).double().mean().item()}
    if rival is None:
        return found
    requests, rows = trees.parent.shape
    chain = tables(torch.arange(-1, rows - 1).repeat(requests, 1))
    chain = TreeTables(chain.parent.cuda(), chain.tap.cuda())
    out = run(layer, slot, chain, method="path")
    states, windows, batch = layer.states.clone(), layer.windows.clone(), stock.Batch.of(slot, rows)
    convolved = rival.convolve(layer.mixed, layer.weights, windows, batch)
    expected = rival.recur(convolved, layer.a, layer.b, layer.weights, states, batch, SHAPE)
    mine = layer.states.clone(), layer.windows.clone()
    path = torch.arange(rows, dtype=torch.int32, device="cuda").repeat(requests, 1)
    count = torch.full((requests,), rows - 1, dtype=torch.int32, device="cuda")
    GdnCommit([layer.record], [mine[0]], [mine[1]])(slot, path, count)
    found["path_is_stock"] = torch.equal(out, expected)
    found["commit_is_stock"] = torch.equal(mine[0], states) and torch.equal(mine[1], windows)
    return found


def parts(layers: list[Layer], slot: torch.Tensor, trees: TreeTables) -> dict[str, list[Work]]:
    """Both kernels of WY verify, each alone."""
    rows_works: list[Work] = []
    wy_works: list[Work] = []
    for layer in layers:
        rows_args = (
            layer.mixed, layer.a, layer.b, layer.weights, layer.windows, slot, trees, layer.record,
            SHAPE,
        )  # fmt: skip
        queries = conv.prepare_rows(*rows_args)
        out = run(layer, slot, trees, method="wy")
        rows_works.append(partial(conv.prepare_rows, *rows_args))
        wy_works.append(
            partial(wy.wy, queries, layer.record, layer.states, slot, trees, out, SHAPE)
        )
    return {"rows": rows_works, "wy_alone": wy_works}


def stock_works(
    rival: stock.Stock, layers: list[Layer], slot: torch.Tensor, trees: TreeTables
) -> dict[str, list[Work]]:
    """SGLang's verify of chain and tree; all layers write the same snapshots, to save memory."""
    requests, rows = trees.parent.shape
    snapshots = stock.Snapshots.allocate(SHAPE, requests, rows)
    batch, of_stock = stock.Batch.of(slot, rows), stock.StockTree.of(trees.parent)
    windows = layers[0].windows.clone()  # stock moves them, also where it only verifies

    def one(layer: Layer, tree: stock.StockTree | None) -> torch.Tensor:
        convolved = rival.convolve(
            layer.mixed, layer.weights, windows, batch, snapshots=snapshots, tree=tree
        )
        return rival.recur(
            convolved, layer.a, layer.b, layer.weights, layer.states, batch, SHAPE,
            snapshots=snapshots, tree=tree,
        )  # fmt: skip

    return {
        name: [partial(one, layer, tree) for layer in layers]
        for name, tree in (("chain_stock", None), ("tree_stock", of_stock))
    }


def bench_verify(
    requests: int, rows: int, replays: int, rival: stock.Stock | None, read: float
) -> dict[str, Any]:
    """One line of the table."""
    layers, trees = make_layers(requests, rows), make_trees(requests, rows)
    slot = torch.randperm(requests, device="cuda")
    checked = check(layers[0], slot, trees, rival)
    verify.warm(SHAPE, rows, torch.cuda.current_device())
    works: dict[str, list[Work]] = {
        "wy": [partial(run, layer, slot, trees, method="wy") for layer in layers],
        "path": [partial(run, layer, slot, trees, method="path") for layer in layers],
        "wy_plain": [
            partial(run, layer, slot, trees, method="wy", dependent=False) for layer in layers
        ],
        **parts(layers, slot, trees),
    }
    if rival is not None:
        works |= stock_works(rival, layers, slot, trees)
    times = in_turns(works, replays)
    times["floor"] = layers[0].states.nbytes / read
    return {
        "requests": requests,
        "rows": rows,
        "times_s": times,
        "checked": checked,
        "record_bytes": layers[0].record.nbytes,
        "state_bytes": layers[0].states.nbytes,
    }


def bench_commit(requests: int, replays: int, read: float) -> dict[str, Any]:
    """A path of 12 tokens through all layers."""
    rows = 33
    layers, trees = make_layers(requests, rows), make_trees(requests, rows)
    slot = torch.randperm(requests, device="cuda")
    for layer in layers:
        run(layer, slot, trees)
    commit = GdnCommit(*([getattr(x, name) for x in layers] for name in
                         ("record", "states", "windows")))  # fmt: skip
    path = torch.arange(PATH_ROWS, dtype=torch.int32, device="cuda").repeat(requests, 1)
    count = torch.full((requests,), PATH_ROWS - 1, dtype=torch.int32, device="cuda")
    work: Work = partial(commit, slot, path, count)
    times = in_turns({"commit": [work] * 4}, replays)
    moved = 2 * sum(layer.states.nbytes for layer in layers)
    return {"requests": requests, "path_rows": PATH_ROWS, "commit_s": times["commit"],
            "floor_s": moved / read}  # fmt: skip


COLUMNS = ("wy", "path", "wy_plain", "rows", "wy_alone", "chain_stock", "tree_stock", "floor")


def show(found: dict[str, Any]) -> None:
    """Print the table and the bars."""
    print(f"{found['gpu']}, read {found['read_bytes_per_s'] / 1e12:.2f} TB/s; us per layer")
    print("requests rows " + "".join(f"{name:>12}" for name in COLUMNS))
    for line in found["verify"]:
        cells = (line["times_s"].get(name) for name in COLUMNS)
        print(f"{line['requests']:>8} {line['rows']:>4} " + "".join(
            f"{'-':>12}" if cell is None else f"{cell * 1e6:12.2f}" for cell in cells))  # fmt: skip
    for line in found["commit"]:
        print(f"commit of {line['path_rows']} rows, {line['requests']} requests: "
              f"{line['commit_s'] * 1e6:.1f} us, floor {line['floor_s'] * 1e6:.1f}")  # fmt: skip
    for name, bar in BARS.items():
        value = found["bars"].get(name)
        if value is not None:
            print(f"bar {name}: {value * 1e6:.2f} us of {bar * 1e6:.0f}: "
                  f"{'met' if value <= bar else 'MISSED'}")  # fmt: skip
    for line in found["verify"]:
        print(f"checked, {line['requests']} requests, {line['rows']} rows: {line['checked']}")


def rival_or_none() -> stock.Stock | None:
    """SGLang's kernels, or a word about why there are none."""
    try:
        return stock.load()
    except stock.StockMissing as error:
        print(f"no stock columns: {error}", file=sys.stderr)
        return None


def usage(rows: Sequence[int]) -> dict[str, int]:
    """Registers per thread of the kernels that were timed."""
    dim = SHAPE.key_dim
    sizes = sorted({next(size for size in modules.WY_ROWS if count <= size) for count in rows})
    found = {}
    for module in (modules.rows(dim), modules.path(dim), modules.commit(dim),
                   *(modules.wy(dim, size) for size in sizes)):  # fmt: skip
        binary = build.build(module, build.architecture_for(module, launch.capability()))
        found[module.name] = binary.usage[module.entries[0].name].registers
    return found


def head(read: float, replays: int) -> dict[str, Any]:
    """The document without a line."""
    return {
        "what": "Gated DeltaNet tree verify per layer and commit of 48 layers, seconds, medians",
        "command": shlex.join(["python", "scripts/bench_gdn_tree.py", *sys.argv[1:]]),
        "date_utc": datetime.now(UTC).strftime("%Y-%m-%d"),
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "layers": LAYERS,
        "replays": replays,
        "read_bytes_per_s": read,
        "registers": {},
        "bars": {},
        "verify": [],
        "commit": [],
    }


def keep(found: dict[str, Any], kind: str, line: dict[str, Any]) -> None:
    """Add a line, and the bar that it decides."""
    found[kind].append(line)
    if line["requests"] == 1 and kind == "commit":
        found["bars"]["commit_s"] = line["commit_s"]
    elif line["requests"] == 1 and line["rows"] == BAR_ROWS:
        found["bars"][f"wy_{BAR_ROWS}_rows_s"] = line["times_s"]["wy"]


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("docs/measurements/gdn_tree_h200.json"))
    parser.add_argument("--replays", type=int, default=25)
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--requests", type=int, nargs="+", default=BATCHES)
    return parser.parse_args()


def main() -> int:
    """Run everything; 0, since a slow kernel is a result too."""
    options = parse()
    begin = time.perf_counter()
    torch.manual_seed(0)
    times = probe.read_times()
    read = times.bytes / statistics.median(times.seconds)
    rival = rival_or_none()
    found = head(read, options.replays)
    options.output.parent.mkdir(parents=True, exist_ok=True)

    def save(kind: str, line: dict[str, Any]) -> None:
        keep(found, kind, line)
        found["wall_s"] = time.perf_counter() - begin
        options.output.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
        print(f"{found['wall_s']:6.1f} s  {kind}: {line['requests']} requests, "
              f"{line.get('rows', PATH_ROWS)} rows", file=sys.stderr)  # fmt: skip

    for requests in options.requests:
        save("commit", bench_commit(requests, options.replays, read))
        for rows in options.rows:
            save("verify", bench_verify(requests, rows, options.replays, rival, read))
            torch.cuda.empty_cache()
    found["registers"] = usage(options.rows)
    options.output.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    show(found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
