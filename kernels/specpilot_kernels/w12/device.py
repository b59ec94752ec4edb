"""The W12 codec on the GPU, torch tensors in and out; the bytes of `reference`.

    parts = device.encode(weight)                    # synchronises once, for the length of lists
    again = device.decode(parts)
    assert not device.compare(weight, parts).item()   # decodes and compares without a second copy

Everything runs on torch's current stream of the tensors' device. `encode_into`, `decode` into a
given tensor and `compare` with a given flag never synchronise and may be captured in a CUDA
graph, once `warm` has run on that device: compiling and loading may not happen in a capture.

Tensors are judged by their 16-bit patterns, so bfloat16, int16 and uint16 are all the same here.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from specpilot_kernels import launch
from specpilot_kernels.w12 import layout, modules
from specpilot_kernels.w12.encoded import MalformedW12, StackShape

_BITS_DTYPES = (torch.bfloat16, torch.int16, torch.uint16)
_MAX_COLS = 1 << 28
_GROUPS_PER_RECORD = layout.RECORD_ROWS // 16
_LEAST_CAPACITY = 1024
_WEIGHTS_PER_ESCAPE = 1024
"""Room that `encode` makes at first; trained weights have one escape in about ten thousand."""


@dataclass(frozen=True, slots=True)
class DeviceW12(StackShape):
    """One encoded matrix, or a stack of equal ones, in device memory; parts as in `EncodedW12`.

    shape: (rows, cols) or (matrices, rows, cols) of the BF16 tensor.
    records: uint8 [matrices x row blocks, column blocks, 12288], 16-byte aligned.
    window: uint8 [channels].
    escape_ptr: int32 [channels + 1].
    escape_col: int32 [escapes].
    escape_bits: uint16 or int16 [escapes].
    """

    shape: tuple[int, ...]
    records: torch.Tensor
    window: torch.Tensor
    escape_ptr: torch.Tensor
    escape_col: torch.Tensor
    escape_bits: torch.Tensor

    def check(self) -> None:
        """Raise MalformedW12 unless dtypes, shapes, devices and alignment are as they must be.

        Looks at no value. Kernels clamp what they read from the lists, so that values that
        contradict each other give wrong weights, never accesses outside the parts.
        """
        row_blocks, col_blocks = layout.grid(self.rows, self.cols)
        channels = self.matrices * self.rows
        escapes, patterns = self.escape_col.numel(), self.escape_bits.numel()
        if escapes != patterns:  # the true count is in escape_ptr, a value: either may be wrong
            raise MalformedW12(f"escape_col has {escapes} entries, escape_bits {patterns}")
        expected = {
            "records": (
                (torch.uint8,),
                (self.matrices * row_blocks, col_blocks, layout.RECORD_BYTES),
            ),
            "window": ((torch.uint8,), (channels,)),
            "escape_ptr": ((torch.int32,), (channels + 1,)),
            "escape_col": ((torch.int32,), (escapes,)),
            "escape_bits": ((torch.uint16, torch.int16), (escapes,)),
        }
        for name, (dtypes, shape) in expected.items():
            part: torch.Tensor = getattr(self, name)
            if part.dtype not in dtypes or tuple(part.shape) != shape:
                raise MalformedW12(
                    f"{name} is {part.dtype} {list(part.shape)}, expected {dtypes[0]} {list(shape)}"
                )
            if not part.is_contiguous() or part.device != self.records.device:
                raise MalformedW12(f"{name} is not contiguous, or on another device than records")
        if self.records.data_ptr() % 16:
            raise MalformedW12("records are not 16-byte aligned")


@dataclass(frozen=True, slots=True)
class Buffers:
    """What `encode_into` writes: made by `allocate`, reusable for tensors of the same shape.

    parts: the escape lists have room for `capacity` escapes, of which `total` are valid.
    progress: int64 [1 + groups], scratch. total: int64 [1], escapes found, even above capacity.
    """

    parts: DeviceW12
    progress: torch.Tensor
    total: torch.Tensor

    @property
    def capacity(self) -> int:
        """Escapes that the lists have room for."""
        return self.parts.escape_bits.numel()


def warm(device: int | torch.device | None = None) -> None:
    """Compile and load every kernel of the codec on a device; errors as in `launch.prepare`."""
    index = _index(device)
    for aligned in (True, False):
        _encoder(index, aligned)
        for kind in ("decode", "compare"):
            _decoder(index, kind, aligned)


def allocate(shape: tuple[int, ...], device: torch.device | int, *, capacity: int) -> Buffers:
    """Make the buffers for encoding a tensor [rows, cols] or [matrices, rows, cols]."""
    matrices = shape[0] if len(shape) == 3 else 1
    rows, cols = shape[-2:]
    row_blocks, col_blocks = layout.grid(rows, cols)

    def empty(count: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(count, dtype=dtype, device=device)

    parts = DeviceW12(
        shape=shape,
        records=empty((matrices * row_blocks, col_blocks, layout.RECORD_BYTES), torch.uint8),
        window=empty((matrices * rows,), torch.uint8),
        escape_ptr=empty((matrices * rows + 1,), torch.int32),
        escape_col=empty((capacity,), torch.int32),
        escape_bits=empty((capacity,), torch.uint16),
    )
    groups = matrices * row_blocks * _GROUPS_PER_RECORD
    return Buffers(parts, empty((1 + groups,), torch.int64), empty((1,), torch.int64))


def encode_into(bits: torch.Tensor, buffers: Buffers) -> None:
    """Encode `bits` into `buffers`, without synchronising.

    bits: bfloat16, int16 or uint16 [rows, cols] or [matrices, rows, cols], contiguous, on the
    GPU. Where `buffers.total` exceeds the capacity, only the lists are incomplete. ValueError for
    another dtype, rank, layout, device or shape.
    """
    parts = buffers.parts
    _check_bits(bits)
    if tuple(bits.shape) != parts.shape or bits.device != parts.records.device:
        raise ValueError(f"buffers are for {list(parts.shape)} on {parts.records.device}")
    row_blocks, _ = layout.grid(parts.rows, parts.cols)
    groups = parts.matrices * row_blocks * _GROUPS_PER_RECORD
    if groups == 0:
        parts.escape_ptr.zero_()
        buffers.total.zero_()
        return
    buffers.progress.zero_()
    _encoder(_index(bits.device), _aligned(bits))(
        (groups, 1, 1),
        bits.data_ptr(), parts.rows, parts.cols, row_blocks, groups, parts.records.data_ptr(),
        parts.window.data_ptr(), parts.escape_ptr.data_ptr(), parts.escape_col.data_ptr(),
        parts.escape_bits.data_ptr(), buffers.capacity, buffers.progress.data_ptr(),
        buffers.total.data_ptr(),
    )  # fmt: skip


def encode(bits: torch.Tensor, *, capacity: int | None = None) -> DeviceW12:
    """Encode BF16 patterns; tensors and errors as in `encode_into`.

    Synchronises once to learn the number of escapes, and encodes again where they exceed
    `capacity` (by default one per 1024 weights). ValueError for more than 2^31 - 1 escapes.
    """
    _check_bits(bits)
    if capacity is None:
        capacity = max(_LEAST_CAPACITY, bits.numel() // _WEIGHTS_PER_ESCAPE)
    shape = tuple(bits.shape)
    buffers = allocate(shape, bits.device, capacity=capacity)
    encode_into(bits, buffers)
    total = int(buffers.total.item())
    if total > layout.MAX_ESCAPES:
        raise ValueError(f"{total} escapes, the format holds {layout.MAX_ESCAPES}")
    if total > capacity:
        buffers = allocate(shape, bits.device, capacity=total)
        encode_into(bits, buffers)
    parts = buffers.parts
    return DeviceW12(
        shape, parts.records, parts.window, parts.escape_ptr,
        # Copies of their own, so that the unused room is given back.
        parts.escape_col[:total].clone(),
        parts.escape_bits.view(torch.int16)[:total].clone().view(torch.uint16),
    )  # fmt: skip


def decode(parts: DeviceW12, out: torch.Tensor | None = None) -> torch.Tensor:
    """Return the patterns in `out`, or in a new bfloat16 tensor of `parts.shape`.

    out: bfloat16, int16 or uint16 of that shape, contiguous, on the same device; else ValueError.
    MalformedW12 if the parts do not fit together; see `DeviceW12.check`.
    """
    parts.check()
    if out is None:
        out = torch.empty(parts.shape, dtype=torch.bfloat16, device=parts.records.device)
    _check_fits(out, parts)
    arguments, grid = _decode_arguments(parts)
    launcher = _decoder(_index(out.device), "decode", _aligned(out))
    launcher(grid, *arguments, out.data_ptr())
    return out


def compare(
    bits: torch.Tensor, parts: DeviceW12, differs: torch.Tensor | None = None
) -> torch.Tensor:
    """Decode and compare with `bits` without storing the weights; return an int32 [1] flag.

    The flag is 0 if every pattern is equal, else 1. A given `differs` must hold 0 before; it is
    only ever set, so one flag may gather many comparisons. Errors as in `decode`.
    """
    parts.check()
    _check_fits(bits, parts)
    if differs is None:
        differs = torch.zeros(1, dtype=torch.int32, device=bits.device)
    arguments, grid = _decode_arguments(parts)
    launcher = _decoder(_index(bits.device), "compare", _aligned(bits))
    launcher(grid, *arguments, bits.data_ptr(), differs.data_ptr())
    return differs


def _decode_arguments(parts: DeviceW12) -> tuple[tuple[int, ...], launch.Dim3]:
    row_blocks, _ = layout.grid(parts.rows, parts.cols)
    chunks = -(-parts.cols // modules.DECODE_TILE_COLS)
    arguments = (
        parts.records.data_ptr(), parts.window.data_ptr(), parts.escape_ptr.data_ptr(),
        parts.escape_col.data_ptr(), parts.escape_bits.data_ptr(), parts.escape_bits.numel(),
        parts.rows, parts.cols, row_blocks, chunks,
    )  # fmt: skip
    return arguments, (parts.matrices * row_blocks * _GROUPS_PER_RECORD * chunks, 1, 1)


def _encoder(device: int, aligned: bool) -> launch.Launcher:
    return launch.prepare(
        modules.ENCODER, "w12_encode" if aligned else "w12_encode_unaligned",
        block=(modules.ENCODE_THREADS, 1, 1), device=device, options=_ENCODE_OPTIONS,
    )  # fmt: skip


def _decoder(device: int, kind: str, aligned: bool) -> launch.Launcher:
    return launch.prepare(
        modules.DECODER, f"w12_{kind}" if aligned else f"w12_{kind}_unaligned",
        block=(modules.DECODE_THREADS, 1, 1), device=device,
    )  # fmt: skip


_ENCODE_OPTIONS = launch.Options(shared_bytes=modules.encode_shared_bytes())


def _aligned(bits: torch.Tensor) -> bool:
    """Whether every row begins at a multiple of 16 bytes."""
    return bits.shape[-1] % 8 == 0 and bits.data_ptr() % 16 == 0


def _check_bits(bits: torch.Tensor) -> None:
    if not bits.is_cuda:
        raise ValueError(f"the GPU codec takes CUDA tensors, got one on {bits.device}")
    if bits.dtype not in _BITS_DTYPES:
        raise ValueError(f"W12 encodes 16-bit BF16 patterns, got {bits.dtype}")
    if bits.dim() not in (2, 3):
        raise ValueError(f"W12 encodes matrices or stacks of them, got shape {list(bits.shape)}")
    if not bits.is_contiguous():
        raise ValueError("the GPU codec takes contiguous tensors")
    if bits.shape[-1] >= _MAX_COLS:
        raise ValueError(f"the GPU codec takes fewer than {_MAX_COLS} inputs per channel")


def _check_fits(bits: torch.Tensor, parts: DeviceW12) -> None:
    _check_bits(bits)
    if tuple(bits.shape) != parts.shape or bits.device != parts.records.device:
        raise ValueError(
            f"a tensor {list(bits.shape)} on {bits.device} does not fit an encoded "
            f"{list(parts.shape)} on {parts.records.device}"
        )


def _index(device: int | torch.device | None) -> int:
    if isinstance(device, int):
        return device
    if device is None or device.index is None:
        return torch.cuda.current_device()
    return device.index
