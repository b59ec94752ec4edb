"""The HTML page of `specpilot apply recipe`: verdict, numbers, figures, method."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from datetime import UTC, datetime

from specpilot_cli.apply.reference.run import RecipeResult
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
from specpilot_cli.report.figures.base import ReportFigure, sentence
from specpilot_cli.report.html import (
    InputHash,
    KeyFigure,
    MethodNote,
    ReportData,
    Verdict,
    environment_rows,
    render_report,
)
from specpilot_cli.report.paired_bench_tables import forest_data, interval_text, noise_text
from specpilot_cli.report.recipe_tables import recipe_tables
from specpilot_cli.report.recipe_text import over_ar, verdict_sentence
from specpilot_cli.report.recipe_words import OUTCOMES, fault_text, projection_notes, system_names
from specpilot_cli.schema.result import Envelope
from specpilot_cli.units import format_percent

_METHOD = (
    MethodNote(
        "Order of work",
        "Lattices and step times come from dev prompts; the node budget is the one with the "
        "largest τ(N) / c(N) there, τ as the geometric mean over benchmarks, which is how the gate "
        "weighs them. Both gates then see unseen prompts only.\n"
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
                OUTCOMES[result.verdict],
                f"{sentence(verdict_sentence(result))}.",
                tuple(_reasons(result)),
            ),
            command=shlex.join(["specpilot", *sys.argv[1:]]),
            specpilot_version=envelope.specpilot_version,
            machine=result.measured.profile.device.name,
            created=datetime.now(UTC),
            alerts=tuple(_alerts(result)),
            key_figures=tuple(_key_figures(result)),
            caveats=tuple(_caveats(result)),
            inputs=tuple(InputHash(item.path, item.sha256) for item in envelope.inputs),
            numbers=tuple(recipe_tables(result)),
            figures=tuple(_figures(result)),
            method=_METHOD,
            environment=environment_rows(envelope.environment),
            data=envelope.model_dump(mode="python"),
        )
    )


def _reasons(result: RecipeResult) -> Iterator[str]:
    """Why not; a promotion's reason stands under its gain."""
    if result.verdict != "promote":
        names = system_names(result)
        yield from (names.in_words(reason) for reason in dict.fromkeys(result.reasons))


def _alerts(result: RecipeResult) -> Iterator[str]:
    if result.settings.fault is not None:
        yield (
            "This run carries a deliberate fault, to see whether the audit catches it: the tuned "
            f"system, called faulty below, puts {fault_text(result.settings.fault)}. Its gain and "
            "its mismatches say nothing about the mechanisms."
        )


def _condition(result: RecipeResult) -> str:
    regime = result.loaded.recipe.regime
    threads = "1 thread" if regime.threads == 1 else f"{regime.threads} threads"
    return (
        f"{result.loaded.recipe.name} on {result.measured.profile.device.name}, {threads}, "
        f"{regime.dtype}, requests in flight: {regime.requests}"
    )


def _gate_condition(result: RecipeResult) -> str:
    """The condition of what the tuned system's own tokens decide."""
    fault = "" if result.settings.fault is None else "; WITH A DELIBERATE FAULT"
    return f"{_condition(result)}, unseen prompts{fault}"


def _key_figures(result: RecipeResult) -> Iterator[KeyFigure]:
    yield from _gain_figures(result)
    summary, measured, names = result.bench.summary, result.measured, system_names(result)
    tau = {system.name: system.tau for system in summary.systems}
    now, before = tau.get(CANDIDATE), tau.get(BASELINE)
    if now is not None and before is not None:
        yield KeyFigure(
            f"tokens per step, {names.candidate}", f"{now:.2f}",
            f"stock {before:.2f}, unseen prompts",
        )  # fmt: skip
    if result.audit is not None:
        yield KeyFigure(
            f"mismatches, {names.candidate}",
            format_percent(result.audit.system.rate, digits=2),
            f"stock {format_percent(result.audit.stock.rate, digits=2)}\n"
            f"token forcing: {result.audit.verdict}",
        )
    yield KeyFigure(
        "ceiling of stock",
        f"{measured.ceiling.factors.product:.2f}×",
        adapters.leading_text(measured.ceiling),
    )
    if measured.projection is not None:
        best, stock = measured.projection.best, measured.projection.stock
        yield KeyFigure(
            f"at step times of {measured.projection.curve.device.name}",
            f"{best.speedup / stock.speedup:.2f}×",
            f"tree of {best.n_nodes} nodes over stock\n{best.basis} step time",
            basis="projected",
        )


