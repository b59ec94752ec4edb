"""Prompt sets cut from held-out documents, checked against the training text."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

WINDOW_BYTES = 50
SHORTEST, LONGEST = 24, 80
# The shortest document rest that still is a continuation worth generating.
LEAST_REST = 24
PER_KIND = {"dev": 12, "unseen": 24}
MAX_NEW_TOKENS = 112


def window_hashes(data: bytes) -> np.ndarray:
    """Polynomial hash uint64 [n - 49] of every 50-byte window, computed modulo 2**64."""
    codes = np.frombuffer(data, dtype=np.uint8).astype(np.uint64)
    count = len(codes) - WINDOW_BYTES + 1
    if count <= 0:
        return np.zeros(0, dtype=np.uint64)
    total = np.zeros(count, dtype=np.uint64)
    base = np.uint64(0x9E3779B97F4A7C15)
    with np.errstate(over="ignore"):
        for offset in range(WINDOW_BYTES):
            total = total * base + codes[offset : offset + count]
    return total


def boundaries(kind: str, text: str) -> list[int]:
    """Character positions where a prompt of this kind may end."""
    if kind in {"prose", "stories"}:
        ends = [m.end() for m in re.finditer(r"[.!?]\"?(?=\s)", text)]
        # Half of the usable cuts are inside a sentence, after a comma.
        return ends + [m.end() for m in re.finditer(r",(?= [a-z])", text)]
    if kind == "reference":
        return [m.end() for m in re.finditer(r"[.:,](?=\s)", text)]
    if kind == "functions":
        return [m.end() for m in re.finditer(r'"""(?=\n)|\):(?=\n)', text)]
    if kind == "code":
        return [m.end() for m in re.finditer(r"[:,)](?=\n)|\"\"\"(?=\n)", text)]
    if kind == "dialogue":
        return [m.end() for m in re.finditer(r"(?m)\n\w+:|\?(?=\n)|\.(?=\n)", text)]
    return [m.end() for m in re.finditer(r":\n|\n\n|\n", text)]


def facts_end(kind: str, text: str) -> int:
    """First position at which the facts that the rest depends on have been stated."""
    if kind == "dialogue":
        return text.index("\n\n") + 2
    if kind in {"lists", "records"}:
        heads = [m.start() for m in re.finditer(r"\n\n", text)]
        marks = ("\n1. ", "In sentences:", "As CSV:", "As JSON:", "As Cards:")
        found = [text.index(mark) for mark in marks if mark in text]
        return min(found) if found else heads[0] + 2
    if kind == "stories":
        return text.index("\n\n", 40) if "\n\n" in text[40:] else 0
    return 0


def candidates(tokenizer: Tokenizer, kind: str, text: str) -> list[str]:
    """Every acceptable prompt of one document."""
    start = facts_end(kind, text)
    whole = tokenizer.encode(text).ids
    result = []
    for cut in boundaries(kind, text):
        if cut < start or cut > 12 * LONGEST:
            continue
        prompt = text[:cut]
        ids = tokenizer.encode(prompt).ids
        # A cut inside a token would start the continuation from ids never seen in training.
        natural = whole[: len(ids)] == ids and len(whole) - len(ids) >= LEAST_REST
        if SHORTEST <= len(ids) <= LONGEST and natural:
            result.append(prompt)
    return result


def choose(
    tokenizer: Tokenizer, kind: str, texts: Sequence[str], count: int, *, seed: int,
    known: np.ndarray | None, training: Sequence[str],
) -> list[str]:  # fmt: skip
    """`count` prompts from different documents that do not occur in the training text.

    `known` uint64 [n]: sorted hashes of all 50-byte windows of the training text (real kinds);
    for generated kinds no training document may start with the prompt.
    """
    rng = random.Random(f"{seed}-{kind}-prompts")
    order = list(texts)
    rng.shuffle(order)
    chosen: list[str] = []
    for text in order:
        options = candidates(tokenizer, kind, text)
        if not options:
            continue
        # Structured documents are short: an early cut leaves more to generate.
        prompt = options[0] if kind in {"lists", "records"} else rng.choice(options)
        if known is not None:
            hashes = window_hashes(prompt.encode())
            found = known[np.minimum(np.searchsorted(known, hashes), len(known) - 1)] == hashes
            if len(hashes) == 0 or found.any():
                continue
        elif any(document.startswith(prompt) for document in training):
            continue
        chosen.append(prompt)
        if len(chosen) == count:
            return chosen
    raise RuntimeError(f"{kind}: only {len(chosen)} of {count} prompts in the held-out text")


def build(
    tokenizer: Tokenizer,
    train: dict[str, list[str]],
    held_out: dict[str, list[str]],
    folder: Path,
    *,
    real_kinds: Sequence[str],
    seed: int,
) -> dict[str, dict[str, int]]:
    """Write dev.jsonl and unseen.jsonl with the same number of prompts per kind."""
    rows: dict[str, list[dict[str, object]]] = {name: [] for name in PER_KIND}
    for kind in sorted(held_out):
        real = kind in real_kinds
        known = np.unique(window_hashes("\n".join(train[kind]).encode())) if real else None
        count = sum(PER_KIND.values())
        texts = choose(tokenizer, kind, held_out[kind], count, seed=seed, known=known,
                       training=train[kind])  # fmt: skip
        first = 0
        for name, size in PER_KIND.items():
            for index, text in enumerate(texts[first : first + size]):
                rows[name].append({"request_id": f"{name}-{kind}-{index:02d}", "benchmark": kind,
                                   "text": text, "max_new_tokens": MAX_NEW_TOKENS})  # fmt: skip
            first += size
    folder.mkdir(parents=True, exist_ok=True)
    for name, items in rows.items():
        lines = "".join(json.dumps(row) + "\n" for row in items)
        (folder / f"{name}.jsonl").write_text(lines, encoding="utf-8")
    return {name: {"prompts": len(items), "per_kind": PER_KIND[name]}
            for name, items in rows.items()}  # fmt: skip
