"""SGLang's W12 layers on a GPU: memory that comes back, products, graphs; with a small SGLang."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="no CUDA device: torch is not installed")

from w12_cases import little_memory, normal, same_bits  # noqa: E402

from specpilot_kernels.w12 import selfcheck  # noqa: E402
from tests.unit.sglang_plugin import fake_sglang  # noqa: E402

pytestmark = pytest.mark.gpu

PLUGIN = "specpilot_cli.engines.sglang.plugin"


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """`make(inputs, outputs, name)` builds a layer on the GPU; `facts` says what became of it."""
    fake_sglang.install(monkeypatch, fake_sglang.Engine())
    linear = importlib.import_module(f"{PLUGIN}.w12_linear")
    product = importlib.import_module(f"{PLUGIN}.w12_product")
    fused = importlib.import_module(f"{PLUGIN}.w12_fused")
    facts = importlib.import_module(f"{PLUGIN}.w12_facts").Facts(asked=True)

    def method(_: Any, name: str) -> Any:
        stock = fake_sglang.UnquantizedLinearMethod
        return linear.W12LinearMethod(name, stock, facts, verify=True)

    def make(inputs: int, outputs: list[int], name: str) -> Any:
        config = SimpleNamespace(get_quant_method=method)
        with torch.device("cuda"):
            layer = fake_sglang.LinearBase(inputs, outputs, config, name)
        layer.weight.data.copy_(weights(sum(outputs), inputs, len(name)))
        return layer

    product.warm(0)
    yield SimpleNamespace(make=make, facts=facts, product=product, fused=fused)
    del sys.modules[f"{PLUGIN}.w12_linear"]  # it is bound to the small SGLang


def weights(rows: int, cols: int, seed: int) -> torch.Tensor:
    return normal(torch.Generator(device="cuda").manual_seed(seed), rows, cols)


def test_a_layer_multiplies_with_its_records(plugin: Any) -> None:
    layer = plugin.make(5120, [1024, 256, 256], "qkv")
    before = layer.weight.data.clone()
    layer.finish()
    assert layer.weight is None
    assert plugin.facts.report()["form"] == "kernel"
    bias = torch.ones(1536, dtype=torch.bfloat16, device="cuda")
    for rows in (1, 7, 64, 200, 1000):
        x = torch.randn((rows, 5120), device="cuda").bfloat16()
        exact = x.double() @ before.double().T + 1
        error = selfcheck.relative_error(layer(x, bias), exact)
        cublas = selfcheck.relative_error(torch.nn.functional.linear(x, before, bias), exact)
        assert error <= selfcheck.RELATIVE_TO_CUBLAS * cublas
        if rows <= 64:
            assert selfcheck.wrong_elements(layer(x, bias), x, before, bias) == 0
    layer.quant_method.restore_weights_before_loading(layer)
    assert same_bits(layer.weight.data, before)


def test_freed_memory_is_the_drivers(plugin: Any) -> None:
    """A quarter of the weights, not a quarter left over in pieces that nobody else can use."""
    torch.cuda.empty_cache()
    layers = [plugin.make(5120, [5120], f"layer {i}") for i in range(12)]
    torch.cuda.synchronize()
    free_before, _ = torch.cuda.mem_get_info()
    for layer in layers:
        layer.finish()
    torch.cuda.empty_cache()
    free_after, _ = torch.cuda.mem_get_info()
    report = plugin.facts.report()
    assert report["layers"] == 12
    assert report["freed_bytes"] > 0.24 * report["bf16_bytes"]
    assert free_after - free_before > 0.9 * report["freed_bytes"]


def test_a_captured_layer_gives_what_an_eager_one_does(plugin: Any) -> None:
    """Rows of the kernel and rows that are decoded; every replay again."""
    layer = plugin.make(2560, [4096], "up")
    layer.finish()
    side = torch.cuda.Stream()  # an engine captures all its graphs on one
    for rows in (1, 32, 64, 512):
        x = torch.randn((rows, 2560), device="cuda").bfloat16()
        wanted = layer(x).clone()
        with torch.cuda.stream(side):
            layer(x)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side):
            out = layer(x)
        for _ in range(3):
            out.zero_()
            graph.replay()
            torch.cuda.synchronize()
            assert same_bits(out, wanted)


def test_a_head_with_padding_rows(plugin: Any) -> None:
    layer = plugin.make(1024, [32064], "head")
    layer.weight.data[32000:] = 0
    before = layer.weight.data.clone()
    layer.finish()
    x = torch.randn((5, 1024), device="cuda").bfloat16()
    logits = layer(x)
    assert selfcheck.wrong_elements(logits, x, before) == 0
    assert not logits[:, 32000:].any()


def test_too_little_memory_names_the_layer(plugin: Any) -> None:
    layer = plugin.make(8192, [8192], "big")
    message = "too little GPU memory to encode `big`"
    with little_memory(), pytest.raises(plugin.product.W12Error, match=message):
        layer.finish()
    layer.finish()
    assert layer.weight is None


def projections(plugin: Any, cols: int, rows: list[int]) -> list[Any]:
    layers = [plugin.make(cols, [n], f"projection {n}") for n in rows]
    plugin.fused.Fusion(layers)
    return layers


@pytest.mark.parametrize(("cols", "rows"), [(5120, [16384, 96]), (5120, [2048, 12])])
def test_two_projections_are_one_weight(plugin: Any, cols: int, rows: list[int]) -> None:
    """Of a gated delta network, whole and one of eight ranks; below and above the kernel's rows."""
    layers = projections(plugin, cols, rows)
    fusion = layers[0].w12_fusion
    before = [layer.weight.data.clone() for layer in layers]
    for layer in layers:
        layer.finish()
    assert fusion.is_active
    assert (plugin.facts.report()["layers"], plugin.facts.report()["fused"]) == (2, 1)
    for n in (1, 8, 64, 100, 200, 2000):
        x = torch.randn((n, cols), device="cuda").bfloat16()
        for part, weight, layer in zip(fusion(x), before, layers, strict=True):
            assert part.shape == (n, len(weight))
            assert part.stride(0) % 8 == 0
            exact = x.double() @ weight.double().T
            cublas = selfcheck.relative_error(torch.nn.functional.linear(x, weight), exact)
            error = selfcheck.relative_error(part, exact)
            assert error <= selfcheck.RELATIVE_TO_CUBLAS * cublas
            if n <= 64:
                assert selfcheck.wrong_elements(part.contiguous(), x, weight) == 0
                assert same_bits(part.contiguous(), layer(x).contiguous())
    for layer, weight in zip(layers, before, strict=True):
        layer.quant_method.restore_weights_before_loading(layer)
        assert same_bits(layer.weight.data, weight)