def _gain_figures(result: RecipeResult) -> Iterator[KeyFigure]:
    summary, names = result.bench.summary, system_names(result)
    if summary.gain is not None:
        note = f"interval {interval_text(summary.gain, digits=3)}"
        if summary.decision is not None:
            decision = summary.decision
            note += f"\nlower bound {decision.lower_bound_ratio:.3f}×"
            note += f"\nmust exceed bound {decision.bound_ratio:.3f}×"
        if result.verdict == "reject":
            note += "\nnot claimed: rejected"
        yield KeyFigure(
            f"gain, {names.candidate} over stock", f"{summary.gain.gain_ratio:.3f}×", note
        )
    for system in (CANDIDATE, BASELINE):
        found = over_ar(result, system)
        if found is not None:
            yield KeyFigure(
                f"{names.of(system)} over plain decoding",
                f"{found.overall.gain_ratio:.2f}×",
                f"interval {interval_text(found.overall, digits=2)}",
            )


def _caveats(result: RecipeResult) -> Iterator[str]:
    summary, names = result.bench.summary, system_names(result)
    if summary.noise is not None:
        yield f"A/A noise: {noise_text(summary.noise, names=names)}"
    yield from (names.in_words(warning) for warning in summary.warnings)
    if result.audit is not None:
        yield from result.audit.warnings
    if result.measured.projection is not None:
        yield from projection_notes(result.measured.projection)


def _figures(result: RecipeResult) -> Iterator[ReportFigure]:
    """The gates first, then where the speed comes from."""
    measured, summary, condition = result.measured, result.bench.summary, _condition(result)
    names, gates = system_names(result), _gate_condition(result)
    if summary.gain is not None:
        remark = "token forcing rejects it, so no gain is claimed"
        yield forest.draw(
            forest_data(
                summary, condition=gates, names=names,
                remark=remark if result.verdict == "reject" else "",
            )
        )  # fmt: skip
    if result.audit is not None and result.audit.rate is not None:
        yield mismatch_bars.draw(adapters.mismatch_data([(names.candidate, result.audit)], gates))
    yield tau_curve.draw(
        adapters.tau_curve_data(
            measured.trees,
            f"{condition}; trajectory replay of {measured.trees.n_requests} dev prompts, all steps "
            "pooled",
            stock=measured.stock_row,
            chosen_nodes=measured.chosen.n_nodes,
        )
    )
    yield _speedup_figure(result)
    peaks = adapters.peaks_text(measured.ceiling, measured.profile.dtype)
    yield step_waterfall.draw(adapters.waterfall_data(measured.ceiling, f"{condition}; {peaks}"))
    yield ceiling_factors.draw(adapters.factors_data(measured.ceiling, condition, system="stock"))


def _speedup_figure(result: RecipeResult) -> ReportFigure:
    measured = result.measured
    panels = [
        adapters.speedup_panel(
            measured.points, measured.stock_point, heading="this machine", projected=False
        )
    ]
    about = "τ from replay of dev prompts; step times timed in this run"
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
        last = projection.curve.points[-1].rows
        about += (
            f"; on {projection.curve.device.name} recorded with {projection.curve.target.name}, "
            f"up to {last} rows ({last - 1} nodes)"
        )
    return speedup_curve.draw(speedup_curve.SpeedupCurveData(tuple(panels), about))
