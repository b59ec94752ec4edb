"""A W12 matrix in the form that the GEMM reads, on any torch device.

    weight = W12Weight.from_bits(linear.weight.data)     # or from_encoded(parts of a checkpoint)

The GEMM decodes every weight to exponent field 0x70 | offset and multiplies each channel's sum by
its scale. What that gets wrong, it adds as corrections, from a list sorted by record. Channels
with lo = 0 hold zeros and denormals, which such a decode cannot express: their scale is 0, and
all their non-zero weights are corrections.

Everything is computed with torch operations on the tensors' device; no step goes through the
host, except for the counts that decide how long the lists are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from specpilot_kernels.w12 import codec, device, layout, reference, stored
from specpilot_kernels.w12.device import DeviceW12
from specpilot_kernels.w12.encoded import EncodedW12, MalformedW12

MAX_ESCAPE_RATIO = 1 / 8500
"""Most corrections per weight with which W12 beats BF16: nearly one per record.

One warp adds them, one after the other, while records are read, so time grows along a line once
that warp is the slowest. On an H200 (docs/measurements/w12_gemm_h200.json) the line crosses
cuBLAS's time / 1.05 at 1.91e-4, 2.07e-4 and 1.28e-4 corrections per weight at 1, 32 and 64 rows;
ordinary weights have 0.5e-4 to 1e-4."""

_CHANCE = 3
"""Standard deviations by which scattered corrections may exceed what was measured on average."""

_TYPICAL_CTAS = 132
_CHUNK_WEIGHTS = 1 << 22
_UNIT_BITS = 27

# Where `struct Escape` of the kernels has its fields.
COLUMN_SHIFT, CHANNEL_SHIFT, WINDOW_SHIFT, UNIT_SHIFT, PATTERN_SHIFT = 0, 6, 13, 21, 48


class TooManyEscapes(ValueError):
    """W12 would be slower than BF16 for this matrix; keep it in BF16."""


@dataclass(frozen=True, slots=True)
class W12Weight:
    """One matrix [out_features, in_features], ready for the GEMM.

    tiles = ceil(out_features / 128), blocks = ceil(in_features / 64), units = tiles x blocks;
    unit u is record [u / blocks, u % blocks].

    encoded: the matrix as stored, for decoding; its records are the ones the GEMM reads.
    scale: float32 [tiles x 128], 2^(lo - 112); 0 for channels with lo = 0 and for padding.
    escape_ptr: int32 [units + 1]; unit u owns escapes ptr[u] .. ptr[u + 1].
    escapes: int64 [max(1, escapes)], by unit, channel, column. Bits 0-5 column in the unit, 6-12
        channel in the tile, 13-20 lo (0: the place counts as zero without it), 21-47 unit, 48-63
        the exact BF16 pattern.
    """

    encoded: DeviceW12
    scale: torch.Tensor
    escape_ptr: torch.Tensor
    escapes: torch.Tensor

    @classmethod
    def from_bits(
        cls, bits: torch.Tensor, *, max_escape_ratio: float = MAX_ESCAPE_RATIO
    ) -> W12Weight:
        """Encode BF16 patterns [out_features, in_features], bfloat16, int16 or uint16.

        On a GPU with the GPU encoder, else with the CPU codec. Errors as in `from_encoded`.
        """
        if bits.dim() != 2:
            raise ValueError(f"a W12 weight is a matrix, got shape {list(bits.shape)}")
        parts = device.encode(bits.contiguous()) if bits.is_cuda else _encode_on_cpu(bits)
        return cls.from_encoded(parts, max_escape_ratio=max_escape_ratio)

    @classmethod
    def from_encoded(
        cls, parts: DeviceW12, *, max_escape_ratio: float = MAX_ESCAPE_RATIO
    ) -> W12Weight:
        """Take the parts of one encoded matrix; `records` and the lists are shared, not copied.

        MalformedW12 if the parts do not fit together, TooManyEscapes (a ValueError) if the
        corrections, on average or around one tile, are more than `max_escape_ratio` of the
        weights, ValueError for a stack (see `from_stack`) or an empty matrix.
        """
        if len(parts.shape) != 2 or min(parts.shape) < 1:
            raise ValueError(f"a W12 weight is a matrix, got shape {list(parts.shape)}")
        parts.check()
        _check_values(parts)
        tiles, blocks = layout.grid(*parts.shape)
        if tiles * blocks >= 1 << _UNIT_BITS:
            raise ValueError(f"shape {list(parts.shape)} has more than 2^{_UNIT_BITS} records")
        channel, column, pattern = _corrections(parts)
        _check_load(channel, tiles, blocks, max_escape_ratio)
        escape_ptr, escapes = _sorted_escapes(parts, channel, column, pattern)
        return cls(parts, _scale(parts.window, tiles), escape_ptr, escapes)

    @property
    def shape(self) -> tuple[int, int]:
        """(out_features, in_features)."""
        rows, cols = self.encoded.shape
        return rows, cols

    @property
    def out_features(self) -> int:
        """Output channels."""
        return self.encoded.rows

    @property
    def in_features(self) -> int:
        """Inputs."""
        return self.encoded.cols

    @property
    def records(self) -> torch.Tensor:
        """uint8 [tiles, blocks, 12288]."""
        return self.encoded.records

    @property
    def device(self) -> torch.device:
        """Where all tensors are."""
        return self.records.device

    @property
    def escape_count(self) -> int:
        """Corrections in the list; zeros and denormals of lo = 0 channels are counted, too."""
        return int(self.escape_ptr[-1].item())

    @property
    def nbytes(self) -> int:
        """Bytes of device memory that the weight takes, parts and list together."""
        parts = self.encoded
        tensors = (
            parts.records, parts.window, parts.escape_ptr, parts.escape_col,
            parts.escape_bits, self.scale, self.escape_ptr, self.escapes,
        )  # fmt: skip
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def stripe(self, begin: int, end: int) -> DeviceW12:
        """Channels begin .. end - 1 as encoded parts that share memory; begin % 128 must be 0."""
        parts, step = self.encoded, layout.RECORD_ROWS
        if begin % step:
            raise ValueError(f"a stripe begins with a record, not at channel {begin}")
        return DeviceW12(
            (end - begin, parts.cols),
            parts.records[begin // step : -(-end // step)],
            parts.window[begin:end],
            parts.escape_ptr[begin : end + 1],
            parts.escape_col,
            parts.escape_bits,
        )

    def to_bf16(self) -> torch.Tensor:
        """The matrix as bfloat16 [out_features, in_features], bit for bit."""
        if self.records.is_cuda:
            return device.decode(self.encoded)
        patterns = torch.from_numpy(codec.decode(_on_host(self.encoded)).view(np.int16))
        return patterns.view(torch.bfloat16)


def from_stack(parts: DeviceW12, *, max_escape_ratio: float = MAX_ESCAPE_RATIO) -> list[W12Weight]:
    """Return each matrix of an encoded stack [matrices, rows, cols]; errors as `from_encoded`.

    The lists are copied so that each begins at zero, the records are shared.
    """
    parts.check()
    tiles, _ = layout.grid(parts.rows, parts.cols)
    bounds = parts.escape_ptr[:: max(1, parts.rows)].tolist()
    weights = []
    for i in range(parts.matrices):
        channels = slice(i * parts.rows, (i + 1) * parts.rows)
        pointers = parts.escape_ptr[channels.start : channels.stop + 1]
        matrix = DeviceW12(
            (parts.rows, parts.cols),
            parts.records[i * tiles : (i + 1) * tiles],
            parts.window[channels],
            pointers - pointers[0],
            parts.escape_col[bounds[i] : bounds[i + 1]],
            parts.escape_bits[bounds[i] : bounds[i + 1]],
        )
        weights.append(W12Weight.from_encoded(matrix, max_escape_ratio=max_escape_ratio))
    return weights


def from_stored(shape: tuple[int, ...], parts: Mapping[str, torch.Tensor]) -> DeviceW12:
    """Return the parts of a tensor [shape] in memory, from those that a checkpoint stores.

    parts: by the names in `layout.PART_SUFFIXES`, all on one device; see `stored.Parts`. Goes
    through the host. MalformedW12 as in `stored.from_stored`.
    """
    place = parts["records"].device
    lists = (parts[name].cpu().numpy() for name in ("escape_ptr", "escape_at"))
    pointers, columns = stored.lists_in_memory(shape, *lists)
    return DeviceW12(
        shape, parts["records"], parts["window"], torch.from_numpy(pointers).to(place),
        torch.from_numpy(columns).to(place), parts["escape_bits"],
    )  # fmt: skip


def stored_parts(parts: DeviceW12) -> dict[str, torch.Tensor]:
    """Undo `from_stored`; ValueError for more inputs than a checkpoint can hold."""
    lists = (parts.escape_ptr.cpu().numpy(), parts.escape_col.cpu().numpy())
    place = parts.records.device
    pointers, at = (
        torch.from_numpy(part).to(place) for part in stored.stored_lists(parts.shape, *lists)
    )
    return {
        "records": parts.records, "window": parts.window, "escape_ptr": pointers,
        "escape_at": at, "escape_bits": parts.escape_bits,
    }  # fmt: skip


def to_device(encoded: EncodedW12, target: torch.device | str = "cpu") -> DeviceW12:
    """Return the numpy parts of an encoded tensor as torch tensors on a device."""
    arrays = (
        encoded.records, encoded.window, encoded.escape_ptr, encoded.escape_col,
        encoded.escape_bits.view(np.int16),
    )  # fmt: skip
    return DeviceW12(encoded.shape, *(torch.from_numpy(array).to(target) for array in arrays))


def _encode_on_cpu(bits: torch.Tensor) -> DeviceW12:
    if bits.element_size() != 2:
        raise ValueError(f"W12 encodes 16-bit BF16 patterns, got {bits.dtype}")
    return to_device(codec.encode(bits.contiguous().view(torch.int16).numpy().view(np.uint16)))


def _on_host(parts: DeviceW12) -> EncodedW12:
    return EncodedW12(
        parts.shape, parts.records.numpy(), parts.window.numpy(), parts.escape_ptr.numpy(),
        parts.escape_col.numpy(), parts.escape_bits.view(torch.int16).numpy().view(np.uint16),
    )  # fmt: skip


def _check_values(parts: DeviceW12) -> None:
    """Raise MalformedW12 unless windows, pointers and columns are possible ones."""
    pointers, columns = parts.escape_ptr, parts.escape_col
    good = (
        (parts.window <= layout.MAX_WINDOW_LO).all()
        & (pointers[0] == 0)
        & (pointers[-1] == columns.numel())
        & (pointers.diff() >= 0).all()
        & ((columns >= 0) & (columns < parts.cols)).all()
    )
    if not good.item():
        raise MalformedW12("windows, escape pointers or escape columns are damaged")


def _scale(window: torch.Tensor, tiles: int) -> torch.Tensor:
    """2^(lo - 112) as float32 [tiles x 128], put together from its bits; 0 where lo is 0."""
    scale = torch.zeros(tiles * layout.RECORD_ROWS, dtype=torch.int32, device=window.device)
    lo = window.to(torch.int32)
    field = lo + (127 - layout.FIXED_EXPONENT_BASE)
    scale[: lo.numel()] = torch.where(lo > 0, field << 23, 0)
    return scale.view(torch.float32)


def _corrections(parts: DeviceW12) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Channel, column and pattern of every correction, int64 [corrections] each, unsorted."""
    everyone = torch.arange(parts.rows, device=parts.records.device)
    counts = parts.escape_ptr.diff().to(torch.int64)
    total = parts.escape_col.numel()
    channel = torch.repeat_interleave(everyone, counts, output_size=total)
    found = [
        (channel, parts.escape_col.to(torch.int64),
         parts.escape_bits.view(torch.int16).to(torch.int64) & 0xFFFF)
    ]  # fmt: skip
    without_scale = (parts.window == 0).nonzero()[:, 0]
    if without_scale.numel():
        step = max(1, _CHUNK_WEIGHTS // parts.cols)
        found += [_nonzero_weights(parts, chunk) for chunk in without_scale.split(step)]
    channel, column, pattern = (torch.cat(several) for several in zip(*found, strict=True))
    return channel, column, pattern


def _nonzero_weights(
    parts: DeviceW12, channels: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Channel, column, pattern of the non-zero weights in the records of lo = 0 `channels`."""
    at_view, at_low, low_shift = (
        torch.from_numpy(table.astype(np.int64).reshape(layout.RECORD_ROWS, layout.RECORD_COLS)).to(
            channels.device
        )[channels % layout.RECORD_ROWS][:, None]  # [channels, 1, 64]
        for table in reference.bit_order()
    )
    tile = (channels // layout.RECORD_ROWS)[:, None, None]
    block = torch.arange(parts.records.shape[1], device=channels.device)[:, None]
    view = parts.records[tile, block, at_view].to(torch.int32)  # [channels, blocks, 64]
    low = parts.records[tile, block, at_low].to(torch.int32) >> low_shift.to(torch.int32) & 0xF
    offset = (view & 7) << 1 | view >> 6 & 1
    magnitude = offset << 7 | (view >> 3 & 7) << 4 | low
    pattern = ((view >> 7) << 15 | magnitude).flatten(1)
    row, column = magnitude.flatten(1).nonzero(as_tuple=True)
    return channels[row], column, pattern[row, column].to(torch.int64)


def _check_load(channel: torch.Tensor, tiles: int, blocks: int, limit: float) -> None:
    """Raise TooManyEscapes where corrections would hold up the CTA that has most of them.

    Counts are taken as draws from a mean: only a mean that is surely too high is refused.
    """
    record = layout.RECORD_ROWS * layout.RECORD_COLS

    def mean(count: int) -> float:
        return max(0.0, count - _CHANCE * count**0.5)

    by_tile = torch.bincount(channel // layout.RECORD_ROWS, minlength=tiles)
    busiest = int(by_tile.max().item())
    units_per_cta = max(blocks, tiles * blocks // _TYPICAL_CTAS)
    load = max(mean(channel.numel()) / (tiles * blocks), mean(busiest) / units_per_cta) / record
    if load > limit:
        raise TooManyEscapes(
            f"{channel.numel()} of the weights do not fit their channel's window, "
            f"{busiest} of them in 128 neighbouring channels: {load:.3%} where W12 is slowest, "
            f"more than the {limit:.3%} up to which it is faster than BF16. Keep this matrix in "
            "BF16."
        )


def _sorted_escapes(
    parts: DeviceW12, channel: torch.Tensor, column: torch.Tensor, pattern: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """`escape_ptr` and `escapes` of a `W12Weight`."""
    tiles, blocks = layout.grid(*parts.shape)
    unit = channel // layout.RECORD_ROWS * blocks + column // layout.RECORD_COLS
    in_unit = (channel % layout.RECORD_ROWS) << CHANNEL_SHIFT | column % layout.RECORD_COLS
    key, order = torch.sort(unit << WINDOW_SHIFT | in_unit)
    unit = key >> WINDOW_SHIFT
    window = parts.window.to(torch.int64)[channel[order]]
    escapes = (
        key & ((1 << WINDOW_SHIFT) - 1)
        | window << WINDOW_SHIFT
        | unit << UNIT_SHIFT
        | pattern[order] << PATTERN_SHIFT
    )
    if not escapes.numel():
        escapes = torch.zeros(1, dtype=torch.int64, device=channel.device)
    bounds = torch.arange(tiles * blocks + 1, device=channel.device)
    return torch.searchsorted(unit, bounds).to(torch.int32), escapes
