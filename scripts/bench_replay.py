#!/usr/bin/env python3
"""Time and weigh replay on this CPU and write docs/measurements/replay_speed_cpu.json.

    OMP_NUM_THREADS=1 python scripts/bench_replay.py --scratch FOLDER [--skip-stream]

Three things, on one thread: the whole curve τ(N), N = 1 … 128, of 5,000 lattices of 16 positions;
the memory in which `specpilot replay` reads recordings of 100 thousand and of 1 million lattices;
and `replay` and `ceiling` on the committed recordings of the demo pair in a process where torch
cannot be imported. Wall time and processor time are both given, since the machine may be shared.
The long recordings take 9 GB under --scratch and are deleted.
"""

from __future__ import annotations

import argparse
import datetime
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from bench_trees import make_lattices

from specpilot_cli.io.atomic import atomic_write_text
from specpilot_cli.io.lattice_file import write_lattice
from specpilot_cli.replay.run import replay
from specpilot_cli.report.json_out import build_envelope, render_json
from specpilot_cli.schema.lattice import LatticeMetadata, LatticeRecording, LatticeRequest
from specpilot_kernels.trees import chain_batch
from specpilot_kernels.trees.trace import truth_pop_index

DEFAULT_OUTPUT = Path("docs/measurements/replay_speed_cpu.json")
ROOT = Path("recipes/demo-cpu")
CURVE_LATTICES, CURVE_NODES = 5000, 128
STREAM_POSITIONS, SHARD_LATTICES, TOKENS = 7, 50_000, 101
STREAM_LATTICES = (100_000, 1_000_000)
REPEATS = 5
# Runs the command in a process that has no torch, and reports its own time and memory. Memory is
# VmHWM: ru_maxrss would count the pages of this script, which the process held until its exec.
_RUNNER = """
import json, resource, sys, time
sys.modules["torch"] = None
start = time.perf_counter()
from specpilot_cli.main import main
code = main(json.loads(sys.argv[1]))
usage = resource.getrusage(resource.RUSAGE_SELF)
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
print(json.dumps({"exit_code": code, "wall_s": time.perf_counter() - start,
    "processor_s": usage.ru_utime + usage.ru_stime,
    "peak_rss_bytes": int(status["VmHWM"].split()[0]) * 1024}), file=sys.stderr)
"""


def timed(function: Callable[[], object], repeats: int) -> dict[str, float]:
    """Best wall and processor seconds of calling `function`."""
    function()  # compile and warm up
    wall, used = [], []
    for _ in range(repeats):
        start, cpu = time.perf_counter(), time.process_time()
        function()
        wall.append(time.perf_counter() - start)
        used.append(time.process_time() - cpu)
    return {"best_wall_s": min(wall), "best_processor_s": min(used)}


def recording(ids: Any, edge: Any, unary: Any, tokens: int, first: int = 0) -> LatticeRecording:
    """A dense recording of these lattices; the truth is the drafter's own first choices."""
    n_steps, n_positions, _ = ids.shape
    n_requests = n_steps // (tokens - 1)
    output = np.zeros((n_requests, tokens), dtype=np.int32)
    output[:, 1:] = ids[:, 0, 0].reshape(n_requests, tokens - 1)
    return LatticeRecording(
        metadata=LatticeMetadata(
            mode="dense",
            block=n_positions + 1,
            engine="synthetic 1",
            requests=[
                LatticeRequest(request_id=f"r{first + r}", benchmark=f"b{r % 4}")
                for r in range(n_requests)
            ],
            target_sha256="0" * 64,
            drafter_sha256="1" * 64,
        ),
        prompt_ids=np.zeros(n_requests, dtype=np.int32),
        prompt_offsets=np.arange(n_requests + 1, dtype=np.int64),
        output_ids=output.reshape(-1),
        output_offsets=np.arange(0, output.size + 1, tokens, dtype=np.int64),
        step_request=np.repeat(np.arange(n_requests, dtype=np.int32), tokens - 1),
        step_position=np.tile(np.arange(tokens - 1, dtype=np.int64), n_requests),
        candidate_ids=ids,
        edge=edge,
        unary=unary,
        unary_logsumexp=np.full(ids.shape[:2], 1e-3, dtype=np.float32),
        stock_choice=chain_batch(ids, edge).token,
    )


def measure_curve(seed: int) -> dict[str, Any]:
    """τ(N) for every N from 1 to 128: the traces alone, and the whole of `replay`."""
    ids, edge, unary = make_lattices(seed, CURVE_LATTICES)
    truth = np.ascontiguousarray(ids[:, :, 0])
    budgets = np.arange(1, CURVE_NODES + 1)

    def curve() -> Any:
        index, _ = truth_pop_index(ids, edge, truth, budgets)
        counts = np.bincount(np.minimum(index, CURVE_NODES + 1).ravel(), minlength=CURVE_NODES + 2)
        return 1.0 + np.cumsum(counts)[1 : CURVE_NODES + 1] / CURVE_LATTICES

    rec = recording(ids, edge, unary, TOKENS)
    whole = timed(lambda: replay(rec, ["best-first"], nodes=budgets.tolist()), REPEATS)
    return {"lattices": CURVE_LATTICES, "nodes": [1, CURVE_NODES],
            "traces": timed(curve, REPEATS), "replay_with_intervals": whole}  # fmt: skip


