"""The tables on the page of `specpilot apply recipe`, the verdict's own first."""

from __future__ import annotations

from collections.abc import Iterator

from specpilot_cli.apply.reference.run import RecipeResult
from specpilot_cli.ceiling.advice import BestTree, advise
from specpilot_cli.convert_w12.inspect import totals
from specpilot_cli.report import adapters
from specpilot_cli.report.html import ReportTable
from specpilot_cli.report.paired_bench_tables import (
    SystemNames,
    benchmark_table,
    latency_table,
    over_ar_table,
    system_table,
)
from specpilot_cli.report.recipe_words import plan_cells, system_names
from specpilot_cli.token_force.result import EventInContext, TokenForceResult
from specpilot_cli.token_force.rules import EventTally, RateSummary
from specpilot_cli.units import format_bytes, format_percent

_WORST_SHOWN = 5


def recipe_tables(result: RecipeResult) -> Iterator[ReportTable]:
    """Every table, in reading order: faster, lossless, where the speed goes, node budgets."""
    names, summary = system_names(result), result.bench.summary
    if summary.gain is not None:
        yield benchmark_table(summary, names=names)
        if summary.over_ar:
            yield over_ar_table(summary, names=names)
    if result.audit is not None:
        yield from audit_tables(result.audit, names)
    yield plans_table(result, names)
    if summary.gain is not None:
        yield system_table(summary, names=names)
        yield latency_table(summary, names=names)
    yield from _cost_tables(result)


def plans_table(result: RecipeResult, names: SystemNames) -> ReportTable:
    """What each system runs, and what the 12-bit weights take."""
    note = ""
    if result.conversion is not None:
        sums = totals(result.conversion.outcomes)
        saved = format_percent(1 - sums.stored_bytes / sums.raw_bytes)
        note = (
            f"W12 weights: {format_bytes(sums.raw_bytes)} → {format_bytes(sums.stored_bytes)} "
            f"(−{saved}), {sums.converted_tensors} of {sums.tensors} tensors converted, restored "
            "bit for bit."
        )
        if result.loaded.recipe.engine == "reference":
            note += (
                " The reference engine restores them when it loads, so they change no speed here: "
                "the gain comes from the tree."
            )
    return ReportTable(
        "What was compared",
        ("system", "decodes by", "block", "nodes", "weights"),
        tuple((names.of(plan.name), *plan_cells(plan)) for plan in result.systems),
        note,
    )


def audit_tables(audit: TokenForceResult, names: SystemNames) -> Iterator[ReportTable]:
    """Mismatches of both systems, both rules, and the worst events where there are any."""
    events = audit.events
    yield ReportTable(
        "Is it the target's text? Tokens that plain decoding would not have chosen",
        ("system", "mismatches", "95 % interval", "tokens", "large-margin", "audited",
         "unexplained"),
        (
            _mismatch_row(names.baseline, audit.stock, None if events is None else events.stock),
            _mismatch_row(names.candidate, audit.system, None if events is None else events.system),
        ),
        f"Large-margin: the scorer prefers another token by more than "
        f"{audit.threshold.event_margin_nats:g} nats, twice the near-tie threshold.",
    )  # fmt: skip
    if audit.rate is not None and events is not None:
        yield ReportTable(
            "Losslessness rules", _RULE_COLUMNS, tuple(_rule_rows(audit)), _power(audit)
        )
    if audit.worst:
        yield ReportTable(
            f"Largest events of {names.candidate}",
            ("request", "position", "margin, nats", "after", "emitted", "plain decoding"),
            tuple(_worst_row(item) for item in audit.worst[:_WORST_SHOWN]),
        )


def _mismatch_row(name: str, rate: RateSummary, tally: EventTally | None) -> tuple[str, ...]:
    counts = ("–", "–", "–") if tally is None else (
        str(tally.n_large), str(tally.n_audited), str(tally.n_unexplained)
    )  # fmt: skip
    percent = (format_percent(value, digits=3) for value in (rate.rate, rate.low, rate.high))
    found, low, high = percent
    return (name, found, f"{low} – {high}", str(rate.n_tokens), *counts)


