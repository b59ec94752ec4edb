"""The answer of `specpilot replay` for a terminal."""

from __future__ import annotations

from specpilot_cli.replay.document import END_OF_OUTPUT, INTERVAL_METHOD, Recording
from specpilot_cli.replay.intervals import Estimate
from specpilot_cli.replay.result import ReplayResult, ReplayRow
from specpilot_cli.report.tables import Column, print_line, print_table

COST_COLUMNS = ("policy", "nodes", "nodes per step", "step", "× plain decoding", "step time")


def recording_line(result: ReplayResult, recording: Recording) -> str:
    """What was replayed, in one line."""
    metadata = recording.metadata
    packed = metadata.packed
    form = "" if packed is None else f", packed for {packed.exact_nodes} nodes"
    return (
        f"{result.n_requests} requests, {result.n_anchors} steps, {metadata.drafter_kind}, block "
        f"{metadata.block}, {result.positions} of {recording.n_positions} positions "
        f"used, {recording.n_candidates} candidates{form}, by {metadata.engine}"
    )


def print_replay(result: ReplayResult, about: str) -> None:
    """Print the τ table, the table by benchmark, and what the numbers mean."""
    right = [Column(title, "right") for title in ("nodes", "rows", "τ")]
    print_table(
        ["policy", *right, "95 % interval", Column("benchmark mean", "right"),
         Column("× chain", "right"), "95 % interval", Column("drafter expects", "right")],
        [_row_cells(row) for row in result.rows],
        title=f"tokens per step, {result.mode} replay",
    )  # fmt: skip
    if any(row.speedup is not None for row in result.rows):
        print_table(
            ["policy", *(Column(title, "right") for title in COST_COLUMNS[1:])],
            cost_rows(result),
            title=cost_title(result),
        )
        for reason in result.projected_because or ():
            print_line(f"projected: {reason}")
    names = list(result.rows[0].benchmarks) if result.rows else []
    if len(names) > 1:
        print_table(
            ["policy", Column("nodes", "right"), *(Column(name, "right") for name in names)],
            [
                [row.policy, _count(row.nodes), *(f"{row.benchmarks[n].value:.3f}" for n in names)]
                for row in result.rows
            ],
            title="τ by benchmark",
        )
    print_line(f"recording: {about}")
    outside = result.stock_outside_by_position
    if outside is not None and outside.any():
        print_line(
            f"stock's own token is not a candidate at {outside.mean():.2%} of all positions, "
            f"at most {outside.max():.2%} at one"
        )
    print_line(f"{result.mode}: {result.bias}")
    print_line(f"end of output: {END_OF_OUTPUT}")
    print_line(f"interval: {INTERVAL_METHOD}")


def _row_cells(row: ReplayRow) -> list[str]:
    expected = "" if row.expected_tau is None else f"{row.expected_tau:.3f}"
    return [
        row.policy,
        _count(row.nodes),
        _count(row.rows),
        f"{row.tau.value:.3f}",
        interval(row.tau),
        f"{row.benchmark_mean.value:.3f}",
        f"{row.gain.value:.3f}",
        interval(row.gain),
        expected,
    ]


def cost_title(result: ReplayResult) -> str:
    """What the speedups are: of one deployment, or tokens of one and times of another."""
    what = "speedup at the given step times"
    return f"{what}, projected" if result.projected_because else what


def cost_rows(result: ReplayResult) -> list[tuple[str, ...]]:
    """One row of text per policy and budget with a step time; see `COST_COLUMNS`."""
    return [
        (
            row.policy, _count(row.nodes), f"{row.mean_nodes:.1f}", f"{1e3 * row.step_s:.3f} ms",
            f"{row.speedup:.3f}", row.step_basis or "not said",
        )
        for row in result.rows
        if row.speedup is not None and row.step_s is not None and row.mean_nodes is not None
    ]  # fmt: skip


def _count(value: int | None) -> str:
    return "-" if value is None else str(value)


def interval(estimate: Estimate) -> str:
    """Both ends of a mean's interval, or what it would need."""
    if estimate.low is None or estimate.high is None:
        return "needs 2 requests"
    return f"[{estimate.low:.3f}, {estimate.high:.3f}]"
