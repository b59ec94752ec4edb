"""The W12 linear layer of SGLang: what becomes of its weight after loading.

SGLang's own loaders shard and merge the BF16 weight, whatever the parallelism; what they made is
encoded then. So each rank encodes its shard, and nothing of a loader knows W12. The BF16 weight is
dropped: a layer's weight is None afterwards, and code that would read it fails instead of using it.

`W12LinearMethod` is not an `UnquantizedLinearMethod`, by which SGLang recognises layers whose
weight may be read. A layer that stays BF16 becomes a stock layer, method included. Layers with a
`Fusion` are encoded together.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.layers.quantization.base_config import LinearMethodBase
from sglang.srt.utils.common import is_cpu
from torch.nn.parameter import Parameter

from specpilot_cli.engines.sglang.plugin.w12_facts import Facts
from specpilot_cli.engines.sglang.plugin.w12_fused import Fusion, Part
from specpilot_cli.engines.sglang.plugin.w12_product import (
    Product,
    W12Error,
    encode,
    reason_to_keep,
)

SHARED = "its weight is another layer's too"

Layer = Any
"""A `torch.nn.Module`; torch types its attributes as tensors or modules only."""


class W12LinearMethod(LinearMethodBase):  # type: ignore[misc]
    """One per layer.

    name: as in the facts. stock: makes the method of a layer that stays BF16. verify: see `encode`.
    is_head: leave an empty uint8 weight instead of None. Drafters that use the target's head ask it
    for its dtype, and take one that is no floating-point type for a quantized head.
    """

    def __init__(
        self,
        name: str,
        stock: Callable[[], Any],
        facts: Facts,
        *,
        verify: bool,
        is_head: bool = False,
    ) -> None:
        self.name = name
        self._is_head = is_head
        self._make_stock = stock
        self._stock = stock()
        self.facts = facts
        self.verify = verify
        self._own: Parameter | None = None
        self._attributes: dict[str, Any] = {}

    def create_weights(self, layer: Layer, *sizes: Any, **attributes: Any) -> None:
        """A stock BF16 weight: loaders see nothing else."""
        self._stock.create_weights(layer, *sizes, **attributes)
        self.adopt(layer)

    def adopt(self, layer: Layer) -> None:
        """Take charge of a layer whose stock weight is there, not loaded yet."""
        self.name = self.facts.claim(self.name)
        self._own = layer.weight
        layer.quant_method, layer.w12_product, layer.w12_fusion = self, None, None

    def process_weights_after_loading(self, layer: Layer) -> None:
        """Encode the loaded weight and drop it, or make the layer a stock one.

        W12Error: the weight is not there, too little memory, or a bit that does not come back.
        """
        if layer.w12_product is not None:  # called again without another load
            return
        fusion: Fusion | None = layer.w12_fusion
        if fusion is None:
            self.encode(layer)
        else:
            fusion.process(layer)

    def reason_to_leave(self, layer: Layer) -> str | None:
        """Return why a loaded weight is not this layer's to encode; W12Error if it is offloaded."""
        weight = layer.weight
        if weight.is_meta or (weight.device.type == "cpu" and not is_cpu()):
            raise W12Error(f"`{self.name}` is offloaded: W12 needs its weights on the GPU")
        return None if weight is self._own else SHARED

    def encode(self, layer: Layer) -> None:
        """Encode a layer alone, or make it a stock one; errors as in `w12_product.encode`."""
        weight = layer.weight
        reason = self.reason_to_leave(layer) or reason_to_keep(weight)
        done = reason or encode(weight.data, name=self.name, verify=self.verify)
        if isinstance(done, str):
            self.facts.keep(self.name, done)
            layer.quant_method = self._make_stock()
            layer.quant_method.process_weights_after_loading(layer)
            return
        product, facts = done
        self.facts.add(self.name, facts)
        self.take(layer, product)

    def take(self, layer: Layer, product: Product | Part) -> None:
        """Multiply with a product from now on, and drop the weight."""
        # A plain attribute: no loader must find it.
        layer.w12_product = product
        self._attributes = dict(vars(layer.weight))
        self._own = None
        device = layer.weight.device
        del layer.weight
        empty = torch.empty(0, dtype=torch.uint8, device=device)
        layer.register_parameter(
            "weight", Parameter(empty, requires_grad=False) if self._is_head else None
        )

    def restore_weights_before_loading(self, layer: Layer) -> None:
        """Give a new load a BF16 weight to write to, with the old values."""
        product: Product | Part | None = layer.w12_product
        if product is None:
            return
        if layer.w12_fusion is not None:
            layer.w12_fusion.restore()
        weight = Parameter(product.to_bf16(), requires_grad=False)
        for name, value in self._attributes.items():
            setattr(weight, name, value)
        self._own = weight
        layer.register_parameter("weight", weight)
        layer.w12_product = None

    def apply(
        self, layer: Layer, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return x bfloat16 [..., in_features] times the weight plus bias."""
        if layer.w12_product is None:  # before the weights are loaded
            stock: torch.Tensor = self._stock.apply(layer, x, bias)
            return stock
        product: torch.Tensor = layer.w12_product(x, bias)
        return product
