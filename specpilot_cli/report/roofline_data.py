"""From a step profile and its device's peaks to the marks of the roofline figure."""

from __future__ import annotations

from specpilot_cli.ceiling.floors import FloorRule
from specpilot_cli.ceiling.peaks import Peaks
from specpilot_cli.report.figures.roofline import RooflineData, RooflineMark
from specpilot_cli.schema.step_profile import StepProfile


def roofline_data(
    profile: StepProfile, peaks: Peaks, rule: FloorRule, condition: str
) -> RooflineData | None:
    """Classes that count bytes and arithmetic in the profile's own data type; None if none does."""
    marks = tuple(
        RooflineMark(item.name, item.flops, item.bytes, item.seconds)
        for item in profile.classes
        if item.flops and item.bytes and item.seconds > 0
        and item.dtype in (None, profile.dtype)
    )  # fmt: skip
    if not marks:
        return None
    return RooflineData(
        marks,
        peaks.compute(profile.dtype).value,
        peaks.bandwidth().value,
        rule.flop_fraction,
        rule.byte_fraction,
        condition,
    )
