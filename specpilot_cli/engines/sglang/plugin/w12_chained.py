"""Norms and gated activations between W12 layers, by kernels that let the next product start early.

A W12 product fetches weights before its input exists, if the kernel that makes the input takes part
in dependent launch. SGLang's do so at their end. So modules that feed W12 layers get a `forward`
that uses `specpilot_kernels.chained` for a step of few rows, and is SGLang's own for everything
else: more rows, prompts, other types, arguments that only few models give.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from typing import Any, Final

import torch
from sglang.srt.layers.activation import GeluAndMul, SiluAndMul
from sglang.srt.layers.layernorm import GemmaRMSNorm, RMSNorm

from specpilot_kernels import launch
from specpilot_kernels.chained import ops
from specpilot_kernels.chained.modules import GATED_COLS, Activation, Gate

FIRST_CAPABILITY: Final = (9, 0)
"""Dependent launch exists since then."""

MOST_ROWS: Final = 8
"""Of a step. At 32 a server was slower with these kernels than with SGLang's (H200)."""

FORCED: Final = "SGLANG_FORCE_FUSED_OP_BACKEND"
"""Set by whoever looks for the kernel to blame: then nothing is put in SGLang's place."""

_SPECIAL: Final = (
    "cast_x_before_out_mul", "variance_size_override", "fp32_residual", "override_orig_dtype",
    "x_pad_to_multiple",
)  # fmt: skip
"""Attributes that make an `RMSNorm` compute something else."""

_GATED: Final = "sglang.kernels.ops.attention.fla.layernorm_gated"
_GATES: Final[dict[str, Gate]] = {"silu": "silu", "swish": "silu", "sigmoid": "sigmoid"}

Forward = Callable[..., Any]


def available() -> bool:
    """Whether this process has a GPU with dependent launch, and SGLang chooses its own kernels."""
    on_gpu = torch.cuda.is_available() and launch.capability() >= FIRST_CAPABILITY
    return on_gpu and not os.environ.get(FORCED)


def adapt(model: torch.nn.Module) -> int:
    """Give a loaded model's modules that feed W12 layers the other kernels; return how many."""
    products = [getattr(layer, "w12_product", None) for layer in model.modules()]
    widths = {product.cols for product in products if product is not None}
    found = 0
    for parent in model.modules():
        for module in parent.children():
            made = (
                _norm(module, widths) or _activation(module, parent) or _gated_norm(module, parent)
            )
            if made is not None and "forward" not in vars(module):
                module.forward = made  # type: ignore[method-assign]
                found += 1
    return found


def _norm(module: Any, widths: set[int]) -> Forward | None:
    if type(module) not in (RMSNorm, GemmaRMSNorm) or _is_native(module):
        return None
    if any(getattr(module, name, None) for name in _SPECIAL):
        return None
    if getattr(module, "weight", None) is None or module.weight.numel() not in widths:
        return None
    original = module.forward
    bias = 1.0 if type(module) is GemmaRMSNorm else 0.0
    eps = module.variance_epsilon

    def forward(x: Any, residual: Any = None, *others: Any, **more: Any) -> Any:
        ours = _is_step(x) and ops.accepts_norm(x, module.weight.data)
        if not ours or _given(others) or _given(more.values()):
            return original(x, residual, *others, **more)
        if residual is None:
            return ops.rms_norm(x, module.weight.data, eps, weight_bias=bias)
        if residual.shape != x.shape or not ops.accepts_rows(residual):
            return original(x, residual, *others, **more)
        return ops.add_rms_norm(x, residual, module.weight.data, eps, weight_bias=bias)

    return forward


def _activation(module: Any, parent: Any) -> Forward | None:
    if getattr(getattr(parent, "down_proj", None), "w12_product", None) is None:
        return None
    activation: Activation
    if type(module) is SiluAndMul and not _is_native(module):
        activation = "silu"
    elif type(module) is GeluAndMul:
        activation = "gelu_tanh" if module.approximate == "tanh" else "gelu"
    else:
        return None
    original = module.forward

    def forward(x: Any, *others: Any, **more: Any) -> Any:
        if not _is_step(x) or not ops.accepts_gated(x) or _given(others) or _given(more.values()):
            return original(x, *others, **more)
        return ops.act_and_mul(x, activation)

    return forward


def _gated_norm(module: Any, parent: Any) -> Forward | None:
    # Its module imports Triton, so it is not imported here.
    gated = sys.modules.get(_GATED)
    product = getattr(getattr(parent, "out_proj", None), "w12_product", None)
    if gated is None or type(module) is not gated.RMSNorm or product is None:
        return None
    whole = module.group_size in (None, GATED_COLS)
    if not whole or not module.norm_before_gate or module.activation not in _GATES:
        return None
    original, gate = module.forward, _GATES[module.activation]
    most = MOST_ROWS * product.cols // GATED_COLS

    def forward(x: Any, z: Any = None, *others: Any, **more: Any) -> Any:
        weight = module.weight.data
        if (
            not _is_step(x, most) or z is None or not ops.accepts_gated_norm(x, z, weight)
            or _given(others) or _given(more.values())
        ):  # fmt: skip
            return original(x, z, *others, **more)
        return ops.gated_rms_norm(x, z, weight, module.eps, gate)

    return forward


def _is_step(x: Any, most: int = MOST_ROWS) -> bool:
    """Whether it is the input of at most so many rows, which no graph compiler traces."""
    return (
        isinstance(x, torch.Tensor)
        and x.dim() == 2
        and 0 < x.shape[0] <= most
        and not torch.compiler.is_compiling()
    )


def _is_native(module: Any) -> bool:
    """Whether SGLang was told to compute it with torch's operators."""
    method = getattr(module, "_forward_method", None)
    return getattr(method, "__name__", None) == "forward_native"


def _given(values: Iterable[Any]) -> bool:
    return any(value is not None for value in values)
