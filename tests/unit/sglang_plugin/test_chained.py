"""Norms and activations beside W12 layers: which get other kernels, for what, and their values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from specpilot_kernels.w12.gemm import MAX_ROWS
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
    for number, calls in ((1, 0), (MAX_ROWS, 0), (MAX_ROWS + 1, 2)):
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
    for number, calls in ((3, 0), (MAX_ROWS + 1, 1)):
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
