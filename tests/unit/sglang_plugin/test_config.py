"""Which layers get W12, registration, and what is decided before a model is built."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from specpilot_cli.engines.sglang.plugin.state import State
from specpilot_cli.schema.plugin_config import PluginConfig, W12Plugin
from specpilot_kernels.build import GpuUnavailable
from specpilot_kernels.w12 import layout
from specpilot_kernels.w12.manifest import W12FolderError
from tests.unit.sglang_plugin.conftest import bits, ordinary


def model(**settings: Any) -> Any:
    """A model configuration as SGLang's loader has it."""
    return SimpleNamespace(hf_config=SimpleNamespace(), is_draft_model=False, **settings)


LOAD = SimpleNamespace(load_format=SimpleNamespace(value="auto"))


def activated(plugin: Any, **settings: Any) -> State:
    state = State()
    plugin.w12_config.activate(PluginConfig(w12=W12Plugin(**settings)), state)
    return state


def prepare(plugin: Any, config: Any, **settings: Any) -> Any:
    return plugin.w12_config.prepared(lambda *_: config, model(**settings), LOAD)


def test_the_method_is_known_after_activation(plugin: Any) -> None:
    from sglang.srt.arg_groups import choices
    from sglang.srt.layers import quantization

    state = activated(plugin)
    assert "w12" in choices.QUANTIZATION_CHOICES
    for methods in ("QUANTIZATION_METHODS", "BASE_QUANTIZATION_METHODS",
                    "CPU_QUANTIZATION_METHODS"):  # fmt: skip
        assert getattr(quantization, methods)["w12"] is plugin.w12_config.W12Config
    hooked = set(plugin.fake.HookRegistry.hooks)
    loader = "sglang.srt.model_loader."
    assert hooked == {
        "sglang.srt.model_executor.model_runner.ModelRunner.load_model",
        loader + "loader._get_quantization_config",
        loader + "weight_utils.safetensors_weights_iterator",
        loader + "weight_utils.buffered_multi_thread_safetensors_weights_iterator",
    }
    assert state.report()["active"] == {}
    assert "`--quantization w12`" in state.report()["problems"][0]


def test_which_layers_get_it(plugin: Any) -> None:
    config = plugin.w12_config.W12Config()
    fake = plugin.fake

    def method(kind: type, prefix: str) -> str:
        layer = kind.__new__(kind)
        torch.nn.Module.__init__(layer)
        return type(config.get_quant_method(layer, prefix)).__name__

    assert method(fake.LinearBase, "model.layers.3.mlp.gate_up_proj") == "W12LinearMethod"
    assert method(fake.ParallelLMHead, "lm_head") == "W12LinearMethod"
    assert method(fake.LinearBase, "visual.blocks.0.attn.qkv") == "UnquantizedLinearMethod"
    assert method(fake.LinearBase, "visual.blocks.1.attn.qkv") == "UnquantizedLinearMethod"
    assert method(fake.LinearBase, "model.embed_vision.proj") == "UnquantizedLinearMethod"
    assert method(fake.FusedMoE, "model.layers.0.mlp.experts") == "NoneType"
    assert method(torch.nn.Module, "model.layers.0.attn") == "NoneType"
    kept = plugin.w12_config.FACTS.kept
    assert set(kept) == {"visual", "model.embed_vision", "model.layers.0.mlp.experts"}


def test_a_model_without_a_layer_for_it_is_not_active(plugin: Any) -> None:
    state = activated(plugin)
    prepare(plugin, plugin.w12_config.W12Config())
    plugin.w12_config.FACTS.keep("a", "its weights are float32")
    (problem,) = state.report()["problems"]
    assert problem == "w12: no layer could be encoded: its weights are float32"


def test_other_methods_pass_untouched(plugin: Any) -> None:
    activated(plugin)
    other = object()
    assert prepare(plugin, other) is other
    assert prepare(plugin, None) is None
    assert plugin.w12_config.FACTS.asked is False


@pytest.mark.parametrize("asked", [False, True])
def test_a_drafter_is_built_as_without_w12_unless_asked_for(plugin: Any, asked: bool) -> None:
    activated(plugin, drafter=asked)
    config = plugin.w12_config.W12Config()
    settings = SimpleNamespace(hf_config=SimpleNamespace(), is_draft_model=True)
    found = plugin.w12_config.prepared(lambda *_: config, settings, LOAD)
    if not asked:
        assert found is None
        return
    assert found is config
    layer = plugin.fake.LinearBase(256, [256], config, "fc")
    assert layer.quant_method.name == "drafter.fc"
    assert plugin.w12_config.FACTS.asked is False


