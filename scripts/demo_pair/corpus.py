"""Build the demo pair's corpus: documents, tokenizer, token arrays, prompts, and a manifest.

    python scripts/demo_pair/corpus.py --output .train --prompts recipes/demo-cpu/prompts

Needs `tokenizers`, `numpy`, and the clients `npm`, `apt-get`, `dpkg-deb` (Debian 12).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

import dialogue
import functions
import lists
import numpy as np
import prompts as prompt_sets
import records
import stories
from sources import Document, load_real
from tokenizer import END, check_round_trip, sample_texts, save_tokenizer, train_tokenizer
from tokenizers import Tokenizer

GENERATORS: dict[str, Callable[[str], str]] = {
    "dialogue": dialogue.dialogue,
    "functions": functions.module,
    "lists": lists.listing,
    "records": records.record,
    "stories": stories.story,
}
# Reference text is capped so that no kind dominates; the generated kinds can be any size.
REAL_CAPS = {"prose": 12_000_000, "code": 7_400_000, "reference": 10_000_000}
HELD_OUT_PER_1000 = 40


def held_out(name: str) -> bool:
    """Whether the document with this name belongs to the held-out side (by hash of the name)."""
    return int(hashlib.sha256(name.encode()).hexdigest(), 16) % 1000 < HELD_OUT_PER_1000


def cap_documents(documents: Sequence[Document], limit: int, *, seed: int) -> list[Document]:
    """At most `limit` characters, chosen by a seeded shuffle, held-out documents first."""
    order = list(documents)
    random.Random(seed).shuffle(order)
    order.sort(key=lambda d: not held_out(d.name))
    kept, size = [], 0
    for document in order:
        if size + len(document.text) <= limit:
            kept.append(document)
            size += len(document.text)
    return kept


def generate(kind: str, chars: int, *, seed: int) -> list[Document]:
    """Different generated documents with `chars` characters in all."""
    make, documents, seen, size, index = GENERATORS[kind], [], set(), 0, 0
    while size < chars:
        text = make(f"{kind}-{seed}-{index}")
        if text not in seen:
            seen.add(text)
            documents.append(Document(f"{kind}-{seed}-{index}", text))
            size += len(text)
        index += 1
    return documents


def split(
    documents: dict[str, list[Document]],
) -> tuple[dict[str, list[Document]], dict[str, list[Document]]]:
    """Train and held-out documents by kind; no generated text is on both sides."""
    train = {k: [d for d in v if not held_out(d.name)] for k, v in documents.items()}
    rest = {k: [d for d in v if held_out(d.name)] for k, v in documents.items()}
    return train, rest


def to_tokens(tokenizer: Tokenizer, texts: Sequence[str]) -> np.ndarray:
    """Token ids uint16 [n] of all texts, each followed by the end-of-text id."""
    end = tokenizer.token_to_id(END)
    parts: list[np.ndarray] = []
    for start in range(0, len(texts), 2000):
        for encoding in tokenizer.encode_batch(list(texts[start : start + 2000])):
            parts.append(np.asarray([*encoding.ids, end], dtype=np.uint16))
    return np.concatenate(parts)


def write_arrays(
    tokenizer: Tokenizer,
    sides: dict[str, dict[str, list[Document]]],
    output: Path,
    *,
    seed: int,
) -> dict[str, dict[str, dict[str, float]]]:
    """Write {train,heldout}_<kind>.npy and corpus.npz; return counts by side and kind."""
    counts: dict[str, dict[str, dict[str, float]]] = {}
    arrays: dict[str, np.ndarray] = {}
    for side, kinds in sides.items():
        for kind, documents in sorted(kinds.items()):
            texts = [d.text for d in documents]
            random.Random(f"{seed}-{side}-{kind}").shuffle(texts)
            tokens = to_tokens(tokenizer, texts)
            size = sum(len(t.encode()) for t in texts)
            arrays[f"{side}_{kind}"] = tokens
            np.save(output / f"{side}_{kind}.npy", tokens)
            counts.setdefault(side, {})[kind] = {
                "documents": len(texts),
                "bytes": size,
                "tokens": len(tokens),
                "bytes_per_token": round(size / (len(tokens) - len(texts)), 3),
            }
    np.savez_compressed(output / "corpus.npz", **arrays)
    return counts


def sha256(path: Path) -> str:
    """Hex digest of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """Command line of this script."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path(".train"))
    parser.add_argument("--prompts", type=Path, help="folder for dev.jsonl and unseen.jsonl")
    parser.add_argument("--vocab-size", type=int, default=2560)
    parser.add_argument("--generated-mb", type=float, default=11.0, help="MB per generated kind")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--seed", type=int, default=20)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> None:
    """Build everything below the output folder."""
    options = parse_arguments(arguments)
    output: Path = options.output
    output.mkdir(parents=True, exist_ok=True)
    documents, packages = load_real(output / "cache")
    for kind, limit in REAL_CAPS.items():
        documents[kind] = cap_documents(documents[kind], limit, seed=options.seed)
    for kind in GENERATORS:
        documents[kind] = generate(kind, int(options.generated_mb * 1e6), seed=options.seed)
    train, rest = split(documents)
    texts = {kind: [d.text for d in docs] for kind, docs in train.items()}
    sample = sample_texts(texts, chars_per_kind=2_500_000, seed=options.seed)
    tokenizer = train_tokenizer(sample, vocab_size=options.vocab_size)
    check_round_trip(tokenizer, seed=options.seed)
    save_tokenizer(tokenizer, output / "tokenizer", context=options.context)
    counts = write_arrays(tokenizer, {"train": train, "heldout": rest}, output, seed=options.seed)
    manifest = {
        "command": "python scripts/demo_pair/corpus.py " + " ".join(arguments),
        "seed": options.seed,
        "vocab_size": options.vocab_size,
        "generated_licence": "Apache-2.0 (text written by this project's own grammar)",
        "packages": [asdict(package) for package in packages],
        "counts": counts,
        "corpus_npz_sha256": sha256(output / "corpus.npz"),
        "tokenizer_sha256": sha256(output / "tokenizer" / "tokenizer.json"),
    }
    if options.prompts is not None:
        manifest["prompts"] = prompt_sets.build(
            tokenizer, texts, {k: [d.text for d in v] for k, v in rest.items()}, options.prompts,
            real_kinds=tuple(REAL_CAPS), seed=options.seed,
        )  # fmt: skip
    text = json.dumps(manifest, indent=2) + "\n"
    (output / "manifest.json").write_text(text, encoding="utf-8")
    if options.prompts is not None:
        shutil.copy(output / "manifest.json", options.prompts.parent / "corpus_manifest.json")
    for side, kinds in counts.items():
        for kind, row in kinds.items():
            print(f"{side:8} {kind:10} {row}", file=sys.stderr)


if __name__ == "__main__":
    main(sys.argv[1:])
