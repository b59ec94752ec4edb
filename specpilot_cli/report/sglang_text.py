"""SGLang recipes in a terminal and as JSON results: plans, running servers, verdicts, checks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specpilot_cli.apply.gates import RecipeVerdict
from specpilot_cli.apply.sglang.dry_run import PlannedServer, PlannedSglangRun
from specpilot_cli.apply.sglang.inspect import ServerCheck
from specpilot_cli.apply.sglang.run import RunningSystem, SglangResult
from specpilot_cli.engines.sglang.memory_plan import MemoryPlan, Part
from specpilot_cli.report.json_out import plain
from specpilot_cli.report.paired_bench_tables import SystemNames, benchmark_table, interval_text
from specpilot_cli.report.tables import Column, print_line, print_pairs, print_table
from specpilot_cli.units import format_bytes

SENTENCES: dict[RecipeVerdict, str] = {
    "promote": "faster than stock beyond noise on unseen prompts, and lossless",
    "no": "lossless, but no gain over stock beyond the bound",
    "reject": "token forcing rejects the tuned system: its tokens are not the target's",
    "invalid": "the measurement carries no verdict",
}
_NAMES = SystemNames("stock", "tuned", "plain")


def print_sglang_plan(plan: PlannedSglangRun) -> None:
    """What would run: models, then each server's command, environment and memory."""
    print_pairs(
        [
            ("folder", plan.folder),
            ("target", plan.target),
            ("shape from", plan.target_known_from),
            ("drafter", plan.drafter or "none"),
            ("mechanisms", ", ".join(plan.mechanisms)),
            ("SGLang", plan.engine_versions),
            ("servers", "all at once" if plan.together else "by turns"),
            ("gates", _gates_text(plan)),
        ],
        title=f"would run {plan.recipe}",
    )
    for server in plan.servers:
        _print_server(server)


def _gates_text(plan: PlannedSglangRun) -> str:
    if plan.no_gates is not None:
        return f"do not run: {plan.no_gates}"
    return f"paired-bench and token-force on {plan.n_timed_prompts} unseen prompts"


def _print_server(server: PlannedServer) -> None:
    variables = [(f"env {name}", value or "(empty)") for name, value in server.environment.items()]
    print_pairs([*variables, ("command", server.command)], title=f"{server.label} server")
    if server.plugin is not None:
        print_line(f"plugin configuration: {server.plugin.model_dump_json()}")
    _print_memory(server.memory, server.label)


def _print_memory(plan: MemoryPlan, label: str) -> None:
    device = f"{plan.device.name}, {format_bytes(plan.device.memory_bytes)} ({plan.device.source})"
    rows = [_part_row(part) for part in plan.parts]
    rows += [_part_row(part) for part in plan.outside]
    print_table(
        ["part", Column("size", "right"), "how"],
        rows,
        title=f"memory of the {label} server on {device}",
    )
    print_line(
        f"free {format_bytes(plan.free_bytes)}, static share {plan.static_fraction:g} = "
        f"{format_bytes(plan.static_bytes)}; while loading {format_bytes(plan.load_peak_bytes)}"
    )
    print_line(f"KV cache: {plan.kv_tokens} tokens, {plan.needed_tokens} needed")
    for warning in plan.warnings:
        print_line(f"note: {warning}")


def _part_row(part: Part) -> tuple[str, str, str]:
    return part.name, format_bytes(part.n_bytes), part.how


def plan_results(plan: PlannedSglangRun) -> dict[str, Any]:
    """The `dry_run` object of the JSON envelope."""
    document: dict[str, Any] = plain(plan)
    for server, planned in zip(document["servers"], plan.servers, strict=True):
        server["memory"] = memory_results(planned.memory)
    return document


def memory_results(plan: MemoryPlan) -> dict[str, Any]:
    """A memory plan with keys that end in their unit."""
    parts = [*plan.parts, *plan.outside]
    return {
        "device": plan.device.name,
        "device_bytes": plan.device.memory_bytes,
        "device_source": plan.device.source,
        "free_bytes": plan.free_bytes,
        "static_ratio": plan.static_fraction,
        "static_bytes": plan.static_bytes,
        "load_peak_bytes": plan.load_peak_bytes,
        "kv_token_bytes": plan.kv_bytes_per_token,
        "kv_tokens": plan.kv_tokens,
        "needed_tokens": plan.needed_tokens,
        "parts": [{"name": p.name, "size_bytes": p.n_bytes, "how": p.how} for p in parts],
        "warnings": list(plan.warnings),
    }


def sglang_results(result: SglangResult) -> dict[str, Any]:
    """The `results` object of the JSON envelope."""
    recipe = result.checked.loaded.recipe
    install = result.checked.install
    return {
        "recipe": recipe.name,
        "title": recipe.title,
        "folder": str(result.folder),
        "phases_s": dict(result.phases_s),
        "wall_s": sum(result.phases_s.values()),
        "sglang": None if install is None else install.sglang,
        "together": result.checked.together,
        "judged": result.bench is not None,
        "reasons": list(result.reasons),
        "systems": [running_results(running) for running in result.systems],
        "kv_growth_ratio": kv_growth(result),
        "paired_bench": None if result.bench is None else plain(result.bench.summary),
        "token_force": None
        if result.audit is None
        else {"verdict": result.audit.verdict, **result.audit.to_json()},
    }


