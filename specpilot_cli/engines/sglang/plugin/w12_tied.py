"""A head that is the embedding table too: the table stays BF16, and logits are read from a copy.

A W12 copy takes memory instead of freeing it, and saves a quarter of the bytes that a step reads
for its logits. So it is made only where `tied_lm_head` asks for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.layers.quantization.base_config import LinearMethodBase
from sglang.srt.layers.vocab_parallel_embedding import ParallelLMHead

from specpilot_cli.engines.sglang.plugin.w12_facts import Facts
from specpilot_cli.engines.sglang.plugin.w12_product import encode, reason_to_keep

NAME = "lm_head"
NOT_ASKED = "it is the embedding table too, and tied_lm_head is false"


class TiedHeadMethod(LinearMethodBase):  # type: ignore[misc]
    """Looks tokens up in the table as before, and multiplies with its copy."""

    def __init__(self, stock: Any, again: Callable[[Any], None]) -> None:
        self._stock = stock
        self._again = again

    def embedding(self, layer: Any, input_: torch.Tensor) -> torch.Tensor:
        """The stock lookup."""
        found: torch.Tensor = self._stock.embedding(layer, input_)
        return found

    def process_weights_after_loading(self, layer: Any) -> None:
        """Called when weights were loaded again: the copy is made again."""
        self._again(layer)

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Return x bfloat16 [..., in_features] times the table plus bias."""
        product: torch.Tensor = layer.w12_product(x, bias)
        return product


def is_tied(model: Any, head: Any) -> bool:
    """Whether a head is, or shares its weight with, an embedding table."""
    weight = getattr(head, "weight", None)
    if weight is None:
        return False
    if not isinstance(head, ParallelLMHead):
        return True
    return any(
        module is not head and module._parameters.get("weight") is weight
        for module in model.modules()
    )


def copy_tied_head(head: Any, facts: Facts, *, reason: str | None) -> None:
    """Give a tied head a W12 copy, unless there is a reason not to; errors as in `encode`."""
    kept = reason or reason_to_keep(head.weight)
    if kept is not None:
        facts.keep(NAME, kept)
        return

    def make(layer: Any) -> None:
        done = encode(layer.weight.data, name=NAME, verify=True)
        if isinstance(done, str):
            facts.keep(NAME, done)
            layer.quant_method = stock
            return
        layer.w12_product, encoded = done
        facts.add(NAME, encoded.as_copy())
        layer.quant_method = method

    stock = getattr(head, "quant_method", None)
    method = TiedHeadMethod(stock, make)
    make(head)
