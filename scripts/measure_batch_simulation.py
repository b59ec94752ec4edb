#!/usr/bin/env python3
"""Does the batch simulation predict the reference engine's throughput on the demo pair?

    OMP_NUM_THREADS=1 python scripts/measure_batch_simulation.py

Measures decode steps of the reference engine on a grid of requests, nodes and blocks that holds
none of the judged settings, and prefill passes; fits the components of
`specpilot_cli/schema/batch_times.py` to them; records lattices of the dev prompts; simulates the
judged policies; then runs the engine with each, in turns, and compares tokens per second. Writes
profiles/batch_times/demo-cpu.json and docs/measurements/batch_simulation.json. Run it from the
repository's root; about two minutes on one core.

All times are seconds of processor time of this process, which runs one thread: on an idle machine
that is the time on the clock, and on a shared one it leaves out what others took.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.optimize import nnls

from specpilot_cli.engines.base import GenerateRequest
from specpilot_cli.engines.reference.decode import Job, prefill_pass
from specpilot_cli.engines.reference.engine import ReferenceEngine
from specpilot_cli.engines.reference.record import record_dense
from specpilot_cli.engines.reference.spec import SpecConfig
from specpilot_cli.engines.reference.stepping import StepRunner
from specpilot_cli.io.atomic import atomic_write_text
from specpilot_cli.io.cpu_info import cpu_name
from specpilot_cli.io.prompts_file import read_prompts
from specpilot_cli.report.json_out import build_envelope, render_json
from specpilot_cli.schema.batch_times import BatchStepTimes
from specpilot_cli.schema.prompts import Prompt
from specpilot_cli.simulate.batch import simulate_batches
from specpilot_cli.simulate.policy import parse_policy

PAIR = Path("recipes/demo-cpu")
TIMES = Path("profiles/batch_times/demo-cpu.json")
OUTPUT = Path("docs/measurements/batch_simulation.json")
REQUESTS, REPEATS = (1, 4, 12), (1, 4)
SETTINGS = (
    SpecConfig("ar"),
    SpecConfig("tree", 6, 4),
    SpecConfig("tree", 6, 10),
    SpecConfig("tree", 12, 24),
    SpecConfig("tree", 10, 48),
    SpecConfig("tree", 14, 12),
    SpecConfig("chain", 12),
)
JUDGED: dict[str, SpecConfig] = {
    "ar": SpecConfig("ar"),
    "chain:block=8": SpecConfig("chain", 8),
    "chain:block=16": SpecConfig("chain", 16),
    "tree:nodes=16,block=8": SpecConfig("tree", 8, 16),
    "tree:nodes=32,block=16": SpecConfig("tree", 16, 32),
}
THREE = ("ar", "chain:block=8", "tree:nodes=32,block=16")
CONCURRENCIES = (2, 8)
KNOTS = (1, 16, 48, 96, 192, 384)
PROMPT_ROWS = (8, 32, 64, 128, 256, 512)
ROUNDS, STEPS = 3, 6


Key = tuple[SpecConfig, int, int]


@dataclass(frozen=True, slots=True)
class StepSample:
    """Mean seconds of a block of steps, and tokens in all contexts, averaged over it."""

    step_s: float
    context_tokens: float


@dataclass(frozen=True, slots=True)
class Load:
    """The workload of `StepRunner`."""

    prompts: tuple[tuple[int, ...], ...]
    concurrency: int
    new_tokens: int = 400


class Watch:
    """Adds up processor time between `start` and `stop`."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._began = 0.0

    def start(self) -> None:
        """Begin."""
        self._began = time.process_time()

    def stop(self) -> None:
        """Add what passed since the last `start`."""
        self.seconds += time.process_time() - self._began


def step_runners(engine: ReferenceEngine, prompts: list[tuple[int, ...]]) -> dict[Key, StepRunner]:
    """A runner per grid point: settings, requests, and how often each prompt is repeated."""
    return {
        (spec, count, times): StepRunner(
            engine, spec, Load(tuple(prompt * times for prompt in prompts), count)
        )
        for spec in SETTINGS
        for count in REQUESTS
        for times in REPEATS
    }


def time_steps(runners: dict[Key, StepRunner], found: dict[Key, list[StepSample]]) -> None:
    """One block of steps at every grid point."""
    watch = Watch()
    for key, runner in runners.items():
        watch.seconds = 0.0
        stats = runner.block(STEPS, before=watch.start, after=watch.stop)
        context = stats.context * stats.requests
        found.setdefault(key, []).append(StepSample(watch.seconds / STEPS, context))


