"""A token-forcing result on the terminal."""

from __future__ import annotations

from specpilot_cli.report.tables import Column, print_line, print_pairs, print_table
from specpilot_cli.token_force.accuracy import AccuracyChange
from specpilot_cli.token_force.calibration import Calibration
from specpilot_cli.token_force.coverage import Coverage
from specpilot_cli.token_force.power import detectable_rate_difference
from specpilot_cli.token_force.result import EventInContext, TokenForceResult
from specpilot_cli.token_force.rules import EventRule, EventTally, RateSummary
from specpilot_cli.token_force.threshold import Threshold


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
    if result.accuracy is not None:
        print_line(f"task accuracy, which decides nothing here: {accuracy_text(result.accuracy)}")


def print_calibration(found: Calibration) -> None:
    """δ with its evidence, and stock's own mismatch rate."""
    threshold, stock = found.threshold, found.stock
    gaps = "-" if threshold.max_gap_nats is None else f"{threshold.max_gap_nats:.3f} nats"
    notes = [] if threshold.note is None else [("note", threshold.note)]
    print_pairs(
        [
            ("delta", threshold_text(threshold)),
            ("largest gap at a first departure", gaps),
            *notes,
            (
                "stock's mismatches",
                f"{100 * stock.rate:.3f} % [{100 * stock.low:.3f}, {100 * stock.high:.3f}] of "
                f"{stock.n_tokens} tokens, {stock.n_requests} requests",
            ),
            ("covered", coverage_text(found.covered)),
        ],
        title="Calibration",
    )


def accuracy_text(found: AccuracyChange) -> str:
    """The paired change in points with its interval, and what it can tell."""
    low, high = found.interval.low, found.interval.high
    word = "a change beyond doubt" if found.decides else "no change beyond doubt"
    return (
        f"{100 * found.change:+.1f} points [{100 * low:+.1f}, {100 * high:+.1f}] on {found.n} "
        f"prompts ({found.system} against {found.stock} right): {word}"
    )


def threshold_text(threshold: Threshold) -> str:
    """δ and where it is from."""
    origin = (
        "given"
        if threshold.n_prompts is None
        else f"{len(threshold.departures)} departures on {threshold.n_prompts} prompts"
    )
    return f"{threshold.delta_nats:g} nats ({origin})"


def coverage_text(covered: Coverage) -> str:
    """How far answers reach and how many were answered at one time."""
    parts = [f"{n} over {mark} tokens" for mark, n in covered.reaching if n]
    reach = f"longest answer {covered.longest} tokens"
    reach += f" ({', '.join(parts)})" if parts else ""
    flight = covered.in_flight
    return reach if flight is None else f"{reach}, {flight:.1f} requests at one time"


def event_text(events: EventRule) -> str:
    """The event rule: counts, ratio with its interval, p and what follows."""
    low, high = events.ratio.low, events.ratio.high
    seen = events.system.n_test_requests + events.stock.n_test_requests > 0
    ratio = f", ratio [{low:.2g}, {'∞' if high == float('inf') else f'{high:.2g}'}]" if seen else ""
    return (
        f"{events.system.n_test_requests} against {events.stock.n_test_requests} requests with an "
        f"unexplained event{ratio}, p = {events.p_value:.3g} "
        f"({'reject' if events.rejects else 'pass'} at {events.alpha:g})"
    )


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
                f"[{100 * test.lower_bound:+.3f}, ∞)",
                f"{100 * (1 - test.alpha):.1f}",
                f"{100 * test.margin:.2f}",
                f"{100 * detectable_rate_difference(test):.2f}",
                "reject" if test.rejects else "pass",
            )
        )
    split = result.rate.split_position
    print_table(
        [
            "positions",
            Column("requests", "right"),
            Column("difference (points)", "right"),
            Column("interval", "right"),
            Column("confidence %", "right"),
            Column("limit", "right"),
            Column("smallest caught", "right"),
            "rate rule",
        ],
        rows,
        title="Rate rule" + ("" if split is None else f" (late: from position {split})"),
    )


def _facts(result: TokenForceResult) -> list[tuple[str, object]]:
    assert result.events is not None
    threshold, events = result.threshold, result.events
    notes = [] if threshold.note is None else [("note", threshold.note)]
    rate, per_token = result.detectable_rate_difference, result.detectable_event_rate
    return [
        ("near-tie threshold", threshold_text(threshold)),
        *notes,
        ("large-margin event", f"margin above {threshold.event_margin_nats:g} nats"),
        ("event rule", event_text(events)),
        ("covered", coverage_text(result.coverage[0])),
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
