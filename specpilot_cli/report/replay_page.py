"""The HTML page of `specpilot replay`."""

from __future__ import annotations

import shlex
import sys
from datetime import UTC, datetime

from specpilot_cli.replay.document import END_OF_OUTPUT, INTERVAL_METHOD
from specpilot_cli.replay.result import ReplayResult, ReplayRow
from specpilot_cli.report import adapters
from specpilot_cli.report.figures import accepted_lengths, tau_curve
from specpilot_cli.report.figures.base import ReportFigure
from specpilot_cli.report.html import (
    InputHash,
    KeyFigure,
    MethodNote,
    ReportData,
    ReportTable,
    Verdict,
    environment_rows,
    render_report,
)
from specpilot_cli.report.replay_text import COST_COLUMNS, cost_rows, cost_title
from specpilot_cli.schema.result import Envelope

_METHOD = MethodNote(
    "Exact replay",
    "Greedy verification accepts a draft only where it is the target's own next token, and the "
    "recording holds those. So each policy's trees are rebuilt from the recorded candidates and "
    "walked along the recorded output. τ is total tokens over total steps; the first output token "
    "comes from prefill and is not counted.\n"
    "\n"
    f"End of output: {END_OF_OUTPUT}. Intervals: {INTERVAL_METHOD}.",
)
_TREES = ("best-first", "marginal", "eagle-2", "sequoia", "cost-aware", "opt-tree")


def render_replay_page(result: ReplayResult, condition: str, envelope: Envelope) -> str:
    """The page; `condition` names the recording, `envelope` gives inputs and environment."""
    lead, chain = _lead(result), _chain(result)
    if lead is None:
        sentence = "No tree policy was replayed."
    else:
        sentence = (
            f"A {lead.policy} tree of {lead.nodes} nodes accepts {lead.gain.value:.2f}× the tokens "
            f"of the stock chain: {lead.tau.value:.2f} per step."
        )
    return render_report(
        ReportData(
            title="Tokens per step in replay",
            verdict=Verdict(f"{result.mode} replay", "none", sentence, (result.bias,)),
            command=shlex.join(["specpilot", *sys.argv[1:]]),
            specpilot_version=envelope.specpilot_version,
            machine="no machine: replay of a recording",
            created=datetime.now(UTC),
            key_figures=_key_figures(lead, chain, result),
            inputs=tuple(InputHash(item.path, item.sha256) for item in envelope.inputs),
            numbers=_tables(result),
            figures=draw_figures(result, condition),
            method=(_METHOD,),
            environment=environment_rows(envelope.environment),
            data=envelope.model_dump(mode="python"),
        )
    )


def draw_figures(result: ReplayResult, condition: str) -> tuple[ReportFigure, ...]:
    """τ against nodes and the accepted-length histogram, each where its rows were replayed."""
    lead, chain = _lead(result), _chain(result)
    if lead is None or chain is None:
        return ()
    curve = adapters.tau_curve_data(result, condition, stock=chain, chosen_nodes=lead.nodes)
    figures = [tau_curve.draw(curve)]
    if lead.lengths is not None and chain.lengths is not None:
        tree = f"a {lead.policy} tree of {lead.nodes} nodes"
        data = accepted_lengths.LengthData(
            accepted_lengths.LengthSeries(tree, tuple(lead.lengths.tolist())),
            accepted_lengths.LengthSeries("stock chain", tuple(chain.lengths.tolist())),
            condition,
        )
        figures.append(accepted_lengths.draw(data))
    return tuple(figures)


def _lead(result: ReplayResult) -> ReplayRow | None:
    """The row that titles compare: the first tree policy at 32 nodes, or at its largest budget."""
    for policy in _TREES:
        rows = [row for row in result.rows if row.policy == policy]
        if rows:
            return next((row for row in rows if row.nodes == 32), rows[-1])
    return None


def _chain(result: ReplayResult) -> ReplayRow | None:
    rows = [row for row in result.rows if row.policy == "chain"]
    return rows[-1] if rows else None


def _key_figures(
    lead: ReplayRow | None, chain: ReplayRow | None, result: ReplayResult
) -> tuple[KeyFigure, ...]:
    oracle = next((row for row in result.rows if row.policy == "oracle"), None)
    found = []
    for label, row in (("stock chain", chain), ("tree", lead), ("oracle", oracle)):
        if row is not None:
            note = row.policy if row.nodes is None else f"{row.policy}, {row.nodes} nodes"
            found.append(KeyFigure(f"τ, {label}", f"{row.tau.value:.2f}", note))
    found.append(KeyFigure("requests", str(result.n_requests), f"{result.n_anchors} lattices"))
    return tuple(found)


def _tables(result: ReplayResult) -> tuple[ReportTable, ...]:
    rows = tuple(
        (
            row.policy,
            "–" if row.nodes is None else str(row.nodes),
            f"{row.tau.value:.3f}",
            "–" if row.tau.low is None else f"{row.tau.low:.3f} – {row.tau.high:.3f}",
            f"{row.benchmark_mean.value:.3f}",
            f"{row.gain.value:.3f}×",
        )
        for row in result.rows
    )
    columns = ("policy", "nodes", "τ", "95 % interval", "benchmark mean", "over chain")
    tables = [ReportTable("Tokens per step", columns, rows, f"{result.mode}: {result.bias}")]
    costs = tuple(cost_rows(result))
    if costs:
        reasons = "; ".join(result.projected_because or ())
        about = f"Projected: {reasons}." if reasons else "Times and recording of one deployment."
        title = cost_title(result)
        tables.append(ReportTable(title[0].upper() + title[1:], COST_COLUMNS, costs, about))
    names = list(result.rows[0].benchmarks) if result.rows else []
    if len(names) > 1:
        cells = tuple(
            (
                row.policy,
                "–" if row.nodes is None else str(row.nodes),
                *(f"{row.benchmarks[name].value:.3f}" for name in names),
            )
            for row in result.rows
        )
        tables.append(ReportTable("By benchmark", ("policy", "nodes", *names), cells))
    return tuple(tables)
