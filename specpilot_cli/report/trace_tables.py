"""Text tables of a step profile that was read from a trace."""

from __future__ import annotations

from specpilot_cli.schema.step_profile import Spread, StepProfile
from specpilot_cli.units import format_bandwidth, format_bytes, format_percent

CLASS_COLUMNS = ("class", "ms", "IQR", "of the step", "calls", "bytes", "rate")


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3f}"


def _range(spread: Spread | None) -> str:
    return "–" if spread is None else f"{_ms(spread.q1_s)} – {_ms(spread.q3_s)}"


def span_rows(step: StepProfile) -> list[tuple[str, ...]]:
    """Spans, kernels outside of them, gaps in them, and the time to the next step."""
    trace = step.trace
    if trace is None:
        return [(span.name, _ms(span.seconds), "–", "–") for span in step.spans]
    spread = {item.name: item for item in trace.spread}
    rows: list[tuple[str, ...]] = []
    for span in step.spans:
        item = spread.get(span.name)
        median = "–" if item is None else _ms(item.median_s)
        rows.append((span.name, _ms(span.seconds), median, _range(item)))
    whole, period = spread["profiled step"], spread["period"]
    rows.append(("profiled step", _ms(step.t_prof_s), _ms(whole.median_s), _range(whole)))
    rows.append(("of it without a kernel", _ms(step.unattributed_s), "–", "–"))
    rows.append(("to the next step", _ms(trace.period_s), _ms(period.median_s), _range(period)))
    return rows


def class_rows(step: StepProfile) -> list[tuple[str, ...]]:
    """One row per kernel class; see `CLASS_COLUMNS`."""
    spread = {} if step.trace is None else {item.name: item for item in step.trace.spread}
    return [
        (
            item.name,
            _ms(item.seconds),
            _range(spread.get(item.name)),
            format_percent(item.seconds / step.t_prof_s),
            f"{item.calls:g}",
            "–" if item.bytes is None else format_bytes(item.bytes),
            "–" if not item.bytes else format_bandwidth(item.bytes / item.seconds),
        )
        for item in step.classes
    ]


def unknown_rows(step: StepProfile) -> list[tuple[str, ...]]:
    """Every kernel that no pattern names, longest first."""
    kernels = () if step.trace is None else step.trace.unknown
    return [
        (
            item.name,
            item.kernel_class,
            f"{1e6 * item.seconds:.1f}",
            format_percent(item.seconds / step.t_prof_s, digits=2),
        )
        for item in kernels
    ]
