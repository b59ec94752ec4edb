#!/usr/bin/env python3
"""Profile the demo pair, so that `ceiling` and `replay --step-times` need no torch to try.

    OMP_NUM_THREADS=1 python scripts/profile_demo_pair.py

Writes recipes/demo-cpu/step.json, stock's step (chain, block 8) by kernel class, and
profiles/step_times/demo-cpu.json, the step times of best-first trees on a block of 16 and of plain
decoding, as `specpilot profile` measures them on the dev prompts. The profile also gets stock's
tokens per step: exact replay of recipes/demo-cpu/recordings/block-8.safetensors, which the other
recordings' trees are then compared with. Run it from the repository's root on an idle machine;
about one minute on one core.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from specpilot_cli.engines.reference.engine import ReferenceEngine
from specpilot_cli.engines.reference.profiler import (
    Plan,
    describe_device,
    profile_steps,
    step_time_curve,
)
from specpilot_cli.engines.reference.spec import SpecConfig
from specpilot_cli.io.json_file import write_json
from specpilot_cli.io.lattice_file import read_lattice
from specpilot_cli.io.prompts_file import read_prompts
from specpilot_cli.replay.run import replay

PAIR = Path("recipes/demo-cpu")
STEP, TIMES = PAIR / "step.json", Path("profiles/step_times/demo-cpu.json")
STOCK, BLOCK = SpecConfig("chain", 8), 16
STOCK_RECORDING = PAIR / "recordings" / "block-8.safetensors"
ROWS = (4, 8, 9, 12, 16, 17, 24, 32, 33, 48, 64)


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--step", type=Path, default=STEP)
    parser.add_argument("--times", type=Path, default=TIMES)
    options = parser.parse_args()
    engine = ReferenceEngine(PAIR / "target", PAIR / "drafter", STOCK, threads=1)
    prompts = read_prompts(PAIR / "prompts" / "dev.jsonl")
    plan = Plan([engine.encode(p.text) for p in prompts], repeats=15, real_prompts=True)
    device = describe_device(engine)
    step = profile_steps(engine, plan, device=device)
    curve = step_time_curve(engine, plan, ROWS, block=BLOCK, device=device)
    tau = replay(read_lattice(STOCK_RECORDING), ["chain"]).rows[0].tau.value
    source = f"{step.source}; tau: exact replay of {STOCK_RECORDING.name}"
    write_json(options.step, step.model_copy(update={"tau": tau, "source": source}), force=True)
    named = curve.model_copy(update={"name": options.times.stem})
    write_json(options.times, named, force=True)


if __name__ == "__main__":
    main()
