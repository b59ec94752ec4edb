"""Two projections of a gated delta network as one weight: bits, products, reloads, and when not."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.sglang_plugin.conftest import bits, ordinary

NAME = "model.layers.0.linear_attn"
COLS = 256


def network(
    plugin: Any, patch: pytest.MonkeyPatch, *, config: Any = None, outputs: int = 256,
    heads: int = 12, ba_cols: int = COLS, **options: Any,
) -> Any:  # fmt: skip
    """A patched network as SGLang builds it: q, k, v, z and b, a, not loaded yet."""

    class Qwen3_5GatedDeltaNet(torch.nn.Module):
        def __init__(
            self, config: Any, layer_id: int, quant_config: Any = None, alt_stream: Any = None,
            prefix: str = "",
        ) -> None:  # fmt: skip
            super().__init__()
            layer = plugin.fake.LinearBase
            self.in_proj_qkvz = layer(
                COLS, [outputs] * 4, quant_config, f"{prefix}.in_proj_qkvz", **options
            )
            self.in_proj_ba = layer(
                ba_cols, [heads] * 2, quant_config, f"{prefix}.in_proj_ba", **options
            )

        def _forward_input_proj(self, hidden_states: torch.Tensor) -> Any:
            return self.in_proj_qkvz(hidden_states), self.in_proj_ba(hidden_states)

    module = SimpleNamespace(Qwen3_5GatedDeltaNet=Qwen3_5GatedDeltaNet)
    patch.setitem(sys.modules, "sglang.srt.models.qwen3_5", module)
    for _ in range(2):  # a drafter's configuration comes after the target's
        plugin.w12_models.adapt(plugin.w12_config.W12Config)
    quantization = plugin.w12_config.W12Config() if config is None else config
    return Qwen3_5GatedDeltaNet(object(), 0, quantization, prefix=NAME)


def load(net: Any, seed: int = 0) -> torch.Tensor:
    """Load random weights as SGLang's loaders do; return all rows of this rank."""
    for layer in (net.in_proj_qkvz, net.in_proj_ba):
        shapes = [(size * layer.tp, layer.weight.shape[1]) for size in layer.parts]
        layer.load(*(ordinary(*shape, seed + i) for i, shape in enumerate(shapes)))
    if net.in_proj_qkvz.weight.shape[1] != net.in_proj_ba.weight.shape[1]:
        return torch.empty(0)
    return torch.cat([net.in_proj_qkvz.weight.data, net.in_proj_ba.weight.data])


def finish(net: Any, *, backwards: bool = False) -> None:
    layers = [net.in_proj_qkvz, net.in_proj_ba]
    for layer in reversed(layers) if backwards else layers:
        layer.finish()


def restore(net: Any) -> None:
    for layer in (net.in_proj_qkvz, net.in_proj_ba):
        layer.quant_method.restore_weights_before_loading(layer)


def report(plugin: Any) -> Any:
    facts = plugin.w12_config.FACTS
    facts.asked = True
    return facts.report()


