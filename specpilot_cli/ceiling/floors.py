"""Byte floors: the least time a kernel class can take on a device (paper §3.1).

A floor is the larger of two times: the arithmetic at 60 % of the dense peak and the traffic at
90 % of the peak bandwidth. Appendix B of the paper uses full peaks instead; `FULL_PEAK` does that.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from specpilot_cli.ceiling.peaks import Peaks
from specpilot_cli.schema.gpu_profile import ComputeType
from specpilot_cli.schema.step_profile import KernelClass, KernelClassName, StepProfile

FloorBound = Literal["bytes", "flops", "measured"]


@dataclass(frozen=True, slots=True)
class FloorRule:
    """Fractions of the peak rates that count as reachable."""

    flop_fraction: float
    byte_fraction: float


PAPER_RULE = FloorRule(flop_fraction=0.6, byte_fraction=0.9)
FULL_PEAK = FloorRule(flop_fraction=1.0, byte_fraction=1.0)


@dataclass(frozen=True, slots=True)
class ClassFloor:
    """Measured time and floor of one kernel class, in seconds per step.

    `bound` says which side sets the floor; `measured` means that neither bytes nor FLOPs were
    counted, so the class keeps its measured time and no slack is claimed for it.
    """

    name: KernelClassName
    calls: float
    measured_s: float
    floor_s: float
    byte_s: float | None
    flop_s: float | None
    bound: FloorBound

    @property
    def slack_s(self) -> float:
        """Seconds above the floor; negative if the class runs faster than its floor."""
        return self.measured_s - self.floor_s

    @property
    def beats_floor(self) -> bool:
        """True if the class runs over 2 % faster than its floor: a peak is then set too low."""
        return self.measured_s < 0.98 * self.floor_s


def floor_s(
    flops: float,
    n_bytes: float,
    *,
    flops_per_s: float,
    bytes_per_s: float,
    rule: FloorRule = PAPER_RULE,
) -> float:
    """Least seconds for `flops` FLOP and `n_bytes` bytes at peaks in FLOP/s and bytes/s (§3.1)."""
    return max(
        flops / (rule.flop_fraction * flops_per_s), n_bytes / (rule.byte_fraction * bytes_per_s)
    )


def class_floor(
    kernel: KernelClass, dtype: ComputeType, peaks: Peaks, rule: FloorRule = PAPER_RULE
) -> ClassFloor:
    """Floor of one class that computes in `dtype` unless it says otherwise.

    Raises `InputError` if `peaks` lacks the arithmetic rate.
    """
    byte_time = flop_time = None
    bound: FloorBound
    if kernel.bytes is not None:
        byte_time = kernel.bytes / (rule.byte_fraction * peaks.bandwidth().value)
    if kernel.flops == 0:
        flop_time = 0.0
    elif kernel.flops is not None:
        rate = peaks.compute(kernel.dtype or dtype)
        flop_time = kernel.flops / (rule.flop_fraction * rate.value)
    if byte_time is None and flop_time is None:
        floor, bound = kernel.seconds, "measured"
    elif (flop_time or 0.0) > (byte_time or 0.0):
        floor, bound = flop_time or 0.0, "flops"
    else:
        floor, bound = byte_time or 0.0, "bytes"
    return ClassFloor(
        name=kernel.name,
        calls=kernel.calls,
        measured_s=kernel.seconds,
        floor_s=floor,
        byte_s=byte_time,
        flop_s=flop_time,
        bound=bound,
    )


def class_floors(
    profile: StepProfile, peaks: Peaks, *, rule: FloorRule = PAPER_RULE
) -> tuple[ClassFloor, ...]:
    """Floor of every kernel class of `profile`, in the profile's order.

    Raises `InputError` if `peaks` lacks the arithmetic rate of a class.
    """
    return tuple(class_floor(kernel, profile.dtype, peaks, rule) for kernel in profile.classes)
