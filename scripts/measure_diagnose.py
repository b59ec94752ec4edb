#!/usr/bin/env python3
"""How often `specpilot diagnose` finds what is there, and how often what is not.

    OMP_NUM_THREADS=1 python scripts/measure_diagnose.py

Three parts: healthy synthetic recordings of many kinds and healthy subsets of the demo pair's own
recording (false alarms), synthetic recordings with one fault (found by its name or not), and the
demo pair itself with one fault in its files (which findings come). Writes
docs/measurements/diagnose.json. Run it from the repository's root; some six minutes on one core.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from diagnose_pair import real
from diagnose_pair.synthetic import Drafter, record

from specpilot_cli.diagnose.facts import read_drafter, read_target
from specpilot_cli.diagnose.run import Diagnosis, Given, diagnose
from specpilot_cli.engines.reference.engine import ReferenceEngine
from specpilot_cli.engines.reference.record import record_dense
from specpilot_cli.io.atomic import atomic_write_text
from specpilot_cli.io.prompts_file import read_prompts
from specpilot_cli.replay.split import requests_of
from specpilot_cli.report.json_out import build_envelope, render_json
from specpilot_cli.schema.lattice import LatticeRecording

PAIR = Path("recipes/demo-cpu")
OUTPUT = Path("docs/measurements/diagnose.json")
HEALTHY, SUBSETS, SEEDS = 150, 60, 8
FAULTS: dict[str, tuple[Drafter, str]] = {
    "lattices one token later": (Drafter(shift=1), "position-shift"),
    "lattices one token earlier": (Drafter(shift=-1), "position-shift"),
    "selector scores are noise": (Drafter(random_selector=True), "collapse"),
    "nothing offered after the first": (Drafter(broken_from=1), "collapse"),
    "nothing offered from position 3": (Drafter(broken_from=3), "collapse"),
    "40 % of true tokens not offered": (Drafter(lost=0.4), "recall"),
    "sure, and 45 % at random": (Drafter(mixed=0.45), "confidence"),
    "sure, and 30 % at random": (Drafter(mixed=0.3), "confidence"),
    "60 % lost beyond context 192": (
        Drafter(tokens=300, prompt_tokens=100, mixed=0.6, mixed_from=192), "long-context",
    ),
    "60 % lost beyond output 128": (
        Drafter(tokens=300, prompt_tokens=300, mixed=0.6, mixed_from_output=128), "late-output",
    ),
    "40 % of outputs loop": (Drafter(loops=0.4), "repetition"),
}  # fmt: skip


def alarms(found: Diagnosis) -> list[str]:
    """Codes of faults and cautions."""
    return [item.code for item in found.outcomes if item.counts]


def healthy_synthetic(count: int) -> dict[str, Any]:
    """False alarms on drafters of many strengths, sizes and lengths."""
    rng = np.random.default_rng(0)
    codes: Counter[str] = Counter()
    alarmed = 0
    for seed in range(count):
        settings = Drafter(
            n_requests=int(rng.integers(8, 64)),
            tokens=int(rng.integers(40, 200)),
            n_positions=int(rng.choice([7, 15])),
            sharpness=float(rng.uniform(1.0, 4.0)),
            recall=float(rng.uniform(0.93, 0.99)),
        )
        raised = alarms(diagnose(record(settings, seed)))
        alarmed += bool(raised)
        codes.update(raised)
    return _rate(alarmed, count, codes)


def healthy_subsets(whole: LatticeRecording, count: int) -> dict[str, Any]:
    """False alarms on random halves and quarters of the demo pair's requests."""
    rng = np.random.default_rng(1)
    given = Given(target=read_target(PAIR / "target"), drafter=read_drafter(PAIR / "drafter"))
    codes: Counter[str] = Counter()
    alarmed = 0
    for index in range(count):
        chosen = np.zeros(whole.n_requests, dtype=np.bool_)
        size = whole.n_requests // (2 if index % 2 else 4)
        chosen[rng.choice(whole.n_requests, size, replace=False)] = True
        raised = alarms(diagnose(requests_of(whole, chosen), given))
        alarmed += bool(raised)
        codes.update(raised)
    return _rate(alarmed, count, codes)


