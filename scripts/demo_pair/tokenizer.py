"""The demo pair's own byte-level BPE tokenizer, saved as a Hugging Face tokenizer folder."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

END = "<|endoftext|>"
SPECIAL_TOKENS = (END, "<|mask|>", "<|pad|>", *(f"<|reserved_{i}|>" for i in range(5)))


def sample_texts(
    kinds: Mapping[str, Sequence[str]], *, chars_per_kind: int, seed: int
) -> Iterator[str]:
    """Texts of every kind, the same number of characters each, in a seeded order."""
    for kind in sorted(kinds):
        order = list(kinds[kind])
        random.Random(f"{seed}-{kind}").shuffle(order)
        taken = 0
        for text in order:
            if taken >= chars_per_kind:
                break
            taken += len(text)
            yield text


def train_tokenizer(texts: Iterator[str], *, vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE whose first ids are `SPECIAL_TOKENS`; every byte stays encodable."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer=trainer)
    if tokenizer.get_vocab_size() != vocab_size:
        raise RuntimeError(f"got {tokenizer.get_vocab_size()} tokens, wanted {vocab_size}")
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path, *, context: int) -> None:
    """Write tokenizer.json and tokenizer_config.json for `PreTrainedTokenizerFast`."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context,
        "bos_token": None,
        "eos_token": END,
        "pad_token": SPECIAL_TOKENS[2],
        "mask_token": SPECIAL_TOKENS[1],
        "additional_special_tokens": list(SPECIAL_TOKENS[3:]),
        "clean_up_tokenization_spaces": False,
        "add_prefix_space": False,
    }
    text = json.dumps(config, indent=2) + "\n"
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")


def check_round_trip(tokenizer: Tokenizer, *, seed: int, cases: int = 300) -> None:
    """Encode and decode random Unicode text; raise if one character changes."""
    rng = random.Random(seed)
    for _ in range(cases):
        limit = rng.choice((0x7F, 0x7FF, 0xFFFF, 0x10FFFF))
        points = (rng.randrange(1, limit) for _ in range(rng.randint(1, 60)))
        text = "".join(chr(p) for p in points if not 0xD800 <= p <= 0xDFFF)
        back = tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False)
        if back != text:
            raise RuntimeError(f"round trip changed {text!r} into {back!r}")
