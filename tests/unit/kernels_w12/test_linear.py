"""Layers and operators of W12, as far as they need no GPU."""

from __future__ import annotations

import logging

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from torch._subclasses import FakeTensorMode  # noqa: E402
from w12_cases import content, exact, normal, same_bits  # noqa: E402

from specpilot_kernels.build import GpuUnavailable  # noqa: E402
from specpilot_kernels.w12 import (  # noqa: E402
    codec,
    gemm,
    layout,
    ops,
    prefill,
    selfcheck,
    stored,
)
from specpilot_kernels.w12.linear import (  # noqa: E402
    W12Linear,
    _tell_of_copies,
    w12_linear,
    w12_linear_view,
)

BF16 = torch.bfloat16


def layer(name: str = "special channels", *, bias: bool = True) -> W12Linear:
    weights = content(name, "cpu")
    return W12Linear(exact(weights), torch.ones(weights.shape[0], dtype=BF16) if bias else None)


@pytest.mark.parametrize("shape", [(320,), (5, 320), (2, 3, 320), (0, 320)], ids=str)
def test_fake_kernels_know_the_output(shape: tuple[int, ...]) -> None:
    module = layer()
    with FakeTensorMode(allow_non_fake_inputs=True):
        x = torch.empty(shape, dtype=BF16, device="cuda")
        for out in (module(x), w12_linear_view(x, module.weight)):
            assert (out.shape, out.dtype) == ((*shape[:-1], 300), BF16)
            assert out.device.type == "cuda"


def test_the_operators_are_traced_without_breaks() -> None:
    module = layer()
    graph = torch.fx.symbolic_trace(module)
    targets = [node.target for node in graph.graph.nodes if node.op == "call_function"]
    assert torch.ops.specpilot.w12_linear in targets
    exported = torch.export.export(
        module.to("meta"), (torch.empty((3, 320), dtype=BF16, device="meta"),)
    )
    called = [node.target for node in exported.graph.nodes if node.op == "call_function"]
    assert torch.ops.specpilot.w12_linear.default in called


@pytest.mark.parametrize("call", [w12_linear, w12_linear_view])
def test_tensors_on_the_cpu_are_refused_in_plain_words(call: object) -> None:
    with pytest.raises(ValueError, match="runs on a GPU, x is on cpu"):
        call(torch.zeros((1, 320), dtype=BF16), layer().weight)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_warming_without_a_gpu_says_what_is_missing() -> None:
    with pytest.raises(GpuUnavailable):
        gemm.warm()


def test_a_state_is_the_checkpoints_tensors_and_loads_into_another_layer() -> None:
    source = layer()
    state = source.state_dict()
    assert sorted(state) == [
        "bias", "weight_w12", "weight_w12_escape_at", "weight_w12_escape_bits",
        "weight_w12_escape_ptr", "weight_w12_window",
    ]  # fmt: skip
    patterns = content("special channels", "cpu").view(torch.int16).numpy().view("u2")
    in_memory = codec.encode(patterns)
    for part, array in stored.stored_parts(in_memory).items():
        of_state = state["weight" + layout.PART_SUFFIXES[part]].numpy()
        assert of_state.tobytes() == array.tobytes()
    other = W12Linear(exact(normal(torch.Generator().manual_seed(1), 300, 320)),
                      torch.zeros(300, dtype=BF16))  # fmt: skip
    other.load_state_dict(state)
    assert same_bits(other.weight.to_bf16(), source.weight.to_bf16())
    assert same_bits(other.bias, source.bias)
    for name in ("scale", "escape_ptr", "escapes"):
        assert torch.equal(getattr(other.weight, name), getattr(source.weight, name))


def test_a_state_of_another_shape_is_refused() -> None:
    with pytest.raises(ValueError, match=r"escape_ptr is int32 \[6\], expected int32 \[4\]"):
        layer().load_state_dict(layer("normal").state_dict())


def test_casting_a_model_leaves_the_weight_alone() -> None:
    module = layer()
    before = module.weight.scale.clone()
    assert torch.equal(module.to(torch.float16).weight.scale, before)


