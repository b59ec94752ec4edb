"""One encoded weight and its product, on a GPU by the kernel, elsewhere by the decoded weight."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from specpilot_cli.engines.sglang.plugin.w12_facts import DECODED, KERNEL, Encoded, Form
from specpilot_kernels.build import GpuError
from specpilot_kernels.chained import ops as chained
from specpilot_kernels.w12 import device, gemm, layout, ops, plans
from specpilot_kernels.w12.weight import TooManyEscapes, W12Weight

NOT_SMALLER = "W12 would not shrink it"
CUBLAS = "cuBLAS with BF16 is faster for this shape on this GPU"
ESCAPES = "too many weights outside their channel's window"


class W12Error(RuntimeError):
    """W12 cannot serve this model on this machine; SGLang stops with this message."""


class Product:
    """A weight [rows, cols] that multiplies; see `encode`.

    On a GPU it holds the tensors of `ops.tensors_of`. Elsewhere there is no kernel: it holds the
    weight decoded from W12, and `form` says so.
    """

    def __init__(self, weight: W12Weight) -> None:
        self.rows, self.cols = weight.shape
        on_kernel = on_gpu(weight.records)
        self.form: Form = KERNEL if on_kernel else DECODED
        self._tensors = ops.tensors_of(weight) if on_kernel else []
        self._decoded = None if on_kernel else weight.to_bf16()

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Return x bfloat16 [..., cols] times the weight plus bias, bfloat16 [..., rows]."""
        if self._decoded is not None:
            return torch.nn.functional.linear(x, self._decoded, bias)
        product: torch.Tensor = torch.ops.specpilot.w12_linear(x, self._tensors, bias, self.rows)
        return product

    def to_bf16(self) -> torch.Tensor:
        """The weight, bfloat16 [rows, cols]."""
        if self._decoded is not None:
            return self._decoded
        return ops.weight_of(self._tensors, self.rows, self.cols).to_bf16()


def warm(index: int) -> None:
    """Compile and load all kernels on a GPU and make room for graph captures.

    W12Error with one sentence if that is not possible: an unsupported GPU, a missing package, too
    little memory.
    """
    try:
        gemm.warm(index)
        device.warm(index)
        chained.warm(index)
    except (GpuError, ValueError) as error:
        raise W12Error(f"W12 cannot run on this machine: {error}") from error
    except torch.OutOfMemoryError as error:
        raise W12Error("W12 cannot run: too little GPU memory for its workspaces") from error


def reason_to_keep(weight: torch.Tensor) -> str | None:
    """Return why a weight stays BF16, as far as that can be told before it is encoded."""
    if weight.dtype != torch.bfloat16:
        return f"its weights are {str(weight.dtype).removeprefix('torch.')}"
    if weight.dim() != 2:
        return f"its weight has {weight.dim()} dimensions"
    rows, cols = weight.shape
    if layout.encoded_nbytes(rows, cols, 0) >= _nbytes(weight):
        return NOT_SMALLER
    if on_gpu(weight):
        name = torch.cuda.get_device_name(weight.device)
        if plans.plan_for(name, rows, cols).kernel_rows == 0:
            return CUBLAS
    return None


def encode(bits: torch.Tensor, *, name: str, verify: bool) -> tuple[Product, Encoded] | str:
    """Encode a weight bfloat16 [rows, cols] where it is, or return why it stays BF16.

    verify: decode it again and compare, bit for bit. W12Error: a bit that does not come back, or
    too little memory; about 0.8 of the weight's bytes are needed beside it.
    """
    start = time.perf_counter()
    if on_gpu(bits):
        # SGLang lets go of the last layer's BF16 weight only after that layer's method returned.
        # Given back to the driver now, it is memory for the KV pool; records put in its place
        # would hold on to the quarter that they leave over.
        torch.cuda.empty_cache()
    try:
        weight = W12Weight.from_bits(bits)
        if weight.nbytes >= _nbytes(bits):
            return ESCAPES
        if verify and not _matches(bits, weight):
            raise W12Error(f"`{name}` does not come back bit for bit from W12: please report this")
        made = Product(weight)
    except TooManyEscapes:
        return ESCAPES
    except torch.OutOfMemoryError as error:
        raise too_little_memory(name, bits.shape) from error
    return made, Encoded(
        weights=bits.numel(),
        bf16_bytes=_nbytes(bits),
        encoded_bytes=weight.nbytes,
        escapes=weight.escape_count,
        verified=verify,
        form=made.form,
        seconds=time.perf_counter() - start,
    )


def too_little_memory(name: str, shape: Sequence[int]) -> W12Error:
    """The error of a weight that there is no room to encode."""
    return W12Error(
        f"too little GPU memory to encode `{name}` {list(shape)}: all BF16 weights of this rank "
        "and one encoded layer must fit while loading"
    )


def on_gpu(tensor: torch.Tensor) -> bool:
    """Whether the kernels are for it."""
    return bool(tensor.is_cuda)


def _matches(bits: torch.Tensor, weight: W12Weight) -> bool:
    if on_gpu(bits):
        return not int(device.compare(bits.contiguous(), weight.encoded).item())
    return torch.equal(bits.view(torch.int16), weight.to_bf16().view(torch.int16))


def _nbytes(weight: torch.Tensor) -> int:
    return weight.numel() * weight.element_size()
