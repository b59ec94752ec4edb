"""What a W12 folder holds, tensor by tensor, and in total."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from specpilot_cli.convert_w12.plan import Outcome
from specpilot_cli.io.safetensors_stream import tensor_nbytes
from specpilot_cli.io.w12_folder import W12Folder, stored_specs
from specpilot_cli.schema.w12_manifest import W12Tensor


@dataclass(frozen=True, slots=True)
class Totals:
    """Sums over tensors, file headers not counted.

    converted_*: of the tensors stored as W12 only. A bits-per-weight value is None where there
    are no weights to divide by.
    """

    tensors: int
    converted_tensors: int
    raw_bytes: int
    stored_bytes: int
    converted_raw_bytes: int
    converted_stored_bytes: int
    converted_weights: int
    escapes: int

    @property
    def saved_ratio(self) -> float | None:
        """Share of the checkpoint's tensor bytes that is gone."""
        return 1 - self.stored_bytes / self.raw_bytes if self.raw_bytes else None

    @property
    def bits_per_weight(self) -> float | None:
        """Over the converted tensors."""
        if not self.converted_weights:
            return None
        return self.converted_stored_bytes * 8 / self.converted_weights

    @property
    def escape_ratio(self) -> float | None:
        """Escapes per converted weight."""
        return self.escapes / self.converted_weights if self.converted_weights else None


@dataclass(frozen=True, slots=True)
class WindowSpread:
    """How the windows of one tensor's channels lie, each known by its lowest exponent field.

    zero_channels: channels whose window begins at field 0, such as all-zero ones. The five
    numbers are of the other channels, quartiles being values that occur; None if there are none.
    """

    channels: int
    zero_channels: int
    least: int | None = None
    lower_quartile: int | None = None
    median: int | None = None
    upper_quartile: int | None = None
    greatest: int | None = None


def spread_of(counts: npt.NDArray[np.int64]) -> WindowSpread:
    """Return the spread of windows, given how many channels have each, int64 [256]."""
    channels, zero_channels = int(counts.sum()), int(counts[0])
    last = channels - zero_channels - 1
    if last < 0:
        return WindowSpread(channels, zero_channels)
    up_to = np.cumsum(counts)
    places = [zero_channels + round(last * share / 4) for share in range(5)]
    five = (int(value) for value in np.searchsorted(up_to, places, side="right"))
    return WindowSpread(channels, zero_channels, *five)


def totals(outcomes: Iterable[Outcome]) -> Totals:
    """Return the sums over `outcomes`."""
    every = list(outcomes)
    converted = [outcome for outcome in every if outcome.converted]
    return Totals(
        tensors=len(every),
        converted_tensors=len(converted),
        raw_bytes=sum(outcome.raw_bytes for outcome in every),
        stored_bytes=sum(outcome.stored_bytes for outcome in every),
        converted_raw_bytes=sum(outcome.raw_bytes for outcome in converted),
        converted_stored_bytes=sum(outcome.stored_bytes for outcome in converted),
        converted_weights=sum(outcome.weights for outcome in converted),
        escapes=sum(outcome.escapes or 0 for outcome in converted),
    )


def inspect_folder(path: Path) -> tuple[tuple[Outcome, ...], dict[str, WindowSpread]]:
    """Return what the W12 folder at `path` holds; reads windows, not records.

    One outcome per tensor, and the spread of the windows of every converted tensor by its name.
    InputError: an unfinished or malformed folder.
    """
    outcomes: list[Outcome] = []
    spreads: dict[str, WindowSpread] = {}
    with W12Folder(path) as opened:
        for tensor in opened.manifest.tensors:
            if tensor.encoding == "stored":
                outcomes.append(_outcome(tensor))
                continue
            counts = opened.window_counts(tensor)
            outcomes.append(_outcome(tensor, counts))
            spreads[tensor.name] = spread_of(counts)
    return tuple(outcomes), spreads


def _outcome(tensor: W12Tensor, windows: npt.NDArray[np.int64] | None = None) -> Outcome:
    """windows: how many channels have each window, if the tensor is converted."""
    shape = tuple(tensor.shape)
    stored = sum(tensor_nbytes(dtype, dims) for _, dtype, dims in stored_specs(tensor))
    raw = tensor_nbytes(tensor.dtype, shape)
    if windows is None:
        return Outcome(
            tensor.name, tensor.dtype, shape, tensor.shard, raw, stored, reason=tensor.reason
        )
    used = np.flatnonzero(windows)
    return Outcome(
        tensor.name, tensor.dtype, shape, tensor.shard, raw, stored,
        escapes=tensor.escapes, window_low=int(used[0]), window_high=int(used[-1]),
    )  # fmt: skip