def test_fused_weights_free_what_they_save(plugin: Any) -> None:
    """Also while they are stacked: nothing is left of the separate weights or the stack."""
    torch.cuda.empty_cache()
    pairs = [projections(plugin, 5120, [8192, 96]) for _ in range(8)]
    torch.cuda.synchronize()
    torch.cuda.empty_cache()  # of what made the weights
    free_before, _ = torch.cuda.mem_get_info()
    for layer in (layer for pair in pairs for layer in pair):
        layer.finish()
    torch.cuda.empty_cache()
    free_after, _ = torch.cuda.mem_get_info()
    report = plugin.facts.report()
    assert report["fused"] == 8
    assert free_after - free_before > 0.9 * report["freed_bytes"]


def test_captured_projections_give_what_eager_ones_do(plugin: Any) -> None:
    layers = projections(plugin, 5120, [4096, 24])
    for layer in layers:
        layer.finish()
    fusion = layers[0].w12_fusion
    side = torch.cuda.Stream()
    for rows in (1, 32, 512):
        x = torch.randn((rows, 5120), device="cuda").bfloat16()
        wanted = [part.clone() for part in fusion(x)]
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side):
            parts = fusion(x)
        for _ in range(3):
            graph.replay()
            torch.cuda.synchronize()
            for part, eager in zip(parts, wanted, strict=True):
                assert same_bits(part.contiguous(), eager.contiguous())
