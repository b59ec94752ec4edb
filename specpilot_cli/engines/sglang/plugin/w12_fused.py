"""Linear layers with one input as one W12 weight: one launch instead of two.

Records have 128 channels, so a layer of a few dozen stays BF16 when it is alone, and every step
waits for its launch. Below a large layer its rows cost a record at most.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

import torch

from specpilot_cli.engines.sglang.plugin.w12_product import (
    Product,
    encode,
    reason_to_keep,
    too_little_memory,
)

ALIGNED: Final = 8
"""The weight is padded with zero rows to a multiple: the rows of its product then begin at
multiples of 16 bytes, as the convolution that reads them wants."""

DIFFERENT = "their weights differ in type or input"


class Part:
    """Some rows of a product; to their layer, a product of its own."""

    def __init__(self, whole: Product, begin: int, end: int) -> None:
        self.cols = whole.cols
        self._whole = whole
        self._begin, self._end = begin, end

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Return x bfloat16 [..., cols] times these rows plus bias: a view; all are computed."""
        if bias is not None:
            bias = torch.nn.functional.pad(bias, (self._begin, self._whole.rows - self._end))
        return self._whole(x, bias)[..., self._begin : self._end]

    def to_bf16(self) -> torch.Tensor:
        """These rows of the weight, bfloat16 [end - begin, cols], in memory of their own."""
        return self._whole.to_bf16()[self._begin : self._end].clone()


class Fusion:
    """Layers whose weights are encoded as one, each with a `W12LinearMethod`.

    They are column-parallel, have one input and no bias, and the first is worth encoding alone.
    Where the weights turn out not to be, each layer is encoded, or not, as without this.
    """

    def __init__(self, layers: Sequence[Any]) -> None:
        self._layers = layers
        self._loaded: set[Any] = set()
        self._product: Product | None = None
        self._widths: list[int] = []
        for layer in layers:
            layer.w12_fusion = self

    @property
    def is_active(self) -> bool:
        """Whether the layers are one weight now."""
        return self._product is not None

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return each layer's product with x bfloat16 [..., cols]: views of one tensor."""
        assert self._product is not None
        parts = self._product(x, None).split(self._widths, dim=-1)
        return parts[: len(self._layers)]

    def process(self, layer: Any) -> None:
        """Encode the weights once the last layer's is loaded; errors as in `encode`."""
        self._loaded.add(layer)
        if len(self._loaded) < len(self._layers):
            return
        self._loaded.clear()
        reason = self._reason_to_part() or self._encode()
        if reason is None:
            return
        self._layers[0].quant_method.facts.apart.add(reason)
        for member in self._layers:
            member.w12_fusion = None
            member.quant_method.encode(member)

    def restore(self) -> None:
        """The layers get their weights back, to load others."""
        self._product = None

    def _reason_to_part(self) -> str | None:
        """Return why the layers stay apart, as far as that can be told before encoding."""
        for layer in self._layers:
            reason: str | None = layer.quant_method.reason_to_leave(layer)
            if reason is not None:
                return reason
        first, *others = (layer.weight for layer in self._layers)
        if any((w.dtype, w.shape[1:]) != (first.dtype, first.shape[1:]) for w in others):
            return DIFFERENT
        return reason_to_keep(first)

    def _encode(self) -> str | None:
        """Encode all rows and drop the weights, or return why not."""
        methods = [layer.quant_method for layer in self._layers]
        name = " + ".join(method.name for method in methods)
        whole = self._stack(name)
        done = reason_to_keep(whole) or encode(whole, name=name, verify=methods[0].verify)
        if isinstance(done, str):
            return done
        self._product, facts = done
        weights = sum(layer.weight.numel() for layer in self._layers)
        bf16_bytes = sum(layer.weight.nbytes for layer in self._layers)
        methods[0].facts.add(
            methods[0].name,
            replace(facts, weights=weights, bf16_bytes=bf16_bytes, layers=len(self._layers)),
        )
        begin = 0
        for layer, width in zip(self._layers, self._widths, strict=False):
            layer.quant_method.take(layer, Part(self._product, begin, begin + width))
            begin += width
        return None

    def _stack(self, name: str) -> torch.Tensor:
        """Return all rows and the padding; the layers' weights become views of it."""
        weights = [layer.weight for layer in self._layers]
        self._widths = [weight.shape[0] for weight in weights]
        padding = -sum(self._widths) % ALIGNED
        rows, cols = sum(self._widths) + padding, weights[0].shape[1]
        if padding:
            self._widths.append(padding)
        try:
            whole = weights[0].new_zeros((rows, cols))
        except torch.OutOfMemoryError as error:
            raise too_little_memory(name, (rows, cols)) from error
        for weight, part in zip(weights, whole.split(self._widths), strict=False):
            part.copy_(weight)
            weight.data = part
        return whole
