"""The HTML page of `specpilot apply recipe`: verdict, numbers, figures, method."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from datetime import UTC, datetime

from specpilot_cli.apply.run import RecipeResult
from specpilot_cli.ceiling.advice import advise
from specpilot_cli.paired_bench.types import BASELINE, CANDIDATE
from specpilot_cli.report import adapters
from specpilot_cli.report.ceiling_page import CEILING_METHOD
from specpilot_cli.report.figures import (
    ceiling_factors,
    forest,
    mismatch_bars,
    speedup_curve,
    step_waterfall,
    tau_curve,
)
from specpilot_cli.report.figures.base import ReportFigure
from specpilot_cli.report.html import (
    InputHash,
    KeyFigure,
    MethodNote,
    Outcome,
    ReportData,
    ReportTable,
    Verdict,
    environment_rows,
    render_report,
)
from specpilot_cli.report.paired_bench_tables import (
    benchmark_table,
    forest_data,
    interval_text,
    noise_text,
    over_ar_table,
    system_table,
)
from specpilot_cli.report.recipe_text import over_ar, verdict_sentence
from specpilot_cli.schema.result import Envelope

_OUTCOMES: dict[str, Outcome] = {
    "promote": "yes",
    "no": "no",
    "reject": "no",
    "invalid": "invalid",
}

_METHOD = (
    MethodNote(
        "Order of work",
        "Lattices and step times come from dev prompts; the node budget is the one with the "
        "largest τ(N) / c(N) there. Both gates then see unseen prompts only.\n"
        "\n"
        "Stock drafts the drafter's trained block as a chain. Tuned verifies a best-first tree on "
        "a wider block, on weights in the lossless 12-bit format. All servers are resident and "
        "one works at a time.",
    ),
    MethodNote(
        "Gain",
        "A request's rate is its output tokens over the time from submit to the last byte. Gains "
        "are geometric means of per-request ratios, benchmarks weighted equally, each request "
        "served by both systems in both orders. A tuned system is promoted if the lower bound of "
        "its gain exceeds one plus the base plus twice the A/A noise.",
    ),
    MethodNote(
        "Losslessness",
        "The very answers that were timed are forced through plain decoding on the BF16 weights. "
        "A mismatch is a token that is not that pass's argmax. The rate rule compares the "
        "mismatch rate with stock's, the event rule looks for mismatches far from a near-tie that "
        "stock does not make too.",
    ),
    CEILING_METHOD,
)


def render_recipe_page(result: RecipeResult, envelope: Envelope) -> str:
    """The page for `result`; `envelope` gives inputs, environment and the embedded data."""
    recipe = result.loaded.recipe
    return render_report(
        ReportData(
            title=recipe.title,
            verdict=Verdict(
                result.verdict,
                _OUTCOMES[result.verdict],
                verdict_sentence(result)[0].upper() + verdict_sentence(result)[1:] + ".",
            ),
            command=shlex.join(["specpilot", *sys.argv[1:]]),
            specpilot_version=envelope.specpilot_version,
            machine=result.measured.profile.device.name,
            created=datetime.now(UTC),
            key_figures=tuple(_key_figures(result)),
            caveats=tuple(_caveats(result)),
            inputs=tuple(InputHash(item.path, item.sha256) for item in envelope.inputs),
            numbers=tuple(_tables(result)),
            figures=tuple(_figures(result)),
            method=_METHOD,
            environment=environment_rows(envelope.environment),
            data=envelope.model_dump(mode="python"),
        )
    )


def _condition(result: RecipeResult) -> str:
    regime = result.loaded.recipe.regime
    threads = "1 thread" if regime.threads == 1 else f"{regime.threads} threads"
    return (
        f"{result.loaded.recipe.name} on {result.measured.profile.device.name}, {threads}, "
        f"{regime.dtype}, requests in flight: {regime.requests}"
    )


def _key_figures(result: RecipeResult) -> Iterator[KeyFigure]:
    summary, measured = result.bench.summary, result.measured
    if summary.gain is not None:
        yield KeyFigure(
            "gain over stock", f"{summary.gain.gain_ratio:.3f}×", interval_text(summary.gain)
        )
    for system, label in ((CANDIDATE, "tuned over plain"), (BASELINE, "stock over plain")):
        found = over_ar(result, system)
        if found is not None:
            yield KeyFigure(label, f"{found.overall.gain_ratio:.2f}×", interval_text(found.overall))
    tau = {system.name: system.tau for system in summary.systems}
    if tau.get(BASELINE) is not None and tau.get(CANDIDATE) is not None:
        yield KeyFigure(
            "tokens per step", f"{tau[CANDIDATE]:.2f}", f"stock {tau[BASELINE]:.2f}, unseen prompts"
        )
    yield KeyFigure("ceiling of stock", f"{measured.ceiling.factors.product:.2f}×")
    if result.audit is not None:
        yield KeyFigure(
            "mismatches", f"{result.audit.system.rate:.3%}", f"stock {result.audit.stock.rate:.3%}"
        )
    if measured.projection is not None:
        best, stock = measured.projection.best, measured.projection.stock
        yield KeyFigure(
            f"at step times of {measured.projection.curve.device.name}",
            f"{best.speedup / stock.speedup:.2f}×",
            f"over stock, {best.n_nodes} nodes, {best.basis}",
            basis="projected",
        )


def _caveats(result: RecipeResult) -> Iterator[str]:
    yield from result.reasons if result.verdict != "promote" else ()
    if result.settings.fault is not None:
        yield f"deliberate fault in the tuned system: {result.settings.fault.describe()}"
    noise = result.bench.summary.noise
    if noise is not None:
        yield f"noise: {noise_text(noise)}"
    yield from result.bench.summary.warnings
    if result.audit is not None:
        yield from result.audit.warnings
    if result.measured.projection is not None:
        yield (
            "the projection combines τ of this pair with step times of another model and machine; "
            "it says what the same trees would be worth there, not what they were measured to be"
        )


def _tables(result: RecipeResult) -> Iterator[ReportTable]:
    summary, measured = result.bench.summary, result.measured
    if summary.gain is not None:
        yield benchmark_table(summary)
        yield over_ar_table(summary)
        yield system_table(summary)
    yield from adapters.ceiling_tables(measured.ceiling)
    advice = advise(measured.ceiling, best_nodes=measured.chosen.n_nodes)
    yield ReportTable(
        "What to try next", ("finding", "next step"), ((advice.headline, advice.next_step),)
    )
    yield ReportTable(
        "Node budget: stock chain first, then best-first trees, step times of this run",
        adapters.SPEEDUP_COLUMNS,
        tuple(adapters.speedup_rows([measured.stock_point, *measured.points])),
    )
    if measured.projection is not None:
        projection = measured.projection
        yield ReportTable(
            f"Projected: the same τ(N) at the step times of {projection.curve.device.name}",
            adapters.SPEEDUP_COLUMNS,
            tuple(adapters.speedup_rows([projection.stock, *projection.points])),
            projection.curve.source,
        )


def _figures(result: RecipeResult) -> Iterator[ReportFigure]:
    measured, summary, condition = result.measured, result.bench.summary, _condition(result)
    yield tau_curve.draw(
        adapters.tau_curve_data(
            measured.trees,
            f"{condition}; trajectory replay of {measured.trees.n_requests} dev prompts",
            stock=measured.stock_row,
            chosen_nodes=measured.chosen.n_nodes,
        )
    )
    panels = [
        adapters.speedup_panel(
            measured.points, measured.stock_point, heading="this machine", projected=False
        )
    ]
    if measured.projection is not None:
        projection = measured.projection
        panels.append(
            adapters.speedup_panel(
                projection.points,
                projection.stock,
                heading=projection.curve.device.name,
                projected=True,
            )
        )
    yield speedup_curve.draw(
        speedup_curve.SpeedupCurveData(tuple(panels), "τ from replay, c from timed steps")
    )
    peaks = adapters.peaks_text(measured.ceiling, measured.profile.dtype)
    yield step_waterfall.draw(adapters.waterfall_data(measured.ceiling, f"{condition}; {peaks}"))
    yield ceiling_factors.draw(adapters.factors_data(measured.ceiling, condition))
    if summary.gain is not None:
        yield forest.draw(
            forest_data(summary, condition=condition, system="tuned", baseline="stock chain")
        )
    if result.audit is not None and result.audit.rate is not None:
        yield mismatch_bars.draw(adapters.mismatch_data([("tuned", result.audit)], condition))
