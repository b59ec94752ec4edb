#!/usr/bin/env python3
"""Measure W12, the recorder and the plugin in SGLang on one GPU, beside stock, in one run.

    python scripts/measure_sglang_w12.py --output docs/measurements/sglang_w12_h200.json
    python scripts/measure_sglang_w12.py --output FILE --phases muse llama --budget-s 300

No checkpoint is needed: models of the published shapes are served with random weights (see
`sglang_bench.server_side`), the demo pair with its own. Servers that are compared are resident
together and take turns in swapped order, so each ratio is one of pairs; the client times streams
(see `sglang_bench.load`). FILE is written anew after every measurement; when the budget ends, what
there is stands in it. Phases:

    plain      27B without speculation: stock with `--bf16-gemm-backend gemv` beside W12, at 1 and
               32 requests; log-probabilities compared
    stock      the same with stock's own choice of GEMM; with `plain`, KV pools on 80 GB
    chain      27B with the stock DFlash2 chain of block 8, BF16 and W12 target
    recorder   the plugin absent, inert, recording dense and anchored
    pair       the demo pair: token-force, and answers for measure_sglang_pair.py compare
    llama      Llama-3.1-8B and Gemma-4-12B shapes at 1, 8 and 32 requests
    muse       Muse-Glimmer-30B shape at 1, 8 and 32 requests

The plugins must be known to Python's package metadata: `--site DIR` writes a folder with both
entry points, to be put on PYTHONPATH together with the repository, `kernels` and `scripts`.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import threading
import tomllib
from pathlib import Path
from types import FrameType

from sglang_bench import models, phases
from sglang_bench.book import Book, Clock
from sglang_bench.fleet import WEIGHTS_PLUGIN, Fleet, gpu_state, wait_memory_free
from sglang_bench.phases import Bench, Phase, Servers

REPOSITORY = Path(__file__).resolve().parent.parent
GROUP = "sglang.srt.plugins"
NAMES = ("plain", "stock", "chain", "recorder", "pair", "llama", "muse")
PAIR_PARTS = ("target", "drafter")
END_S = 6.0


def write_site(folder: Path) -> None:
    """A folder of package metadata with specpilot's entry points and the weights' plugin."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    ours = project["entry-points"][GROUP]
    for name, points in (
        (project["name"], ours),
        (WEIGHTS_PLUGIN, {WEIGHTS_PLUGIN: "sglang_bench.server_side:register"}),
    ):
        version = project["version"]
        place = folder / f"{name.replace('-', '_')}-{version}.dist-info"
        place.mkdir(parents=True, exist_ok=True)
        about = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
        lines = [f"[{GROUP}]", *(f"{key} = {value}" for key, value in points.items())]
        (place / "METADATA").write_text("\n".join(about) + "\n")
        (place / "entry_points.txt").write_text("\n".join(lines) + "\n")


def prepare_models(folder: Path, tiny: tuple[Path, Path] | None) -> None:
    """Model folders: shapes, or the `tiny` target and drafter under their names; the demo pair."""
    folder.mkdir(parents=True, exist_ok=True)
    places = {f"pair-{part}": REPOSITORY / "recipes" / "demo-cpu" / part for part in PAIR_PARTS}
    if tiny is None:
        models.write_folders(folder, models.folders())
    else:
        places |= {name: tiny[name.endswith("dflash2")] for name in models.folders()}
        places |= {f"pair-{part}": tiny[number] for number, part in enumerate(PAIR_PARTS)}
    for name, place in places.items():
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(place.resolve())


def chosen_phases(bench: Bench, names: list[str]) -> list[Phase]:
    """Phases in the order of importance."""
    found: list[Phase] = []
    plain = zip(phases.plain_phases(bench), ("plain", "stock"), strict=True)
    found += [phase for phase, name in plain if name in names]
    if "chain" in names:
        found.append(phases.chain_phase(bench))
    if "recorder" in names:
        found.append(phases.recorder_phase(bench, with_pair="pair" in names))
    others = phases.other_model_phases(bench)
    return found + [p for p, name in zip(others, ("llama", "muse"), strict=True) if name in names]


