"""What a token-forcing audit found, and its form in JSON."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from specpilot_cli.stats import Interval
from specpilot_cli.token_force.accuracy import AccuracyChange
from specpilot_cli.token_force.audit import AuditedEvent
from specpilot_cli.token_force.config import TokenForceSettings
from specpilot_cli.token_force.coverage import Coverage
from specpilot_cli.token_force.power import detectable_rate_difference
from specpilot_cli.token_force.rules import (
    EventRule,
    EventTally,
    RateRule,
    RateSummary,
    RateTest,
)
from specpilot_cli.token_force.threshold import Threshold

Verdict = Literal["accept", "reject", "invalid"]
Results = dict[str, Any]


@dataclass(frozen=True, slots=True)
class EventInContext:
    """One event with the tokens around it; text only where a tokenizer was given.

    before, after: token ids just before and just after the event's token.
    """

    audited: AuditedEvent
    before: tuple[int, ...]
    after: tuple[int, ...]
    before_text: str | None = None
    token_text: str | None = None
    argmax_text: str | None = None
    after_text: str | None = None


@dataclass(frozen=True, slots=True)
class TokenForceResult:
    """The verdict with everything it rests on.

    rate, events: None when the verdict is `invalid`.
    coverage: how far the system's outputs and stock's reach, and how many ran at one time.
    audit_clauses: the explanations the audit was able to look for.
    detectable_event_rate: unexplained events per token; detectable_rate_difference: a fraction;
    both are the smallest that this audit would have caught with 95 % power. accuracy: task
    accuracy beside the verdict, where the prompts hold answers.
    """

    verdict: Verdict
    reasons: tuple[str, ...]
    warnings: tuple[str, ...]
    threshold: Threshold
    settings: TokenForceSettings
    system: RateSummary
    stock: RateSummary
    coverage: tuple[Coverage, Coverage]
    rate: RateRule | None
    events: EventRule | None
    audited: tuple[AuditedEvent, ...]
    worst: tuple[EventInContext, ...]
    audit_clauses: tuple[str, ...]
    detectable_rate_difference: float | None
    detectable_event_rate: float | None
    accuracy: AccuracyChange | None = None

    def explanations(self, system: str) -> Mapping[str, int]:
        """How many audited events of `system` each clause explained."""
        return Counter(
            item.explanation or "unexplained"
            for item in self.audited
            if item.event.system == system
        )

    def to_json(self) -> Results:
        """The `results` object of the JSON envelope; keys end in their unit."""
        return {
            "reasons": list(self.reasons),
            "warnings": list(self.warnings),
            "threshold": threshold_json(self.threshold),
            "system": {**summary_json(self.system), **coverage_json(self.coverage[0])},
            "stock": {**summary_json(self.stock), **coverage_json(self.coverage[1])},
            "rate_rule": _rate_rule(self.rate),
            "event_rule": self._event_rule(),
            "smallest_fault_caught": {
                "power_ratio": 0.95,
                "rate_difference_pct": _percent(self.detectable_rate_difference),
                "unexplained_events_per_token_ratio": self.detectable_event_rate,
            },
            "accuracy": _accuracy(self.accuracy),
            "worst_events": [_in_context(item) for item in self.worst],
        }

    def _event_rule(self) -> Results | None:
        if self.events is None:
            return None
        return {
            "rejects": self.events.rejects,
            "p_value": self.events.p_value,
            "alpha": self.events.alpha,
            "frequency_ratio": _ratio(self.events.ratio, 1.0 - 2.0 * self.events.alpha),
            "event_margin_nats": self.threshold.event_margin_nats,
            "audit_clauses": list(self.audit_clauses),
            "system": _tally(self.events.system, self.explanations("system")),
            "stock": _tally(self.events.stock, self.explanations("stock")),
        }


def _percent(value: float | None) -> float | None:
    return None if value is None else 100.0 * value


def _ratio(interval: Interval, confidence: float) -> Results:
    """The system's frequency of events over stock's; no upper end where stock has none."""
    return {
        "low_ratio": interval.low,
        "high_ratio": interval.high if math.isfinite(interval.high) else None,
        "confidence_pct": 100.0 * confidence,
    }


def _accuracy(found: AccuracyChange | None) -> Results | None:
    if found is None:
        return None
    return {
        "n_prompts": found.n,
        "system_pct": 100.0 * found.system / found.n,
        "stock_pct": 100.0 * found.stock / found.n,
        "change_pct": 100.0 * found.change,
        "change_low_pct": 100.0 * found.interval.low,
        "change_high_pct": 100.0 * found.interval.high,
        "decides": found.decides,
    }


def coverage_json(covered: Coverage) -> Results:
    """How far outputs reach, as JSON."""
    return {
        "longest_output_tokens": covered.longest,
        "n_requests_reaching": {f"over_{mark}_tokens": n for mark, n in covered.reaching},
        "mean_requests_in_flight": covered.in_flight,
    }


def summary_json(summary: RateSummary) -> Results:
    """A mismatch rate with its interval, as JSON."""
    return {
        "n_requests": summary.n_requests,
        "n_tokens": summary.n_tokens,
        "n_mismatches": summary.n_mismatches,
        "mismatch_rate_pct": 100.0 * summary.rate,
        "mismatch_rate_low_pct": 100.0 * summary.low,
        "mismatch_rate_high_pct": 100.0 * summary.high,
    }


def threshold_json(threshold: Threshold) -> Results:
    """δ with its evidence, as JSON; `--delta FILE` reads it back."""
    return {
        "delta_nats": threshold.delta_nats,
        "calibrated": threshold.n_prompts is not None,
        "n_prompts": threshold.n_prompts,
        "n_departures": len(threshold.departures),
        "max_gap_nats": threshold.max_gap_nats,
        "p99_gap_nats": threshold.p99_gap_nats,
        "departures": [asdict(departure) for departure in threshold.departures],
        "warnings": list(threshold.warnings),
        "note": threshold.note,
    }


def _rate_test(test: RateTest) -> Results:
    interval = test.estimate.interval()
    return {
        "stratum": test.stratum,
        "n_requests": test.n_requests,
        "system_rate_pct": 100.0 * test.system_rate,
        "stock_rate_pct": 100.0 * test.stock_rate,
        "difference_pct": 100.0 * test.estimate.rate,
        "difference_low_pct": 100.0 * interval.low,
        "difference_high_pct": 100.0 * interval.high,
        "lower_bound_pct": 100.0 * test.lower_bound,
        "confidence_pct": 100.0 * (1.0 - test.alpha),
        "smallest_difference_caught_pct": 100.0 * detectable_rate_difference(test),
        "rejects": test.rejects,
    }


def _rate_rule(rule: RateRule | None) -> Results | None:
    if rule is None:
        return None
    return {
        "rejects": rule.rejects,
        "margin_pct": 100.0 * rule.paper.margin,
        "split_position": rule.split_position,
        "tests": [_rate_test(test) for test in rule.tests],
        "pooled_at_full_alpha": _rate_test(rule.paper),
    }


def _tally(tally: EventTally, explanations: Mapping[str, int]) -> Results:
    return {
        "n_large_margin": tally.n_large,
        "n_audited": tally.n_audited,
        "n_unexplained": tally.n_unexplained,
        "n_tested": tally.n_tested,
        "n_requests_with_unexplained": tally.n_test_requests,
        "exposure_tokens": tally.exposure_tokens,
        "explanations": dict(explanations),
    }


def _in_context(item: EventInContext) -> Results:
    event = item.audited.event
    return {
        "request_id": event.request_id,
        "benchmark": event.benchmark,
        "position": event.position,
        "token_id": event.token_id,
        "argmax_id": event.argmax_id,
        "margin_nats": event.margin_nats,
        "explanation": item.audited.explanation,
        "before_ids": list(item.before),
        "after_ids": list(item.after),
        "before_text": item.before_text,
        "token_text": item.token_text,
        "argmax_text": item.argmax_text,
        "after_text": item.after_text,
    }
