"""Token forcing from recorded answers to a verdict (paper §3.3)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specpilot_cli.errors import InputError, MeasurementInvalid
from specpilot_cli.schema.outputs import OutputRecord, outputs_by_id
from specpilot_cli.token_force.audit import (
    AuditedEvent,
    AuditMeans,
    Event,
    StockProbe,
    audit,
    find_events,
    sample_events,
)
from specpilot_cli.token_force.config import TokenForceSettings
from specpilot_cli.token_force.coverage import Coverage, coverage
from specpilot_cli.token_force.power import detectable_event_rate, detectable_rate_difference
from specpilot_cli.token_force.result import EventInContext, TokenForceResult
from specpilot_cli.token_force.rules import (
    EventRule,
    EventTally,
    RateRule,
    event_rule,
    rate_rule,
    rate_summary,
    share_to_test,
)
from specpilot_cli.token_force.scorer import ScoredOutput, Scorer, score_outputs
from specpilot_cli.token_force.text import TextDecoder
from specpilot_cli.token_force.threshold import Threshold, calibrate
from specpilot_cli.ui import Reporter, SilentReporter

_TOKENS_BEFORE = 16
_TOKENS_AFTER = 8


@dataclass(frozen=True, slots=True)
class _Scored:
    """Both systems' answers, scored and in the same order of requests."""

    system: list[ScoredOutput]
    stock: list[ScoredOutput]

    def coverage(self) -> tuple[Coverage, Coverage]:
        """What the system's answers cover, and stock's."""
        return (
            coverage([output.record for output in self.system]),
            coverage([output.record for output in self.stock]),
        )


def run_token_force(
    system_outputs: Sequence[OutputRecord],
    stock_outputs: Sequence[OutputRecord],
    ar_outputs: Sequence[OutputRecord] | None,
    scorer: Scorer,
    *,
    settings: TokenForceSettings = TokenForceSettings(),  # noqa: B008  frozen
    threshold: Threshold | None = None,
    probe: StockProbe | None = None,
    text: TextDecoder | None = None,
    reporter: Reporter = SilentReporter(),
) -> TokenForceResult:
    """Judge whether the system's answers could have come from stock.

    system_outputs, stock_outputs: answers to the same prompts; requests that only stock answered
    just help to calibrate δ. ar_outputs: stock without speculation, for δ; None with
    `settings.delta_nats` or with a `threshold` that was calibrated before. probe: live stock for
    the audit; None leaves only recorded answers and the scorer to explain an event.

    Raises InputError when the answers do not belong together, MeasurementInvalid when they are
    too few or a server answers wrongly, MachineError when it is gone. A scorer that disagrees
    with stock itself gives the verdict `invalid`.
    """
    paired_stock = _paired_stock(system_outputs, stock_outputs)
    _check_size(len(paired_stock), settings)
    if threshold is None:
        threshold = _threshold(stock_outputs, ar_outputs, scorer, settings, reporter)
    warnings = [*threshold.warnings, *_ending_warnings(system_outputs, paired_stock)]
    for warning in warnings:
        reporter.warn(warning)
    scored = _Scored(
        score_outputs(system_outputs, scorer, label="system", reporter=reporter),
        score_outputs(paired_stock, scorer, label="stock", reporter=reporter),
    )
    means = _means(paired_stock, ar_outputs, scorer, probe)
    return _judge(scored, means, threshold, settings, warnings, text, reporter)


def _judge(
    scored: _Scored,
    means: AuditMeans,
    threshold: Threshold,
    settings: TokenForceSettings,
    warnings: list[str],
    text: TextDecoder | None,
    reporter: Reporter,
) -> TokenForceResult:
    system, stock = rate_summary(scored.system), rate_summary(scored.stock)
    if stock.rate > settings.max_stock_mismatch:
        reason = (
            f"the scorer disagrees with stock itself on {100 * stock.rate:.2f} % of tokens: "
            "it does not run stock's model, or not with exact weights"
        )
        return _invalid(reason, warnings, threshold, settings, scored)
    audited, events = _event_audit(scored, means, threshold, settings, reporter)
    rates = rate_rule(scored.system, scored.stock, settings)
    return TokenForceResult(
        verdict="reject" if rates.rejects or events.rejects else "accept",
        reasons=_reasons(rates, events),
        warnings=(*warnings, *_rate_warnings(rates, reporter)),
        threshold=threshold,
        settings=settings,
        system=system,
        stock=stock,
        coverage=scored.coverage(),
        rate=rates,
        events=events,
        audited=tuple(audited),
        worst=_worst(audited, scored.system, settings.n_worst, text),
        audit_clauses=_clauses(means),
        detectable_rate_difference=detectable_rate_difference(rates.tests[0]),
        detectable_event_rate=detectable_event_rate(
            events, [output.n_tokens for output in scored.system]
        ),
    )


