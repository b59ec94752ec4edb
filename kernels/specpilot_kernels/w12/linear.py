"""Linear layers with W12 weights: a function, and a module.

    weight = W12Weight.from_bits(matrix)
    y = w12_linear(x, weight)                      # x bfloat16 [..., in_features]

    layer = W12Linear.from_linear(linear)          # replaces a torch.nn.Linear

Up to 64 rows one kernel multiplies without unpacking the weight; see `prefill` for more. Calls
work under `torch.compile`, on any stream, and in CUDA graphs if `warm` ran before the capture.
"""

from __future__ import annotations

import logging
from functools import cache
from typing import Any

import torch

from specpilot_kernels.w12 import gemm, layout, ops, plans
from specpilot_kernels.w12.device import DeviceW12
from specpilot_kernels.w12.weight import (
    MAX_ESCAPE_RATIO,
    TooManyEscapes,
    W12Weight,
    from_stored,
    stored_parts,
)

__all__ = ["W12Linear", "w12_linear", "w12_linear_view", "warm"]

_log = logging.getLogger(__name__)


@cache
def _tell_of_copies(out_features: int, in_features: int, above: int) -> None:
    """Once for all layers of a shape."""
    _log.warning(
        "[%d, %d]: cuBLAS is faster above %d rows on this GPU, so BF16 copies are kept",
        out_features, in_features, above,
    )  # fmt: skip


def w12_linear(
    x: torch.Tensor, weight: W12Weight, bias: torch.Tensor | None = None, *, dependent: bool = True
) -> torch.Tensor:
    """Return x [..., in_features] times the weight plus bias, bfloat16 [..., out_features].

    x: bfloat16 on the weight's GPU. bias: bfloat16 [out_features]. dependent: see `gemm.gemm`.
    Sums in float32. Up to `plans.Plan.passes_rows` rows, each row's result is independent of the
    others; above, cuBLAS decides. ValueError for tensors that do not fit, UnsupportedGpu.
    """
    rows, _ = weight.shape
    return torch.ops.specpilot.w12_linear(
        x, ops.tensors_of(weight), bias, rows, dependent=dependent
    )


def w12_linear_view(
    x: torch.Tensor, weight: W12Weight, bias: torch.Tensor | None = None, *, dependent: bool = True
) -> torch.Tensor:
    """The same with the 8-bit view of each weight, read alone; see `reference_gemm.weights`.

    An approximation that reads two thirds of the bytes; 64 rows at a time.
    """
    rows, _ = weight.shape
    return torch.ops.specpilot.w12_linear_view(
        x, ops.tensors_of(weight), bias, rows, dependent=dependent
    )


warm = gemm.warm


class W12Linear(torch.nn.Module):
    """`torch.nn.Linear` for inference with a W12 weight.

    The state holds the tensors that a converted checkpoint has: `weight_w12`,
    `weight_w12_window` and so on, and `bias`. What the kernel needs besides is computed when they
    are loaded. With `copy_above` a BF16 copy serves inputs of more rows than that.
    """

    def __init__(
        self,
        weight: W12Weight,
        bias: torch.Tensor | None = None,
        *,
        copy_above: int | None = None,
        dependent: bool = True,
    ) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.copy_above = copy_above
        self.dependent = dependent
        if copy_above is not None:
            _tell_of_copies(self.out_features, self.in_features, copy_above)
        self.register_buffer("bias", None if bias is None else bias.detach().contiguous())
        self.set_weight(weight)

    @classmethod
    def from_linear(
        cls, linear: torch.nn.Linear, *, max_escape_ratio: float = MAX_ESCAPE_RATIO
    ) -> W12Linear | torch.nn.Linear:
        """Encode a bfloat16 layer; return the layer itself where W12 would not be faster.

        That is so with more corrections than `max_escape_ratio` (see `W12Weight.from_encoded`), and
        where the stored plan says that cuBLAS is always faster for this shape. Where it is from
        some number of rows on, the new layer keeps a BF16 copy for those. Either is logged.
        ValueError for another dtype.
        """
        source = linear.weight.detach()
        if source.dtype != torch.bfloat16:
            raise ValueError(f"W12 holds bfloat16 weights, got {source.dtype}")
        kernel_rows = gemm.MAX_ROWS
        if source.is_cuda:
            gpu = torch.cuda.get_device_name(source.device)
            kernel_rows = plans.plan_for(gpu, *source.shape).kernel_rows
            if kernel_rows == 0:
                _log.warning("%s stays BF16: cuBLAS is faster at any number of rows", linear)
                return linear
        try:
            weight = W12Weight.from_bits(source, max_escape_ratio=max_escape_ratio)
        except TooManyEscapes as reason:
            _log.warning("%s stays BF16: %s", linear, reason)
            return linear
        copy_above = kernel_rows if kernel_rows < gemm.MAX_ROWS else None
        return cls(weight, linear.bias, copy_above=copy_above)

    def set_weight(self, weight: W12Weight) -> None:
        """Take another weight of the same shape; ValueError for another shape."""
        if weight.shape != (self.out_features, self.in_features):
            raise ValueError(f"a weight {list(weight.shape)} is not of this layer's shape")
        for part, tensor in stored_parts(weight.encoded).items():
            self.register_buffer(_buffer(part), tensor)
        self.register_buffer("channel_ptr", weight.encoded.escape_ptr, persistent=False)
        self.register_buffer("escape_col", weight.encoded.escape_col, persistent=False)
        # As words, since `module.to(dtype)` would round floating-point buffers.
        self.register_buffer("scale_words", weight.scale.view(torch.int32), persistent=False)
        self.register_buffer("unit_ptr", weight.escape_ptr, persistent=False)
        self.register_buffer("escapes", weight.escapes, persistent=False)
        copy = None if self.copy_above is None else weight.to_bf16()
        self.register_buffer("copy", copy, persistent=False)

    @property
    def weight(self) -> W12Weight:
        """The weight; its tensors are this module's buffers."""
        return W12Weight(
            DeviceW12(
                (self.out_features, self.in_features), self.weight_w12, self.weight_w12_window,
                self.channel_ptr, self.escape_col, self.weight_w12_escape_bits,
            ),
            self.scale_words.view(torch.float32), self.unit_ptr, self.escapes,
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x bfloat16 [..., in_features] times the weight plus bias."""
        tensors = [
            self.scale_words.view(torch.float32), self.unit_ptr, self.escapes,
            self.weight_w12, self.weight_w12_window, self.channel_ptr, self.escape_col,
            self.weight_w12_escape_bits,
        ]  # fmt: skip
        return torch.ops.specpilot.w12_linear(
            x, tensors, self.bias, self.out_features, self.copy, self.copy_above or 0,
            self.dependent,
        )  # fmt: skip

    def extra_repr(self) -> str:
        """What `print(module)` shows."""
        copy = "" if self.copy_above is None else f", BF16 above {self.copy_above} rows"
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}{copy}"
        )

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *args: Any) -> None:
        """Load; the lists of another weight have other lengths, so buffers are replaced."""
        names = {part: prefix + _buffer(part) for part in layout.PART_SUFFIXES}
        if all(name in state for name in names.values()):
            place = self.scale_words.device
            stored = {part: state[name].to(place) for part, name in names.items()}
            parts = from_stored((self.out_features, self.in_features), stored)
            self.set_weight(W12Weight.from_encoded(parts, max_escape_ratio=1.0))
        super()._load_from_state_dict(state, prefix, *args)


def _buffer(part: str) -> str:
    return "weight" + layout.PART_SUFFIXES[part]
