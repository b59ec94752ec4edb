"""The near-tie threshold δ: how far stock itself strays from AR through rounding.

Paper §3.3: the largest margin at stock's first departures from AR, rounded up to a multiple
of 1/8 nat. Only the first departure of a prompt counts, because after it the two runs condition
on different text. δ is a sample maximum, so it grows with the number of departures: that number
is stored with it, and a lone outlier is reported, since a bug in stock would widen δ.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from specpilot_cli.errors import InputError
from specpilot_cli.schema.outputs import OutputRecord, outputs_by_id
from specpilot_cli.token_force.scorer import Scorer
from specpilot_cli.ui import Reporter, SilentReporter

STEP_NATS = 1 / 8
CAP_NATS = 0.5
# Fewer prompts see fewer departures, and the maximum of fewer is smaller.
ENOUGH_PROMPTS = 100


@dataclass(frozen=True, slots=True)
class Departure:
    """Where stock first emits another token than AR.

    position: index in the output. gap_nats: log-probability gap between the two tokens under
    the scorer, given their common prefix.
    """

    request_id: str
    position: int
    ar_token: int
    stock_token: int
    gap_nats: float


@dataclass(frozen=True, slots=True)
class Threshold:
    """δ with the evidence behind it; `n_prompts` is None when δ was given, not calibrated."""

    delta_nats: float
    n_prompts: int | None = None
    departures: tuple[Departure, ...] = ()
    max_gap_nats: float | None = None
    p99_gap_nats: float | None = None
    warnings: tuple[str, ...] = ()

    @property
    def event_margin_nats(self) -> float:
        """A mismatch with a margin above this, 2δ, is a large-margin event."""
        return 2.0 * self.delta_nats

    @property
    def note(self) -> str | None:
        """What a reader should know of a δ that rests on little."""
        if self.n_prompts is None:
            return None
        if not self.departures:
            return (
                f"stock departed from AR on none of {self.n_prompts} prompts, so delta is its "
                f"least value, {STEP_NATS:g} nats"
            )
        if self.n_prompts < ENOUGH_PROMPTS:
            return (
                f"delta rests on {self.n_prompts} prompts; with {ENOUGH_PROMPTS} or more it may "
                "come out larger"
            )
        return None


def first_departure(ar_ids: Sequence[int], stock_ids: Sequence[int]) -> int | None:
    """Index of the first differing token; None when one output begins with the other."""
    for index, (ar, stock) in enumerate(zip(ar_ids, stock_ids, strict=False)):
        if ar != stock:
            return index
    return None


def round_up(gap_nats: float) -> float:
    """The smallest multiple of 1/8 not below `gap_nats`, at least 1/8."""
    return max(1, math.ceil(gap_nats / STEP_NATS)) * STEP_NATS


def threshold_from_gaps(departures: Sequence[Departure], n_prompts: int) -> Threshold:
    """δ from the gaps at the departures of `n_prompts` prompts."""
    if not departures:
        return Threshold(STEP_NATS, n_prompts=n_prompts)
    gaps = np.array([departure.gap_nats for departure in departures], dtype=np.float64)
    largest = float(gaps.max())
    # The order statistic below the quantile, so that with few departures the maximum is not
    # compared with itself.
    p99 = float(np.quantile(gaps, 0.99, method="lower"))
    delta = round_up(largest)
    warnings = []
    if delta > CAP_NATS:
        warnings.append(
            f"stock departs from AR by up to {largest:.3f} nats; delta is capped at {CAP_NATS} "
            "nats, and a gap that large is more than rounding: check stock"
        )
        delta = CAP_NATS
    if len(gaps) >= 2 and largest > 2.0 * p99:
        warnings.append(
            f"the largest departure gap ({largest:.3f} nats) is over twice the 99th percentile "
            f"({p99:.3f} nats): one outlier sets delta"
        )
    return Threshold(delta, n_prompts, tuple(departures), largest, p99, tuple(warnings))


def calibrate(
    ar_outputs: Sequence[OutputRecord],
    stock_outputs: Sequence[OutputRecord],
    scorer: Scorer,
    *,
    reporter: Reporter = SilentReporter(),
) -> Threshold:
    """δ from AR and stock answers to the same prompts.

    Both tokens of a departure are scored at the same prefill length. Raises InputError when no
    request id is in both sets, or one has different prompts.
    """
    ar_by_id = outputs_by_id(ar_outputs, where="AR outputs")
    stock_by_id = outputs_by_id(stock_outputs, where="stock outputs")
    shared = [name for name in stock_by_id if name in ar_by_id]
    if not shared:
        raise InputError(
            "AR and stock answered no request in common, so delta cannot be calibrated",
            hint="record both on the same prompts, or give --delta",
        )
    departures = []
    for done, name in enumerate(shared):
        reporter.progress("calibrating delta", done, len(shared))
        ar, stock = ar_by_id[name], stock_by_id[name]
        if ar.prompt_ids != stock.prompt_ids:
            raise InputError(
                f"request `{name}` has different prompt ids in AR and in stock",
                hint="record both on the same prompts, with one tokenizer",
            )
        position = first_departure(ar.output_ids, stock.output_ids)
        if position is not None:
            departures.append(_measure(ar, stock, position, scorer))
    reporter.progress("calibrating delta", len(shared), len(shared))
    return threshold_from_gaps(departures, len(shared))


def _measure(ar: OutputRecord, stock: OutputRecord, position: int, scorer: Scorer) -> Departure:
    prefix = (*ar.prompt_ids, *ar.output_ids[:position])
    ar_token, stock_token = ar.output_ids[position], stock.output_ids[position]
    start = len(ar.prompt_ids)
    values = [
        float(scorer.score((*prefix, token), start).token_logprobs[-1])
        for token in (ar_token, stock_token)
    ]
    return Departure(ar.request_id, position, ar_token, stock_token, abs(values[0] - values[1]))
