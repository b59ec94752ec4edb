"""The HTML page of `specpilot apply recipe` for SGLang: verdict, servers, memory, gates."""

from __future__ import annotations

import importlib.util
import shlex
import sys
from collections.abc import Iterator
from datetime import UTC, datetime

from specpilot_cli.apply.sglang.run import RunningSystem, SglangResult
from specpilot_cli.engines.sglang.memory_plan import MemoryPlan
from specpilot_cli.report import adapters
from specpilot_cli.report.figures.base import ReportFigure, sentence
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
from specpilot_cli.report.paired_bench_tables import (
    SystemNames,
    benchmark_table,
    forest_data,
    interval_text,
    latency_table,
    noise_text,
    over_ar_table,
    system_table,
)
from specpilot_cli.report.recipe_tables import audit_tables
from specpilot_cli.report.recipe_words import OUTCOMES
from specpilot_cli.report.sglang_text import SENTENCES, kv_growth, running_row
from specpilot_cli.schema.result import Envelope
from specpilot_cli.units import format_bytes, format_percent

NAMES = SystemNames("stock", "tuned", "plain")
_METHOD = (
    MethodNote(
        "Servers",
        "Every server was started from the recipe's arguments and believed only after its "
        "handshake: its version, its model, its drafter, and each mechanism as active and read "
        "from this run's configuration. Stock had the plugin off.",
    ),
    MethodNote(
        "Memory",
        "Planned sizes follow the way SGLang divides a GPU; beside them stands what SGLang "
        "reported after the start.",
    ),
    MethodNote(
        "Gates",
        "Gains are geometric means of per-request ratios on unseen prompts, each request served by "
        "both systems in both orders. The very answers that were timed are then forced through "
        "plain decoding on the BF16 weights.",
    ),
)


def render_sglang_page(result: SglangResult, envelope: Envelope) -> str:
    """The page for `result`; `envelope` gives inputs, environment and the embedded data."""
    checked = result.checked
    return render_report(
        ReportData(
            title=checked.loaded.recipe.title,
            verdict=_verdict(result),
            command=shlex.join(["specpilot", *sys.argv[1:]]),
            specpilot_version=envelope.specpilot_version,
            machine=checked.device.name,
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


def _verdict(result: SglangResult) -> Verdict:
    verdict = result.verdict
    if verdict is None:
        text = "Every server ran what it was asked to; nothing was judged."
        return Verdict("not judged", "none", text, result.reasons)
    reasons = () if verdict == "promote" else tuple(dict.fromkeys(result.reasons))
    return Verdict(
        verdict, OUTCOMES[verdict], f"{sentence(SENTENCES[verdict])}.",
        tuple(NAMES.in_words(reason) for reason in reasons),
    )  # fmt: skip


def _key_figures(result: SglangResult) -> Iterator[KeyFigure]:
    growth = kv_growth(result)
    if growth is not None:
        yield KeyFigure("KV pool, tuned over stock", f"{growth:.3f}×", "as SGLang reports both")
    if result.bench is not None and result.bench.summary.gain is not None:
        gain = result.bench.summary.gain
        note = f"interval {interval_text(gain, digits=3)}"
        if result.verdict == "reject":
            note += "\nnot claimed: rejected"
        yield KeyFigure("gain, tuned over stock", f"{gain.gain_ratio:.3f}×", note)
    if result.audit is not None:
        yield KeyFigure(
            "mismatches, tuned",
            format_percent(result.audit.system.rate, digits=2),
            f"stock {format_percent(result.audit.stock.rate, digits=2)}\n"
            f"token forcing: {result.audit.verdict}",
        )


def _caveats(result: SglangResult) -> Iterator[str]:
    if result.bench is None:
        return
    if not result.checked.together:
        yield (
            "the servers took turns, each started again for its turn: noise between launches "
            "falls on the gain, and the A/A sessions do not see it"
        )
    summary = result.bench.summary
    if summary.noise is not None:
        yield f"A/A noise: {noise_text(summary.noise, names=NAMES)}"
    yield from (NAMES.in_words(warning) for warning in summary.warnings)
    if result.audit is not None:
        yield from result.audit.warnings
    if importlib.util.find_spec("matplotlib") is None:
        yield "figures are missing: they need matplotlib (the extra `report`)"


def _tables(result: SglangResult) -> Iterator[ReportTable]:
    if result.bench is not None and result.bench.summary.gain is not None:
        summary = result.bench.summary
        yield benchmark_table(summary, names=NAMES)
        if summary.over_ar:
            yield over_ar_table(summary, names=NAMES)
        yield system_table(summary, names=NAMES)
        yield latency_table(summary, names=NAMES)
    if result.audit is not None:
        yield from audit_tables(result.audit, NAMES)
    yield ReportTable(
        "Servers as they said they ran",
        ("server", "mechanisms", "weights", "KV tokens", "planned"),
        tuple(running_row(running) for running in result.systems),
    )
    yield from (_commands(running) for running in result.systems)
    yield from (_memory(one.planned.system.label, one.planned.memory) for one in result.systems)


def _commands(running: RunningSystem) -> ReportTable:
    system = running.planned.system
    rows = [("command", f"`{shlex.join(system.command(0))}`")]
    rows += [(f"`{name}`", f"`{value}`") for name, value in system.environment().items() if value]
    return ReportTable(
        f"How the {system.label} server was started", ("what", "value"), tuple(rows),
        note="The port is written as 0; a free one was taken, or the one that was asked for.",
    )  # fmt: skip


def _memory(label: str, plan: MemoryPlan) -> ReportTable:
    parts = (*plan.parts, *plan.outside)
    return ReportTable(
        f"Memory planned for the {label} server",
        ("part", "size", "how"),
        tuple((part.name, format_bytes(part.n_bytes), part.how) for part in parts),
        note=f"{plan.device.name}, {format_bytes(plan.device.memory_bytes)}: {plan.device.source}",
    )


def _figures(result: SglangResult) -> Iterator[ReportFigure]:
    if result.bench is None or importlib.util.find_spec("matplotlib") is None:
        return
    from specpilot_cli.report.figures import forest, mismatch_bars

    recipe = result.checked.loaded.recipe
    condition = (
        f"{recipe.name} on {result.checked.device.name}, requests in flight: "
        f"{recipe.regime.requests}, unseen prompts"
    )
    if result.bench.summary.gain is not None:
        rejected = result.verdict == "reject"
        remark = "token forcing rejects it, so no gain is claimed" if rejected else ""
        data = forest_data(result.bench.summary, condition=condition, names=NAMES, remark=remark)
        yield forest.draw(data)
    if result.audit is not None and result.audit.rate is not None:
        bars = adapters.mismatch_data([(NAMES.candidate, result.audit)], condition)
        yield mismatch_bars.draw(bars)
