"""A token-forcing result on the terminal."""

from __future__ import annotations

from specpilot_cli.report.tables import Column, print_line, print_pairs, print_table
from specpilot_cli.token_force.result import EventInContext, TokenForceResult
from specpilot_cli.token_force.rules import EventTally, RateSummary


def print_result(result: TokenForceResult) -> None:
    """Both systems, the tests of both rules, the worst events, then the verdict."""
    _print_systems(result)
    if result.rate is not None and result.events is not None:
        _print_rate_tests(result)
        print_line()
        print_pairs(_facts(result), title="Limits of this audit")
        _print_worst(result)
    print_line()
    print_line(f"verdict: {result.verdict}")
    for reason in result.reasons:
        print_line(f"  {reason}")


def _print_systems(result: TokenForceResult) -> None:
    def row(name: str, rate: RateSummary, tally: EventTally | None) -> tuple[str, ...]:
        counts = (
            ("-", "-", "-")
            if tally is None
            else (str(tally.n_large), str(tally.n_audited), str(tally.n_unexplained))
        )
        return (
            name,
            str(rate.n_requests),
            str(rate.n_tokens),
            f"{100 * rate.rate:.3f}",
            f"[{100 * rate.low:.3f}, {100 * rate.high:.3f}]",
            *counts,
        )

    events = result.events
    print_table(
        [
            "system",
            Column("requests", "right"),
            Column("tokens", "right"),
            Column("mismatch %", "right"),
            Column("95 % interval", "right"),
            Column("large-margin", "right"),
            Column("audited", "right"),
            Column("unexplained", "right"),
        ],
        [
            row("system", result.system, None if events is None else events.system),
            row("stock", result.stock, None if events is None else events.stock),
        ],
        title="Tokens that the scorer would not have chosen",
    )


def _print_rate_tests(result: TokenForceResult) -> None:
    assert result.rate is not None
    rows = []
    for test in result.rate.tests:
        rows.append(
            (
                test.stratum,
                str(test.n_requests),
                f"{100 * test.estimate.rate:+.3f}",
                f"{100 * test.lower_bound:+.3f}",
                f"{100 * (1 - test.alpha):.1f}",
                f"{100 * test.margin:.2f}",
                "reject" if test.rejects else "pass",
            )
        )
    split = result.rate.split_position
    print_table(
        [
            "positions",
            Column("requests", "right"),
            Column("difference (points)", "right"),
            Column("lower bound", "right"),
            Column("confidence %", "right"),
            Column("limit", "right"),
            "rate rule",
        ],
        rows,
        title="Rate rule" + ("" if split is None else f" (late: from position {split})"),
    )


def _facts(result: TokenForceResult) -> list[tuple[str, object]]:
    assert result.events is not None
    threshold, events = result.threshold, result.events
    origin = (
        "given"
        if threshold.n_prompts is None
        else f"{len(threshold.departures)} departures on {threshold.n_prompts} prompts"
    )
    notes = [] if threshold.note is None else [("note", threshold.note)]
    rate, per_token = result.detectable_rate_difference, result.detectable_event_rate
    return [
        ("near-tie threshold", f"{threshold.delta_nats:g} nats ({origin})"),
        *notes,
        ("large-margin event", f"margin above {threshold.event_margin_nats:g} nats"),
        (
            "event rule",
            f"{events.system.n_test_requests} against {events.stock.n_test_requests} requests "
            f"with an unexplained event, p = {events.p_value:.3g} "
            f"({'reject' if events.rejects else 'pass'} at {events.alpha:g})",
        ),
        ("explanations sought", ", ".join(result.audit_clauses)),
        (
            "smallest rate rise caught",
            "-" if rate is None else f"{100 * rate:.2f} points with 95 % power",
        ),
        (
            "smallest event rate caught",
            "none: too few requests"
            if per_token is None
            else f"{per_token:.2g} per token with 95 % power",
        ),
    ]


def _print_worst(result: TokenForceResult) -> None:
    if not result.worst:
        return
    print_line()
    print_table(
        [
            "request",
            Column("position", "right"),
            Column("margin (nats)", "right"),
            "explained by",
            "before",
            "emitted",
            "scorer's choice",
        ],
        [_worst_row(item) for item in result.worst],
        title="Largest events of the system",
    )


def _worst_row(item: EventInContext) -> tuple[str, ...]:
    event = item.audited.event

    def shown(text: str | None, ids: tuple[int, ...]) -> str:
        return " ".join(map(str, ids)) if text is None else repr(text)

    return (
        event.request_id,
        str(event.position),
        f"{event.margin_nats:.3f}",
        item.audited.explanation or "nothing",
        shown(item.before_text, item.before[-6:]),
        shown(item.token_text, (event.token_id,)),
        shown(item.argmax_text, (event.argmax_id,)),
    )