def running_results(running: RunningSystem) -> dict[str, Any]:
    """One running server: what was planned, what SGLang says, what the plugin says."""
    system = running.planned.system
    return {
        "name": system.name,
        "label": system.label,
        "arguments": {name: plain(value) for name, value in system.arguments.items()},
        "environment": system.environment(),
        "facts": plain(running.facts),
        "plugin": None if running.state is None else plain(running.state),
        "planned": memory_results(running.planned.memory),
    }


def kv_growth(result: SglangResult) -> float | None:
    """Tokens in the tuned server's KV pool over stock's, as SGLang reports both.

    None where both ran at once: the pools were held to one size for the comparison.
    """
    if result.checked.together:
        return None
    tokens = {one.planned.system.name: one.facts.kv_tokens for one in result.systems}
    stock, tuned = tokens.get("baseline"), tokens.get("candidate")
    return None if not stock or not tuned else tuned / stock


def print_sglang(result: SglangResult, report: str) -> None:
    """The servers that ran, the gain per benchmark where it was measured, the closing lines."""
    print_table(
        ["server", "mechanisms", Column("weights", "right"), Column("KV tokens", "right"),
         Column("planned", "right")],
        [running_row(running) for running in result.systems],
        title=f"{result.checked.loaded.recipe.title}: servers as they said they ran",
    )  # fmt: skip
    if result.bench is not None and result.bench.summary.gain is not None:
        table = benchmark_table(result.bench.summary, names=_NAMES)
        print_table(list(table.columns), list(table.rows), title=table.title)
    for line in closing_lines(result):
        print_line(line)
    print_line(f"report: {report}")


def closing_lines(result: SglangResult) -> list[str]:
    """What a reader must see last: KV growth, losslessness, gain, verdict or why there is none."""
    lines, growth = [], kv_growth(result)
    if growth is not None:
        lines.append(f"KV pool of tuned over stock: {growth:.3f}×")
    if result.bench is None:
        why = result.reasons[0] if result.reasons else "the gates did not run"
        return [*lines, f"not judged: {why}; every handshake was right"]
    if result.audit is not None:
        lines.append(
            f"token forcing: {result.audit.verdict}, mismatches {result.audit.system.rate:.3%} "
            f"(stock {result.audit.stock.rate:.3%})"
        )
    summary = result.bench.summary
    if summary.gain is not None:
        line = f"gain over stock: {summary.gain.gain_ratio:.4f}× {interval_text(summary.gain)}"
        if summary.decision is not None:
            line += f", bound {summary.decision.bound_ratio:.4f}×"
        lines.append(line)
    verdict = result.verdict
    if verdict != "promote":
        lines.extend(f"why: {_NAMES.in_words(reason)}" for reason in result.reasons)
    if verdict is not None:
        lines.append(f"verdict: {verdict}, {SENTENCES[verdict]}")
    return lines


def running_row(running: RunningSystem) -> tuple[str, str, str, str, str]:
    """Label, mechanisms, weights and KV tokens as reported, both as planned."""
    facts, state = running.facts, running.state
    planned = running.planned.memory
    active = ", ".join(state.active) if state is not None else ""
    return (
        running.planned.system.label,
        active or "none",
        "?" if facts.weight_bytes is None else format_bytes(facts.weight_bytes),
        "?" if facts.kv_tokens is None else str(facts.kv_tokens),
        f"{format_bytes(planned.parts[0].n_bytes)}, {planned.kv_tokens} tokens",
    )


def print_running(url: str, running: RunningSystem) -> None:
    """A server that stays: where it is, and what is active in it."""
    pairs: list[tuple[str, object]] = [("url", url), ("SGLang", running.facts.version)]
    state = running.state
    pairs += _mechanism_pairs({} if state is None else {str(k): v for k, v in state.active.items()})
    print_pairs(pairs, title=f"{running.planned.system.label} server, Ctrl-C ends it")


def print_check(found: ServerCheck) -> None:
    """What a server says of itself, one fact a line."""
    facts = found.facts
    pairs: list[tuple[str, object]] = [
        ("engine", f"{found.engine} {facts.version or ''}".rstrip()),
        ("model", facts.model_path or "?"),
        ("plugin", found.plugin_version or "none"),
    ]
    if facts.speculative_algorithm is not None:
        pairs.append(("speculation", f"{facts.speculative_algorithm}, {facts.draft_tokens} tokens"))
    if facts.kv_tokens is not None:
        pairs.append(("KV cache", f"{facts.kv_tokens} tokens"))
    pairs += _mechanism_pairs(found.active)
    pairs += [("missing", name) for name in found.missing]
    pairs += [("problem", problem) for problem in found.problems]
    print_pairs(pairs, title=found.url)


def _mechanism_pairs(active: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, object]]:
    """One line a mechanism; long lists are counted, not printed."""
    if not active:
        return [("active", "no mechanism of specpilot")]
    lines: list[tuple[str, object]] = []
    for name, facts in active.items():
        shown = ", ".join(f"{key} {_fact(key, value)}" for key, value in facts.items())
        lines.append((f"active {name}", shown))
    return lines


def _fact(key: str, value: Any) -> str:
    if isinstance(value, list):
        return str(len(value))
    if key.endswith("_bytes") and isinstance(value, int) and abs(value) < 2**63:
        return format_bytes(value)
    return f"{value:.4g}" if isinstance(value, float) else str(value)