_RULE_COLUMNS = ("rule", "found", "bound", "limit", "result")


def _rule_rows(audit: TokenForceResult) -> Iterator[tuple[str, ...]]:
    """One row per test of the rate rule (points of mismatch rate), then the event rule."""
    assert audit.rate is not None
    assert audit.events is not None
    for test in audit.rate.tests:
        yield (
            f"rate, {test.stratum} positions",
            f"{100 * test.estimate.rate:+.2f} points",
            f"lower {100 * test.lower_bound:+.2f} points",
            f"{100 * test.margin:.2f} points",
            "reject" if test.rejects else "pass",
        )
    events = audit.events
    yield (
        "events",
        f"{events.system.n_test_requests} requests against {events.stock.n_test_requests}",
        f"p = {events.p_value:.2g}",
        f"p > {events.alpha:g}",
        "reject" if events.rejects else "pass",
    )


def _power(audit: TokenForceResult) -> str:
    """What a fault must do at least to be caught by an audit of this size."""
    rate, events = audit.detectable_rate_difference, audit.detectable_event_rate
    if rate is None:
        return ""
    text = f"With 95 % power this audit catches mismatches on {100 * rate:.2f} more tokens in 100"
    return (
        f"{text}." if events is None else f"{text}, or {events:.2g} unexplained events per token."
    )


def _worst_row(item: EventInContext) -> tuple[str, ...]:
    event = item.audited.event

    def shown(text: str | None, ids: tuple[int, ...]) -> str:
        return " ".join(map(str, ids)) if text is None else repr(text)

    before = None if item.before_text is None else item.before_text[-32:]
    return (
        event.request_id,
        str(event.position),
        f"{event.margin_nats:.2f}",
        shown(before, item.before[-6:]),
        shown(item.token_text, (event.token_id,)),
        shown(item.argmax_text, (event.argmax_id,)),
    )


def _cost_tables(result: RecipeResult) -> Iterator[ReportTable]:
    measured = result.measured
    factors, classes = adapters.ceiling_tables(measured.ceiling)
    chosen = measured.chosen
    gain = chosen.speedup / measured.stock_point.speedup
    advice = advise(measured.ceiling, tree=BestTree(nodes=chosen.n_nodes, gain=gain))
    step = f"{advice.headline[0].upper()}{advice.headline[1:]}: {advice.next_step}."
    weighed = "τ is the geometric mean over benchmarks of dev prompts, as the gate weighs them."
    note = "\n\n".join(part for part in (step, factors.note, weighed) if part)
    yield ReportTable("Ceiling of stock", factors.columns, factors.rows, note, sum_row=True)
    yield classes
    yield ReportTable(
        "Node budget: stock chain first, then trees, at the step times of this run",
        ("system", *adapters.SPEEDUP_COLUMNS),
        _with_names(adapters.speedup_rows([measured.stock_point, *measured.points])),
        "S is the speedup over plain decoding that τ from replay and the step time predict; τ as "
        "above. The figure of τ against nodes pools all steps instead.",
    )
    if measured.projection is not None:
        projection = measured.projection
        yield ReportTable(
            f"Projected, not measured: the same τ at the step times of "
            f"{projection.curve.device.name}",
            ("system", *adapters.SPEEDUP_COLUMNS),
            _with_names(adapters.speedup_rows([projection.stock, *projection.points])),
            " ".join((f"Step times: {projection.curve.source}.", *projection.curve.notes)),
        )


def _with_names(rows: list[tuple[str, ...]]) -> tuple[tuple[str, ...], ...]:
    return tuple(("stock chain" if i == 0 else "tree", *row) for i, row in enumerate(rows))
