#!/usr/bin/env python3
"""Compare replay of the committed recordings with the live reference engine, step by step.

    OMP_NUM_THREADS=1 python scripts/measure_replay_live.py [--write-recordings]

The recordings in recipes/demo-cpu/recordings/ hold the first unseen prompt of every kind, outputs
cut at 60 tokens, dense, packed for 63 nodes; no tree was decoded when they were made. This decodes
the same prompts live at blocks 8, 12 and 16 with 8, 16, 32 and 63 nodes and with the chain, and
writes docs/measurements/replay_live_demo.json: steps that committed what replay said, and every
other step traced to the choice that rounding flipped. About three minutes on one core. Exits with 1
if a difference is no near-tie. `--write-recordings` makes the recordings anew first.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from specpilot_cli.engines.base import GenerateRequest
from specpilot_cli.engines.reference.engine import ReferenceEngine
from specpilot_cli.engines.reference.near_ties import StepTracer, trace_differences
from specpilot_cli.engines.reference.record import record_dense
from specpilot_cli.engines.reference.spec import EngineResult, SpecConfig
from specpilot_cli.io.atomic import atomic_write_text
from specpilot_cli.io.lattice_file import read_lattice
from specpilot_cli.io.prompts_file import read_prompts
from specpilot_cli.replay.pack import pack
from specpilot_cli.replay.run import replay_accept_lengths
from specpilot_cli.report.json_out import build_envelope, render_json
from specpilot_cli.schema.lattice import LatticeRecording, Packing
from specpilot_cli.schema.prompts import Prompt

ROOT = Path("recipes/demo-cpu")
RECORDINGS = ROOT / "recordings"
DEFAULT_OUTPUT = Path("docs/measurements/replay_live_demo.json")
BLOCKS, NODES = (8, 12, 16), (8, 16, 32, 63)
MAX_NEW_TOKENS = 60
PACKING = Packing(exact_nodes=63, top_k=4)


def chosen_prompts() -> list[Prompt]:
    """The first unseen prompt of every kind, its output cut."""
    first: dict[str, Prompt] = {}
    for prompt in read_prompts(ROOT / "prompts/unseen.jsonl"):
        first.setdefault(prompt.benchmark, prompt)
    update = {"max_new_tokens": MAX_NEW_TOKENS}
    return [prompt.model_copy(update=update) for prompt in first.values()]


def committed(result: EngineResult) -> list[int]:
    """Tokens each live step added: accepted drafts and bonus, cut at the end of the output."""
    left, found = len(result.output_ids) - 1, []
    for accepted in result.accept_lengths:
        found.append(min(accepted + 1, left))
        left -= found[-1]
    return found


def comparable(result: EngineResult, recorded: list[int]) -> list[int]:
    """Tokens of each live step that ends before the outputs part, if they do.

    Behind a token that a near-tie of the target flipped, live and recorded text are two texts.
    """
    live = list(result.output_ids)
    pairs = enumerate(zip(live, recorded, strict=False))
    same = next((i for i, (a, b) in pairs if a != b), max(len(live), len(recorded)))
    found, at = [], 0
    for tokens in committed(result):
        at += tokens
        if at >= same:
            break
        found.append(tokens)
    return found


def compare(
    engine: ReferenceEngine,
    requests: list[GenerateRequest],
    spec: SpecConfig,
    packed: LatticeRecording,
    fresh: LatticeRecording,
) -> dict[str, Any]:
    """One setting: live against the packed recording, differences traced on the fresh one."""
    tracer = StepTracer()
    results = engine.generate(requests, spec=spec, observer=tracer, concurrency=1)
    policy = "chain" if spec.mode == "chain" else "best-first"
    budget = spec.drafts if spec.mode == "chain" else spec.n_nodes
    replayed = replay_accept_lengths(packed, policy, budget)
    unpacked = replay_accept_lengths(fresh, policy, budget)
    differences = trace_differences(engine, spec, results, tracer, fresh)
    tokens = sum(len(result.output_ids) - 1 for result in results)
    pairs = [
        (comparable(result, fresh.output(index).tolist()), steps.tolist())
        for index, (result, steps) in enumerate(zip(results, replayed, strict=True))
    ]
    steps_live = sum(len(committed(result)) for result in results)
    equal = sum(x == y for a, b in pairs for x, y in zip(a, b, strict=False))
    return {
        "block": fresh.metadata.block,
        "policy": policy,
        "nodes": budget,
        "live_steps": steps_live,
        "compared_steps": sum(len(a) for a, _ in pairs),
        "equal_steps": equal,
        "equal_requests": sum(a == b for a, b in pairs),
        "requests": len(pairs),
        "live_tau_tokens_per_step": tokens / steps_live,
        "replayed_tau_tokens_per_step": int(
            sum(fresh.output(r).size - 1 for r in range(len(pairs)))
        )
        / sum(len(b) for _, b in pairs),
        "packed_equals_unpacked": all(
            a.tolist() == b.tolist() for a, b in zip(replayed, unpacked, strict=True)
        ),
        "differences": [{**asdict(d), "explained": d.explained} for d in differences],
    }


def main() -> int:
    """Measure, print a table, write the JSON; 1 if anything is not explained by rounding."""
    parser = argparse.ArgumentParser(description="Live decoding against replay, step by step.")
    parser.add_argument("--output", type=Path, default=DEFAULT_OUTPUT)
    parser.add_argument("--write-recordings", action="store_true")
    arguments = parser.parse_args()
    engine = ReferenceEngine(ROOT / "target", ROOT / "drafter")
    prompts = chosen_prompts()
    requests = [
        GenerateRequest(p.request_id, engine.encode(p.text), p.max_new_tokens) for p in prompts
    ]
    records: list[dict[str, Any]] = []
    files = {block: RECORDINGS / f"block-{block}.safetensors" for block in BLOCKS}
    for block, path in files.items():
        fresh = record_dense(engine, prompts, block).recording
        if arguments.write_recordings:
            pack(path, fresh, PACKING, force=True)
        packed = read_lattice(path)
        specs = [SpecConfig("chain", block), *(SpecConfig("tree", block, n) for n in NODES)]
        for spec in specs:
            found = compare(engine, requests, spec, packed, fresh)
            records.append(found)
            print(
                f"block {block:2} {found['policy']:10} {found['nodes']:2} nodes: "
                f"{found['equal_steps']} of {found['compared_steps']} steps equal, τ live "
                f"{found['live_tau_tokens_per_step']:.4f}, replay "
                f"{found['replayed_tau_tokens_per_step']:.4f}, "
                f"{len(found['differences'])} differences traced"
            )
    document = {
        "prompts": [prompt.request_id for prompt in prompts],
        "max_new_tokens": MAX_NEW_TOKENS,
        "recordings_bytes": sum(path.stat().st_size for path in files.values()),
        "settings": records,
    }
    envelope = build_envelope("scripts/measure_replay_live.py", document, inputs=files.values())
    atomic_write_text(arguments.output, render_json(envelope), force=True)
    unexplained = [d for r in records for d in r["differences"] if not d["explained"]]
    print(f"{document['recordings_bytes']:,} bytes of recordings; unexplained: {len(unexplained)}")
    return 1 if unexplained or not all(r["packed_equals_unpacked"] for r in records) else 0


if __name__ == "__main__":
    sys.exit(main())
