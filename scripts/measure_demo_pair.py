#!/usr/bin/env python3
"""Measure the shipped demo pair on its unseen prompts with the reference engine.

    OMP_NUM_THREADS=1 python scripts/measure_demo_pair.py

Writes docs/measurements/demo_pair_quality.json: per kind of text the tokens per step of the chain
and of three trees, repetition, bytes per token and output length; and for every configuration how
many outputs equal plain greedy decoding, with the margin at each first difference. Run it from the
repository's root; about four minutes on one core. Exits with 1 if a difference is no near-tie.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from demo_pair.quality import (
    NGRAM,
    bytes_per_token,
    departure,
    equal_weight_mean,
    mean_by_kind,
    repeated_pct,
    tokens_per_step,
)

from specpilot_cli.engines.base import GenerateRequest
from specpilot_cli.engines.reference.engine import ReferenceEngine
from specpilot_cli.engines.reference.near_ties import MAX_ROUNDING_NATS
from specpilot_cli.engines.reference.spec import EngineResult, SpecConfig
from specpilot_cli.io.atomic import atomic_write_text
from specpilot_cli.io.prompts_file import read_prompts
from specpilot_cli.report.json_out import build_envelope, render_json

DEFAULT_OUTPUT = Path("docs/measurements/demo_pair_quality.json")
CONFIGURATIONS = {
    "chain_8": SpecConfig("chain", 8),
    "tree_8": SpecConfig("tree", 16, 8),
    "tree_16": SpecConfig("tree", 16, 16),
    "tree_32": SpecConfig("tree", 16, 32),
}
# two scores of float32, each off by the most that rounding was seen to do
NEAR_TIE_NATS = 2 * MAX_ROUNDING_NATS
AR_CONCURRENCY = 8


def describe_outputs(
    engine: ReferenceEngine, outputs: Sequence[EngineResult], kinds: Sequence[str]
) -> dict[str, dict[str, float]]:
    """Repetition, token size and length of outputs: means by kind, and `mean` over the kinds."""
    figures = {
        f"repeated_{NGRAM}grams_pct": [repeated_pct(r.output_ids) for r in outputs],
        "bytes_per_token": [bytes_per_token(engine, r.output_ids) for r in outputs],
        "output_tokens": [float(len(r.output_ids)) for r in outputs],
    }
    table: dict[str, dict[str, float]] = {}
    for name, values in figures.items():
        by_kind = mean_by_kind(values, kinds)
        for kind, value in {**by_kind, "mean": equal_weight_mean(by_kind)}.items():
            table.setdefault(kind, {})[name] = round(value, 3)
    return table


def compare(
    engine: ReferenceEngine, plain: Sequence[EngineResult], outputs: Sequence[EngineResult]
) -> dict[str, Any]:
    """How many outputs equal plain greedy decoding, and every first difference."""
    pairs = zip(plain, outputs, strict=True)
    found = [
        departure(engine, a.request_id, a.prompt_ids, a.output_ids, b.output_ids) for a, b in pairs
    ]
    differences = [d for d in found if d is not None]
    return {
        "requests": len(outputs),
        "same_as_plain": len(outputs) - len(differences),
        "differences": [asdict(d) for d in differences],
        "all_near_ties": all(d.below_argmax_nats <= NEAR_TIE_NATS for d in differences),
    }


def measure_configuration(
    engine: ReferenceEngine,
    spec: SpecConfig,
    requests: Sequence[GenerateRequest],
    plain: Sequence[EngineResult],
    kinds: Sequence[str],
) -> dict[str, Any]:
    """Tokens per step of one way to draft, in all and by kind, and its outputs against plain."""
    outputs = engine.generate(requests, concurrency=1, spec=spec)
    lengths, steps = [len(r.output_ids) for r in outputs], [r.verify_steps for r in outputs]

    def of_kind(kind: str) -> float:
        chosen = [i for i, k in enumerate(kinds) if k == kind]
        return tokens_per_step([lengths[i] for i in chosen], [steps[i] for i in chosen])

    return {
        "spec": spec.describe(),
        "output_tokens": sum(lengths),
        "verify_steps": sum(steps),
        "tokens_per_step": round(tokens_per_step(lengths, steps), 3),
        "tokens_per_step_by_kind": {k: round(of_kind(k), 3) for k in sorted(set(kinds))},
        **compare(engine, plain, outputs),
    }


def measure(pair: Path, prompts_path: Path) -> dict[str, Any]:
    """All figures of the pair in `pair`/target and `pair`/drafter."""
    engine = ReferenceEngine(pair / "target", pair / "drafter", threads=1)
    prompts = read_prompts(prompts_path)
    kinds = [p.benchmark for p in prompts]
    requests = [
        GenerateRequest(p.request_id, engine.encode(p.text), p.max_new_tokens) for p in prompts
    ]
    plain = engine.generate(requests, concurrency=AR_CONCURRENCY)
    drafted = {}
    for name, spec in CONFIGURATIONS.items():
        drafted[name] = measure_configuration(engine, spec, requests, plain, kinds)
        print(f"{name}: {drafted[name]['tokens_per_step']} tokens per step", file=sys.stderr)
    return {
        "dtype": engine.dtype,
        "threads": engine.threads,
        "near_tie_nats": NEAR_TIE_NATS,
        "plain": {
            "concurrency": AR_CONCURRENCY,
            "output_tokens": sum(len(r.output_ids) for r in plain),
            "by_kind": describe_outputs(engine, plain, kinds),
        },
        "drafted": drafted,
    }


def main() -> int:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pair", type=Path, default=Path("recipes/demo-cpu"))
    parser.add_argument(
        "--prompts", type=Path, default=Path("recipes/demo-cpu/prompts/unseen.jsonl")
    )
    parser.add_argument("--output", type=Path, default=DEFAULT_OUTPUT)
    args = parser.parse_args()
    results = measure(args.pair, args.prompts)
    near = all(row["all_near_ties"] for row in results["drafted"].values())
    envelope = build_envelope(
        "scripts/measure_demo_pair.py",
        results,
        inputs=[args.pair / "target", args.pair / "drafter", args.prompts],
        verdict="accept" if near else "reject",
    )
    atomic_write_text(args.output, render_json(envelope), force=True)
    return 0 if near else 1


if __name__ == "__main__":
    sys.exit(main())
