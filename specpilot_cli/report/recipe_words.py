"""What a recipe's reader calls things, the same in the terminal and on the page."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specpilot_cli.apply.reference.measure import Projection
from specpilot_cli.apply.reference.run import RecipeResult
from specpilot_cli.apply.reference.systems import SystemPlan
from specpilot_cli.engines.reference.faults import LogitFault
from specpilot_cli.report.paired_bench_tables import SystemNames

if TYPE_CHECKING:
    from specpilot_cli.report.html import Outcome

# What a page makes of a run's verdict, on either engine.
OUTCOMES: dict[str, Outcome] = {
    "promote": "yes",
    "no": "no",
    "reject": "no",
    "invalid": "invalid",
}


def system_names(result: RecipeResult) -> SystemNames:
    """Stock, tuned and plain; a tuned system with a deliberate fault is never called tuned."""
    faulty = result.settings.fault is not None
    return SystemNames("stock", "faulty" if faulty else "tuned", "plain")


def fault_text(fault: LogitFault) -> str:
    """What the deliberate fault does, in words."""
    return (
        f"{fault.bias:+g} on the logits of one in {fault.every} token ids, from output position "
        f"{fault.after} on"
    )


def plan_cells(plan: SystemPlan) -> tuple[str, str, str, str]:
    """How a system decodes, its drafted block, its verified nodes, and its weights."""
    how = {"ar": "plain decoding", "chain": "chain", "tree": "best-first tree"}[plan.spec.mode]
    if plan.spec.mode == "tree" and plan.spec.scoring == "marginal":
        how = "tree by marginal scores"
    weights = {"w12": "W12 (12 bits, lossless)", "bf16": "BF16"}
    return (
        how,
        "–" if plan.spec.mode == "ar" else str(plan.spec.block),
        str(plan.spec.drafts),
        weights.get(plan.weight_format, plan.weight_format),
    )


def projection_notes(projection: Projection) -> tuple[str, ...]:
    """What the projected numbers are, and where no step time was recorded behind them."""
    curve = projection.curve
    notes = [
        f"projected, not measured: τ of this pair at step times of {curve.target.name} on "
        f"{curve.device.name}; it says what the same trees would be worth there"
    ]
    last = curve.points[-1].rows
    if any(point.rows > last for point in projection.points):
        text = (
            f"the projection has no recorded step time beyond {last} rows and continues the slope "
            "of the last two"
        )
        if curve.engine.name == "sglang":
            text += (
                "; they were recorded with stock's kernels, which write a state snapshot for "
                "every row, so it is pessimistic for kernels without snapshots"
            )
        notes.append(text)
    return tuple(notes)
