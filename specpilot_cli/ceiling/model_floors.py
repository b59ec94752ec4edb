"""Floors of a step that nobody has run: a model's shape on a device's peaks (paper §3.1).

What a step must at least read and compute follows from shapes, so this needs neither a GPU nor a
profile. It bounds any engine on that device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from specpilot_cli.ceiling.floors import ClassFloor, FloorRule, class_floor
from specpilot_cli.ceiling.levers import BF16_BITS, W12_BITS
from specpilot_cli.ceiling.peaks import Peaks
from specpilot_cli.models.shapes import OUTPUT_ENDINGS, Projection, head, projections
from specpilot_cli.models.work import StepShape, step_work, weight_work
from specpilot_cli.schema.model_profile import ModelProfile
from specpilot_cli.schema.step_profile import KernelClass


@dataclass(frozen=True, slots=True)
class ModelFloors:
    """Floors of one step of `target` on `peaks`, with the work behind each class."""

    target: ModelProfile
    drafter: ModelProfile | None
    shape: StepShape
    peaks: Peaks
    rule: FloorRule
    work: tuple[KernelClass, ...]
    classes: tuple[ClassFloor, ...]

    @property
    def floor_s(self) -> float:
        """Least seconds of the whole step."""
        return sum(item.floor_s for item in self.classes)

    @property
    def matrices(self) -> tuple[Projection, ...]:
        """Projections of the target and its LM head."""
        return (*projections(self.target), head(self.target))

    @property
    def weight_bytes(self) -> float:
        """Bytes of the matrices that the step reads."""
        rows = self.shape.requests * self.shape.rows
        return weight_work(self.matrices, rows, self.target.weight_bytes.value).bytes

    @property
    def weight_s(self) -> float:
        """Least seconds that reading these bytes takes."""
        return self.weight_bytes / (self.rule.byte_fraction * self.peaks.bandwidth().value)


def model_floors(
    target: ModelProfile,
    drafter: ModelProfile | None,
    shape: StepShape,
    peaks: Peaks,
    *,
    rule: FloorRule,
) -> ModelFloors:
    """Floors per kernel class of one step of `shape`.

    Raises `InputError` if `peaks` has no BF16 rate.
    """
    found = step_work(target, drafter, shape)
    work = tuple(
        KernelClass(name=name, seconds=0.0, bytes=item.bytes, flops=item.flops, calls=0)
        for name, item in found.items()
    )
    classes = tuple(class_floor(item, "bfloat16", peaks, rule) for item in work)
    return ModelFloors(target, drafter, shape, peaks, rule, work, classes)


def model_floors_document(floors: ModelFloors) -> dict[str, Any]:
    """`floors` as plain values for JSON."""
    shape, bandwidth = floors.shape, floors.peaks.bandwidth()
    item = floors.target.weight_bytes.value
    return {
        "target": floors.target.title,
        "drafter": None if floors.drafter is None else floors.drafter.title,
        "requests": shape.requests,
        "rows": shape.rows,
        "context_tokens": shape.context,
        "draft_block": shape.block or None,
        "device": floors.peaks.title,
        "read_bytes_per_s": bandwidth.value,
        "read_bytes_kind": bandwidth.kind,
        "byte_fraction_ratio": floors.rule.byte_fraction,
        "flop_fraction_ratio": floors.rule.flop_fraction,
        "classes": [
            {
                "name": floor.name,
                "bytes": work.bytes,
                "flops": work.flops,
                "byte_time_s": floor.byte_s,
                "flop_time_s": floor.flop_s,
                "floor_s": floor.floor_s,
                "bound": floor.bound,
            }
            for work, floor in zip(floors.work, floors.classes, strict=True)
        ],
        "t_floor_s": floors.floor_s,
        "weights_read_bytes": floors.weight_bytes,
        "weights_read_s": floors.weight_s,
        "matrices": [
            {
                "name": matrix.name,
                "count": matrix.count * matrix.experts,
                "out_features": matrix.out_features,
                "in_features": matrix.in_features,
                "bytes": item * matrix.weights,
                "is_output": matrix.name.endswith(OUTPUT_ENDINGS),
            }
            for matrix in floors.matrices
        ],
        "w12": _w12(floors),
    }


def _w12(floors: ModelFloors) -> dict[str, Any]:
    """Bytes of the matrices in 12 bits: all, and without the mixers' output projections.

    The paper's first converted set is the second one without the head (§4.1).
    """
    item = floors.target.weight_bytes.value
    linears = [matrix for matrix in floors.matrices if matrix.name != "head"]
    inner = [matrix for matrix in linears if not matrix.name.endswith(OUTPUT_ENDINGS)]
    ratio = W12_BITS / (8 * item)

    def size(matrices: list[Projection]) -> int:
        return item * sum(matrix.weights for matrix in matrices)

    return {
        "bits_per_weight": W12_BITS,
        "bf16_bits_per_weight": BF16_BITS,
        "linear_bytes": size(linears),
        "linear_w12_bytes": size(linears) * ratio,
        "linear_without_outputs_bytes": size(inner),
        "linear_without_outputs_w12_bytes": size(inner) * ratio,
        "head_bytes": item * head(floors.target).weights,
    }