def run_phases(bench: Bench, todo: list[Phase]) -> None:
    """Every phase that the budget still allows; the next one's servers wait at their gates."""
    idle = float(gpu_state().get("memory.used", 0))
    bench.fleet.launch(todo[0].specs())
    for number, phase in enumerate(todo):
        following = todo[number + 1] if number + 1 < len(todo) else None
        names = [spec.name for spec in phase.specs()]
        if bench.book.clock.left_s < phase.need_s:
            bench.book.note(f"{phase.name}: {phase.need_s:g} s no longer fit, left out")
            bench.fleet.stop(names)
            if following is not None:
                bench.fleet.launch(following.specs())
            continue
        facts = load(bench, phase, following)
        bench.book.note(f"{phase.name}: {', '.join(facts)} ready")
        if phase.essential is not None and phase.essential not in facts:
            bench.book.note(f"without {phase.essential} the rest would say little")
            return
        try:
            phase.run(bench, facts)
        except Exception as error:  # noqa: BLE001 - the other phases go on
            bench.book.fail(phase.name, error)
        bench.fleet.stop(names)
        waiting = len(bench.fleet.running)
        wait_memory_free(idle + 1000 + 700 * waiting)


def load(bench: Bench, phase: Phase, following: Phase | None) -> Servers:
    """Open the gates of a phase group by group; return the facts of the servers that are ready."""
    fleet, book = bench.fleet, bench.book
    fleet.wait_parked(spec.name for spec in phase.specs())
    if following is not None:
        fleet.launch(following.specs())
    for spec in phase.sides:
        fleet.open(spec.name)
    for spec in phase.sides:
        fleet.wait_pools(spec.name)
    side = threading.Thread(target=_side_work, args=(bench, phase), daemon=True)
    side.start()
    for group in phase.groups:
        for spec in group:
            fleet.open(spec.name)
        for spec in group:
            fleet.wait_pools(spec.name)
    side.join()
    facts = {}
    for group in phase.groups:
        for spec in group:
            found = _ready(bench, spec.name)
            if found is not None:
                facts[spec.name] = found
    if following is not None:
        fleet.wait_parked(spec.name for spec in following.specs())
    book.note(f"{phase.name}: GPU {gpu_state()}")
    return facts


def _side_work(bench: Bench, phase: Phase) -> None:
    if phase.side is None:
        return
    ready = [_ready(bench, spec.name) for spec in phase.sides]
    if all(ready):
        phase.side(bench)
    bench.fleet.stop(spec.name for spec in phase.sides)


def _ready(bench: Bench, name: str) -> dict[str, object] | None:
    try:
        facts = bench.fleet.wait_ready(name)
    except Exception as error:  # noqa: BLE001 - the other servers go on
        bench.book.fail(f"server {name}", error)
        return None
    bench.book.put("servers", name, facts)
    return facts


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path)
    parser.add_argument("--work", type=Path, default=Path("/tmp/specpilot-bench"))
    parser.add_argument("--phases", nargs="+", choices=NAMES, default=list(NAMES[:5]))
    parser.add_argument("--budget-s", type=float, default=560.0)
    parser.add_argument("--port", type=int, default=9000, help="the first server is 1100 above")
    parser.add_argument("--setup", type=Path, help="a JSON object that goes into the result")
    parser.add_argument("--site", type=Path, help="write the package metadata there, and stop")
    parser.add_argument("--cpu", type=Path, nargs=2, metavar=("TARGET", "DRAFTER"),
                        help="rehearse on the CPU: every model is this one")  # fmt: skip
    args = parser.parse_args()
    if args.site is None and args.output is None:
        parser.error("--output is required")
    return args


def _give_up(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def main() -> int:
    """Run; 0 if every measurement was made."""
    args = parse()
    if args.site is not None:
        write_site(args.site)
        return 0
    signal.signal(signal.SIGTERM, _give_up)
    folders = args.work / "models"
    prepare_models(folders, args.cpu)
    setup = json.loads(args.setup.read_text(encoding="utf-8")) if args.setup else {}
    book = Book(args.output, Clock(args.budget_s - END_S), {"gpu": gpu_state(), **setup})
    common = phases.CPU_ARGS if args.cpu else phases.GPU_ARGS
    fleet = Fleet(args.work / "servers", common, first_port=args.port)
    bench = Bench(
        fleet, book, folders, args.work, REPOSITORY, cpu=bool(args.cpu), short=bool(args.cpu)
    )  # fmt: skip
    try:
        run_phases(bench, chosen_phases(bench, args.phases))
    finally:
        fleet.close()
        book.note(f"end, {len(book.results['failures'])} failures")
    return 1 if book.results["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
