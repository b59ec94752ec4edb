"""Measure tree verify and commit of Gated DeltaNet layers on this GPU; print a table, write JSON.

    SPECPILOT_SGLANG_SOURCE=.../sglang python scripts/bench_gdn_tree.py \\
        --output docs/measurements/gdn_tree_h200.json --rows 9 17 33 65 --requests 1 8

A time is that of one layer in a CUDA graph of 48 layers with states of their own, together larger
than L2 by far; the median over replays in which all columns take turns. Columns, per layer:

    wy, path     verify by either method: convolution, norms, gates, recurrence
    rows         its first kernel alone: convolution, norms, gates
    wy_alone     its second kernel alone
    chain_stock  SGLang's convolution and verify of a chain, with a snapshot per row
    tree_stock   the same on the tree
    floor        one read of the states at the measured bandwidth

With --variants also other ways to do WY verify, each as a whole, and its second kernel alone as
"..._alone". Names are the form, then "_launch" with programmatic dependent launch, then "_3" with
three rows instead of two in a block of the first kernel:

    direct       weights of the right sides are solved while the state is multiplied
    solve        U is solved after the state is multiplied

And of one commit of all layers: a path of 12 tokens, and its floor, a read and a write of all
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
VARIANTS = ("solve", "solve_launch", "direct", "direct_3", "direct_launch", "direct_launch_3")
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


def run_variant(layer: Layer, slot: torch.Tensor, trees: TreeTables, name: str) -> torch.Tensor:
    """Verify one layer in one of the ways of `VARIANTS`."""
    out = layer.mixed.new_empty((len(layer.mixed), SHAPE.value_heads, SHAPE.value_dim))
    dependent = "_launch" in name
    queries = conv.prepare_rows(
        *rows_args(layer, slot, trees), dependent=dependent,
        rows_per_block=3 if name.endswith("_3") else modules.ROWS_PER_BLOCK,
    )  # fmt: skip
    wy.wy(queries, layer.record, layer.states, slot, trees, out, SHAPE,
          form=form_of(name), dependent=dependent)  # fmt: skip
    return out


def form_of(variant: str) -> modules.Form:
    """The form of WY verify in a variant's name."""
    return "direct" if variant.startswith("direct") else "solve"


def rows_args(layer: Layer, slot: torch.Tensor, trees: TreeTables) -> tuple[Any, ...]:
    """What the first kernel takes."""
    return (layer.mixed, layer.a, layer.b, layer.weights, layer.windows, slot, trees,
            layer.record, SHAPE)  # fmt: skip


def check(
    layer: Layer, slot: torch.Tensor, trees: TreeTables, rival: stock.Stock | None,
    variants: Sequence[str],
) -> Any:  # fmt: skip
    """Stop if something is wrong; return what was compared."""
    path_out = run(layer, slot, trees, method="path")
    found = {}
    for name in ("wy", *variants):
        if name == "wy":
            out = run(layer, slot, trees, method="wy")
        else:
            out = run_variant(layer, slot, trees, name)
        far = int(gdn_reference.far_apart(out, path_out).sum())
        if far or not out.isfinite().all():
            sys.exit(f"{far} outputs of {name} are not those of path; times mean nothing")
        found[f"{name}_differs_ratio"] = (out != path_out).double().mean().item()
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


def parts(
    layers: list[Layer], slot: torch.Tensor, trees: TreeTables, forms: Sequence[modules.Form]
) -> dict[str, list[Work]]:
    """Both kernels of WY verify, each alone, the second one in all `forms` and as it ships."""
    works: dict[str, list[Work]] = {name: [] for name in (
        "rows", "wy_alone", *(f"{form}_alone" for form in forms))}  # fmt: skip
    for layer in layers:
        queries = conv.prepare_rows(*rows_args(layer, slot, trees))
        out = run(layer, slot, trees, method="wy")
        args = (queries, layer.record, layer.states, slot, trees, out, SHAPE)
        works["rows"].append(partial(conv.prepare_rows, *rows_args(layer, slot, trees)))
        works["wy_alone"].append(partial(wy.wy, *args))
        for form in forms:
            works[f"{form}_alone"].append(partial(wy.wy, *args, form=form))
    return works


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
    requests: int, rows: int, replays: int, rival: stock.Stock | None, read: float,
    variants: Sequence[str],
) -> dict[str, Any]:  # fmt: skip
    """One line of the table."""
    layers, trees = make_layers(requests, rows), make_trees(requests, rows)
    slot = torch.randperm(requests, device="cuda")
    checked = check(layers[0], slot, trees, rival, variants)
    verify.warm(SHAPE, rows, torch.cuda.current_device())
    works: dict[str, list[Work]] = {
        "wy": [partial(run, layer, slot, trees, method="wy") for layer in layers],
        "path": [partial(run, layer, slot, trees, method="path") for layer in layers],
        **{name: [partial(run_variant, layer, slot, trees, name) for layer in layers]
           for name in variants},
        **parts(layers, slot, trees, sorted({form_of(name) for name in variants})),
    }  # fmt: skip
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


def show(found: dict[str, Any]) -> None:
    """Print the table and the bars."""
    print(f"{found['gpu']}, read {found['read_bytes_per_s'] / 1e12:.2f} TB/s; us per layer")
    lines = found["verify"]
    head_line = (f"{line['requests']:>8} x{line['rows']:>3}" for line in lines)
    print("requests x rows " + "".join(head_line))
    for name in lines[0]["times_s"]:
        print(f"{name:<16}" + "".join(f"{line['times_s'][name] * 1e6:>13.2f}" for line in lines))
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


def usage(rows: Sequence[int], variants: Sequence[str]) -> dict[str, int]:
    """Registers per thread of the kernels that were timed."""
    dim = SHAPE.key_dim
    sizes = sorted({next(size for size in modules.WY_ROWS if count <= size) for count in rows})
    forms = sorted({modules.WY_FORM, *(form_of(name) for name in variants)})
    found = {}
    for module in (modules.rows(dim), modules.path(dim), modules.commit(dim),
                   *(modules.wy(dim, size, form) for size in sizes for form in forms)):  # fmt: skip
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
    parser.add_argument("--variants", nargs="+", choices=(*VARIANTS, "all"), default=[])
    return parser.parse_args()


def main() -> int:
    """Run everything; 0, since a slow kernel is a result too."""
    options = parse()
    variants = VARIANTS if "all" in options.variants else options.variants
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
            save("verify", bench_verify(requests, rows, options.replays, rival, read, variants))
            torch.cuda.empty_cache()
    found["registers"] = usage(options.rows, variants)
    options.output.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    show(found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
