"""From results of the domain packages to the plain data that figures take.

Figures know nothing of the domain; whoever has a result in hand comes through here.
"""

from __future__ import annotations

from collections.abc import Sequence

from specpilot_cli.ceiling.advice import LEADERS, overhead_note
from specpilot_cli.ceiling.answer import CeilingAnswer
from specpilot_cli.ceiling.factors import Ceiling
from specpilot_cli.ceiling.floors import ClassFloor
from specpilot_cli.ceiling.levers import Lever
from specpilot_cli.ceiling.speedup import SpeedupPoint
from specpilot_cli.ceiling.what_if import WhatIf
from specpilot_cli.replay.result import ReplayResult, ReplayRow
from specpilot_cli.report.figures.ceiling_factors import FactorsData
from specpilot_cli.report.figures.mismatch_bars import MismatchBar, MismatchData
from specpilot_cli.report.figures.speedup_curve import SpeedupMark, SpeedupPanel
from specpilot_cli.report.figures.step_waterfall import ClassTime, WaterfallData
from specpilot_cli.report.figures.tau_curve import TauCurveData, TauSeries, TreeKind
from specpilot_cli.report.html import ReportTable
from specpilot_cli.token_force.result import TokenForceResult
from specpilot_cli.token_force.rules import RateSummary
from specpilot_cli.units import format_bandwidth, format_flops, format_percent, format_seconds

_TREE_KINDS: dict[str, TreeKind] = {
    "best-first": "best_first",
    "marginal": "marginal",
    "eagle-2": "eagle_2",
    "sequoia": "sequoia",
    "cost-aware": "cost_aware",
    "opt-tree": "opt_tree",
}


def peaks_text(ceiling: Ceiling, dtype: str = "") -> str:
    """One phrase: which shares of which peaks the floors use."""
    bandwidth = ceiling.peaks.bandwidth()
    text = (
        f"floors at {format_percent(ceiling.rule.byte_fraction, digits=0)} of "
        f"{format_bandwidth(bandwidth.value)} ({bandwidth.kind})"
    )
    rates = ceiling.peaks.rates.flops_per_s
    known = next((name for name in rates if name == dtype), None)
    if known is None:
        return text
    number = ceiling.peaks.compute(known)
    return (
        f"{text} and {format_percent(ceiling.rule.flop_fraction, digits=0)} of "
        f"{format_flops(number.value)} ({number.kind})"
    )


def waterfall_data(
    ceiling: Ceiling, condition: str, *, split: Sequence[tuple[str, float]] = ()
) -> WaterfallData:
    """The waterfall of `ceiling`; `split` parts the step by the engine's passes."""
    return WaterfallData(
        t_step_s=ceiling.t_step_s,
        t_prof_s=ceiling.t_prof_s,
        classes=tuple(ClassTime(c.name, c.measured_s, c.floor_s) for c in ceiling.classes),
        condition=condition,
        split=tuple(split),
    )


def factors_data(
    ceiling: Ceiling, condition: str, *, system: str = "the measured system"
) -> FactorsData:
    """The three factors of `ceiling`; `system` is what was profiled."""
    factors = ceiling.factors
    return FactorsData(factors.tau, factors.kernel, factors.overhead, condition, system)


def tau_curve_data(
    trees: ReplayResult,
    condition: str,
    *,
    stock: ReplayRow,
    chosen_nodes: int | None = None,
) -> TauCurveData:
    """τ against nodes of the tree policies in `trees`, with its oracle if it was replayed.

    `stock` is the chain's row at the block that stock drafts; it may come from another replay,
    since stock's block is often shorter than the trees'.
    """
    series = []
    for policy, kind in _TREE_KINDS.items():
        rows = [row for row in trees.rows if row.policy == policy and row.nodes is not None]
        if not rows:
            continue
        with_bounds = all(row.tau.low is not None and row.tau.high is not None for row in rows)
        series.append(
            TauSeries(
                kind=kind,
                label=policy,
                nodes=tuple(row.nodes or 0 for row in rows),
                tau=tuple(row.tau.value for row in rows),
                low=tuple(row.tau.low or 0.0 for row in rows) if with_bounds else (),
                high=tuple(row.tau.high or 0.0 for row in rows) if with_bounds else (),
            )
        )
    oracle = next((row for row in trees.rows if row.policy == "oracle"), None)
    return TauCurveData(
        series=tuple(series),
        stock_tau=stock.tau.value,
        stock_nodes=stock.nodes or 0,
        oracle_tau=None if oracle is None else oracle.tau.value,
        condition=condition,
        chosen_nodes=chosen_nodes,
    )