def run_without_torch(arguments: list[str]) -> dict[str, Any]:
    """One command in a process of its own: exit code, seconds, peak memory, and its answer."""
    done = subprocess.run(
        [sys.executable, "-c", _RUNNER, json.dumps(arguments)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    found: dict[str, Any] = json.loads(done.stderr.strip().splitlines()[-1])
    if found["exit_code"] != 0:
        raise SystemExit(f"{' '.join(arguments)}: exit code {found['exit_code']}\n{done.stderr}")
    return found


def measure_stream(scratch: Path, seed: int) -> list[dict[str, Any]]:
    """Peak memory of `specpilot replay` against the length of the recording."""
    ids, edge, unary = make_lattices(seed, SHARD_LATTICES, STREAM_POSITIONS)
    rec = recording(ids, edge, unary, TOKENS)
    found = []
    for lattices in STREAM_LATTICES:
        folder = scratch / f"stream-{lattices}"
        shards = lattices // SHARD_LATTICES
        for shard in range(shards):
            requests = [
                LatticeRequest(request_id=f"r{shard}-{r}", benchmark=f"b{r % 4}")
                for r in range(rec.n_requests)
            ]
            update = {"requests": requests, "shard_index": shard, "shard_count": shards}
            part = LatticeRecording(
                metadata=rec.metadata.model_copy(update=update), **rec.tensors()
            )
            write_lattice(folder / f"shard-{shard:03}.safetensors", part, force=True)
        size = sum(path.stat().st_size for path in folder.iterdir())
        arguments = ["replay", str(folder), "--policy", "chain", "--policy", "best-first"]
        run = run_without_torch([*arguments, "--nodes", "8,32,63", "--json", "-q"])
        found.append({"lattices": lattices, "file_bytes": size, **run})
        print(f"{lattices:,} lattices, {size:,} bytes: {run}")
        shutil.rmtree(folder)
    return found


def measure_commands(scratch: Path) -> list[dict[str, Any]]:
    """`replay` and `ceiling` on the committed recordings; a step profile is made first."""
    profile = scratch / "step.json"
    make = [
        sys.executable, "-m", "specpilot_cli", "profile", "--target", str(ROOT / "target"),
        "--drafter", str(ROOT / "drafter"), "--mode", "chain", "-o", str(profile), "--force", "-q",
    ]  # fmt: skip
    subprocess.run(make, check=True, stdout=subprocess.DEVNULL)
    found = []
    for path in sorted((ROOT / "recordings").glob("*.safetensors")):
        for arguments in (
            ["replay", str(path), "-q"],
            ["replay", str(path), "--calibrate", "-q"],
            ["ceiling", str(profile), "--lattices", str(path), "-q"],
        ):
            runs = [run_without_torch(arguments) for _ in range(2)]
            best = min(runs, key=lambda run: run["processor_s"])
            shown = " ".join(arguments).replace(str(profile), "step.json")
            found.append({"command": shown, "file_bytes": path.stat().st_size, **best})
            print(f"{shown}: {best['wall_s']:.2f} s, {best['processor_s']:.2f} s of processor")
    return found


def main() -> None:
    """Measure, print, write the JSON file."""
    parser = argparse.ArgumentParser(description="Time and weigh replay on this CPU.")
    parser.add_argument("--output", type=Path, default=DEFAULT_OUTPUT)
    parser.add_argument("--scratch", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--skip-stream", action="store_true", help="keep the 9 GB part of the last run"
    )
    arguments = parser.parse_args()
    arguments.scratch.mkdir(parents=True, exist_ok=True)
    curve = measure_curve(arguments.seed)
    print(f"τ(N) to {CURVE_NODES} of {CURVE_LATTICES} lattices: {curve}")
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    document = {
        "measured_at_utc": now,
        "curve": curve,
        "commands": measure_commands(arguments.scratch),
    }
    if arguments.skip_stream:
        before = json.loads(arguments.output.read_text(encoding="utf-8"))["results"]
        document |= {name: before[name] for name in ("stream_measured_at_utc", "stream")}
    else:
        stream = measure_stream(arguments.scratch, arguments.seed)
        document |= {"stream_measured_at_utc": now, "stream": stream}
    envelope = build_envelope("scripts/bench_replay.py", document, seed=arguments.seed)
    atomic_write_text(arguments.output, render_json(envelope), force=True)


if __name__ == "__main__":
    main()
