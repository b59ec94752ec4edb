"""A profiled step on another GPU or with another target: a projection from floors.

Each kernel class keeps the distance to its floor that it has here, `measured / floor`; only the
floor changes. Classes without a floor, gaps between kernels and the time outside the profile keep
their seconds. Nothing is run: kernels tuned for one device need not do as well on another one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from specpilot_cli.ceiling.factors import Ceiling
from specpilot_cli.ceiling.floors import ClassFloor, class_floor
from specpilot_cli.ceiling.levers import BF16_BITS, W12_BITS
from specpilot_cli.ceiling.peaks import Peaks
from specpilot_cli.errors import InputError
from specpilot_cli.models.work import StepShape, step_work
from specpilot_cli.schema.model_profile import ModelProfile
from specpilot_cli.schema.step_profile import KernelClass, KernelClassName, StepProfile

_OF_TARGET: frozenset[KernelClassName] = frozenset(
    ("target_gemm", "head", "recurrent", "attention", "rest")
)


@dataclass(frozen=True, slots=True)
class ProjectedClass:
    """Seconds of one class here and there, and its floor there (None where none is known)."""

    name: KernelClassName
    measured_s: float
    projected_s: float
    floor_s: float | None


@dataclass(frozen=True, slots=True)
class WhatIf:
    """The step elsewhere. `kept` are classes whose time was taken over for want of a floor."""

    device: str
    target: str
    here_s: float
    t_step_s: float
    classes: tuple[ProjectedClass, ...]

    @property
    def speedup(self) -> float:
        """Steps per second there over here; tokens per step are another question."""
        return self.here_s / self.t_step_s

    @property
    def kept(self) -> tuple[KernelClassName, ...]:
        """Classes without a floor."""
        return tuple(item.name for item in self.classes if item.floor_s is None)

    @property
    def assumes(self) -> str:
        """One sentence on what the projection takes for granted."""
        text = "every class stays as far above its floor as here; time outside the kernels is kept"
        if any(item.measured_s == 0 < item.projected_s for item in self.classes):
            text = f"{text}; classes that did not run here enter at their floors"
        return f"{text}; so is that of {', '.join(self.kept)}" if self.kept else text


def what_if(
    profile: StepProfile,
    ceiling: Ceiling,
    *,
    peaks: Peaks | None = None,
    target: ModelProfile | None = None,
) -> WhatIf:
    """`profile` on a device with `peaks`, with `target` in place of its own, or both.

    `ceiling` must have been made with the peaks of the device that ran. Raises `InputError` where
    neither is given, or the device states no rate for the profile's data type.
    """
    if peaks is None and target is None:
        raise InputError("a projection needs another device, another target or both")
    there = peaks or ceiling.peaks
    work = _work(profile, target)
    classes = tuple(
        _projected(profile, kernel, here, there, ceiling, work)
        for kernel, here in zip(profile.classes, ceiling.classes, strict=True)
    )
    classes += _added(profile, there, ceiling, work)
    outside = ceiling.t_step_s - sum(item.measured_s for item in ceiling.classes)
    return WhatIf(
        device=there.title,
        target=profile.target.name if target is None else target.title,
        here_s=ceiling.t_step_s,
        # Classes of overlapping streams may add up to slightly more than the step.
        t_step_s=max(0.0, outside) + sum(item.projected_s for item in classes),
        classes=classes,
    )


def _work(
    profile: StepProfile, target: ModelProfile | None
) -> dict[KernelClassName, KernelClass] | None:
    """Bytes and FLOPs of `target` in a step of this shape; None without another target."""
    if target is None:
        return None
    # A block makes it a verify pass; the drafter's own work is kept.
    block = 0 if profile.mode == "ar" else profile.draft_block or 1
    shape = StepShape(profile.requests, profile.rows, 1, profile.context or 0, block)
    share = W12_BITS / BF16_BITS if profile.weights == "w12" else 1.0
    return {
        name: KernelClass(
            name=name, seconds=0.0, flops=item.flops, calls=0,
            bytes=item.bytes * (share if name == "target_gemm" else 1.0),
        )
        for name, item in step_work(target, None, shape).items()
    }  # fmt: skip


def _projected(
    profile: StepProfile,
    kernel: KernelClass,
    here: ClassFloor,
    there: Peaks,
    ceiling: Ceiling,
    work: dict[KernelClassName, KernelClass] | None,
) -> ProjectedClass:
    if here.bound == "measured" or here.floor_s == 0:
        return ProjectedClass(here.name, here.measured_s, here.measured_s, None)
    if work is not None and here.name in _OF_TARGET:
        if here.name not in work:  # such as recurrent layers in a target that has none
            return ProjectedClass(here.name, here.measured_s, 0.0, 0.0)
        kernel = work[here.name]
    floor = class_floor(kernel, profile.dtype, there, ceiling.rule).floor_s
    return ProjectedClass(here.name, here.measured_s, here.measured_s * floor / here.floor_s, floor)


def _added(
    profile: StepProfile,
    there: Peaks,
    ceiling: Ceiling,
    work: dict[KernelClassName, KernelClass] | None,
) -> tuple[ProjectedClass, ...]:
    """Classes that only the other target has, such as recurrent layers: at their floors."""
    known = {kernel.name for kernel in profile.classes}
    found = [
        class_floor(kernel, profile.dtype, there, ceiling.rule)
        for kernel in (work or {}).values()
        if kernel.name not in known
    ]
    return tuple(ProjectedClass(item.name, 0.0, item.floor_s, item.floor_s) for item in found)


def what_if_document(found: WhatIf) -> dict[str, Any]:
    """`found` as plain values for JSON."""
    return {
        "basis": "projected",
        "device": found.device,
        "target": found.target,
        "t_step_s": found.t_step_s,
        "step_speedup_ratio": found.speedup,
        "assumes": found.assumes,
        "classes": [
            {
                "name": item.name,
                "measured_s": item.measured_s,
                "projected_s": item.projected_s,
                "floor_s": item.floor_s,
            }
            for item in found.classes
        ],
    }