@pytest.mark.parametrize(
    ("engine", "reason"),
    [
        ({}, None),
        ({"algorithm": "NGRAM"}, None),
        ({"algorithm": "STANDALONE"}, None),
        ({"algorithm": "DSPARK"}, None),
        ({"algorithm": "DFLASH", "drafter": "dflash2"}, None),
        ({"algorithm": "DFLASH", "drafter": "dflash"}, "the DFLASH drafter multiplies"),
        ({"algorithm": "EAGLE3"}, "the EAGLE3 drafter multiplies"),
        ({"fp32_head": True}, "float32"),
    ],
    ids=str,
)
def test_when_the_head_stays(
    make_plugin: Callable[..., Any], tmp_path: Path, engine: dict[str, Any], reason: str | None
) -> None:
    for name, selector in (("dflash2", {"selector_rank": 16}), ("dflash", {})):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({"dflash_config": selector}))
    if "drafter" in engine:
        engine = {**engine, "drafter": str(tmp_path / engine["drafter"])}
    plugin = make_plugin(**engine)
    activated(plugin)
    config = prepare(plugin, plugin.w12_config.W12Config())
    head = plugin.fake.ParallelLMHead(256, 512, config, "lm_head")
    if reason is None:
        assert type(head.quant_method).__name__ == "W12LinearMethod"
        head.load(ordinary(512, 256))
        head.finish()
        # What SGLang's drafters ask of a quantized head.
        assert (head.weight.dtype, head.weight.numel()) == (torch.uint8, 0)
        x = ordinary(3, 256, 1)
        wanted = torch.nn.functional.linear(x, ordinary(512, 256))
        assert torch.equal(bits(head(x)), bits(wanted))
        head.quant_method.restore_weights_before_loading(head)
        assert torch.equal(bits(head.weight.data), bits(ordinary(512, 256)))
    else:
        assert type(head.quant_method) is plugin.fake.UnquantizedEmbeddingMethod
        assert reason in plugin.w12_config.FACTS.kept["lm_head"]


def test_the_head_stays_if_it_is_not_asked_for(plugin: Any) -> None:
    activated(plugin, lm_head=False)
    config = prepare(plugin, plugin.w12_config.W12Config())
    assert config.head_reason == plugin.w12_head.NOT_ASKED


def test_a_folder_of_another_version_is_refused(plugin: Any) -> None:
    numbers = {"version": layout.FORMAT_VERSION, "layout": layout.LAYOUT}
    config = plugin.w12_config.W12Config.from_config({**numbers, "hf_config": object()})
    assert config.checkpoint_is_w12
    with pytest.raises(W12FolderError, match="layout 99 is unknown"):
        plugin.w12_config.W12Config.from_config({**numbers, "layout": 99})


def test_a_folder_is_not_read_by_loaders_that_would_not_decode_it(plugin: Any) -> None:
    activated(plugin)
    config = plugin.w12_config.W12Config()
    config.checkpoint_is_w12 = True
    load = SimpleNamespace(load_format=SimpleNamespace(value="fastsafetensors"))
    with pytest.raises(W12FolderError, match="not fastsafetensors"):
        plugin.w12_config.prepared(lambda *_: config, model(), load)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (GpuUnavailable("cuda-bindings is not installed: pip install 'specpilot[gpu]'"), "gpu"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried ..."), "too little GPU memory"),
    ],
)
def test_a_gpu_that_cannot_be_used_stops_before_anything_is_loaded(
    make_plugin: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    words: str,
) -> None:
    plugin = make_plugin(cpu=False)
    activated(plugin)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)

    def fails(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(plugin.w12_product.gemm, "warm", fails)
    with pytest.raises(plugin.w12_product.W12Error, match=words):
        prepare(plugin, plugin.w12_config.W12Config())


def test_a_server_that_divides_the_gpu_is_refused(make_plugin: Callable[..., Any]) -> None:
    """Some of the kernel's blocks would find no place, and the others wait for them."""
    plugin = make_plugin(pdmux=True)
    activated(plugin)
    with pytest.raises(plugin.w12_product.W12Error, match="cannot run with --enable-pdmux"):
        prepare(plugin, plugin.w12_config.W12Config())


def test_a_server_on_the_cpu_asks_no_gpu(
    make_plugin: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    plugin = make_plugin()
    activated(plugin)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(plugin.w12_product.gemm, "warm", lambda index: pytest.fail("asked"))
    assert prepare(plugin, plugin.w12_config.W12Config()) is not None


def test_muse_glimmers_attention_keeps_its_merged_projection(
    plugin: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = plugin.fake

    class MuseGlimmerAttention(torch.nn.Module):
        def __init__(
            self, config: Any, layer_id: int, quant_config: Any = None, prefix: str = ""
        ) -> None:
            super().__init__()
            self.unfused_qkv = quant_config is not None
            stock = SimpleNamespace(get_quant_method=lambda *_: fake.UnquantizedLinearMethod())
            self.qkv_proj = fake.LinearBase(256, [128, 64, 64], quant_config or stock, prefix)
            self.norm = torch.nn.LayerNorm(4)

    module = SimpleNamespace(MuseGlimmerAttention=MuseGlimmerAttention)
    monkeypatch.setitem(sys.modules, "sglang.srt.models.muse_glimmer", module)
    activated(plugin)
    for _ in range(2):  # a drafter's configuration comes after the target's
        config = prepare(plugin, plugin.w12_config.W12Config())
    attention = MuseGlimmerAttention(object(), 3, quant_config=config, prefix="layers.3.self_attn")
    assert attention.unfused_qkv is False
    method = attention.qkv_proj.quant_method
    assert (type(method).__name__, method.name) == (
        "W12LinearMethod", "layers.3.self_attn.qkv_proj"
    )  # fmt: skip
    parts = [ordinary(size, 256, size) for size in (128, 64, 64)]
    attention.qkv_proj.load(*parts)
    attention.qkv_proj.finish()
    x = ordinary(3, 256)
    whole = torch.nn.functional.linear(x, torch.cat(parts))
    assert torch.equal(bits(attention.qkv_proj(x)), bits(whole))
    assert attention.qkv_proj.weight is None
    assert MuseGlimmerAttention(object(), 3, other_configuration()).unfused_qkv is True


def other_configuration() -> Any:
    """A quantization that is not W12."""
    from tests.unit.sglang_plugin.fake_sglang import UnquantizedLinearMethod

    return SimpleNamespace(get_quant_method=lambda *_: UnquantizedLinearMethod())