def step_table(found: dict[Key, list[StepSample]]) -> list[dict[str, Any]]:
    """Median step time and mean context of every grid point."""
    return [
        {
            "mode": spec.mode,
            "requests": count,
            "rows": count * spec.rows,
            "draft_rows": 0 if spec.mode == "ar" else count * spec.block,
            "context_tokens": statistics.fmean(item.context_tokens for item in samples),
            "step_s": statistics.median(item.step_s for item in samples),
            "all_s": [item.step_s for item in samples],
        }
        for (spec, count, _), samples in found.items()
    ]


def measure_prefill(engine: ReferenceEngine) -> list[dict[str, Any]]:
    """Median time of one prefill pass by prompt rows."""
    core = engine.core(SpecConfig("chain", 8))
    found = []
    for rows in PROMPT_ROWS:
        seconds = []
        for index in range(ROUNDS + 1):
            slot = core.new_slot(Job(str(index), tuple(range(2, 2 + rows)), 4))
            started = time.process_time()
            prefill_pass(core, [slot], rows)
            seconds.append(time.process_time() - started)
        found.append(
            {"rows": rows, "seconds": statistics.median(seconds[1:]), "all_s": seconds[1:]}
        )
    return found


def fit(steps: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], float]:
    """Nonnegative least squares on relative errors; the curves and the mean absolute error."""
    knots = np.array(KNOTS, dtype=np.float64)
    rows = np.array([item["rows"] for item in steps], dtype=np.float64)
    # hats between knots, and a slope beyond the last: a piecewise linear curve that never falls
    hinges = [np.ones_like(rows)]
    ends = [*knots[1:], np.inf]
    hinges += [np.clip(rows - low, 0, high - low) for low, high in zip(knots, ends, strict=True)]
    requests = np.array([item["requests"] for item in steps], dtype=np.float64)
    drafts = np.array([item["draft_rows"] for item in steps], dtype=np.float64)
    drafting = (drafts > 0).astype(np.float64)
    context = np.array([item["context_tokens"] for item in steps])
    matrix = np.stack([*hinges, context, requests, drafting, drafts], axis=1)
    measured = np.array([item["step_s"] for item in steps])
    weights, _ = nnls(matrix / measured[:, None], np.ones(len(measured)))
    error = float(np.abs(matrix @ weights / measured - 1).mean())
    base, slopes = weights[0], weights[1 : 1 + len(knots)]
    levels = base + np.concatenate([[0.0], np.cumsum(slopes[:-1] * np.diff(knots))])
    beyond = (2 * knots[-1], levels[-1] + slopes[-1] * knots[-1])
    per_request, draft_base, per_draft = weights[-3:]
    per_token = weights[-4]
    far = 16 * max(REQUESTS)
    curves = [
        _curve("verified rows", "rows", [*zip(knots, levels, strict=True), beyond]),
        _curve("requests", "requests", [(1, per_request), (64, 64 * per_request)]),
        _curve("contexts", "context_tokens", [(1, per_token), (8000, 8000 * per_token)]),
        _curve(
            "drafting", "draft_rows",
            [(1, draft_base + per_draft), (far, draft_base + far * per_draft)],
        ),
    ]  # fmt: skip
    return curves, error


def _curve(name: str, driver: str, points: list[tuple[float, float]]) -> dict[str, Any]:
    return {
        "name": name,
        "driver": driver,
        "points": [{"amount": float(x), "seconds": float(y)} for x, y in points],
    }


def batch_times(curves: list[dict[str, Any]], prefill: list[dict[str, Any]]) -> BatchStepTimes:
    """The profile file."""
    points = [(item["rows"], item["seconds"]) for item in prefill]
    return BatchStepTimes.model_validate(
        {
            "schema_version": 1,
            "name": "demo-cpu",
            "engine": {"name": "specpilot-reference", "version": "0.1.0"},
            "device": {"name": cpu_name(), "kind": "cpu", "threads": 1},
            "target": {"name": "demo-cpu target"},
            "drafter": {"name": "demo-cpu drafter"},
            "dtype": "float32",
            "decode": curves,
            "prefill": _curve("prefill", "prompt_rows", points),
            "source": "scripts/measure_batch_simulation.py, fitted to measured steps",
        }
    )


