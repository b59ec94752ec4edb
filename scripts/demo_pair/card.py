"""Model cards of the demo pair, filled from what its runs and measurements wrote.

    python scripts/train_demo_pair.py cards --to recipes/demo-cpu

Nothing in a card is typed in by hand but its prose: figures come from `training.json`,
`corpus_manifest.json`, the weights' own headers and `docs/measurements/demo_pair_quality.json`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specpilot_cli.io.hashing import sha256_folder
from specpilot_cli.io.safetensors_stream import SafetensorsFile

QUALITY = Path("docs/measurements/demo_pair_quality.json")
_HEAD = """---
license: apache-2.0
library_name: transformers
---

"""


def cards(pair: Path, quality: Path) -> dict[Path, str]:
    """Text of `pair`/target/README.md and `pair`/drafter/README.md.

    Raises `SystemExit` if `quality` was measured on other weights.
    """
    training = json.loads((pair / "training.json").read_text(encoding="utf-8"))
    manifest = json.loads((pair / "corpus_manifest.json").read_text(encoding="utf-8"))
    measured = json.loads(quality.read_text(encoding="utf-8"))
    hashes = {Path(entry["path"]).name: entry["sha256"] for entry in measured["inputs"]}
    for name in ("target", "drafter"):
        if hashes[name] != sha256_folder(pair / name):
            raise SystemExit(f"{quality} is of another {name}: run scripts/measure_demo_pair.py")
    results = measured["results"]
    return {
        pair / "target" / "README.md": target_card(
            training["target"], manifest, results["plain"]["by_kind"], parameters(pair / "target")
        ),
        pair / "drafter" / "README.md": drafter_card(
            training["drafter"], results["drafted"], parameters(pair / "drafter")
        ),
    }


def parameters(folder: Path) -> str:
    """Number of weights in `folder`/model.safetensors, in millions."""
    with SafetensorsFile(folder / "model.safetensors") as file:
        count = sum(math.prod(file.info(name).shape) for name in file.names)
    return f"{count / 1e6:.2f} M"


def target_card(
    report: Mapping[str, Any],
    manifest: Mapping[str, Any],
    outputs: Mapping[str, Mapping[str, float]],
    size: str,
) -> str:
    """README.md of the target folder."""
    sources = "\n".join(
        f"| `{p['name']}` | {p['kind']} | {p['licence']} | {p['size_bytes'] / 1e6:.1f} MB |"
        for p in manifest["packages"]
    )
    return f"""{_HEAD}# specpilot demo target

A small hybrid language model that exists to exercise specpilot: {size} parameters in native BF16,
Qwen3.5 architecture (8 layers: three Gated DeltaNet, one gated attention, twice; hidden 256), tied
embeddings, byte-level BPE with {manifest["vocab_size"]:,} tokens. It writes short English and Python
in the styles below and knows nothing about the world. Not for any use beyond tests and
demonstrations.

## Training

{_target_training(report, manifest, outputs)}
## Sources

Real text from Python, PostgreSQL and SQLite documentation, the Python standard library, State of
the Union addresses and Moby-Dick; `dialogue`, `functions`, `lists`, `records` and `stories` are
written by the grammar in `scripts/demo_pair/` (Apache-2.0).

| package | kind | licence | archive |
|---|---|---|---|
{sources}
"""


def _target_training(
    report: Mapping[str, Any],
    manifest: Mapping[str, Any],
    outputs: Mapping[str, Mapping[str, float]],
) -> str:
    losses, counts = report["held_out_nats_per_token"], manifest["counts"]["train"]
    kinds = sorted(losses)
    rows = "\n".join(
        f"| {kind} | {counts[kind]['tokens']:,} | {losses[kind]:.2f} | {_outputs(outputs[kind])} |"
        for kind in kinds
    )
    mean_loss = sum(losses.values()) / len(losses)
    total = sum(counts[kind]["tokens"] for kind in kinds)
    s = report["settings"]
    return f"""`python scripts/train_demo_pair.py target` on one H200, {report["log"][-1]["s"]:.0f} s:
{s["steps"]:,} steps of {s["batch"]} x {s["length"]} tokens (AdamW, peak {s["peak_lr"]}, cosine), then
{s["unlikelihood_steps"]} steps that add unlikelihood on repeated {s["ngram"]}-grams of the model's own greedy text.
Seed {s["seed"]}, corpus seed {manifest["seed"]}. A second run gives other bits: sums on a GPU run in
no fixed order, and in this run the initial values of the convolutions were not seeded.

