"""Model cards of the demo pair, filled from the training reports."""

from __future__ import annotations

from typing import Any

_HEAD = """---
license: apache-2.0
library_name: transformers
---

"""


def target_card(report: dict[str, Any], manifest: dict[str, Any]) -> str:
    """README.md of the target folder."""
    losses = report["held_out_nats_per_token"]
    counts = manifest["counts"]["train"]
    rows = "\n".join(
        f"| {kind} | {counts[kind]['tokens']:,} | {counts[kind]['bytes_per_token']:.2f} | "
        f"{losses[kind]:.2f} |"
        for kind in sorted(losses)
    )
    sources = "\n".join(
        f"| `{p['name']}` | {p['kind']} | {p['licence']} | {p['size_bytes'] / 1e6:.1f} MB |"
        for p in manifest["packages"]
    )
    s = report["settings"]
    return f"""{_HEAD}# specpilot demo target

A small hybrid language model that exists to exercise specpilot: 3.69 M parameters in native BF16,
Qwen3.5 architecture (8 layers: three Gated DeltaNet, one gated attention, twice; hidden 256), tied
embeddings, byte-level BPE with 2,560 tokens. It writes short English and Python in the styles
below and knows nothing about the world. Not for any use beyond tests and demonstrations.

## Training

`scripts/train_demo_pair.py target`, one H200, {report["log"][-1]["s"]:.0f} s: {s["steps"]:,} steps of
{s["batch"]} x {s["length"]} tokens (AdamW, peak {s["peak_lr"]}, cosine), then {s["unlikelihood_steps"]}
steps that add unlikelihood on repeated {s["ngram"]}-grams of the model's own greedy text. Seed {s["seed"]};
corpus seed {manifest["seed"]}. GPU reductions are not ordered, so a second run gives other bits.

| kind | training tokens | bytes per token | held-out loss, nats per token |
|---|---|---|---|
{rows}

## Sources

Real text from Python, PostgreSQL and SQLite documentation, the Python standard library, State of
the Union addresses and Moby-Dick; `dialogue`, `functions`, `lists`, `records` and `stories` are
written by the grammar in `scripts/demo_pair/` (Apache-2.0).

| package | kind | licence | archive |
|---|---|---|---|
{sources}
"""


def drafter_card(report: dict[str, Any]) -> str:
    """README.md of the drafter folder."""
    s = report["settings"]
    return f"""{_HEAD}# specpilot demo drafter

DFlash2 drafter for the demo target: 0.79 M parameters in native BF16, 2 layers, reads target layers
1, 3 and 6, top-16 candidates, selector rank 24. Trained block 8; blocks of 16 were half of its
training, so both work. It borrows the target's embedding and head.

## Training

`scripts/train_demo_pair.py drafter`, one H200, {report["log"][-1]["s"]:.0f} s: the target's own greedy
continuations of {s["greedy_rounds"] * s["greedy_batch"]:,} training prefixes ({s["greedy_length"]} tokens each),
{s["steps"]:,} steps of {s["batch"]} sequences x {s["anchors"]} anchors (AdamW, peak {s["peak_lr"]}, cosine),
cross-entropy of the unary and of the selector scores over the full vocabulary. Seed {s["seed"]}.
"""
