"""The plugin's modules, imported with a small SGLang."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from tests.unit.sglang_plugin import fake_sglang  # noqa: E402

PLUGIN = "specpilot_cli.engines.sglang.plugin"
NAMES = (
    "w12_facts", "w12_product", "w12_fused", "w12_linear", "w12_tied", "w12_head", "w12_checkpoint",
    "w12_chained", "w12_models", "w12_config",
)  # fmt: skip


@pytest.fixture
def make_plugin(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """`make_plugin(algorithm=, drafter=, fp32_head=, tp=)` -> the modules `NAMES`, fresh."""

    def make(**settings: Any) -> Any:
        engine = fake_sglang.Engine()
        for name, value in settings.items():
            setattr(engine, name, value)
        fake_sglang.install(monkeypatch, engine)
        loaded = {name: importlib.import_module(f"{PLUGIN}.{name}") for name in NAMES}
        return SimpleNamespace(**loaded, fake=fake_sglang)

    yield make
    for name in [name for name in sys.modules if name.startswith(f"{PLUGIN}.w12_")]:
        del sys.modules[name]


@pytest.fixture(scope="module")
def shared() -> Iterator[Any]:
    """One fake engine for all examples of a property."""
    patch = pytest.MonkeyPatch()
    fake_sglang.install(patch, fake_sglang.Engine())
    loaded = {name: importlib.import_module(f"{PLUGIN}.{name}") for name in NAMES}
    yield SimpleNamespace(**loaded, fake=fake_sglang)
    patch.undo()


@pytest.fixture
def plugin(make_plugin: Callable[..., Any]) -> Any:
    """The modules with an engine that has no drafter."""
    return make_plugin()


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Patterns: comparing floats would miss the sign of zero."""
    return tensor.contiguous().view(torch.int16)


def ordinary(rows: int, cols: int, seed: int = 0) -> torch.Tensor:
    """Weights like trained ones, bfloat16 [rows, cols], with a few escapes."""
    generator = torch.Generator().manual_seed(seed)
    weights = 0.02 * torch.randn((rows, cols), generator=generator)
    return weights.to(torch.bfloat16)