The corpus is the build of `scripts/demo_pair/corpus.py` that `../corpus_manifest.json` describes;
the generated texts' grammar was corrected afterwards ("a owner"), so a new build gives slightly
other counts and another tokenizer. `../training.json` holds settings and the whole log.

The last three columns are of the greedy outputs on `../prompts/unseen.jsonl` (reference engine,
float32): 8-grams that occurred earlier in the same output, bytes per token, tokens per output.
`mean` weighs the kinds equally.

| kind | training tokens | held-out loss, nats per token | repeated 8-grams | bytes per token | tokens |
|---|---|---|---|---|---|
{rows}
| mean | {total:,} in all | {mean_loss:.2f} | {_outputs(outputs["mean"])} |
"""


def _outputs(figures: Mapping[str, float]) -> str:
    return (
        f"{figures['repeated_8grams_pct']:.1f} % | {figures['bytes_per_token']:.2f} | "
        f"{figures['output_tokens']:.0f}"
    )


def drafter_card(
    report: Mapping[str, Any], drafted: Mapping[str, Mapping[str, Any]], size: str
) -> str:
    """README.md of the drafter folder."""
    s = report["settings"]
    by_kind = {name: row["tokens_per_step_by_kind"] for name, row in drafted.items()}
    rows = "\n".join(
        f"| {kind} | " + " | ".join(f"{by_kind[name][kind]:.2f}" for name in by_kind) + " |"
        for kind in sorted(next(iter(by_kind.values())))
    )
    pooled = " | ".join(f"{row['tokens_per_step']:.2f}" for row in drafted.values())
    same = " | ".join(f"{row['same_as_plain']} of {row['requests']}" for row in drafted.values())
    return f"""{_HEAD}# specpilot demo drafter

DFlash2 drafter for the demo target: {size} parameters in native BF16, 2 layers, reads target layers
1, 3 and 6, top-16 candidates, selector rank 24. Trained block 8; blocks of 16 were half of its
training, so both work. It borrows the target's embedding and head.

## Training

`python scripts/train_demo_pair.py drafter` on one H200, {report["log"][-1]["s"]:.0f} s: the target's own
greedy continuations of {s["greedy_rounds"] * s["greedy_batch"]:,} training prefixes ({s["greedy_length"]} tokens each),
{s["steps"]:,} steps of {s["batch"]} sequences x {s["anchors"]} anchors (AdamW, peak {s["peak_lr"]}, cosine),
cross-entropy of the unary and of the selector scores over the full vocabulary. Seed {s["seed"]}.

## Tokens per step

Tokens that one verify step commits, bonus token included, on `../prompts/unseen.jsonl` (reference
engine, float32, one request at a time; `python scripts/measure_demo_pair.py`). The chain has block
8, the stock choice; the trees draft 16 positions. `all` pools the requests. Outputs that are not
the same as plain greedy decoding's part from it at a near-tie, where rounding decides: the margins
are in `docs/measurements/demo_pair_quality.json`, a comparison with SGLang on an H200 in
`docs/measurements/demo_pair_sglang_h200.json`.

| kind | chain, 7 nodes | tree, 8 nodes | tree, 16 nodes | tree, 32 nodes |
|---|---|---|---|---|
{rows}
| all | {pooled} |
| same as plain | {same} |
"""
