"""Seconds of a step from the curves of `schema/batch_times.py`."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from specpilot_cli.schema.batch_times import BatchStepTimes, CostCurve


@dataclass(frozen=True, slots=True)
class StepLoad:
    """What one decode step holds: verified rows (roots and admitted prompt rows included),
    decoding requests, drafted rows, tokens in the contexts of all requests.
    """

    rows: int
    requests: int
    draft_rows: int
    context_tokens: int = 0


class StepClock:
    """Prices steps, and remembers whether any lay outside what was measured."""

    def __init__(self, times: BatchStepTimes) -> None:
        self._decode = times.decode
        self._prefill = times.prefill
        self.extrapolated: set[str] = set()

    def decode_s(self, load: StepLoad) -> float:
        """Seconds of a decode step; 0 for an empty one."""
        if load.rows == 0:
            return 0.0
        amounts = {
            "step": 1, "rows": load.rows, "requests": load.requests,
            "draft_rows": load.draft_rows, "context_tokens": load.context_tokens,
        }  # fmt: skip
        return sum(self._at(curve, amounts[curve.driver]) for curve in self._decode)

    def prefill_s(self, prompt_rows: int) -> float:
        """Seconds of a pass over prompt rows alone; 0 for none."""
        return self._at(self._prefill, prompt_rows)

    def _at(self, curve: CostCurve, amount: float) -> float:
        if amount <= 0:
            return 0.0
        x = np.array([point.amount for point in curve.points])
        y = np.array([point.seconds for point in curve.points])
        if amount <= x[-1]:
            return float(np.interp(amount, x, y))
        if curve.driver != "step":
            self.extrapolated.add(curve.name)
        slope = max(0.0, float(y[-1] - y[-2]) / float(x[-1] - x[-2])) if len(x) > 1 else 0.0
        return float(y[-1]) + slope * (amount - float(x[-1]))