def speedup_panel(
    points: Sequence[SpeedupPoint], stock: SpeedupPoint, *, heading: str, projected: bool
) -> SpeedupPanel:
    """One panel of the speedup curve from Eq. 3 points under one step-time curve."""
    return SpeedupPanel(heading, projected, tuple(_mark(p) for p in points), _mark(stock))


def _mark(point: SpeedupPoint) -> SpeedupMark:
    return SpeedupMark(point.n_nodes, point.tau, point.c, point.speedup, point.basis)


def factor_rows(ceiling: Ceiling) -> list[tuple[str, str, str]]:
    """Name, ratio and origin of each factor of Eq. 4 and of their product, as text."""
    factors = ceiling.factors
    tau = ("–", "not evaluated") if factors.tau is None else (
        f"{factors.tau:.3f}×", f"τ {ceiling.tau:.3f} → {ceiling.tau_best:.3f} tokens per step"
    )  # fmt: skip
    step, prof, floor = (
        format_seconds(s) for s in (ceiling.t_step_s, ceiling.t_prof_s, ceiling.t_floor_s)
    )
    name = "ceiling" if factors.tau is not None else "step cost (τ factor missing)"
    noise = f"{step} plain, {prof} profiled: noise, no overhead seen"
    return [
        ("tokens (best τ / τ)", *tau),
        ("kernels (profile / floors)", f"{factors.kernel:.3f}×", f"{prof} → {floor}"),
        (
            "overhead (step / profile)",
            f"{factors.overhead:.3f}×",
            f"{step} → {prof}" if ceiling.overhead_s >= 0 else noise,
        ),
        (name, f"{factors.product:.3f}×", LEADERS[factors.leading]),
    ]


def leading_text(ceiling: Ceiling) -> str:
    """Which factor leads, with its ratio: a short note under the ceiling."""
    factors = ceiling.factors
    value = {"tau": factors.tau, "kernel": factors.kernel, "overhead": factors.overhead}
    word = {"tau": "tokens lead", "kernel": "kernels lead", "overhead": "overhead leads"}
    return f"{word[factors.leading]} with {value[factors.leading]:.2f}×"


CLASS_COLUMNS = ("kernel class", "calls", "measured", "floor", "above", "bound by", "of the step")


def class_rows(ceiling: Ceiling) -> list[tuple[str, ...]]:
    """One row of text per kernel class, then gaps and overhead; see `CLASS_COLUMNS`.

    Profiled steps slower than the plain ones leave no row: a time below zero is no part of a step,
    and `overhead_note` says what it is.
    """

    def row(name: str, calls: str, seconds: float, floor: float, bound: str) -> tuple[str, ...]:
        share = format_percent(seconds / ceiling.t_step_s)
        above = format_seconds(seconds - floor)
        least = format_seconds(floor) if floor > 0 else "–"
        return (name, calls, format_seconds(seconds), least, above, bound, share)

    def of_class(item: ClassFloor) -> tuple[str, ...]:
        bound = "not counted" if item.bound == "measured" else item.bound
        return row(item.name, f"{item.calls:g}", item.measured_s, item.floor_s, bound)

    rows = [of_class(item) for item in ceiling.classes]
    rows.append(row("gaps in the profile", "–", ceiling.unattributed_s, 0.0, "–"))
    if ceiling.overhead_s >= 0:
        rows.append(row("outside the profile", "–", ceiling.overhead_s, 0.0, "–"))
    return rows


