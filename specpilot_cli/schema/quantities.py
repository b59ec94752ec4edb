"""Numbers of files that have a unit, refused where the unit must be another one.

The bounds are no opinion on what is fast: nothing that exists comes near them, while a time in
milliseconds or a rate in GB/s misses them by a factor of a thousand.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

_LONGEST_STEP_S = {"gpu": 10.0, "cpu": 1000.0}
_SHORTEST_S = 1e-7
_SECONDS_HINT = "times are in seconds: 14.8 ms is 0.0148"
_RATE_HINT = "rates are in bytes/s and FLOP/s: 4.8 TB/s is 4.8e12, 989 TFLOP/s is 9.89e14"
# Times of unlike steps beside each other, as a ratio: a thousand between them is a unit.
_MOST_APART = 200.0


def impossible(problem: str, hint: str) -> PydanticCustomError:
    """The error of a number that no device has; `io.validation` shows `hint` as the hint."""
    return PydanticCustomError("impossible", "{problem}", {"problem": problem, "hint": hint})


def check_arithmetic(flops_per_s: float) -> None:
    """Raise for a rate that no device has."""
    if not 1e8 <= flops_per_s <= 1e18:
        raise impossible(f"no device computes at {flops_per_s:g} FLOP/s", _RATE_HINT)


def check_bandwidth(bytes_per_s: float) -> None:
    """Raise for a read bandwidth that no memory has."""
    if not 1e8 <= bytes_per_s <= 1e14:
        raise impossible(f"no memory is read at {bytes_per_s:g} bytes/s", _RATE_HINT)


def _step(value: float) -> float:
    if not _SHORTEST_S <= value <= _LONGEST_STEP_S["cpu"]:
        raise impossible(f"no step takes {value:g} s", _SECONDS_HINT)
    return value


def _part(value: float) -> float:
    if not (value == 0 or 1e-12 <= value <= _LONGEST_STEP_S["cpu"]):
        raise impossible(f"no part of a step takes {value:g} s", _SECONDS_HINT)
    return value


_Positive = Field(gt=0, allow_inf_nan=False)
#: Seconds of a whole step, and of a part of one, which may be none.
StepSeconds = Annotated[float, _Positive, AfterValidator(_step)]
PartSeconds = Annotated[float, Field(ge=0, allow_inf_nan=False), AfterValidator(_part)]
#: Bytes or FLOPs of one step.
Amount = Annotated[float, Field(ge=0, le=1e40, allow_inf_nan=False)]
Rows = Annotated[int, Field(ge=1, le=1_000_000)]
Block = Annotated[int, Field(ge=1, le=10_000)]


def check_step_on(kind: Literal["cpu", "gpu"], *seconds: float | None) -> None:
    """Raise where a step of this device's kind cannot take so long."""
    for value in seconds:
        if value is not None and value > _LONGEST_STEP_S[kind]:
            raise impossible(f"no step takes {value:g} s on a {kind.upper()}", _SECONDS_HINT)


def check_together(one: float, other: float, what: str) -> None:
    """Raise where two times in seconds of one deployment are of unlike size."""
    if not 1 / _MOST_APART <= one / other <= _MOST_APART:
        raise impossible(f"{what}: {one:g} s beside {other:g} s", f"{_SECONDS_HINT}; are both?")
