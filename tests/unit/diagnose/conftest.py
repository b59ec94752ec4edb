"""Synthetic recordings, healthy or with one fault, from the script that measures false alarms."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "scripts"))  # as for a script that runs there

from diagnose_pair.synthetic import Drafter, record

from specpilot_cli.schema.lattice import LatticeRecording

TEMPLATE = "<|im_start|>user\n{{ text }}<|im_end|>{% if enable_thinking %}<think>{% endif %}"


@pytest.fixture(scope="session")
def recorded() -> Callable[..., LatticeRecording]:
    """`recorded(seed=1, **changes)`: a recording of a drafter with these settings, kept."""
    kept: dict[tuple[Any, ...], LatticeRecording] = {}

    def make(seed: int = 1, **changes: Any) -> LatticeRecording:
        key = (seed, *sorted(changes.items()))
        if key not in kept:
            kept[key] = record(Drafter(**changes), seed)
        return kept[key]

    return make


@pytest.fixture
def plain_dflash(recorded: Callable[..., LatticeRecording]) -> LatticeRecording:
    """A healthy recording of a drafter without a selector: scores have no predecessor."""
    source = recorded(sharpness=3.0)
    own = source.unary - source.unary_logsumexp[..., None]
    choice = np.take_along_axis(source.candidate_ids, own.argmax(axis=-1)[..., None], axis=-1)
    metadata = source.metadata.model_copy(update={"drafter_kind": "dflash"})
    return replace(source, metadata=metadata, edge=own[:, :, None, :], stock_choice=choice[..., 0])


@pytest.fixture
def target_folder(tmp_path: Path) -> Callable[..., Path]:
    """`target_folder(config=, template=, bos=)`: a target's configuration and tokenizer."""

    def make(
        *, config: dict[str, Any] | None = None, template: str | None = TEMPLATE,
        bos: str | None = None,
    ) -> Path:  # fmt: skip
        folder = tmp_path / "target"
        folder.mkdir(exist_ok=True)
        text = {"num_hidden_layers": 8, "hidden_size": 64, "vocab_size": 4099}
        (folder / "config.json").write_text(json.dumps({"text_config": text, **(config or {})}))
        words = ("<s>", "<|im_start|>", "<|im_end|>", "<think>", "</think>")
        added = [{"id": 4000 + i, "content": word} for i, word in enumerate(words)]
        (folder / "tokenizer.json").write_text(json.dumps({"added_tokens": added}))
        settings = {"chat_template": template, "bos_token": bos}
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
        return folder

    return make


@pytest.fixture
def drafter_folder(tmp_path: Path) -> Callable[..., Path]:
    """`drafter_folder(**changes)`: a configuration that fits `target_folder`'s and block 8."""

    def make(**changes: Any) -> Path:
        folder = tmp_path / "drafter"
        folder.mkdir(exist_ok=True)
        inner = {"block_size": 8, "mask_token_id": 4098, "target_layer_ids": [1, 3, 6]}
        outer = {"hidden_size": 64, "vocab_size": 4099, "num_target_layers": 8}
        for key, value in changes.items():
            (inner if key in inner else outer)[key] = value
        (folder / "config.json").write_text(json.dumps({**outer, "dflash_config": inner}))
        return folder

    return make
