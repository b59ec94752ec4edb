"""The training scripts on a model a hundredth of the demo pair's size, and random tokens."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

_SCRIPTS = Path(__file__).parents[3] / "scripts"
sys.path.insert(0, str(_SCRIPTS))  # as for a script that runs there

from demo_pair import shapes, train_drafter, train_target  # noqa: E402

VOCAB = 96
KINDS = ("aa", "bb", "cc")


@pytest.fixture(scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch, _one_thread: None) -> None:
    """Shrink the pair in every module that names its shape."""
    target = replace(
        shapes.TARGET, vocab_size=VOCAB, hidden_size=32, intermediate_size=32, n_heads=2,
        key_dim=16, value_dim=16,
    )  # fmt: skip
    drafter = replace(
        shapes.DRAFTER, vocab_size=VOCAB, hidden_size=32, intermediate_size=32, selector_rank=4
    )
    for module in (shapes, train_target, train_drafter):
        monkeypatch.setattr(module, "TARGET", target)
    for module in (shapes, train_drafter):
        monkeypatch.setattr(module, "DRAFTER", drafter)


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Token arrays of three kinds; a kind's tokens leave the same remainder modulo 3."""
    folder = tmp_path_factory.mktemp("corpus")
    rng = np.random.default_rng(0)
    for split, count in (("train", 3000), ("heldout", 1500)):
        for remainder, kind in enumerate(KINDS):
            tokens = 3 * rng.integers(1, VOCAB // 3, count) + remainder
            tokens[rng.random(count) < 1 / 60] = shapes.EOS
            np.save(folder / f"{split}_{kind}.npy", tokens.astype(np.uint16))
    return folder
