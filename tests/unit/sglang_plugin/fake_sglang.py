"""A small SGLang for tests: the names that the plugin imports, and linear layers that shard.

Layers load as SGLang's do: a parameter with `input_dim`, `output_dim` and a `weight_loader`, which
narrows what a rank gets and writes merged parts one below the other. Everything else is only as
much as the plugin touches. Whether the real one has these signatures is tested on the wheels.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterator
from enum import Enum
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import torch
from torch.nn.parameter import Parameter


class HookType(Enum):
    AFTER = "after"
    AROUND = "around"


class HookRegistry:
    hooks: ClassVar[dict[str, list[tuple[HookType, Any]]]] = defaultdict(list)

    @classmethod
    def register(cls, target: str, hook: Any, hook_type: HookType = HookType.AFTER) -> None:
        cls.hooks[target].append((hook_type, hook))


class QuantizationConfig:
    def __init__(self) -> None:
        self.packed_modules_mapping: dict[str, list[str]] = {}


class LinearMethodBase:
    pass


class _Stock:
    def create_weights(
        self, layer: Any, input_size_per_partition: int, output_partition_sizes: list[int],
        input_size: int, output_size: int, params_dtype: torch.dtype, **extra: Any,
    ) -> None:  # fmt: skip
        shape = (sum(output_partition_sizes), input_size_per_partition)
        weight = Parameter(torch.empty(shape, dtype=params_dtype), requires_grad=False)
        for name, value in {"input_dim": 1, "output_dim": 0, **extra}.items():
            setattr(weight, name, value)
        layer.register_parameter("weight", weight)

    def process_weights_after_loading(self, layer: Any) -> None:
        layer.processed = type(self).__name__

    def restore_weights_before_loading(self, layer: Any) -> None:
        pass

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return torch.nn.functional.linear(x, layer.weight, bias)


class UnquantizedLinearMethod(LinearMethodBase, _Stock):
    pass


class UnquantizedEmbeddingMethod(_Stock):
    def embedding(self, layer: Any, input_: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.embedding(input_, layer.weight)


class _Layer(torch.nn.Module):
    """A merged layer sharded over `tp` ranks, along outputs or, with `row`, along inputs."""

    def __init__(
        self, inputs: int, outputs: list[int], config: Any, prefix: str, *,
        tp: int = 1, rank: int = 0, row: bool = False, dtype: torch.dtype = torch.bfloat16,
    ) -> None:  # fmt: skip
        super().__init__()
        self.tp, self.rank, self.row = tp, rank, row
        self.parts = [size if row else size // tp for size in outputs]
        self.quant_method = config.get_quant_method(self, prefix)
        self.quant_method.create_weights(
            self, inputs // tp if row else inputs, self.parts, inputs, sum(outputs), dtype,
            weight_loader=self.weight_loader,
        )  # fmt: skip

    def weight_loader(self, param: Parameter, loaded: torch.Tensor, part: int = 0) -> None:
        dim = 1 if self.row else 0
        size = loaded.shape[dim] // self.tp
        begin = sum(self.parts[:part])
        target = param.data if self.row else param.data[begin : begin + self.parts[part]]
        target.copy_(loaded.narrow(dim, self.rank * size, size))

    def load(self, *parts: torch.Tensor) -> None:
        for number, loaded in enumerate(parts):
            self.weight.weight_loader(self.weight, loaded, number)

    def finish(self) -> None:
        self.quant_method.process_weights_after_loading(self)

    def forward(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return self.quant_method.apply(self, x, bias)


class LinearBase(_Layer):
    bias: Any = None
    gather_output = False


class ParallelLMHead(_Layer):
    def __init__(self, inputs: int, outputs: int, config: Any, prefix: str) -> None:
        wanted = config.get_quant_method(self, prefix) or UnquantizedEmbeddingMethod()
        super().__init__(
            inputs, [outputs], SimpleNamespace(get_quant_method=lambda *_: wanted), prefix
        )


class FusedMoE(torch.nn.Module):
    pass


class Engine:
    """What the runtime context says; tests change it."""

    algorithm: str | None = None
    drafter: str | None = None
    fp32_head = False
    tp = 1
    cpu = True
    lora = False


def stock_iterator(hf_weights_files: list[str], *_: Any, **__: Any) -> Iterator[tuple[str, Any]]:
    yield "stock", list(hf_weights_files)


class RMSNorm(torch.nn.Module):
    """SGLang's on the CPU: the sum is rounded before it is normed. Counts its calls."""

    weight_bias = 0.0

    def __init__(self, hidden_size: int, eps: float = 1e-6, **special: Any) -> None:
        super().__init__()
        self.weight = Parameter(torch.zeros(hidden_size, dtype=torch.bfloat16))
        self.variance_epsilon = eps
        self._forward_method: Any = None
        self.calls = 0
        vars(self).update(special)

    def forward(self, x: torch.Tensor, residual: Any = None, post_residual_addition: Any = None,
                quant_linear: Any = None) -> Any:  # fmt: skip
        self.calls += 1
        if residual is not None:
            added = 0 if post_residual_addition is None else post_residual_addition
            residual = x + (residual + added)
            x = residual
        values = x.float()
        values = values * torch.rsqrt(
            values.square().mean(-1, keepdim=True) + self.variance_epsilon
        )
        normed = (values * (self.weight_bias + self.weight.float())).to(x.dtype)
        return normed if residual is None else (normed, residual)


