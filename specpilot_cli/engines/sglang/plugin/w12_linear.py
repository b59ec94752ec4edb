"""The W12 linear layer of SGLang: how one weight is encoded after loading, and multiplied.

SGLang's own loaders shard and merge the BF16 weight, whatever the parallelism; what they made is
encoded then. So each rank encodes its shard, and nothing of a loader knows W12. The BF16 weight is
dropped: `layer.weight` is None afterwards, and code that would read it fails instead of using it.

`W12LinearMethod` is not an `UnquantizedLinearMethod`, by which SGLang recognises layers whose
weight may be read. A layer that stays BF16 becomes a stock layer, method included.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.layers.quantization.base_config import LinearMethodBase
from torch.nn.parameter import Parameter

from specpilot_cli.engines.sglang.plugin.w12_facts import DECODED, KERNEL, Encoded, Facts, Form
from specpilot_kernels.w12 import device, gemm, layout, ops, plans
from specpilot_kernels.w12.weight import TooManyEscapes, W12Weight

NOT_SMALLER = "W12 would not shrink it"
SHARED = "its weight is another layer's too"
CUBLAS = "cuBLAS with BF16 is faster for this shape on this GPU"
ESCAPES = "too many weights outside their channel's window"


Layer = Any
"""A `torch.nn.Module`; torch types its attributes as tensors or modules only."""


class W12Error(RuntimeError):
    """W12 cannot serve this model on this machine; SGLang stops with this message."""


def warm(index: int) -> str:
    """Compile and load all kernels on a GPU and make room for graph captures; returns its name.

    W12Error with one sentence if that is not possible: an unsupported GPU, a missing package, too
    little memory.
    """
    from specpilot_kernels.build import GpuError

    try:
        gemm.warm(index)
        device.warm(index)
    except (GpuError, ValueError) as error:
        raise W12Error(f"W12 cannot run on this machine: {error}") from error
    except torch.OutOfMemoryError as error:
        raise W12Error("W12 cannot run: too little GPU memory for its workspaces") from error
    return str(torch.cuda.get_device_name(index))


class W12LinearMethod(LinearMethodBase):  # type: ignore[misc]
    """One per layer. name: as in the facts; stock: makes the method of a layer that stays BF16."""

    def __init__(self, name: str, stock: Callable[[], Any], facts: Facts, *, verify: bool) -> None:
        self.name = name
        self._make_stock = stock
        self._stock = stock()
        self._facts = facts
        self._verify = verify
        self._own: Parameter | None = None
        self._attributes: dict[str, Any] = {}

    def create_weights(self, layer: Layer, *sizes: Any, **attributes: Any) -> None:
        """A stock BF16 weight: loaders see nothing else."""
        self._stock.create_weights(layer, *sizes, **attributes)
        self.adopt(layer)

    def adopt(self, layer: Layer) -> None:
        """Take charge of a layer whose stock weight is there, not loaded yet."""
        self.name = self._facts.claim(self.name)
        self._own = layer.weight
        layer.quant_method = self

    def process_weights_after_loading(self, layer: Layer) -> None:
        """Encode the loaded weight and drop it, or make the layer a stock one.

        W12Error: the weight is not there, too little memory, or a bit that does not come back.
        """
        weight = layer.weight
        if weight is None:  # called again without another load
            return
        reason = self._reason_to_keep(weight)
        try:
            if reason is None:
                self._encode(layer, weight.data)
                return
        except TooManyEscapes:
            reason = ESCAPES
        except torch.OutOfMemoryError as error:
            raise W12Error(
                f"too little GPU memory to encode `{self.name}` {list(weight.shape)}: all BF16 "
                "weights of this rank and one encoded layer must fit while loading"
            ) from error
        self._facts.keep(self.name, reason)
        layer.quant_method = self._make_stock()
        layer.quant_method.process_weights_after_loading(layer)

    def restore_weights_before_loading(self, layer: Layer) -> None:
        """Give a new load a BF16 weight to write to, with the old values."""
        if layer.weight is not None:
            return
        weight = Parameter(self._decoded(layer), requires_grad=False)
        for name, value in self._attributes.items():
            setattr(weight, name, value)
        self._own = weight
        layer.register_parameter("weight", weight)
        layer.w12_tensors, layer.w12_decoded = None, None

    def apply(
        self, layer: Layer, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return x bfloat16 [..., in_features] times the weight plus bias."""
        if layer.weight is not None:  # before the weights are loaded
            return self._stock.apply(layer, x, bias)
        if layer.w12_tensors is None:
            return torch.nn.functional.linear(x, layer.w12_decoded, bias)
        return torch.ops.specpilot.w12_linear(x, layer.w12_tensors, bias, layer.w12_rows)

    def _reason_to_keep(self, weight: torch.Tensor) -> str | None:
        if weight.is_meta:
            raise W12Error(f"`{self.name}` is offloaded: W12 needs its weights on the GPU")
        if weight is not self._own:
            return SHARED
        if weight.dtype != torch.bfloat16:
            return f"its weights are {str(weight.dtype).removeprefix('torch.')}"
        if weight.dim() != 2:
            return f"its weight has {weight.dim()} dimensions"
        rows, cols = weight.shape
        if layout.encoded_nbytes(rows, cols, 0) >= weight.numel() * weight.element_size():
            return NOT_SMALLER
        if on_gpu(weight):
            name = torch.cuda.get_device_name(weight.device)
            if plans.plan_for(name, *weight.shape).kernel_rows == 0:
                return CUBLAS
        return None

    def _encode(self, layer: Layer, bits: torch.Tensor) -> None:
        start = time.perf_counter()
        if on_gpu(bits):
            # SGLang lets go of a BF16 weight after this method returned. Given back to the driver
            # before the next records are allocated, it is memory for the KV pool; records put in
            # its place would hold on to the quarter that they leave over.
            torch.cuda.empty_cache()
        encoded = W12Weight.from_bits(bits)
        if encoded.nbytes >= bits.numel() * bits.element_size():
            raise TooManyEscapes("the lists take what the records save")
        if self._verify and not _matches(bits, encoded):
            raise W12Error(
                f"`{self.name}` does not come back bit for bit from W12: please report this"
            )
        form = self._attach(layer, encoded)
        self._attributes = dict(vars(layer.weight))
        self._own = None
        del layer.weight
        layer.register_parameter("weight", None)
        self._facts.add(
            self.name,
            Encoded(
                weights=bits.numel(),
                bf16_bytes=bits.numel() * bits.element_size(),
                encoded_bytes=encoded.nbytes,
                escapes=encoded.escape_count,
                verified=self._verify,
                form=form,
                seconds=time.perf_counter() - start,
            ),
        )

    def _attach(self, layer: Layer, encoded: W12Weight) -> Form:
        """Put what `apply` needs on the layer, as plain attributes: no loader must find them."""
        layer.w12_rows, layer.w12_cols = encoded.shape
        if on_gpu(encoded.records):
            layer.w12_tensors, layer.w12_decoded = ops.tensors_of(encoded), None
            return KERNEL
        layer.w12_tensors, layer.w12_decoded = None, encoded.to_bf16()
        return DECODED

    def _decoded(self, layer: Layer) -> torch.Tensor:
        if layer.w12_tensors is None:
            return layer.w12_decoded
        return ops.weight_of(layer.w12_tensors, layer.w12_rows, layer.w12_cols).to_bf16()


def on_gpu(tensor: torch.Tensor) -> bool:
    """Whether the kernels are for it; elsewhere the decoded weight is multiplied, and said so."""
    return bool(tensor.is_cuda)


def _matches(bits: torch.Tensor, encoded: W12Weight) -> bool:
    """Whether the encoded weight is `bits`, bit for bit."""
    if on_gpu(bits):
        return not int(device.compare(bits.contiguous(), encoded.encoded).item())
    return torch.equal(bits.view(torch.int16), encoded.to_bf16().view(torch.int16))
