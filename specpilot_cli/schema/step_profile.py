"""What one speculative step costs on a running engine: profile per kernel class, and step times.

`StepProfile` is one step taken apart (paper §3.1: target GEMMs, recurrent layers, attention,
drafter, prefill and the rest); `StepTimeCurve` is the step time against the verified rows, which
gives c(N) of Eq. 3. All amounts are averages per step, in seconds, bytes and FLOPs.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, StringConstraints, model_validator

from specpilot_cli.errors import InputError
from specpilot_cli.schema.base import FileModel
from specpilot_cli.schema.gpu_profile import (
    ComputeType,
    PeakRates,
    PositiveFloat,
    ProfileName,
    Sentence,
)
from specpilot_cli.schema.quantities import (
    Amount,
    Block,
    PartSeconds,
    Rows,
    StepSeconds,
    check_step_on,
    check_together,
    impossible,
)

KernelClassName = Literal[
    "target_gemm", "head", "recurrent", "attention", "drafter", "tree", "prefill", "rest"
]
StepMode = Literal["ar", "chain", "tree"]
NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]

# Timer resolution and overlapping streams let the classes add up to slightly more than the span.
_SUM_TOLERANCE = 0.01


class EngineInfo(FileModel):
    """Name and version of the engine that ran the step."""

    name: Annotated[str, StringConstraints(min_length=1)]
    version: Annotated[str, StringConstraints(min_length=1)]


class ModelInfo(FileModel):
    """Which weights ran: a readable name and the hash of the folder (`io.hashing`)."""

    name: Annotated[str, StringConstraints(min_length=1)]
    sha256: Sha256 | None = None


class DeviceInfo(FileModel):
    """The device of the profile, with its own peaks when there is no profile file for it.

    A CPU has no file in `profiles/gpus`: whoever records the profile measures read bandwidth (on
    a working set as large as the weights, so that caches count the same way) and GEMM FLOP/s, and
    writes both to `peaks` as kind `measured`.
    """

    name: Annotated[str, StringConstraints(min_length=1)]
    kind: Literal["cpu", "gpu"]
    threads: Annotated[int, Field(ge=1)] | None = None
    gpu_profile: ProfileName | None = None
    peaks: PeakRates | None = None

    @model_validator(mode="after")
    def _threads_on_cpu(self) -> DeviceInfo:
        if self.kind == "cpu" and self.threads is None:
            raise ValueError("a CPU device states its threads")
        return self


class KernelClass(FileModel):
    """One class of kernels in one step.

    `bytes` counts what the class must move at least (weights, states, caches), `flops` a multiply
    and an add as two. None means not counted: the class then keeps its measured time as floor.
    `dtype` overrides the profile's data type for the arithmetic peak.
    """

    name: KernelClassName
    seconds: PartSeconds
    bytes: Amount | None
    flops: Amount | None
    calls: Amount
    dtype: ComputeType | None = None


class StepSpan(FileModel):
    """A named stretch of the step, such as VERIFY or DRAFT, in seconds per step."""

    name: Annotated[str, StringConstraints(min_length=1)]
    seconds: NonNegativeFloat


class KernelTime(FileModel):
    """All launches of one kernel name within one class, per step.

    `seconds` counts time that it shares with other classes' kernels in part. `known` is False for
    a name that no pattern matches; such a kernel keeps the class of its span, or `rest`.
    """

    name: Annotated[str, StringConstraints(min_length=1)]
    kernel_class: KernelClassName
    seconds: NonNegativeFloat
    calls: NonNegativeFloat
    known: bool


class Spread(FileModel):
    """Quartiles over the recorded steps, in seconds; `name` is a class, a span or a whole."""

    name: Annotated[str, StringConstraints(min_length=1)]
    q1_s: NonNegativeFloat
    median_s: NonNegativeFloat
    q3_s: NonNegativeFloat


class TraceFacts(FileModel):
    """What a profiler trace says beside the classes; seconds per step unless a name says else.

    period_s: from one step's start to the next one's in the profiled run, not a timing: the
    profiler slows the host. overlap_s: kernel time that ran beside other kernels and is counted
    once. kernels: every name, longest first. prefill_s: all prefill spans of the trace together.
    """

    files: Annotated[tuple[str, ...], Field(min_length=1)]
    steps_seen: Annotated[int, Field(ge=1)]
    period_s: PositiveFloat
    overlap_s: NonNegativeFloat
    spread: tuple[Spread, ...]
    kernels: tuple[KernelTime, ...]
    prefill_spans: Annotated[int, Field(ge=0)] = 0
    prefill_s: NonNegativeFloat = 0.0
    notes: tuple[Sentence, ...] = ()

    @property
    def unknown(self) -> tuple[KernelTime, ...]:
        """Kernels that no pattern names."""
        return tuple(kernel for kernel in self.kernels if not kernel.known)


class StepProfile(FileModel):
    """One step by kernel class.

    `t_prof_s` is the step time in the profiled run; whatever the classes do not cover of it are
    gaps inside the profile. `t_step_s` is the step time of the same server without the profiler,
    so `t_step_s / t_prof_s` is the overhead factor of Eq. 4; None where only a trace was read, and
    then it comes from step times recorded without the profiler. `rows` counts the root row of one
    request: rows = nodes + 1. `tau` is tokens committed per step, bonus included, where it was
    measured. `context` is the mean number of committed tokens a request, if it is known.
    `weights` says whether the target's matrices are read in 12 bits.
    """

    schema_version: Literal[1]
    engine: EngineInfo
    device: DeviceInfo
    target: ModelInfo
    drafter: ModelInfo | None
    dtype: ComputeType
    mode: StepMode
    nodes: Annotated[int, Field(ge=0)]
    rows: Rows
    draft_block: Block | None = None
    requests: Annotated[int, Field(ge=1, le=1_000_000)] = 1
    context: Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)] | None = None
    weights: Literal["plain", "w12"] = "plain"
    steps: Annotated[int, Field(ge=1)]
    t_step_s: StepSeconds | None
    t_prof_s: StepSeconds
    tau: Annotated[float, Field(ge=1, allow_inf_nan=False)] | None = None
    classes: Annotated[tuple[KernelClass, ...], Field(min_length=1)]
    spans: tuple[StepSpan, ...] = ()
    trace: TraceFacts | None = None
    source: Sentence
    source_sha256: Sha256 | None = None

    @model_validator(mode="after")
    def _consistent(self) -> StepProfile:
        if self.rows != self.nodes + 1:
            raise ValueError(f"rows must be nodes + 1, got {self.rows} rows, {self.nodes} nodes")
        if self.mode == "ar" and self.nodes != 0:
            raise ValueError("plain decoding (mode ar) verifies no nodes")
        if self.tau is not None and self.tau > self.rows:
            raise impossible(
                f"tau is {self.tau:g}, but a step of {self.rows} rows commits no more than these",
                "tau is tokens committed per step and request, bonus included",
            )
        check_step_on(self.device.kind, self.t_step_s, self.t_prof_s)
        if self.t_step_s is not None:
            check_together(self.t_step_s, self.t_prof_s, "t_step_s and t_prof_s")
        names = [kernel_class.name for kernel_class in self.classes]
        if len(set(names)) != len(names):
            raise ValueError("each kernel class may appear once")
        total = sum(kernel_class.seconds for kernel_class in self.classes)
        if total > self.t_prof_s * (1 + _SUM_TOLERANCE):
            raise ValueError(
                f"classes sum to {total:.6g} s, more than the profiled step {self.t_prof_s:.6g} s"
            )
        return self

    @property
    def step_s(self) -> float:
        """Seconds of a step without the profiler.

        Raises `InputError` where nobody timed one: a trace cannot tell, since the profiler
        changes what it shows.
        """
        if self.t_step_s is None:
            raise InputError(
                "the step's time without the profiler is not known, and a trace cannot tell it",
                where="t_step_s",
                hint="pass --step-times FILE|NAME with steps timed without the profiler",
            )
        return self.t_step_s

    def span_s(self, name: str) -> float | None:
        """Seconds per step of the span `name`, or None."""
        return next((span.seconds for span in self.spans if span.name == name), None)

    @property
    def unattributed_s(self) -> float:
        """Seconds of the profiled step that no class covers (gaps between kernels)."""
        return max(0.0, self.t_prof_s - sum(c.seconds for c in self.classes))


class StepTimePoint(FileModel):
    """Seconds of one step at one number of rows; `range_s` is the spread over repeats."""

    rows: Rows
    step_s: StepSeconds
    draft_block: Block | None = None
    range_s: tuple[StepSeconds, StepSeconds] | None = None

    @model_validator(mode="after")
    def _inside_range(self) -> StepTimePoint:
        if self.range_s is not None and not self.range_s[0] <= self.step_s <= self.range_s[1]:
            raise ValueError(f"step_s {self.step_s} lies outside range_s {self.range_s}")
        return self


class StepTimeCurve(FileModel):
    """Step time against verified rows on one deployment, drafting included, and one AR step.

    `points` are sorted by rows, each row count once. c(N) = step_s / ar_step_s (Eq. 3).
    """

    schema_version: Literal[1]
    name: ProfileName
    engine: EngineInfo
    device: DeviceInfo
    target: ModelInfo
    drafter: ModelInfo
    dtype: ComputeType
    ar_step_s: StepSeconds
    ar_range_s: tuple[StepSeconds, StepSeconds] | None = None
    includes_drafting: Literal[True]
    points: Annotated[tuple[StepTimePoint, ...], Field(min_length=1)]
    source: Sentence
    notes: tuple[Sentence, ...] = ()

    @model_validator(mode="after")
    def _sorted_rows(self) -> StepTimeCurve:
        rows = [point.rows for point in self.points]
        if rows != sorted(set(rows)):
            raise ValueError("points must be sorted by rows, each row count once")
        if self.ar_range_s is not None and not (
            self.ar_range_s[0] <= self.ar_step_s <= self.ar_range_s[1]
        ):
            raise ValueError(f"ar_step_s {self.ar_step_s} lies outside {self.ar_range_s}")
        check_step_on(self.device.kind, self.ar_step_s, *(point.step_s for point in self.points))
        check_together(self.points[0].step_s, self.ar_step_s, "the first point and ar_step_s")
        return self
