#!/usr/bin/env python3
"""Check the demo pair in SGLang against the reference engine.

    # beside two SGLang servers of the pair, one plain and one with --speculative-algorithm DFLASH
    python scripts/measure_sglang_pair.py ask --url http://localhost:30000 --output plain.json
    python scripts/measure_sglang_pair.py ask --url http://localhost:30001 --output drafted.json
    # anywhere
    python scripts/measure_sglang_pair.py compare --plain plain.json --drafted drafted.json \\
        --setup setup.json --output docs/measurements/demo_pair_sglang_h200.json

`ask` sends the first prompts of every kind as token ids, greedily, one at a time. `compare` lets
the reference engine answer the same prompts in bfloat16 and float32 and compares tokens per step
and outputs. Where two outputs part, both tokens are scored in float32 after the common prefix: the
margin says whether rounding can have chosen. The verdict is "accept" if SGLang and the reference
engine in SGLang's dtype agree in tokens per step within 2 %, both when each decodes by itself and
along SGLang's own outputs. SETUP is a JSON object with machine, versions and
server arguments, which goes into the result as it is.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from demo_pair.quality import chain_steps_along, departure, tokens_per_step
from tokenizers import Tokenizer

from specpilot_cli.engines.base import GenerateRequest
from specpilot_cli.engines.reference.engine import ReferenceEngine
from specpilot_cli.engines.reference.spec import SpecConfig
from specpilot_cli.io.atomic import atomic_write_text
from specpilot_cli.io.prompts_file import read_prompts
from specpilot_cli.report.json_out import build_envelope, render_json
from specpilot_cli.schema.prompts import Prompt

PAIR = Path("recipes/demo-cpu")
EOS = 0
BLOCK = 8
TIMEOUT_S = 120
AGREEMENT_PCT = 2.0

Outputs = dict[str, tuple[int, ...]]


def choose(prompts: Sequence[Prompt], per_kind: int) -> list[Prompt]:
    """The first `per_kind` prompts of every kind, in file order."""
    taken: dict[str, int] = {}
    chosen = []
    for prompt in prompts:
        taken[prompt.benchmark] = taken.get(prompt.benchmark, 0) + 1
        if taken[prompt.benchmark] <= per_kind:
            chosen.append(prompt)
    return chosen


def ask_one(url: str, prompt: Prompt, ids: Sequence[int]) -> dict[str, Any]:
    """One greedy answer as a row: ids as text, verify steps, why it ended, server latency."""
    sampling = {"temperature": 0, "max_new_tokens": prompt.max_new_tokens, "stop_token_ids": [EOS]}
    body = json.dumps({"input_ids": list(ids), "sampling_params": sampling}).encode()
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(f"{url.rstrip('/')}/generate", body, headers)
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as reply:
        answer = json.load(reply)
    meta = answer["meta_info"]
    if meta["completion_tokens"] != len(answer["output_ids"]):
        raise SystemExit(f"{prompt.request_id}: the server miscounts its tokens")
    return {
        "request_id": prompt.request_id,
        "benchmark": prompt.benchmark,
        "max_new_tokens": prompt.max_new_tokens,
        "prompt_ids": " ".join(map(str, ids)),
        "output_ids": " ".join(map(str, answer["output_ids"])),
        "verify_steps": meta.get("spec_verify_ct"),
        "finish_reason": meta["finish_reason"]["type"],
        "server_latency_s": meta["e2e_latency"],
    }


def ask(args: argparse.Namespace) -> None:
    """Ask one server and write its rows."""
    tokenizer = Tokenizer.from_file(str(args.pair / "target" / "tokenizer.json"))
    rows = [
        ask_one(args.url, prompt, tokenizer.encode(prompt.text).ids)
        for prompt in choose(read_prompts(args.prompts), args.per_kind)
    ]
    atomic_write_text(args.output, json.dumps({"rows": rows}, indent=1) + "\n", force=True)


def ids_of(text: str) -> tuple[int, ...]:
    """Token ids from their text form."""
    return tuple(int(word) for word in text.split())


def compare_outputs(
    scorer: ReferenceEngine, prompts: Outputs, left: Outputs, right: Outputs
) -> dict[str, Any]:
    """Equal outputs of two runs, and the margins where the others part."""
    found = [departure(scorer, name, prompts[name], left[name], right[name]) for name in prompts]
    differences = [d for d in found if d is not None]
    margins = [d.margin_nats for d in differences]
    return {
        "requests": len(prompts),
        "same": len(prompts) - len(differences),
        "median_margin_nats": statistics.median(margins) if margins else None,
        "largest_margin_nats": max(margins, default=None),
        "largest_below_argmax_nats": max((d.below_argmax_nats for d in differences), default=None),
        "departures": [asdict(d) for d in differences],
    }


def reference_run(
    engine: ReferenceEngine, requests: Sequence[GenerateRequest], rows: Sequence[dict[str, Any]]
) -> tuple[dict[str, Any], Outputs, Outputs]:
    """The reference engine's figures, its plain outputs and its chain outputs.

    Three counts of steps: live decoding; live decoding where the output equals SGLang's; and the
    steps the chain would need along SGLang's own outputs.
    """
    plain = engine.generate(requests, concurrency=1, spec=SpecConfig("ar"))
    drafted = engine.generate(requests, concurrency=1, spec=SpecConfig("chain", BLOCK))
    lengths, steps = [len(r.output_ids) for r in drafted], [r.verify_steps for r in drafted]
    theirs = [ids_of(row["output_ids"]) for row in rows]
    equal = [i for i, r in enumerate(drafted) if r.output_ids == theirs[i]]
    along = [
        len(chain_steps_along(engine, request.input_ids, output, block=BLOCK))
        for request, output in zip(requests, theirs, strict=True)
    ]
    figures = {
        "output_tokens": sum(lengths),
        "verify_steps": sum(steps),
        "tokens_per_step": tokens_per_step(lengths, steps),
        "on_equal_outputs": {
            "requests": len(equal),
            "verify_steps": sum(steps[i] for i in equal),
            "sglang_verify_steps": sum(rows[i]["verify_steps"] for i in equal),
        },
        "along_sglang_outputs": {
            "verify_steps": sum(along),
            "tokens_per_step": tokens_per_step([len(o) for o in theirs], along),
            "requests_with_equal_steps": sum(
                n == row["verify_steps"] for n, row in zip(along, rows, strict=True)
            ),
        },
    }
    return (
        figures,
        {r.request_id: r.output_ids for r in plain},
        {r.request_id: r.output_ids for r in drafted},
    )


def compare_engines(pair: Path, plain: list[Any], drafted: list[Any]) -> dict[str, Any]:
    """Everything that `compare` finds, from the rows of two servers."""
    if [r["prompt_ids"] for r in plain] != [r["prompt_ids"] for r in drafted]:
        raise SystemExit("the two runs did not answer the same prompts")
    prompts = {row["request_id"]: ids_of(row["prompt_ids"]) for row in drafted}
    requests = [
        GenerateRequest(r["request_id"], prompts[r["request_id"]], r["max_new_tokens"])
        for r in drafted
    ]
    outputs: dict[str, Outputs] = {
        "sglang plain": {r["request_id"]: ids_of(r["output_ids"]) for r in plain},
        "sglang chain": {r["request_id"]: ids_of(r["output_ids"]) for r in drafted},
    }
    figures: dict[str, Any] = {}
    for dtype in ("bfloat16", "float32"):
        engine = ReferenceEngine(pair / "target", pair / "drafter", dtype=dtype)
        figures[dtype], outputs[f"{dtype} plain"], outputs[f"{dtype} chain"] = reference_run(
            engine, requests, drafted
        )
    pairs = [
        ("sglang plain", "sglang chain"),
        ("sglang plain", "bfloat16 plain"),
        ("sglang plain", "float32 plain"),
        ("sglang chain", "bfloat16 chain"),
        ("sglang chain", "float32 chain"),
        ("bfloat16 plain", "bfloat16 chain"),
        ("float32 plain", "float32 chain"),
    ]
    # the last engine is the float32 one: it scores
    compared = {
        f"{left} / {right}": compare_outputs(engine, prompts, outputs[left], outputs[right])
        for left, right in pairs
    }
    lengths = [len(o) for o in outputs["sglang chain"].values()]
    steps = [row["verify_steps"] for row in drafted]
    return {
        "block": BLOCK,
        "sglang": {
            "output_tokens": sum(lengths),
            "verify_steps": sum(steps),
            "tokens_per_step": tokens_per_step(lengths, steps),
        },
        "reference": figures,
        "outputs": compared,
    }


def compare(args: argparse.Namespace) -> None:
    """Compare two servers' rows with the reference engine and write the result."""
    plain, drafted = (
        json.loads(path.read_text(encoding="utf-8"))["rows"] for path in (args.plain, args.drafted)
    )
    found = compare_engines(args.pair, plain, drafted)
    served, ours = found["sglang"]["tokens_per_step"], found["reference"]["bfloat16"]
    apart_pct = {
        "bfloat16_live": 100 * abs(ours["tokens_per_step"] / served - 1),
        "bfloat16_along_sglang_outputs": 100
        * abs(ours["along_sglang_outputs"]["tokens_per_step"] / served - 1),
    }
    results = {
        "setup": json.loads(args.setup.read_text(encoding="utf-8")),
        "tokens_per_step_apart_pct": apart_pct,
        **found,
        "rows": {"plain": plain, "drafted": drafted},
    }
    envelope = build_envelope(
        "scripts/measure_sglang_pair.py",
        results,
        inputs=[args.pair / "target", args.pair / "drafter"],
        verdict="accept" if max(apart_pct.values()) <= AGREEMENT_PCT else "reject",
    )
    atomic_write_text(args.output, render_json(envelope), force=True)


def main() -> None:
    """Run `ask` or `compare`."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    modes = parser.add_subparsers(required=True)
    asking = modes.add_parser("ask", help="ask one server")
    asking.add_argument("--url", required=True)
    asking.add_argument("--prompts", type=Path, default=PAIR / "prompts" / "unseen.jsonl")
    asking.add_argument("--per-kind", type=int, default=4)
    comparing = modes.add_parser("compare", help="compare with the reference engine")
    for name in ("--plain", "--drafted", "--setup"):
        comparing.add_argument(name, type=Path, required=True)
    todo: dict[argparse.ArgumentParser, Callable[[argparse.Namespace], None]] = {
        asking: ask, comparing: compare,
    }  # fmt: skip
    for mode, function in todo.items():
        mode.add_argument("--pair", type=Path, default=PAIR)
        mode.add_argument("--output", type=Path, required=True)
        mode.set_defaults(run=function)
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    sys.exit(main())