class GemmaRMSNorm(RMSNorm):
    weight_bias = 1.0


class SiluAndMul(torch.nn.Module):
    """Rounds the activation, as torch's operators do. Counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        gate, up = x.chunk(2, dim=-1)
        return self.activation(gate) * up

    def activation(self, gate: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.silu(gate)


class GeluAndMul(SiluAndMul):
    def __init__(self, approximate: str = "tanh") -> None:
        super().__init__()
        self.approximate = approximate

    def activation(self, gate: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.gelu(gate, approximate=self.approximate)


def modules(engine: Engine) -> dict[str, ModuleType]:
    """Name -> module, with every parent package."""
    methods: dict[str, Any] = {"fp8": object}
    choices: list[str] = ["fp8"]
    spec = SimpleNamespace(
        speculative_algorithm=engine.algorithm, speculative_draft_model_path=engine.drafter
    )
    features = SimpleNamespace(enable_fp32_lm_head=engine.fp32_head)
    content: dict[str, dict[str, Any]] = {
        "plugins.hook_registry": {"HookRegistry": HookRegistry, "HookType": HookType},
        "layers.quantization": {
            "QUANTIZATION_METHODS": methods,
            "BASE_QUANTIZATION_METHODS": dict(methods),
            "CPU_QUANTIZATION_METHODS": dict(methods),
        },
        "layers.quantization.base_config": {
            "QuantizationConfig": QuantizationConfig,
            "LinearMethodBase": LinearMethodBase,
        },
        "layers.quantization.unquant": {
            "UnquantizedLinearMethod": UnquantizedLinearMethod,
            "UnquantizedEmbeddingMethod": UnquantizedEmbeddingMethod,
        },
        "layers.activation": {"SiluAndMul": SiluAndMul, "GeluAndMul": GeluAndMul},
        "layers.layernorm": {"RMSNorm": RMSNorm, "GemmaRMSNorm": GemmaRMSNorm},
        "layers.linear": {"LinearBase": LinearBase},
        "layers.vocab_parallel_embedding": {"ParallelLMHead": ParallelLMHead},
        "runtime_context": {
            "get_spec": lambda: spec,
            "get_lora": lambda: SimpleNamespace(enable_lora=engine.lora, lora_paths=None),
            "get_exec": lambda: SimpleNamespace(features=features),
            "get_parallel": lambda: SimpleNamespace(tp_size=engine.tp),
        },
        "utils.common": {"is_cpu": lambda: engine.cpu},
        "server_args": {"add_quantization_method_choices": choices.extend, "choices": choices},
    }
    made: dict[str, ModuleType] = {}
    for name, names in content.items():
        full = f"sglang.srt.{name}"
        for end in [i for i, c in enumerate(full) if c == "."] + [len(full)]:
            made.setdefault(full[:end], ModuleType(full[:end]))
        vars(made[full]).update(names)
    for name, module in made.items():
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(made[parent], child, module)
    return made


def install(patch: Any, engine: Engine) -> None:
    """Put the fake in place and forget plugin modules that were imported with another one."""
    HookRegistry.hooks.clear()
    for name in [name for name in sys.modules if name == "sglang" or name.startswith("sglang.")]:
        patch.delitem(sys.modules, name)
    for name in [name for name in sys.modules if ".plugin.w12_" in name]:
        patch.delitem(sys.modules, name)
    for name, module in modules(engine).items():
        patch.setitem(sys.modules, name, module)