def test_from_linear_encodes_and_keeps_the_bias(caplog: pytest.LogCaptureFixture) -> None:
    linear = torch.nn.Linear(320, 256, dtype=BF16)
    linear.weight.data = normal(torch.Generator().manual_seed(2), 256, 320)
    module = W12Linear.from_linear(linear)
    assert same_bits(module.weight.to_bf16(), linear.weight.data)
    assert same_bits(module.bias, linear.bias.detach())
    assert not list(module.parameters())
    assert "in_features=320, out_features=256, bias=True" in repr(module)
    with pytest.raises(ValueError, match="float32"):
        W12Linear.from_linear(torch.nn.Linear(4, 4))
    linear.weight.data[:, ::50] = 0
    assert not caplog.text
    assert W12Linear.from_linear(linear) is linear
    assert "stays BF16" in caplog.text
    assert "do not fit their channel's window" in caplog.text


def test_a_layer_that_keeps_a_copy_says_so(caplog: pytest.LogCaptureFixture) -> None:
    weight = exact(content("odd", "cpu"))
    _tell_of_copies.cache_clear()
    with caplog.at_level(logging.WARNING):
        module = W12Linear(weight, copy_above=16)
        W12Linear(weight, copy_above=16)
    assert "BF16 above 16 rows" in repr(module)
    assert caplog.text.count("cuBLAS is faster above 16 rows") == 1
    assert same_bits(module.copy, weight.to_bf16())
    assert "copy" not in module.state_dict()


def test_the_operators_arguments_are_the_weight_again() -> None:
    weight = layer().weight
    again = ops.weight_of(ops.tensors_of(weight), 300, 320)
    assert again == weight


def test_stripes_are_whole_records_within_the_scratch() -> None:
    for in_features in (1, 64, 5120, 17408, 10**6):
        height = prefill.stripe_channels(in_features)
        assert height % 128 == 0
        assert height == 128 or 2 * in_features * height <= prefill.SCRATCH_BYTES
    assert prefill.stripe_channels(5120) == 3200


class TestJudgement:
    """`selfcheck.wrong_elements` accepts rounding and nothing more."""

    x = torch.randn((4, 512), generator=torch.Generator().manual_seed(1)).bfloat16()
    weights = normal(torch.Generator().manual_seed(2), 300, 512)

    def right(self) -> torch.Tensor:
        return (self.x.double() @ self.weights.double().T).bfloat16()

    def test_the_rounded_product_is_right(self) -> None:
        assert selfcheck.wrong_elements(self.right(), self.x, self.weights, channels=128) == 0
        single = (self.x.float() @ self.weights.float().T).bfloat16()
        assert selfcheck.wrong_elements(single, self.x, self.weights) == 0

    def test_the_next_number_is_wrong(self) -> None:
        next_up = self.right()
        next_up.view(torch.int16).add_(1)
        wrong = selfcheck.wrong_elements(next_up, self.x, self.weights, channels=128)
        assert wrong > 0.9 * next_up.numel()  # some lie near the middle of two numbers

    @pytest.mark.parametrize("value", [torch.nan, torch.inf, 0.0])
    def test_one_bad_element_is_counted(self, value: float) -> None:
        bad = self.right()
        bad[2, 130] = value
        assert selfcheck.wrong_elements(bad, self.x, self.weights) == 1

    def test_not_finite_where_fp64_is_not(self) -> None:
        weights = self.weights.clone()
        weights[7, 3], weights[8, 3] = torch.inf, torch.nan
        right = (self.x.double() @ weights.double().T).bfloat16()
        assert selfcheck.wrong_elements(right, self.x, weights) == 0
        assert selfcheck.wrong_elements(self.right(), self.x, weights) == 8

    def test_a_forgotten_bias_is_wrong(self) -> None:
        bias = torch.ones(300, dtype=BF16)
        assert selfcheck.wrong_elements(self.right(), self.x, self.weights, bias) > 1000

    def test_relative_error(self) -> None:
        assert selfcheck.relative_error(torch.tensor([3.0, 4.0]), torch.tensor([0.0, 4.0])) == 0.75
        assert selfcheck.relative_error(torch.zeros(2), torch.zeros(2)) == 0.0
