"""Norms and activations beside W12 layers: which get other kernels, for what, and their values."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from specpilot_cli.schema.plugin_config import W12Plugin
from tests.unit.sglang_plugin.conftest import ordinary

HIDDEN, WIDE = 256, 512


def model(plugin: Any, *, norm: Any, activation: Any, encoded: bool = True) -> torch.nn.Module:
    """A loaded MLP, a norm before it, and a norm and an activation that feed no W12 layer."""
    layer = plugin.fake.LinearBase
    config = plugin.w12_config.W12Config()

    class Mlp(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate_up_proj = layer(HIDDEN, [WIDE, WIDE], config, "mlp.gate_up_proj")
            self.act_fn = activation
            self.down_proj = layer(WIDE, [HIDDEN], config, "mlp.down_proj")

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mlp = Mlp()
            self.norm = norm
            self.q_norm = plugin.fake.GemmaRMSNorm(64)
            self.unused_activation = plugin.fake.SiluAndMul()

    made = Model()
    for norms in (made.norm, made.q_norm):
        norms.weight.data.normal_(generator=torch.Generator().manual_seed(7))
    made.mlp.gate_up_proj.load(ordinary(WIDE, HIDDEN, 0), ordinary(WIDE, HIDDEN, 1))
    made.mlp.down_proj.load(ordinary(HIDDEN, WIDE, 2))
    if encoded:
        made.mlp.gate_up_proj.finish()
        made.mlp.down_proj.finish()
    return made


MOST_ROWS = 8
"""Of a step."""


def rows(number: int, cols: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn((number, cols), generator=generator).to(torch.bfloat16)


def apart(one: torch.Tensor, other: torch.Tensor) -> float:
    """The largest difference, in steps of BF16."""
    steps = (one.view(torch.int16).int() - other.view(torch.int16).int()).abs()
    near_zero = (one.float() - other.float()).abs() < 1e-3
    return float(steps.masked_fill(near_zero, 0).max())


@pytest.mark.parametrize("kind", ["RMSNorm", "GemmaRMSNorm"])
def test_a_step_is_normed_by_the_other_kernel_and_a_prompt_by_sglang(
    plugin: Any, kind: str
) -> None:
    net = model(
        plugin, norm=getattr(plugin.fake, kind)(HIDDEN), activation=plugin.fake.SiluAndMul()
    )
    stock = getattr(plugin.fake, kind)(HIDDEN)
    stock.weight = net.norm.weight
    assert plugin.w12_chained.adapt(net) == 2
    for number, calls in ((1, 0), (MOST_ROWS, 0), (MOST_ROWS + 1, 2)):
        x, residual = rows(number, HIDDEN), rows(number, HIDDEN, 1)
        expected, sums = stock(x, residual)
        assert apart(net.norm(x), stock(x)) <= 1
        given = x.clone(), residual.clone()
        normed, added = net.norm(*given)
        assert torch.equal(added, sums)
        assert apart(normed, expected) <= 2
        assert net.norm.calls == calls
        if not calls:
            assert normed is given[0] and added is given[1]  # noqa: PT018 - both in place


@pytest.mark.parametrize("make", [
    lambda fake: fake.SiluAndMul(),
    lambda fake: fake.GeluAndMul("tanh"),
    lambda fake: fake.GeluAndMul("none"),
])  # fmt: skip
def test_a_step_is_activated_by_the_other_kernel(plugin: Any, make: Callable[[Any], Any]) -> None:
    net = model(plugin, norm=plugin.fake.RMSNorm(HIDDEN), activation=make(plugin.fake))
    stock = make(plugin.fake)
    assert plugin.w12_chained.adapt(net) == 2
    for number, calls in ((3, 0), (MOST_ROWS + 1, 1)):
        x = 3 * rows(number, 2 * WIDE)
        assert apart(net.mlp.act_fn(x), stock(x)) <= 1
        assert net.mlp.act_fn.calls == calls


def test_nothing_else_is_touched(plugin: Any) -> None:
    net = model(plugin, norm=plugin.fake.RMSNorm(HIDDEN), activation=plugin.fake.SiluAndMul())
    plugin.w12_chained.adapt(net)
    net.q_norm(rows(2, 64))
    net.unused_activation(rows(2, 64))
    assert (net.q_norm.calls, net.unused_activation.calls) == (1, 1)
    stock = model(
        plugin, norm=plugin.fake.RMSNorm(HIDDEN), activation=plugin.fake.SiluAndMul(),
        encoded=False,
    )  # fmt: skip
    assert plugin.w12_chained.adapt(stock) == 0


def test_adapting_twice_is_adapting_once(plugin: Any) -> None:
    net = model(plugin, norm=plugin.fake.RMSNorm(HIDDEN), activation=plugin.fake.SiluAndMul())
    assert plugin.w12_chained.adapt(net) == 2
    before = net.norm.forward
    assert plugin.w12_chained.adapt(net) == 0
    assert net.norm.forward is before


@pytest.mark.parametrize("special", [
    {"cast_x_before_out_mul": True}, {"fp32_residual": True}, {"variance_size_override": 128},
    {"override_orig_dtype": torch.float32}, {"x_pad_to_multiple": 256},
])  # fmt: skip
def test_a_norm_that_computes_something_else_stays(plugin: Any, special: dict[str, Any]) -> None:
    norm = plugin.fake.RMSNorm(HIDDEN, **special)
    net = model(plugin, norm=norm, activation=plugin.fake.SiluAndMul())
    assert plugin.w12_chained.adapt(net) == 1


def test_a_norm_that_sglang_computes_natively_stays(plugin: Any) -> None:
    def forward_native() -> None: ...

    norm = plugin.fake.RMSNorm(HIDDEN, _forward_method=forward_native)
    net = model(plugin, norm=norm, activation=plugin.fake.SiluAndMul())
    assert plugin.w12_chained.adapt(net) == 1


def test_arguments_of_few_models_go_to_sglang(plugin: Any) -> None:
    net = model(plugin, norm=plugin.fake.RMSNorm(HIDDEN), activation=plugin.fake.SiluAndMul())
    stock = plugin.fake.RMSNorm(HIDDEN)
    stock.weight = net.norm.weight
    plugin.w12_chained.adapt(net)
    x, residual, third = (rows(2, HIDDEN, seed) for seed in range(3))
    calls = [(x, residual, third), (x.float(), residual), (x.view(1, 2, -1),), (x, residual[:1])]
    for number, args in enumerate(calls, start=1):
        ours, theirs = net.norm(*args), stock(*args)
        for one, other in zip(ours, theirs, strict=True):
            assert torch.equal(one, other)
        assert net.norm.calls == number
    net.norm(x, residual, quant_linear=object())
    assert net.norm.calls == len(calls) + 1
    net.norm(x, residual, None, quant_linear=None)
    assert net.norm.calls == len(calls) + 1


def test_without_dependent_launch_or_with_a_forced_backend_nothing_changes(
    plugin: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    chained = plugin.w12_chained
    assert not chained.available()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for capability, expected in (((8, 9), False), ((9, 0), True), ((12, 0), True)):
        monkeypatch.setattr(chained.launch, "capability", lambda found=capability: found)
        assert chained.available() is expected
    monkeypatch.setenv(chained.FORCED, "torch")
    assert not chained.available()


def network(plugin: Any, patch: pytest.MonkeyPatch, **options: Any) -> Any:
    """A delta network's gated norm of two heads and the projection behind it, encoded."""

    class RMSNorm(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(1 + 0.1 * rows(1, 128, 5)[0], requires_grad=False)
            self.eps, self.group_size, self.norm_before_gate = 1e-6, None, True
            self.activation, self.calls = "swish", 0
            vars(self).update(options)

        def forward(self, x: torch.Tensor, z: Any = None) -> torch.Tensor:
            self.calls += 1
            values = x.float()
            values = values * torch.rsqrt(values.square().mean(-1, keepdim=True) + self.eps)
            values = values * self.weight.float()
            if z is not None:
                gates = z.float()
                one = self.activation == "sigmoid"
                values = values * (gates.sigmoid() if one else gates * gates.sigmoid())
            return values.to(x.dtype)

    gated = "sglang.kernels.ops.attention.fla.layernorm_gated"
    patch.setitem(sys.modules, gated, SimpleNamespace(RMSNorm=RMSNorm))
    net = torch.nn.Module()
    net.norm = RMSNorm()
    config = plugin.w12_config.W12Config()
    net.out_proj = plugin.fake.LinearBase(256, [256], config, "out_proj")
    net.out_proj.load(ordinary(256, 256, 0))
    net.out_proj.finish()
    whole = torch.nn.Module()
    whole.linear_attn = net
    return whole


@pytest.mark.parametrize("activation", ["swish", "silu", "sigmoid"])
def test_the_gated_norm_of_a_delta_network(
    plugin: Any, monkeypatch: pytest.MonkeyPatch, activation: str
) -> None:
    net = network(plugin, monkeypatch, activation=activation)
    norm = net.linear_attn.norm
    stock = type(norm)()
    assert plugin.w12_chained.adapt(net) == 1
    for number, calls in ((2, 0), (2 * MOST_ROWS, 0), (2 * MOST_ROWS + 2, 1)):
        x, z = rows(number, 128), rows(number, 128, 1)
        assert apart(norm(x, z), stock(x, z)) <= 1
        assert norm.calls == calls
    assert torch.equal(norm(x[:2]), stock(x[:2]))
    assert norm.calls == 2


@pytest.mark.parametrize("options", [
    {"norm_before_gate": False}, {"activation": "tanh"}, {"group_size": 64},
])  # fmt: skip
def test_another_gated_norm_stays(
    plugin: Any, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    assert plugin.w12_chained.adapt(network(plugin, monkeypatch, **options)) == 0


@pytest.mark.parametrize("asked", [True, False])
def test_it_is_done_where_it_is_asked_for(
    plugin: Any, monkeypatch: pytest.MonkeyPatch, asked: bool
) -> None:
    net = model(plugin, norm=plugin.fake.RMSNorm(HIDDEN), activation=plugin.fake.SiluAndMul())
    monkeypatch.setattr(plugin.w12_chained, "available", lambda: True)
    monkeypatch.setattr(plugin.w12_config, "_settings", W12Plugin(chained=asked))
    plugin.w12_config.FACTS.asked = True
    runner = SimpleNamespace(model=net, is_draft_worker=False, model_config=None)
    plugin.w12_config.loaded(None, runner)
    assert plugin.w12_config.FACTS.report()["chained"] == (2 if asked else 0)