def mismatch_data(
    results: Sequence[tuple[str, TokenForceResult]], condition: str, *, stock: str = "stock"
) -> MismatchData:
    """Stock and every judged system, named, from token-forcing results against the same stock.

    Raises `ValueError` for no results, or for one whose measurement was invalid.
    """
    if not results:
        raise ValueError("no token-forcing result to draw")
    bars: list[MismatchBar] = []
    limit = 0.0
    for name, result in results:
        if result.rate is None or result.events is None:
            raise ValueError(f"token forcing of {name} was invalid, so it has no limit to draw")
        if not bars:
            limit = result.stock.rate + result.rate.paper.margin
            bars.append(_bar(stock, result.stock, result.events.stock.n_unexplained, None))
        events = result.events.system.n_unexplained
        rules = (("rate rule", result.rate.rejects), ("event rule", result.events.rejects))
        by = " and the ".join(rule for rule, rejects in rules if rejects)
        bars.append(_bar(name, result.system, events, result.verdict, by))
    return MismatchData(tuple(bars), limit, condition)


def _bar(
    label: str, rates: RateSummary, events: int, verdict: str | None, by: str = ""
) -> MismatchBar:
    return MismatchBar(
        label, rates.rate, rates.low, rates.high, rates.n_tokens, events, verdict, by
    )


LEVER_COLUMNS = ("mechanism", "speedup, projected", "arithmetic", "assumes")


def lever_rows(levers: Sequence[Lever]) -> list[tuple[str, ...]]:
    """One row of text per mechanism; see `LEVER_COLUMNS`."""
    return [(item.name, _gain(item), item.arithmetic, item.assumes) for item in levers]


def _gain(lever: Lever) -> str:
    if lever.high is None:
        return "–"
    if lever.low is None:
        return f"up to {lever.high:.2f}×"
    same = f"{lever.low:.2f}" == f"{lever.high:.2f}"
    return f"{lever.high:.2f}×" if same else f"{lever.low:.2f}× – {lever.high:.2f}×"


WHAT_IF_COLUMNS = ("kernel class", "here", "there, projected", "floor there")


def what_if_rows(found: WhatIf) -> list[tuple[str, ...]]:
    """One row of text per class and one for the step; see `WHAT_IF_COLUMNS`."""
    rows = [
        (
            item.name,
            format_seconds(item.measured_s),
            format_seconds(item.projected_s),
            "–" if item.floor_s is None else format_seconds(item.floor_s),
        )
        for item in found.classes
    ]
    return [*rows, ("step", format_seconds(found.here_s), format_seconds(found.t_step_s), "–")]


def what_if_text(found: WhatIf) -> str:
    """One sentence: where, how fast, and what it assumes."""
    ratio = f"{found.speedup:.2f}" if found.speedup >= 0.1 else f"{found.speedup:.2g}"
    return (
        f"{found.target} on {found.device}: {ratio}× as many steps a second "
        f"(projected; {found.assumes})"
    )


def split_rows(split: Sequence[tuple[str, float]], t_step_s: float) -> list[tuple[str, ...]]:
    """Name, time and share of the step."""
    return [
        (name, format_seconds(value) if value > 0 else "–", format_percent(value / t_step_s))
        for name, value in split
    ]


SPEEDUP_COLUMNS = ("nodes", "rows", "τ", "step", "c (break-even τ)", "S = τ / c", "step time")


def speedup_title(answer: CeilingAnswer) -> str:
    """Under whose step times the speedups are, and whether anybody ran the two together."""
    name = "" if answer.curve is None else f" at the step times of {answer.curve.name}"
    label = ", projected" if answer.projected_because else ""
    return f"speedup over plain decoding{name}{label}"


def speedup_rows(points: Sequence[SpeedupPoint]) -> list[tuple[str, ...]]:
    """One row of text per node budget; see `SPEEDUP_COLUMNS`."""
    return [
        (
            str(point.n_nodes),
            str(point.rows),
            f"{point.tau:.3f}",
            format_seconds(point.step_s),
            f"{point.c:.3f}",
            f"{point.speedup:.3f}",
            point.basis,
        )
        for point in points
    ]


def ceiling_tables(ceiling: Ceiling) -> tuple[ReportTable, ReportTable]:
    """Factors and kernel classes as tables of a report."""
    note = overhead_note(ceiling)
    about = "" if note is None else f"{note[0].upper()}{note[1:]}."
    return (
        ReportTable("Ceiling", ("factor", "ratio", "from"), tuple(factor_rows(ceiling)), about),
        ReportTable("Kernel classes of one step", CLASS_COLUMNS, tuple(class_rows(ceiling))),
    )
