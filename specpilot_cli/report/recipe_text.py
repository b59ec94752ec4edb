"""A recipe run as JSON results and in a terminal: before it starts, and when it is finished."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from specpilot_cli.apply.gates import RecipeVerdict
from specpilot_cli.apply.reference.dry_run import PlannedRun
from specpilot_cli.apply.reference.measure import Projection
from specpilot_cli.apply.reference.run import RecipeResult
from specpilot_cli.apply.reference.systems import SystemPlan
from specpilot_cli.ceiling.speedup import SpeedupPoint
from specpilot_cli.convert_w12.inspect import totals
from specpilot_cli.engines.reference.faults import LogitFault
from specpilot_cli.paired_bench.types import BASELINE, CANDIDATE, ArSpeedup
from specpilot_cli.replay.document import row_document
from specpilot_cli.report.adapters import SPEEDUP_COLUMNS, factor_rows, speedup_rows
from specpilot_cli.report.json_out import plain
from specpilot_cli.report.paired_bench_tables import benchmark_table, interval_text
from specpilot_cli.report.recipe_words import fault_text, system_names
from specpilot_cli.report.tables import print_line, print_pairs, print_table
from specpilot_cli.report.w12 import totals_object

_SENTENCES: dict[RecipeVerdict, str] = {
    "promote": "faster than stock beyond noise on unseen prompts, and lossless",
    "no": "lossless, but no gain over stock beyond the bound",
    "reject": "token forcing rejects the tuned system: its tokens are not the target's",
    "invalid": "the measurement carries no verdict",
}


def verdict_sentence(result: RecipeResult) -> str:
    """One sentence for the verdict."""
    return _SENTENCES[result.verdict]


def over_ar(result: RecipeResult, system: str) -> ArSpeedup | None:
    """Speedup of one system over plain decoding, if it was measured."""
    return next((s for s in result.bench.summary.over_ar if s.system == system), None)


def recipe_results(result: RecipeResult) -> dict[str, Any]:
    """The `results` object of the JSON envelope."""
    measured, recipe = result.measured, result.loaded.recipe
    return {
        "recipe": recipe.name,
        "title": recipe.title,
        "folder": str(result.folder),
        "phases_s": dict(result.phases_s),
        "wall_s": sum(result.phases_s.values()),
        "reasons": list(result.reasons),
        "fault": None if result.settings.fault is None else result.settings.fault.describe(),
        "w12": None
        if result.conversion is None
        else totals_object(totals(result.conversion.outcomes)),
        "systems": [_system(plan) for plan in result.systems],
        "replay": {
            "stock": row_document(measured.stock_row),
            "trees": [row_document(row) for row in measured.trees.rows],
        },
        "stock_point": _point(measured.stock_point),
        "budgets": [_point(point) for point in measured.points],
        "chosen": _point(measured.chosen),
        "predicted_gain_ratio": measured.chosen.speedup / measured.stock_point.speedup,
        "ceiling": {
            "tau_ratio": measured.ceiling.factors.tau,
            "kernel_ratio": measured.ceiling.factors.kernel,
            "overhead_ratio": measured.ceiling.factors.overhead,
            "product_ratio": measured.ceiling.factors.product,
            "leading": measured.ceiling.factors.leading,
        },
        "projection": None if measured.projection is None else _projection(measured.projection),
        "paired_bench": plain(result.bench.summary),
        "token_force": None
        if result.audit is None
        else {"verdict": result.audit.verdict, **result.audit.to_json()},
    }


def print_recipe(result: RecipeResult, report: str) -> None:
    """Ceiling, replay curve, gain per benchmark, then the closing lines and the report path."""
    measured, summary = result.measured, result.bench.summary
    print_table(
        ["factor", "ratio", "from"], factor_rows(measured.ceiling), title="Ceiling of stock"
    )
    print_table(
        list(SPEEDUP_COLUMNS),
        speedup_rows([measured.stock_point, *measured.points]),
        title="Tokens per step and step time: stock chain first, then best-first trees",
    )
    if summary.gain is not None:
        table = benchmark_table(summary, names=system_names(result))
        print_table(list(table.columns), list(table.rows), title=table.title)
    for line in closing_lines(result):
        print_line(line)
    print_line(f"report: {report}")


def closing_lines(result: RecipeResult) -> list[str]:
    """What a reader must see last: fault, budget, losslessness, gain, verdict."""
    chosen, names = result.measured.chosen, system_names(result)
    auto = result.checked.tree.nodes == "auto"
    lines = [] if result.settings.fault is None else [fault_line(result.settings.fault)]
    lines.append(
        f"tree: {chosen.n_nodes} nodes, {chosen.rows} rows, "
        f"{'largest τ / c of the run' if auto else 'fixed by the recipe'}"
    )
    if result.measured.projection is not None:
        lines.append(projection_line(result.measured.projection))
    for system in (CANDIDATE, BASELINE):
        found = over_ar(result, system)
        if found is not None:
            lines.append(
                f"{names.of(system)} over plain decoding: {found.overall.gain_ratio:.3f}× "
                f"{interval_text(found.overall)}"
            )
    if result.audit is not None:
        lines.append(
            f"token forcing: {result.audit.verdict}, mismatches {result.audit.system.rate:.3%} "
            f"(stock {result.audit.stock.rate:.3%})"
        )
    lines.extend(_gain_line(result))
    if result.verdict != "promote":
        lines.extend(f"why: {names.in_words(reason)}" for reason in result.reasons)
    lines.append(f"verdict: {result.verdict}, {verdict_sentence(result)}")
    return lines


def fault_line(fault: LogitFault) -> str:
    """That the numbers below are not the mechanism's own."""
    return f"deliberate fault in the tuned system: {fault_text(fault)}"