@settings(max_examples=20, deadline=None)
@given(
    tp=st.sampled_from([1, 2]),
    outputs=st.sampled_from([128, 150, 200]),
    heads=st.sampled_from([1, 3, 12, 16]),
    rows=st.integers(0, 9),
    backwards=st.booleans(),
    seed=st.integers(0, 1 << 16),
)
def test_the_products_are_those_of_the_loaded_weights(
    shared: Any, tp: int, outputs: int, heads: int, rows: int, backwards: bool, seed: int
) -> None:
    """Every rank, any width, whichever layer comes last."""
    with pytest.MonkeyPatch.context() as patch:
        net = network(shared, patch, outputs=outputs * tp, heads=heads * tp, tp=tp, rank=tp - 1)
    whole = load(net, seed)
    x = ordinary(rows, COLS, seed)
    apart = net._forward_input_proj(x)
    finish(net, backwards=backwards)
    assert net.w12_fusion.is_active
    fused = net._forward_input_proj(x)
    assert [part.shape for part in fused] == [(rows, 4 * outputs), (rows, 2 * heads)]
    for part, alone in zip(fused, apart, strict=True):
        assert torch.equal(bits(part), bits(alone))
        assert part.stride() == (-(-(4 * outputs + 2 * heads) // 8) * 8, 1)
    assert dict(net.named_parameters()) == {}
    restore(net)
    both = torch.cat([net.in_proj_qkvz.weight.data, net.in_proj_ba.weight.data])
    assert torch.equal(bits(both), bits(whole))


def test_facts_count_layers_weights_and_bytes(plugin: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    net = network(plugin, monkeypatch, heads=11)  # two rows of padding
    whole = load(net)
    finish(net)
    found = report(plugin)
    assert (found["layers"], found["fused"], found["not_fused"]) == (2, 1, [])
    assert (found["weights"], found["bf16_bytes"]) == (whole.numel(), whole.nbytes)
    product = net.in_proj_qkvz.w12_product._whole
    assert product.rows == whole.shape[0] + 2
    assert found["encoded_bytes"] > plugin.w12_product.layout.encoded_nbytes(1046, COLS, 0)
    assert found["freed_bytes"] == whole.nbytes - found["encoded_bytes"]
    assert (found["kept_bf16"], found["verified"]) == ([], True)


def test_a_layer_called_alone_gives_its_rows(plugin: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    net = network(plugin, monkeypatch)
    load(net)
    x, bias = ordinary(3, COLS, 5), ordinary(1, 24, 6)[0]
    wanted = net.in_proj_qkvz(x), net.in_proj_ba(x, bias)
    finish(net)
    for part, alone in zip((net.in_proj_qkvz(x), net.in_proj_ba(x, bias)), wanted, strict=True):
        assert torch.equal(bits(part), bits(alone))


def test_weights_can_be_loaded_again(plugin: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    net = network(plugin, monkeypatch)
    loader = net.in_proj_ba.weight.weight_loader
    x = ordinary(3, COLS, 5)
    for seed in (1, 2):
        restore(net)
        assert not net.w12_fusion.is_active
        assert net.in_proj_ba.weight.weight_loader == loader
        whole = load(net, seed)
        before = net._forward_input_proj(x)  # as stock, between loading and encoding
        for _ in range(2):
            finish(net)
        both = torch.cat(net._forward_input_proj(x), dim=-1)
        assert torch.equal(bits(both), bits(torch.cat(before, dim=-1)))
        assert torch.equal(bits(both), bits(torch.nn.functional.linear(x, whole)))
    assert report(plugin)["fused"] == 1


def test_a_reload_that_does_not_shrink_parts_the_layers(
    plugin: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    net = network(plugin, monkeypatch)
    load(net)
    finish(net)
    restore(net)
    whole = load(net, 1)
    spread = net.in_proj_ba.weight.data
    spread[:, ::2] *= 2.0**-40
    whole[-24:] = spread
    finish(net)
    assert type(net.in_proj_qkvz.quant_method).__name__ == "W12LinearMethod"
    assert type(net.in_proj_ba.quant_method) is plugin.fake.UnquantizedLinearMethod
    x = ordinary(3, COLS, 5)
    both = torch.cat(net._forward_input_proj(x), dim=-1)
    assert torch.equal(bits(both), bits(torch.nn.functional.linear(x, whole)))
    found = report(plugin)
    assert (found["layers"], found["fused"]) == (1, 0)
    assert found["not_fused"] == [plugin.w12_product.ESCAPES]
    assert found["bf16_bytes"] == 2 * 1024 * COLS
    restore(net)
    load(net)
    finish(net)
    assert report(plugin)["layers"] == 1


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"ba_cols": 320}, "their weights differ in type or input"),
        ({"outputs": 8}, "W12 would not shrink it"),
        ({"dtype": torch.float32}, "its weights are float32"),
    ],
)
def test_layers_that_do_not_fit_together_stay_apart(
    plugin: Any, monkeypatch: pytest.MonkeyPatch, options: Any, reason: str
) -> None:
    net = network(plugin, monkeypatch, **options)
    load(net)
    weights = net.in_proj_ba.weight.data.clone()
    finish(net)
    assert net.w12_fusion.is_active is False
    assert plugin.w12_config.FACTS.apart == {reason}
    assert torch.equal(net.in_proj_ba.weight.data, weights)


def test_a_shared_weight_stays_apart(plugin: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    net = network(plugin, monkeypatch)
    load(net)
    table = torch.nn.Parameter(ordinary(24, COLS), requires_grad=False)
    net.in_proj_ba.weight = table
    finish(net)
    assert net.in_proj_ba.weight is table
    assert plugin.w12_config.FACTS.apart == {plugin.w12_linear.SHARED}
    assert net.in_proj_qkvz.w12_product is not None


def test_adapters_find_each_layer(
    make_plugin: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    plugin = make_plugin(lora=True)
    net = network(plugin, monkeypatch)
    load(net)
    finish(net)
    assert net.w12_fusion is None
    assert net.in_proj_ba.weight is not None
    assert report(plugin)["not_fused"] == [plugin.w12_models.LORA]


@pytest.mark.parametrize("change", [{"bias": torch.zeros(24)}, {"gather_output": True}], ids=str)
def test_layers_that_do_more_than_multiply_stay_apart(
    plugin: Any, monkeypatch: pytest.MonkeyPatch, change: Any
) -> None:
    for name, value in change.items():
        monkeypatch.setattr(plugin.fake.LinearBase, name, value)
    net = network(plugin, monkeypatch)
    assert net.w12_fusion is None
    assert plugin.w12_config.FACTS.apart == {plugin.w12_models.WHOLE}


def test_other_configurations_are_left_alone(plugin: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    stock = plugin.fake.UnquantizedLinearMethod
    other = SimpleNamespace(get_quant_method=lambda *_: stock())
    net = network(plugin, monkeypatch, config=other)
    whole = load(net)
    finish(net)
    assert net.w12_fusion is None
    x = ordinary(3, COLS, 5)
    both = torch.cat(net._forward_input_proj(x), dim=-1)
    assert torch.equal(bits(both), bits(torch.nn.functional.linear(x, whole)))
    assert plugin.w12_config.FACTS.apart == set()


def test_a_bit_that_does_not_come_back_stops_the_server(
    plugin: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    net = network(plugin, monkeypatch)
    load(net)
    whole = plugin.w12_product.W12Weight.to_bf16

    def damaged(self: Any) -> torch.Tensor:
        decoded = whole(self)
        decoded.view(torch.int16)[1040, 33] ^= 1  # of the second layer
        return decoded

    monkeypatch.setattr(plugin.w12_product.W12Weight, "to_bf16", damaged)
    words = r"in_proj_qkvz \+ model.*in_proj_ba` does not come back bit for bit"
    with pytest.raises(plugin.w12_product.W12Error, match=words):
        finish(net)


def test_too_little_memory_names_both(plugin: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    net = network(plugin, monkeypatch)
    load(net)

    def full(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.81 GiB. GPU 0 ...")

    monkeypatch.setattr(torch.Tensor, "new_zeros", full)
    with pytest.raises(plugin.w12_product.W12Error, match=r"encode `.*qkvz \+ .*ba` \[1048, 256\]"):
        finish(net)


def test_one_product_is_compiled_without_breaks(
    plugin: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    net = network(plugin, monkeypatch, heads=11)
    load(net)
    finish(net)
    compiled = torch.compile(net._forward_input_proj, backend="eager", fullgraph=True, dynamic=True)
    for rows in (3, 5, 70):
        x = ordinary(rows, COLS, rows)
        for part, eager in zip(compiled(x), net._forward_input_proj(x), strict=True):
            assert torch.equal(bits(part), bits(eager))
