"""The ceiling and its three factors (paper §3.1, Eq. 4).

    ceiling = tau_best / tau  ×  T_prof / T_floor  ×  T_step / T_prof
              tokens             kernels              overhead

It is the speedup over the profiled system itself that a step could reach if it drafted once,
verified the best tree in one exact pass and ran every kernel class at its floor.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from specpilot_cli.ceiling.floors import PAPER_RULE, ClassFloor, FloorRule, class_floors
from specpilot_cli.ceiling.peaks import Peaks
from specpilot_cli.errors import InputError, MeasurementInvalid
from specpilot_cli.schema.step_profile import StepProfile

DeviceKind = Literal["cpu", "gpu"]
FactorName = Literal["tau", "kernel", "overhead"]
_MOST_TOKENS = 4097  # beyond any tree
FACTOR_ORDER: tuple[FactorName, ...] = ("tau", "kernel", "overhead")


@dataclass(frozen=True, slots=True)
class Factors:
    """Eq. 4 as ratios. `tau` is None where no better tree was evaluated."""

    tau: float | None
    kernel: float
    overhead: float

    @property
    def product(self) -> float:
        """The ceiling over the profiled system; without `tau` it is the step-cost part alone."""
        return (1.0 if self.tau is None else self.tau) * self.step_cost

    @property
    def step_cost(self) -> float:
        """T_step / T_floor: kernel and overhead factor together."""
        return self.kernel * self.overhead

    @property
    def leading(self) -> FactorName:
        """The largest factor: the gap that holds most speed. A tie goes to the earlier one."""
        known = {name: getattr(self, name) for name in FACTOR_ORDER}
        return max(FACTOR_ORDER, key=lambda name: -1.0 if known[name] is None else known[name])


@dataclass(frozen=True, slots=True)
class Ceiling:
    """Factors of one profile with the seconds and tokens that they come from.

    `engine` and `device_kind` are the profile's: what can be done about a gap depends on them.
    """

    factors: Factors
    tau: float | None
    tau_best: float | None
    t_step_s: float
    t_prof_s: float
    t_floor_s: float
    unattributed_s: float
    classes: tuple[ClassFloor, ...]
    peaks: Peaks
    rule: FloorRule
    engine: str
    device_kind: DeviceKind

    @property
    def overhead_s(self) -> float:
        """Seconds of the step outside the profile; negative if the profiled steps were slower."""
        return self.t_step_s - self.t_prof_s


def ceiling_factors(
    t_step_s: float,
    t_prof_s: float,
    t_floor_s: float,
    *,
    tau: float | None = None,
    tau_best: float | None = None,
) -> Factors:
    """Eq. 4 from its five quantities: seconds, and tokens per step (both taus or neither).

    Raises `MeasurementInvalid` for times or token counts that cannot be.
    """
    for name, seconds in (("T_step", t_step_s), ("T_prof", t_prof_s), ("T_floor", t_floor_s)):
        if not seconds > 0:
            raise MeasurementInvalid(f"{name} must be above zero, got {seconds:g} s")
    for name, value in (("tau", tau), ("best tau", tau_best)):
        if value is not None and not 1 <= value < math.inf:
            raise MeasurementInvalid(f"a step commits at least one token, got {name} {value:g}")
    ratio = None if tau is None or tau_best is None else tau_best / tau
    return Factors(tau=ratio, kernel=t_prof_s / t_floor_s, overhead=t_step_s / t_prof_s)


def check_tau(tau: float | None, option: str, *, most: int | None) -> None:
    """Raise `InputError` at `option` for tokens per step that no step can commit.

    most: what a step commits if all its drafts are right, bonus included; None = not known.
    """
    if tau is None:
        return
    if not 1 <= tau < math.inf:
        raise InputError(
            f"{tau:g} tokens per step: every step commits at least one", where=option,
            hint="tokens per step count the bonus: 1 is plain decoding",
        )  # fmt: skip
    limit = _MOST_TOKENS if most is None else most
    if tau > limit:
        raise InputError(
            f"{tau:g} tokens per step: this step commits {limit} at most", where=option,
            hint="tokens of one request and step, bonus included",
        )  # fmt: skip


def measure_ceiling(
    profile: StepProfile,
    peaks: Peaks,
    *,
    tau: float | None = None,
    tau_best: float | None = None,
    rule: FloorRule = PAPER_RULE,
) -> Ceiling:
    """Ceiling of `profile` on `peaks`. `tau` defaults to the profile's own measured tau.

    `tau_best` is the tokens per step of the best tree in exact replay. Raises `InputError` for a
    `tau_best` without any `tau`, or for a profile whose classes count neither bytes nor FLOPs.
    """
    tau = profile.tau if tau is None else tau
    if tau_best is not None and tau is None:
        raise InputError(
            "a best tau needs the measured tau to compare with",
            where="tau",
            hint="record it in the profile, or pass --tau",
        )
    classes = class_floors(profile, peaks, rule=rule)
    if all(item.bound == "measured" for item in classes):
        raise InputError(
            "no kernel class counts bytes or FLOPs, so there is no floor",
            where="classes",
            hint="record the profile again with `specpilot profile`",
        )
    floor = sum(item.floor_s for item in classes)
    return Ceiling(
        factors=ceiling_factors(
            profile.step_s, profile.t_prof_s, floor, tau=tau, tau_best=tau_best
        ),
        tau=tau,
        tau_best=tau_best,
        t_step_s=profile.step_s,
        t_prof_s=profile.t_prof_s,
        t_floor_s=floor,
        unattributed_s=profile.unattributed_s,
        classes=classes,
        peaks=peaks,
        rule=rule,
        engine=profile.engine.name,
        device_kind=profile.device.kind,
    )