class LiveRuns:
    """Runs of the engine with every judged policy."""

    def __init__(self, engine: ReferenceEngine, prompts: list[Prompt]) -> None:
        self._engine = engine
        self._requests = [
            GenerateRequest(p.request_id, engine.encode(p.text), p.max_new_tokens) for p in prompts
        ]
        self._rates: dict[tuple[str, int], list[float]] = {}
        self._tau: dict[str, float] = {}
        self.shares: list[float] = []

    def once(self) -> None:
        """Each policy at each concurrency, once."""
        for name, spec in JUDGED.items():
            for count in CONCURRENCIES:
                clock, started = time.monotonic(), time.process_time()
                results = self._engine.generate(self._requests, concurrency=count, spec=spec)
                seconds = time.process_time() - started
                self.shares.append(seconds / (time.monotonic() - clock))
                tokens = sum(len(result.output_ids) for result in results)
                self._rates.setdefault((name, count), []).append(tokens / seconds)
                steps = sum(len(result.accept_lengths) for result in results)
                self._tau[name] = (tokens - len(results)) / steps
                sys.stderr.write(f"{name} at {count}: {tokens / seconds:.1f} tokens/s\n")

    def table(self) -> dict[tuple[str, int], dict[str, Any]]:
        """Median tokens per second, all of them, and tau."""
        return {
            key: {"tokens_per_s": statistics.median(rates), "all": rates, "tau": self._tau[key[0]]}
            for key, rates in self._rates.items()
        }


def judge(
    predicted: dict[tuple[str, int], Any], live: dict[tuple[str, int], Any]
) -> dict[str, Any]:
    """Orders and errors, at every concurrency."""
    table: dict[str, Any] = {}
    for count in CONCURRENCIES:
        names = list(JUDGED)
        said = sorted(names, key=lambda name: -predicted[name, count].tokens_per_s)
        was = sorted(names, key=lambda name: -live[name, count]["tokens_per_s"])
        table[f"concurrency_{count}"] = {
            "policies": {
                name: {
                    "predicted_tokens_per_s": predicted[name, count].tokens_per_s,
                    "measured_tokens_per_s": live[name, count]["tokens_per_s"],
                    "measured_all": live[name, count]["all"],
                    "predicted_over_measured_ratio": predicted[name, count].tokens_per_s
                    / live[name, count]["tokens_per_s"],
                    "predicted_tau": predicted[name, count].tau,
                    "measured_tau": live[name, count]["tau"],
                }
                for name in names
            },
            "predicted_order": said,
            "measured_order": was,
            "three_policies_ordered_alike": [n for n in said if n in THREE]
            == [n for n in was if n in THREE],
            "all_ordered_alike": said == was,
        }
    return table


def main() -> None:
    """Measure, fit, predict, compare, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-o", "--output", type=Path, default=OUTPUT)
    parser.add_argument("--times", type=Path, default=TIMES)
    parser.add_argument("--every", type=int, default=6, help="take every so many-th dev prompt")
    options = parser.parse_args()
    torch.set_num_threads(1)
    engine = ReferenceEngine(PAIR / "target", PAIR / "drafter", threads=1)
    prompts = list(read_prompts(PAIR / "prompts" / "dev.jsonl"))[:: options.every]
    encoded = [engine.encode(prompt.text) for prompt in prompts]
    runners = step_runners(engine, encoded)
    time_steps(runners, {})  # warms up
    live = LiveRuns(engine, prompts)
    samples: dict[Key, list[StepSample]] = {}
    for _ in range(ROUNDS):  # steps and runs in turns: what slows one slows the other
        time_steps(runners, samples)
        live.once()
    steps, prefill = step_table(samples), measure_prefill(engine)
    curves, error = fit(steps)
    times = batch_times(curves, prefill)
    recording = record_dense(engine, prompts, 16).recording
    policies = [parse_policy(name) for name in JUDGED]
    results = simulate_batches(recording, times, policies, list(CONCURRENCIES))
    predicted = {(item.policy, item.concurrency): item for item in results}
    document = {
        "requests": len(prompts),
        "judged": judge(predicted, live.table()),
        "predictions": [asdict(item) for item in results],
        "steps": steps,
        "prefill": prefill,
        "fit_mean_absolute_error_ratio": error,
        "share_of_the_processor_ratio": [min(live.shares), max(live.shares)],
    }
    options.times.parent.mkdir(parents=True, exist_ok=True)
    text = times.model_dump_json(indent=2) + "\n"
    atomic_write_text(options.times, text, force=True)
    envelope = build_envelope("measure_batch_simulation", document)
    atomic_write_text(options.output, render_json(envelope), force=True)
    sys.stdout.write(render_json(build_envelope("judged", document["judged"])))


if __name__ == "__main__":
    main()
