"""A diagnosis as plain data for the JSON envelope."""

from __future__ import annotations

from typing import Any

from specpilot_cli.diagnose.outcome import Outcome
from specpilot_cli.diagnose.run import TREE_NODES, Diagnosis
from specpilot_cli.replay.intervals import Estimate


def diagnosis_document(found: Diagnosis) -> dict[str, Any]:
    """Findings first, then every check, and the numbers by position."""
    return {
        "findings": [_outcome(item) for item in found.found],
        "checks": [_outcome(item) for item in found.outcomes],
        "positions": [
            {
                "position": row.position,
                "anchors": row.anchors,
                "accepted_ratio": row.accepted,
                "in_lattice_ratio": row.in_lattice,
                "own_probability_ratio": row.own,
            }
            for row in found.rows
        ],
        "mode": found.mode,
        "tree_nodes": TREE_NODES,
        "chain_tau_tokens_per_step": _estimate(found.chain),
        "tree_tau_tokens_per_step": _estimate(found.tree),
        "oracle_tau_tokens_per_step": _estimate(found.oracle),
        "requests": found.n_requests,
        "anchors": found.n_anchors,
    }


def _outcome(item: Outcome) -> dict[str, Any]:
    return {
        "code": item.code,
        "state": item.state,
        "kind": item.kind,
        "title": item.title,
        "detail": item.detail,
        "numbers": item.numbers,
        "next_steps": list(item.next_steps),
    }


def _estimate(estimate: Estimate) -> dict[str, Any]:
    return {"value": estimate.value, "low": estimate.low, "high": estimate.high}