def _paired_stock(
    system_outputs: Sequence[OutputRecord], stock_outputs: Sequence[OutputRecord]
) -> list[OutputRecord]:
    """Stock's answer to each of the system's requests, in the same order."""
    system = outputs_by_id(system_outputs, where="system outputs")
    stock = outputs_by_id(stock_outputs, where="stock outputs")
    if not system:
        raise InputError("the system answered no request", hint="ask it some: --prompts FILE")
    paired = []
    for name, answer in system.items():
        if name not in stock:
            raise InputError(
                f"stock has no answer to request `{name}`",
                hint="both systems must answer the same prompts",
            )
        other = stock[name]
        if other.prompt_ids != answer.prompt_ids:
            raise InputError(
                f"request `{name}` has different prompt ids in system and stock",
                hint="record both on the same prompts, with one tokenizer",
            )
        limits = (answer.max_new_tokens, other.max_new_tokens)
        if None not in limits and limits[0] != limits[1]:
            raise InputError(
                f"request `{name}` was limited to {limits[0]} tokens in the system "
                f"and to {limits[1]} in stock",
                hint="record both with the same max_new_tokens",
            )
        paired.append(other)
    return paired


def _check_size(n_requests: int, settings: TokenForceSettings) -> None:
    if n_requests < settings.min_requests:
        raise MeasurementInvalid(
            f"{n_requests} requests carry no verdict",
            hint=f"the spread between requests needs at least {settings.min_requests} of them",
        )


def _threshold(
    stock_outputs: Sequence[OutputRecord],
    ar_outputs: Sequence[OutputRecord] | None,
    scorer: Scorer,
    settings: TokenForceSettings,
    reporter: Reporter,
) -> Threshold:
    if settings.delta_nats is not None:
        return Threshold(settings.delta_nats)
    if ar_outputs is None:
        raise InputError(
            "delta needs AR answers to calibrate it, or a value",
            hint="give --ar URL|FILE (stock's engine without speculation), or --delta NATS|FILE",
        )
    return calibrate(ar_outputs, stock_outputs, scorer, reporter=reporter)


def _means(
    stock_outputs: Sequence[OutputRecord],
    ar_outputs: Sequence[OutputRecord] | None,
    scorer: Scorer,
    probe: StockProbe | None,
) -> AuditMeans:
    records = [outputs_by_id(stock_outputs, where="stock outputs")]
    if ar_outputs is not None:
        records.append(outputs_by_id(ar_outputs, where="AR outputs"))
    return AuditMeans(scorer, tuple(records), probe)


def _clauses(means: AuditMeans) -> tuple[str, ...]:
    live = ("path", "margin") if means.probe is not None else ()
    return ("record", "prefill_length", *live)


def _event_audit(
    scored: _Scored,
    means: AuditMeans,
    threshold: Threshold,
    settings: TokenForceSettings,
    reporter: Reporter,
) -> tuple[list[AuditedEvent], EventRule]:
    limit = threshold.event_margin_nats
    large = find_events(scored.system, limit, system="system")
    stock_large = find_events(scored.stock, limit, system="stock")
    share = share_to_test(len(large), len(stock_large), settings.audit_limit)
    # Stock's own answers do not explain stock's events: they would explain every one.
    stock_means = AuditMeans(means.scorer, means.records[1:], means.probe)
    audited: list[AuditedEvent] = []
    tallies = []
    for outputs, events, used, label in (
        (scored.system, large, means, "system's events"),
        (scored.stock, stock_large, stock_means, "stock's events"),
    ):
        done = audit(
            sample_events(events, settings.audit_limit, settings.seed),
            {output.record.request_id: output.record for output in outputs},
            used,
            limit,
            settings,
            label=label,
            reporter=reporter,
        )
        audited.extend(done)
        tallies.append(_tally(outputs, events, done, share))
    return audited, event_rule(tallies[0], tallies[1], settings.alpha)


