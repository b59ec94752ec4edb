"""`specpilot doctor --measure`: read bandwidth and GEMM rate of this GPU, kept as a profile."""

from __future__ import annotations

import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specpilot_cli.errors import InputError, MachineError, MeasurementInvalid
from specpilot_cli.io.gpu_profiles import bundled_gpu, local_folder
from specpilot_cli.schema.gpu_profile import GpuProfile, MmaFamily, PeakRates, SourcedNumber
from specpilot_cli.ui import Reporter
from specpilot_cli.units import format_bytes, format_percent

if TYPE_CHECKING:
    from specpilot_kernels.probe.measure import Device, Times

ROWS = (1, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 256)
_HINT = "needs an NVIDIA GPU and pip install 'specpilot[gpu]'"
# A GPU that somebody else uses shows it in the spread of the reads; an idle one stays near 1 %.
_MOST_SPREAD = 0.10
_MMA: dict[int, tuple[MmaFamily, ...]] = {
    8: ("mma.sync",),
    9: ("wgmma", "mma.sync"),
    10: ("tcgen05", "mma.sync"),
    12: ("mma.sync",),
}


@dataclass(frozen=True, slots=True)
class Rate:
    """A rate per second: the median over replays, and the middle half's width over the median."""

    value: float
    spread_ratio: float
    replays: int


@dataclass(frozen=True, slots=True)
class SkinnyRow:
    """All projections of a model with `rows` rows: seconds of each replay, bytes and FLOPs."""

    rows: int
    seconds: tuple[float, ...]
    bytes: int
    flops: int

    @property
    def median_s(self) -> float:
        """Median seconds."""
        return statistics.median(self.seconds)


@dataclass(frozen=True, slots=True)
class Measured:
    """What this GPU reaches.

    read: bytes/s of device memory, L2 cold. square: dense BF16 FLOP/s of a large product. skinny:
    every projection of `model` by rows; empty if the weights do not fit.
    """

    device: Device
    read: Rate
    square: Rate
    square_size: int
    model: str
    skinny: tuple[SkinnyRow, ...]


def measure(model: str, *, reporter: Reporter) -> Measured:
    """Measure torch's current GPU; takes some ten seconds.

    InputError for an unknown model, MachineError without a usable GPU, MeasurementInvalid where
    the reads scatter as they do on a GPU that is busy.
    """
    from specpilot_kernels.build import GpuError
    from specpilot_kernels.w12.shapes import MODELS

    if model not in MODELS:
        raise InputError(f"no shapes are known of `{model}`", hint=f"one of {', '.join(MODELS)}")
    try:
        return _measure(model, reporter)
    except ImportError as error:
        raise MachineError(f"cannot measure: {error}", hint=_HINT) from error
    except GpuError as error:
        raise MachineError(str(error), hint=_HINT) from error


def _measure(model: str, reporter: Reporter) -> Measured:
    from specpilot_kernels.probe import measure as probe
    from specpilot_kernels.w12.shapes import MODELS

    device = probe.device()
    reporter.note(f"{device.name}: reading {format_bytes(probe.READ_BYTES)} per replay")
    reads = probe.read_times()
    read = _rate(reads, reads.bytes)
    if read.spread_ratio > _MOST_SPREAD:
        raise MeasurementInvalid(
            f"reads of {device.name} scatter by {format_percent(read.spread_ratio)}",
            hint="is another process using this GPU? stop it, or choose an idle one with "
            "CUDA_VISIBLE_DEVICES",
        )
    reporter.note(f"products of {probe.SQUARE} x {probe.SQUARE}")
    square = probe.square_times()
    reporter.note(f"projections of {model}")
    shapes = list(MODELS[model].values())
    need = 2 * 2 * sum(out * inner for out, inner in shapes)  # two copies in BF16
    found = probe.row_times(shapes, ROWS) if need < probe.free_bytes() else []
    skinny = tuple(
        SkinnyRow(row.rows, row.times.seconds, row.times.bytes, row.times.flops) for row in found
    )
    return Measured(device, read, _rate(square, square.flops), probe.SQUARE, model, skinny)


def _rate(times: Times, amount: int) -> Rate:
    median = statistics.median(times.seconds)
    quarters = statistics.quantiles(times.seconds, n=4)
    return Rate(amount / median, (quarters[2] - quarters[0]) / median, len(times.seconds))


def local_profile(measured: Measured, *, day: str | None = None) -> GpuProfile:
    """The profile to keep: the bundled data-sheet numbers of this GPU, if any, and the measured.

    A GPU without a bundled profile gets measured numbers alone, under a name made of its own.
    """
    device, today = measured.device, day or datetime.now(UTC).date().isoformat()
    known = bundled_gpu(device.name)
    read = _number(
        measured.read.value,
        f"specpilot doctor --measure, {today}: read stream, L2 cold, median of "
        f"{measured.read.replays} graph replays",
    )
    rate = _number(
        measured.square.value,
        f"specpilot doctor --measure, {today}: BF16 product of {measured.square_size} x "
        f"{measured.square_size}, median of {measured.square.replays} graph replays",
    )
    if known is None:
        return _unknown(device, read, rate)
    flops = dict(known.peaks.flops_per_s)
    flops["bfloat16"] = _with(flops.get("bfloat16", ()), rate)
    peaks = PeakRates(read_bytes_per_s=_with(known.peaks.read_bytes_per_s, read), flops_per_s=flops)
    title = f"{known.title}, measured on this machine"
    return known.model_copy(update={"peaks": peaks, "title": title})


def _with(numbers: Sequence[SourcedNumber], new: SourcedNumber) -> tuple[SourcedNumber, ...]:
    return (*(n for n in numbers if n.kind == "datasheet"), new)


def _number(value: float, source: str) -> SourcedNumber:
    return SourcedNumber(value=float(f"{value:.4g}"), kind="measured", source=source)


def _unknown(device: Device, read: SourcedNumber, rate: SourcedNumber) -> GpuProfile:
    major, minor = device.capability
    driver = "the driver's description of the device"
    name = re.sub(r"[^a-z0-9]+", "-", device.name.lower().removeprefix("nvidia ")).strip("-")

    def stated(value: int) -> SourcedNumber:
        return SourcedNumber(value=float(value), kind="measured", source=driver)

    return GpuProfile(
        schema_version=1,
        name=name or "gpu",
        title=f"{device.name}, measured on this machine",
        aliases=(device.name,),
        architecture=f"sm_{major}{minor}{'a' if major >= 9 else ''}",
        mma=_MMA.get(major, ()),
        peaks=PeakRates(read_bytes_per_s=(read,), flops_per_s={"bfloat16": (rate,)}),
        memory_bytes=stated(device.memory_bytes),
        multiprocessors=stated(device.multiprocessors),
        shared_memory_per_block_bytes=stated(device.shared_memory_per_block_bytes),
    )


def keep(profile: GpuProfile) -> Path:
    """Write `profile` to the local folder, in place of an earlier measurement; returns the file.

    Raises MachineError if the folder cannot be written.
    """
    import yaml

    from specpilot_cli.io.atomic import atomic_write_text

    path = local_folder() / f"{profile.name}.yaml"
    content: dict[str, Any] = profile.model_dump(mode="json")
    text = yaml.safe_dump(content, sort_keys=False, allow_unicode=True, width=100)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise MachineError(
            f"cannot create `{path.parent}`: {error.strerror}",
            hint="set SPECPILOT_GPU_PROFILES to a folder you may write",
        ) from error
    atomic_write_text(path, f"# Written by `specpilot doctor --measure`.\n{text}", force=True)
    return path
