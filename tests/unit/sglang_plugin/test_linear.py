"""What becomes of a layer's weight: W12 that multiplies, or a stock layer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st

from specpilot_kernels.w12 import reference_gemm
from tests.unit.sglang_plugin.conftest import bits, ordinary


def decoded(layer: Any) -> torch.Tensor:
    """The patterns that the layer multiplies with."""
    layer.quant_method.restore_weights_before_loading(layer)
    return bits(layer.weight.data)


def make(plugin: Any, inputs: int, outputs: list[int], **options: Any) -> Any:
    config = plugin.w12_config.W12Config()
    return plugin.fake.LinearBase(inputs, outputs, config, "model.layers.0.mlp.up", **options)


@settings(max_examples=25, deadline=None)
@given(
    tp=st.sampled_from([1, 2, 4]),
    row=st.booleans(),
    inputs=st.sampled_from([60, 64, 128, 320]),
    outputs=st.lists(st.sampled_from([40, 120, 128, 256]), min_size=1, max_size=3),
    seed=st.integers(0, 1 << 16),
)
def test_every_rank_holds_exactly_its_shard(
    shared: Any, tp: int, row: bool, inputs: int, outputs: list[int], seed: int
) -> None:
    """Any split, also one in the middle of a record, and merged layers like QKV and gate-up."""
    inputs, outputs = inputs * tp, [size * tp for size in outputs]
    if row:
        outputs = [sum(outputs)]  # SGLang's row-parallel layers are never merged
    parts = [ordinary(size, inputs, seed + i) for i, size in enumerate(outputs)]
    parts[0][0, 0], parts[-1][-1, -1] = float("inf"), -0.0
    for rank in range(tp):
        layer = make(shared, inputs, outputs, tp=tp, rank=rank, row=row)
        layer.load(*parts)
        wanted = bits(layer.weight.data.clone())
        layer.finish()
        method = type(layer.quant_method).__name__
        event(method)
        if method == "W12LinearMethod":
            assert layer.weight is None
            assert torch.equal(decoded(layer), wanted)
        else:
            assert torch.equal(bits(layer.weight.data), wanted)


def test_the_product_is_the_one_of_the_loaded_weight(plugin: Any) -> None:
    layer = make(plugin, 256, [128, 128, 256])
    parts = [ordinary(size, 256, size) for size in (128, 128, 256)]
    layer.load(*parts)
    x = ordinary(5, 256, 9)
    bias = torch.ones(512, dtype=torch.bfloat16)
    before = layer(x, bias)
    layer.finish()
    assert not isinstance(layer.quant_method, plugin.fake.UnquantizedLinearMethod)
    assert torch.equal(bits(layer(x, bias)), bits(before))
    facts = plugin.w12_config.FACTS
    facts.asked = True
    report = facts.report()
    assert report["layers"] == 1
    assert report["verified"] is True
    assert report["form"] == "decoded reference"
    assert report["bf16_bytes"] == 2 * 512 * 256
    assert report["freed_bytes"] == report["bf16_bytes"] - report["encoded_bytes"]
    assert report["bf16_bytes"] * 0.75 < report["encoded_bytes"] < report["bf16_bytes"] * 0.8
    assert report["kept_bf16"] == []


def test_parameters_that_code_would_read_are_gone(plugin: Any) -> None:
    layer = make(plugin, 256, [256])
    layer.load(ordinary(256, 256))
    layer.finish()
    assert layer.weight is None
    assert hasattr(layer, "weight")  # SGLang asks the head for it before it calls the method
    assert dict(layer.named_parameters()) == {}
    assert layer.state_dict() == {}


KEPT = {
    "small": ({"inputs": 5120, "outputs": [48, 48]}, None, "would not shrink"),
    "float32": ({"inputs": 256, "outputs": [256], "dtype": torch.float32}, None, "float32"),
    "escapes": ({"inputs": 512, "outputs": [256]}, "spread", "outside their channel's window"),
}


@pytest.mark.parametrize("case", KEPT)
def test_a_layer_that_gains_nothing_becomes_a_stock_one(plugin: Any, case: str) -> None:
    shape, content, reason = KEPT[case]
    layer = make(plugin, **shape)
    weights = ordinary(sum(shape["outputs"]), shape["inputs"])
    if content == "spread":
        weights[:, ::2] *= 2.0**-40
    wanted = weights.to(layer.weight.dtype)
    begin = 0
    for number, size in enumerate(shape["outputs"]):
        layer.weight.weight_loader(layer.weight, wanted[begin : begin + size], number)
        begin += size
    layer.finish()
    assert type(layer.quant_method) is plugin.fake.UnquantizedLinearMethod
    assert layer.processed == "UnquantizedLinearMethod"
    assert torch.equal(layer.weight.data, wanted)
    (entry,) = plugin.w12_config.FACTS.kept.items()
    assert entry[0] == "model.layers.0.mlp.up"
    assert reason in entry[1]


def test_a_weight_that_another_layer_has_too_stays(plugin: Any) -> None:
    layer = make(plugin, 256, [256])
    table = torch.nn.Parameter(ordinary(256, 256), requires_grad=False)
    layer.weight = table
    layer.finish()
    assert layer.weight is table
    assert plugin.w12_config.FACTS.kept == {"model.layers.0.mlp.up": plugin.w12_linear.SHARED}


def test_weights_can_be_loaded_again(plugin: Any) -> None:
    layer = make(plugin, 256, [256])
    loader = layer.weight.weight_loader
    for seed in (1, 2):
        layer.quant_method.restore_weights_before_loading(layer)
        assert layer.weight.weight_loader == loader
        assert (layer.weight.input_dim, layer.weight.output_dim) == (1, 0)
        new = ordinary(256, 256, seed)
        layer.load(new)
        layer.finish()
        layer.finish()
        x = ordinary(3, 256, 7)
        assert torch.equal(bits(layer(x)), bits(torch.nn.functional.linear(x, new)))
    assert len(plugin.w12_config.FACTS.encoded) == 1


def test_before_loading_a_layer_is_as_stock(plugin: Any) -> None:
    layer = make(plugin, 256, [256])
    layer.load(ordinary(256, 256))
    x = ordinary(3, 256)
    assert torch.equal(bits(layer(x)), bits(torch.nn.functional.linear(x, layer.weight)))


def test_a_bit_that_does_not_come_back_stops_the_server(
    plugin: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = make(plugin, 256, [256])
    layer.load(ordinary(256, 256))
    whole = plugin.w12_product.W12Weight.to_bf16

    def damaged(self: Any) -> torch.Tensor:
        decoded = whole(self)
        decoded.view(torch.int16)[17, 33] ^= 1
        return decoded

    monkeypatch.setattr(plugin.w12_product.W12Weight, "to_bf16", damaged)
    with pytest.raises(plugin.w12_product.W12Error, match=r"up` does not come back bit for bit"):
        layer.finish()
    assert layer.weight is not None


def test_too_little_memory_is_one_sentence(plugin: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = make(plugin, 256, [256])
    layer.load(ordinary(256, 256))

    def full(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.81 GiB. GPU 0 ...")

    monkeypatch.setattr(plugin.w12_product.W12Weight, "from_bits", full)
    with pytest.raises(plugin.w12_product.W12Error, match="too little GPU memory to encode"):
        layer.finish()


def test_offloaded_weights_are_refused(plugin: Any) -> None:
    layer = make(plugin, 256, [256])
    layer.to("meta")
    with pytest.raises(plugin.w12_product.W12Error, match="offloaded"):
        layer.finish()


def test_a_gpu_server_never_multiplies_on_the_cpu(make_plugin: Any) -> None:
    plugin = make_plugin(cpu=False)
    layer = make(plugin, 256, [256])
    layer.load(ordinary(256, 256))
    with pytest.raises(plugin.w12_product.W12Error, match="offloaded"):
        layer.finish()


def test_layers_without_names_are_told_apart(plugin: Any) -> None:
    config = plugin.w12_config.W12Config()
    for _ in range(2):
        layer = plugin.fake.LinearBase(256, [256], config, "")
        layer.load(ordinary(256, 256))
        layer.finish()
    assert sorted(plugin.w12_config.FACTS.encoded) == ["layer", "layer#2"]


class TestOnTheGpu:
    """The way of a GPU, with the CPU codec and the product's definition behind its functions."""

    @pytest.fixture
    def gpu(self, plugin: Any, monkeypatch: pytest.MonkeyPatch) -> list[str]:
        from specpilot_kernels.w12 import device, gemm, ops, plans

        calls: list[str] = []

        def compare(weights: torch.Tensor, parts: Any) -> torch.Tensor:
            calls.append("compare")
            again = plugin.w12_product.W12Weight.from_encoded(parts).to_bf16()
            return torch.tensor([int(not torch.equal(bits(weights), bits(again)))])

        def multiply(x: Any, weight: Any, bias: Any, *, out: Any, dependent: bool) -> None:
            calls.append("gemm")
            out.copy_(reference_gemm.linear(x, weight, bias))

        monkeypatch.setattr(device, "compare", compare)
        monkeypatch.setattr(gemm, "check", lambda *_: None)
        monkeypatch.setattr(gemm, "gemm", multiply)
        monkeypatch.setattr(ops, "_gpu_name", lambda _: "fake")
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append("empty_cache"))
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "fake")
        monkeypatch.setattr(plugin.w12_product, "on_gpu", lambda _: True)
        monkeypatch.setattr(
            plans, "plan_for", lambda gpu, n, k: plans.Plan(kernel_rows=0 if n == 384 else 64)
        )
        return calls

    def test_the_kernel_multiplies_with_the_records(self, plugin: Any, gpu: list[str]) -> None:
        layer = make(plugin, 256, [256])
        weights = ordinary(256, 256)
        layer.load(weights)
        layer.finish()
        assert gpu == ["empty_cache", "compare"]
        x = ordinary(5, 256, 3)
        exact = torch.nn.functional.linear(x.double(), weights.double())
        assert torch.equal(bits(layer(x)), bits(exact.to(torch.bfloat16)))
        assert gpu[-1] == "gemm"
        (facts,) = plugin.w12_config.FACTS.encoded.values()
        assert (facts.form, facts.verified) == ("kernel", True)

    def test_a_shape_that_cublas_multiplies_faster_stays(self, plugin: Any, gpu: list[str]) -> None:
        layer = make(plugin, 256, [384])
        layer.load(ordinary(384, 256))
        layer.finish()
        assert list(plugin.w12_config.FACTS.kept.values()) == [plugin.w12_product.CUBLAS]

    def test_layers_with_one_input_take_one_launch(self, plugin: Any, gpu: list[str]) -> None:
        layers = [make(plugin, 256, [512]), make(plugin, 256, [12])]
        fusion = plugin.w12_fused.Fusion(layers)
        weights = [ordinary(512, 256, 1), ordinary(12, 256, 2)]
        for layer, loaded in zip(layers, weights, strict=True):
            layer.load(loaded)
            layer.finish()
        assert gpu == ["empty_cache", "compare"]
        x = ordinary(5, 256, 3)
        parts = fusion(x)
        assert gpu[2:] == ["gemm"]
        for part, layer, loaded in zip(parts, layers, weights, strict=True):
            exact = torch.nn.functional.linear(x.double(), loaded.double())
            assert torch.equal(bits(part), bits(exact.to(torch.bfloat16)))
            assert torch.equal(decoded(layer), bits(loaded))

    def test_the_product_is_compiled_without_breaks(self, plugin: Any, gpu: list[str]) -> None:
        layer = make(plugin, 256, [256])
        layer.load(ordinary(256, 256))
        layer.finish()
        compiled = torch.compile(layer.forward, backend="eager", fullgraph=True, dynamic=True)
        for rows in (3, 5, 70):
            x = ordinary(rows, 256, rows)
            assert torch.equal(bits(compiled(x)), bits(layer(x)))

    def test_weights_can_be_loaded_again(self, plugin: Any, gpu: list[str]) -> None:
        layer = make(plugin, 256, [256])
        weights = ordinary(256, 256)
        layer.load(weights)
        layer.finish()
        assert torch.equal(decoded(layer), bits(weights))
