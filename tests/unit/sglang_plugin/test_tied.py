"""Heads that are the embedding table too."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from specpilot_cli.engines.sglang.plugin.state import State
from specpilot_cli.schema.plugin_config import PluginConfig, W12Plugin
from tests.unit.sglang_plugin.conftest import bits, ordinary


class Embedding(torch.nn.Module):
    """As SGLang's vocabulary tables: a weight, and a method for looking up."""

    def __init__(self, table: torch.Tensor, method: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(table, requires_grad=False)
        self.quant_method = method


class Model(torch.nn.Module):
    """head: "table" is the table itself, "shared" has its weight, "own" has one of its own."""

    def __init__(self, fake: Any, config: Any, head: str) -> None:
        super().__init__()
        self.embed_tokens = Embedding(ordinary(512, 256), fake.UnquantizedEmbeddingMethod())
        if head == "table":
            self.lm_head = self.embed_tokens
            return
        self.lm_head = fake.ParallelLMHead(256, 512, config, "lm_head")
        if head == "shared":
            self.lm_head.weight = self.embed_tokens.weight
        else:
            self.lm_head.weight.data.copy_(ordinary(512, 256, 1))


def load(plugin: Any, head: str, *, drafter: bool = False, **settings: Any) -> tuple[Model, Any]:
    """Build and load a model as SGLang does; return it and the facts."""
    plugin.w12_config.activate(PluginConfig(w12=W12Plugin(**settings)), State())
    described = SimpleNamespace(hf_config=SimpleNamespace(), is_draft_model=False)
    auto = SimpleNamespace(load_format="auto")
    config = plugin.w12_config.prepared(lambda *_: plugin.w12_config.W12Config(), described, auto)
    model = Model(plugin.fake, config, head)
    if model.lm_head is not model.embed_tokens:
        model.lm_head.finish()
    runner = SimpleNamespace(model=model, is_draft_worker=drafter, model_config=described)
    assert plugin.w12_config.loaded(None, runner) is None
    return model, plugin.w12_config.FACTS


@pytest.mark.parametrize("head", ["table", "shared"])
def test_logits_come_from_a_copy_and_lookups_from_the_table(
    plugin: Any, head: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    model, facts = load(plugin, head, tied_lm_head=True)
    table = ordinary(512, 256)
    assert torch.equal(bits(model.embed_tokens.weight.data), bits(table))
    assert model.lm_head.weight is model.embed_tokens.weight
    x = ordinary(3, 256, 5)
    method = model.lm_head.quant_method
    assert torch.equal(
        bits(method.apply(model.lm_head, x)), bits(torch.nn.functional.linear(x, table))
    )
    ids = torch.tensor([3, 500])
    assert torch.equal(bits(method.embedding(model.lm_head, ids)), bits(table[ids]))
    (entry,) = facts.encoded.values()
    assert entry.is_copy
    assert facts.report()["freed_bytes"] == -entry.encoded_bytes
    assert "specpilot: W12: 1 layers, 0.000 GB to 0.000 GB, verified bit for bit" in caplog.text


def test_a_copy_follows_new_weights(plugin: Any) -> None:
    model, _ = load(plugin, "table", tied_lm_head=True)
    new = ordinary(512, 256, 9)
    model.embed_tokens.weight.data.copy_(new)
    model.lm_head.quant_method.process_weights_after_loading(model.lm_head)
    x = ordinary(3, 256, 5)
    found = model.lm_head.quant_method.apply(model.lm_head, x)
    assert torch.equal(bits(found), bits(torch.nn.functional.linear(x, new)))


@pytest.mark.parametrize("head", ["table", "shared"])
def test_without_being_asked_a_tied_head_is_stock(plugin: Any, head: str) -> None:
    model, facts = load(plugin, head)
    assert type(model.lm_head.quant_method) is plugin.fake.UnquantizedEmbeddingMethod
    assert facts.kept == {"lm_head": plugin.w12_tied.NOT_ASKED}


def test_a_head_of_its_own_gets_no_copy(plugin: Any) -> None:
    model, facts = load(plugin, "own", tied_lm_head=True)
    assert model.lm_head.weight.numel() == 0
    assert [entry.is_copy for entry in facts.encoded.values()] == [False]


def test_a_head_of_its_own_that_stays_gets_no_copy(plugin: Any) -> None:
    model, facts = load(plugin, "own", lm_head=False, tied_lm_head=True)
    assert facts.encoded == {}
    assert model.lm_head.weight is not None


def test_a_head_in_float32_gets_no_copy(make_plugin: Any) -> None:
    plugin = make_plugin(fp32_head=True)
    _, facts = load(plugin, "table", tied_lm_head=True)
    assert facts.kept == {"lm_head": plugin.w12_head.FP32}


def test_a_drafters_head_is_left_alone(plugin: Any) -> None:
    model, facts = load(plugin, "table", drafter=True, tied_lm_head=True)
    assert type(model.lm_head.quant_method) is plugin.fake.UnquantizedEmbeddingMethod
    assert facts.encoded == {}