def _tally(
    outputs: Sequence[ScoredOutput],
    events: Sequence[Event],
    audited: Sequence[AuditedEvent],
    share: float,
) -> EventTally:
    n_tested = min(len(audited), round(len(events) * share))
    unexplained = {a.event.request_id for a in audited[:n_tested] if a.explanation is None}
    return EventTally(
        n_tokens=sum(output.n_tokens for output in outputs),
        n_large=len(events),
        n_audited=len(audited),
        n_unexplained=sum(item.explanation is None for item in audited),
        n_tested=n_tested,
        n_test_requests=len(unexplained),
        tested_share=share,
    )


def _ending_warnings(
    system_outputs: Sequence[OutputRecord], stock_outputs: Sequence[OutputRecord]
) -> list[str]:
    """Answers that stop on a token that never ends one of stock's.

    Forcing tokens cannot see an answer that was cut short: every token in it is right.
    """
    endings = {r.output_ids[-1] for r in stock_outputs if r.finish_reason == "stop"}
    odd = [
        record.request_id
        for record in system_outputs
        if record.finish_reason == "stop" and record.output_ids[-1] not in endings
    ]
    if not odd:
        return []
    return [
        f"{len(odd)} answers of the system stop on a token that ends no stock answer "
        f"(first: `{odd[0]}`): were they cut short?"
    ]


def _rate_warnings(rates: RateRule, reporter: Reporter) -> tuple[str, ...]:
    if not rates.paper.rejects or rates.rejects:
        return ()
    warning = (
        "the pooled rate test alone would reject at the full confidence level; "
        "the stratified tests share that level and do not"
    )
    reporter.warn(warning)
    return (warning,)


def _reasons(rates: RateRule, events: EventRule) -> tuple[str, ...]:
    reasons = [
        f"rate rule ({test.stratum}): mismatches exceed stock's by {100 * test.estimate.rate:.2f} "
        f"points, lower bound {100 * test.lower_bound:.2f} > {100 * test.margin:.2f}"
        for test in rates.tests
        if test.rejects
    ]
    if events.rejects:
        reasons.append(
            f"event rule: {events.system.n_test_requests} requests with an unexplained "
            f"large-margin event against stock's {events.stock.n_test_requests}, "
            f"p = {events.p_value:.2g}"
        )
    return tuple(reasons)


def _worst(
    audited: Sequence[AuditedEvent],
    outputs: Sequence[ScoredOutput],
    limit: int,
    text: TextDecoder | None,
) -> tuple[EventInContext, ...]:
    """The system's events to look at first: unexplained ones, then by margin."""
    answers = {output.record.request_id: output.record.output_ids for output in outputs}
    own = [item for item in audited if item.event.system == "system"]
    own.sort(key=lambda item: (item.explanation is not None, -item.event.margin_nats))
    found = []
    for item in own[:limit]:
        event, ids = item.event, answers[item.event.request_id]
        before = ids[max(0, event.position - _TOKENS_BEFORE) : event.position]
        after = ids[event.position + 1 : event.position + 1 + _TOKENS_AFTER]
        found.append(
            EventInContext(item, before, after)
            if text is None
            else EventInContext(
                item,
                before,
                after,
                before_text=text.decode(before),
                token_text=text.decode((event.token_id,)),
                argmax_text=text.decode((event.argmax_id,)),
                after_text=text.decode(after),
            )
        )
    return tuple(found)


def _invalid(
    reason: str,
    warnings: Sequence[str],
    threshold: Threshold,
    settings: TokenForceSettings,
    scored: _Scored,
) -> TokenForceResult:
    return TokenForceResult(
        verdict="invalid",
        reasons=(reason,),
        warnings=tuple(warnings),
        threshold=threshold,
        settings=settings,
        system=rate_summary(scored.system),
        stock=rate_summary(scored.stock),
        coverage=scored.coverage(),
        rate=None,
        events=None,
        audited=(),
        worst=(),
        audit_clauses=(),
        detectable_rate_difference=None,
        detectable_event_rate=None,
    )