def _gain_line(result: RecipeResult) -> Iterator[str]:
    summary = result.bench.summary
    if summary.gain is None:
        return
    line = f"gain over stock: {summary.gain.gain_ratio:.4f}× {interval_text(summary.gain)}"
    if summary.decision is not None:
        line += f", bound {summary.decision.bound_ratio:.4f}×"
    if summary.noise is not None and summary.noise.provisional:
        n = len(summary.noise.sessions)
        line += f" ({n} A/A comparison{'s' if n > 1 else ''} only: provisional)"
    if result.verdict == "reject":
        line += ", not claimed: rejected"
    yield line


def projection_line(projection: Projection) -> str:
    """The projected gain with its condition; never to be read as a measurement."""
    best, stock = projection.best, projection.stock
    return (
        f"projected, not measured: this τ(N) at the step times of {projection.curve.device.name} "
        f"with {projection.curve.target.name}: {best.speedup / stock.speedup:.2f}× over stock at "
        f"{best.n_nodes} nodes ({best.basis} step time)"
    )


def _point(point: SpeedupPoint) -> dict[str, Any]:
    return {
        "nodes": point.n_nodes,
        "rows": point.rows,
        "tau_tokens_per_step": point.tau,
        "step_s": point.step_s,
        "c_ratio": point.c,
        "speedup_ratio": point.speedup,
        "basis": point.basis,
    }


def _projection(projection: Projection) -> dict[str, Any]:
    return {
        "projected": True,
        "step_times": projection.curve.name,
        "source": projection.curve.source,
        "stock": _point(projection.stock),
        "budgets": [_point(point) for point in projection.points],
        "best": _point(projection.best),
        "gain_ratio": projection.best.speedup / projection.stock.speedup,
    }


def _system(plan: SystemPlan) -> dict[str, Any]:
    return {"name": plan.name, "label": plan.label, **plan.describe()}


def print_plan(plan: PlannedRun) -> None:
    """What a run would do, one fact a line."""
    budgets = ", ".join(str(n) for n in plan.node_budgets)
    pairs: list[tuple[str, object]] = [
        ("folder", plan.folder),
        ("target", plan.target),
        ("drafter", plan.drafter),
        ("mechanisms", ", ".join(plan.mechanisms)),
        ("nodes", f"best of {budgets}" if plan.nodes is None else plan.nodes),
        ("dev prompts", plan.n_dev_prompts),
        ("unseen prompts", f"{plan.n_timed_prompts}, {plan.runs} runs"),
        ("A/A sessions", plan.aa_sessions),
        *((f"server {server.name}", server.command) for server in plan.servers),
    ]
    print_pairs(pairs, title=f"would run {plan.recipe}")
    if plan.fault is not None:
        print_line(fault_line(plan.fault))