def _rate(alarmed: int, count: int, codes: Counter[str]) -> dict[str, Any]:
    return {"recordings": count, "with_alarm": alarmed, "alarms_by_check": dict(codes)}


def found_synthetic(seeds: int) -> dict[str, Any]:
    """By fault and number of requests: how often the expected finding comes, and what else."""
    table: dict[str, Any] = {}
    for name, (settings, code) in FAULTS.items():
        row: dict[str, Any] = {"expected": code}
        for requests in (12, 24, 48):
            hits, others = 0, Counter[str]()
            for seed in range(seeds):
                raised = alarms(diagnose(record(replace(settings, n_requests=requests), seed)))
                hits += code in raised
                others.update(set(raised) - {code})
            row[f"{requests}_requests"] = {"found": hits, "of": seeds, "also": dict(others)}
        table[name] = row
        sys.stderr.write(f"{name}: {row}\n")
    return table


def recorded(target: Path, drafter: Path, *, block: int, limit: int | None) -> LatticeRecording:
    """A dense recording of the demo pair's dev prompts."""
    prompts = list(read_prompts(PAIR / "prompts" / "dev.jsonl"))
    engine = ReferenceEngine(target, drafter)
    return record_dense(engine, prompts[:: 1 if limit is None else limit], block).recording


def broken_pair(healthy: LatticeRecording, scratch: Path) -> dict[str, Any]:
    """Findings on the demo pair with one fault in its files, alone and against the healthy one."""
    cases: dict[str, tuple[str, real.Edit]] = {
        "mask token of another tokenizer": ("drafter", real.wrong_mask_token),
        "captured layers one too early": ("drafter", real.swapped_layers),
        "selector codebooks swapped": ("drafter", real.swapped_codebooks),
        "selector weights not loaded": ("drafter", real.random_selector),
        "target rounded to 4 bits": ("target", real.quantised(4)),
        "target rounded to 3 bits": ("target", real.quantised(3)),
    }
    table: dict[str, Any] = {}
    for index, (name, (side, edit)) in enumerate(cases.items()):
        folders = {"target": PAIR / "target", "drafter": PAIR / "drafter"}
        folders[side] = real.copy_with(scratch / str(index), folders[side], edit)
        recording = recorded(folders["target"], folders["drafter"], block=8, limit=3)
        given = Given(
            target=read_target(folders["target"]), drafter=read_drafter(folders["drafter"])
        )
        alone = diagnose(recording, given)
        beside = diagnose(recording, replace(given, other=healthy))
        table[name] = {
            "tau": alone.chain.value,
            "alone": alarms(alone),
            "against_the_healthy_recording": alarms(beside),
            "first_position_accepted_ratio": alone.rows[0].accepted,
            "first_position_offered_ratio": alone.rows[0].in_lattice,
            "first_position_own_probability_ratio": alone.rows[0].own,
        }
        sys.stderr.write(f"{name}: {table[name]}\n")
    return table


def main() -> None:
    """Measure and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-o", "--output", type=Path, default=OUTPUT)
    options = parser.parse_args()
    found = found_synthetic(SEEDS)
    whole = recorded(PAIR / "target", PAIR / "drafter", block=16, limit=None)
    third = recorded(PAIR / "target", PAIR / "drafter", block=8, limit=3)
    with tempfile.TemporaryDirectory() as folder:
        broken = broken_pair(third, Path(folder))
    results = {
        "healthy_synthetic": healthy_synthetic(HEALTHY),
        "healthy_demo_pair_subsets": healthy_subsets(whole, SUBSETS),
        "healthy_demo_pair_tau": diagnose(third).chain.value,
        "faults_synthetic": found,
        "faults_demo_pair": broken,
    }
    envelope = build_envelope("measure_diagnose", results)
    atomic_write_text(options.output, render_json(envelope), force=True)


if __name__ == "__main__":
    main()
