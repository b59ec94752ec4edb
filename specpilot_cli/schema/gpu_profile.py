"""Peak rates of one device, each number with its value, its kind and its source.

A peak is either what the vendor's data sheet states or what somebody measured; a file may hold one
of each, and a reader chooses. The ceiling (paper §3.1) turns them into byte floors. Nothing here
guesses: a device without a number for a data type has no floor for that data type.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, StringConstraints, field_validator, model_validator

from specpilot_cli.schema.base import FileModel
from specpilot_cli.schema.quantities import check_arithmetic, check_bandwidth

_MOST = {
    "memory_bytes": 1e14, "multiprocessors": 1e4, "shared_memory_per_block_bytes": 1e9,
}  # fmt: skip

PeakKind = Literal["datasheet", "measured"]
ComputeType = Literal["float32", "bfloat16", "float16", "float8", "int8"]
MmaFamily = Literal["wgmma", "mma.sync", "tcgen05"]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Sentence = Annotated[str, StringConstraints(strip_whitespace=True, min_length=3)]
ProfileName = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9.\-]*$")]


class SourcedNumber(FileModel):
    """One number, in the unit its field names, with where it comes from."""

    value: PositiveFloat
    kind: PeakKind
    source: Sentence


def _one_per_kind(numbers: tuple[SourcedNumber, ...]) -> None:
    kinds = [number.kind for number in numbers]
    if len(set(kinds)) != len(kinds):
        raise ValueError("at most one number of each kind (datasheet, measured)")


class PeakRates(FileModel):
    """Read bandwidth in bytes/s and dense arithmetic rate in FLOP/s per data type."""

    read_bytes_per_s: Annotated[tuple[SourcedNumber, ...], Field(min_length=1)]
    flops_per_s: dict[ComputeType, Annotated[tuple[SourcedNumber, ...], Field(min_length=1)]]

    @field_validator("read_bytes_per_s")
    @classmethod
    def _bandwidth_kinds(cls, numbers: tuple[SourcedNumber, ...]) -> tuple[SourcedNumber, ...]:
        _one_per_kind(numbers)
        for number in numbers:
            check_bandwidth(number.value)
        return numbers

    @field_validator("flops_per_s")
    @classmethod
    def _flops_kinds(
        cls, rates: dict[ComputeType, tuple[SourcedNumber, ...]]
    ) -> dict[ComputeType, tuple[SourcedNumber, ...]]:
        for numbers in rates.values():
            _one_per_kind(numbers)
            for number in numbers:
                check_arithmetic(number.value)
        return rates

    def bandwidth(self, kind: PeakKind) -> SourcedNumber | None:
        """Read bandwidth of that kind in bytes/s, or None."""
        return next((n for n in self.read_bytes_per_s if n.kind == kind), None)

    def compute(self, dtype: ComputeType, kind: PeakKind) -> SourcedNumber | None:
        """Dense FLOP/s of that kind for `dtype`, or None."""
        return next((n for n in self.flops_per_s.get(dtype, ()) if n.kind == kind), None)


class GpuProfile(FileModel):
    """One GPU model as sold: `profiles/gpus/NAME.yaml`."""

    schema_version: Literal[1]
    name: ProfileName
    title: Sentence
    aliases: tuple[str, ...] = ()
    architecture: Annotated[str, StringConstraints(pattern=r"^(sm_\d{2,3}a?|gfx[0-9a-f]+)$")]
    mma: tuple[MmaFamily, ...]
    peaks: PeakRates
    memory_bytes: SourcedNumber
    multiprocessors: SourcedNumber
    shared_memory_per_block_bytes: SourcedNumber

    @model_validator(mode="after")
    def _whole_counts(self) -> GpuProfile:
        for field in ("memory_bytes", "multiprocessors", "shared_memory_per_block_bytes"):
            value = getattr(self, field).value
            if value != int(value) or value > _MOST[field]:
                raise ValueError(f"{field} is no whole number up to {_MOST[field]:g}: {value:g}")
        return self
