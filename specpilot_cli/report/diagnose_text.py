"""A diagnosis in words and tables, for the terminal and the page."""

from __future__ import annotations

from specpilot_cli.diagnose.run import LEAST_REQUESTS, TREE_NODES, Diagnosis
from specpilot_cli.units import format_percent

POSITION_COLUMNS = (
    "position", "steps", "draft right", "true token offered", "drafter's own probability",
)  # fmt: skip
CHECK_COLUMNS = ("check", "result", "evidence")


def tau_line(found: Diagnosis) -> str:
    """Tokens per step of stock, of a tree and of the candidates."""
    chain, tree, oracle = found.chain.value, found.tree.value, found.oracle.value
    return (
        f"τ {chain:.2f} with stock's chain; the same lattices allow {tree:.2f} with a best-first "
        f"tree of {TREE_NODES} nodes and {oracle:.2f} at most ({found.mode} replay, "
        f"{found.n_requests} requests)"
    )


def position_rows(found: Diagnosis) -> list[tuple[str, ...]]:
    """One row of text per drafted position; see `POSITION_COLUMNS`."""
    return [
        (
            str(row.position),
            str(row.anchors),
            format_percent(row.accepted),
            format_percent(row.in_lattice),
            format_percent(row.own),
        )
        for row in found.rows
    ]


def check_rows(found: Diagnosis) -> list[tuple[str, ...]]:
    """One row of text per check; see `CHECK_COLUMNS`."""
    return [
        (item.code, item.kind if item.state == "found" else item.state, item.detail)
        for item in found.outcomes
    ]


def headline(found: Diagnosis) -> str:
    """One sentence: what to look at first."""
    counted = [item for item in found.found if item.counts]
    if counted:
        more = f" ({len(counted) - 1} more)" if len(counted) > 1 else ""
        return f"found: {counted[0].title}{more}; next: {counted[0].next_steps[0]}"
    if found.verdict == "invalid":
        return (
            f"no verdict: {found.n_requests} requests say too little, "
            f"{LEAST_REQUESTS} are the least; record more"
        )
    gain = found.tree.value / found.chain.value
    return (
        "nothing wrong found; what is left is the choice among what the drafter offers: a tree "
        f"of {TREE_NODES} nodes commits {gain:.2f}× the tokens per step (`specpilot replay`)"
    )
