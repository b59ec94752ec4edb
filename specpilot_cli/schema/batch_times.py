"""What a step costs by what it holds: the measured times that drive a batch simulation.

A decode step's time is a sum of components, each a curve over one driver: verified rows (target
GEMMs, LM head), requests (recurrent state, bookkeeping), tokens in the contexts of all requests
(attention), drafted rows (the drafter), or nothing (what every step costs). A prompt processed in a
pass of its own has a curve of its own.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from specpilot_cli.schema.base import FileModel
from specpilot_cli.schema.gpu_profile import ComputeType, ProfileName, Sentence
from specpilot_cli.schema.quantities import PartSeconds, check_step_on
from specpilot_cli.schema.step_profile import DeviceInfo, EngineInfo, ModelInfo

Driver = Literal["step", "rows", "requests", "draft_rows", "context_tokens", "prompt_rows"]


class CostPoint(FileModel):
    """Seconds at one amount of a driver."""

    amount: Annotated[float, Field(gt=0, le=1e12, allow_inf_nan=False)]
    seconds: PartSeconds


class CostCurve(FileModel):
    """One component. `points` ascend by amount; a component whose driver is zero costs nothing.

    Between points time is interpolated; below the first it is held, because a smaller step was
    never seen to cost less; above the last the last slope goes on, and never falls.
    """

    name: Annotated[str, Field(min_length=1)]
    driver: Driver
    points: Annotated[tuple[CostPoint, ...], Field(min_length=1)]

    @model_validator(mode="after")
    def _ascending(self) -> CostCurve:
        amounts = [point.amount for point in self.points]
        if amounts != sorted(set(amounts)):
            raise ValueError("points must ascend by amount, each once")
        return self

    @property
    def largest(self) -> float:
        """The largest measured amount; beyond it times are extrapolated."""
        return self.points[-1].amount

    @property
    def always(self) -> bool:
        """Whether every decode step has some of its driver, and spends time on it."""
        everywhere = self.driver in ("step", "rows", "requests")
        return everywhere and all(point.seconds > 0 for point in self.points)


class BatchStepTimes(FileModel):
    """Step times of one deployment. `decode` curves add up; `prefill` is over prompt rows."""

    schema_version: Literal[1]
    name: ProfileName
    engine: EngineInfo
    device: DeviceInfo
    target: ModelInfo
    drafter: ModelInfo
    dtype: ComputeType
    decode: Annotated[tuple[CostCurve, ...], Field(min_length=1)]
    prefill: CostCurve
    source: Sentence
    notes: tuple[Sentence, ...] = ()

    @model_validator(mode="after")
    def _drivers(self) -> BatchStepTimes:
        if self.prefill.driver != "prompt_rows":
            raise ValueError("the prefill curve's driver is prompt_rows")
        if not any(curve.driver == "rows" for curve in self.decode):
            raise ValueError("no decode component depends on rows")
        if any(curve.driver == "prompt_rows" for curve in self.decode):
            raise ValueError("prompt rows of a decode step count as rows")
        check_step_on(self.device.kind, *(p.seconds for c in self.decode for p in c.points))
        if not any(curve.always for curve in self.decode):
            raise ValueError("a decode step may cost nothing: no component of it always takes time")
        if not all(point.seconds > 0 for point in self.prefill.points):
            raise ValueError("a prefill pass costs nothing")
        return self
