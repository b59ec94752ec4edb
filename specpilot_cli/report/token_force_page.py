"""The page of one `specpilot token-force` run: verdict, mismatch bars, rules, worst events."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from datetime import UTC, datetime

from specpilot_cli.report import adapters
from specpilot_cli.report.figures import mismatch_bars
from specpilot_cli.report.html import (
    InputHash,
    KeyFigure,
    MethodNote,
    Outcome,
    ReportData,
    Verdict,
    environment_rows,
    render_report,
)
from specpilot_cli.report.paired_bench_tables import SystemNames
from specpilot_cli.report.recipe_tables import audit_tables
from specpilot_cli.report.token_force_text import (
    accuracy_text,
    coverage_text,
    event_text,
    threshold_text,
)
from specpilot_cli.schema.result import Envelope
from specpilot_cli.token_force.result import TokenForceResult
from specpilot_cli.units import format_percent

_NAMES = SystemNames("stock", "system")
_OUTCOMES: dict[str, Outcome] = {"accept": "yes", "reject": "no", "invalid": "invalid"}
_SENTENCES = {
    "accept": "Neither rule found a fault of a size that this audit could see.",
    "reject": "The system's tokens are not stock's up to rounding.",
    "invalid": "The measurement carries no verdict.",
}
_METHOD = MethodNote(
    "Token forcing",
    "Every output token was scored by the exact model given everything before it. A mismatch is a "
    "token less likely than the best one; an exact tie is none. The rate rule rejects where the "
    "system's mismatch rate exceeds stock's by more than 0.5 points at 95 % confidence, with "
    "requests as the unit and systems paired by prompt. The event rule rejects where requests with "
    "an unexplained mismatch beyond twice the near-tie threshold are more frequent than stock's.",
)


def render_page(result: TokenForceResult, envelope: Envelope) -> str:
    """The page as text; opens offline."""
    verdict = Verdict(
        result.verdict, _OUTCOMES[result.verdict], _SENTENCES[result.verdict], result.reasons
    )
    bars = []
    if result.rate is not None:
        condition = f"{result.system.n_tokens} forced tokens, {_condition(result)}"
        bars.append(mismatch_bars.draw(adapters.mismatch_data([("system", result)], condition)))
    return render_report(
        ReportData(
            title="Token forcing: is it stock's output?",
            verdict=verdict,
            command=shlex.join(["specpilot", *sys.argv[1:]]),
            specpilot_version=envelope.specpilot_version,
            machine=str(envelope.environment.get("cpu") or "this machine"),
            created=datetime.now(UTC),
            key_figures=tuple(_key_figures(result)),
            caveats=tuple(_caveats(result)),
            inputs=tuple(InputHash(item.path, item.sha256) for item in envelope.inputs),
            numbers=tuple(audit_tables(result, _NAMES)),
            figures=tuple(bars),
            method=(_METHOD,),
            environment=environment_rows(envelope.environment),
            data=envelope.model_dump(mode="python"),
        )
    )


def _condition(result: TokenForceResult) -> str:
    return f"{result.system.n_requests} requests, {coverage_text(result.coverage[0])}"


def _key_figures(result: TokenForceResult) -> Iterator[KeyFigure]:
    for name, rate in (("system", result.system), ("stock", result.stock)):
        low, high = (format_percent(value, digits=3) for value in (rate.low, rate.high))
        yield KeyFigure(
            f"mismatches, {name}", format_percent(rate.rate, digits=3), f"95 %: {low} – {high}"
        )
    if result.detectable_rate_difference is not None:
        yield KeyFigure(
            "smallest rise caught",
            f"{100 * result.detectable_rate_difference:.2f} points",
            "with 95 % power",
        )
    if result.detectable_event_rate is not None:
        yield KeyFigure(
            "smallest event rate caught",
            f"{result.detectable_event_rate:.2g}",
            "unexplained events per token, 95 % power",
        )
    if result.accuracy is not None:
        found = result.accuracy
        yield KeyFigure(
            "task accuracy", f"{100 * found.change:+.1f} points", "beside the verdict, not in it"
        )


def _caveats(result: TokenForceResult) -> Iterator[str]:
    yield from result.warnings
    yield f"Near-tie threshold: {threshold_text(result.threshold)}."
    if result.threshold.note is not None:
        yield f"{result.threshold.note}."
    if result.events is not None:
        yield f"Event rule: {event_text(result.events)}."
    if result.accuracy is not None:
        yield f"Task accuracy decides nothing here: {accuracy_text(result.accuracy)}."
