"""A replay result as plain data for the JSON envelope; keys end in their unit."""

from __future__ import annotations

from typing import Any

from specpilot_cli.io.lattice_file import LatticeFiles
from specpilot_cli.replay.calibration import Calibration, half_names
from specpilot_cli.replay.intervals import CONFIDENCE, Estimate
from specpilot_cli.replay.result import ReplayResult, ReplayRow
from specpilot_cli.schema.lattice import LatticeRecording
from specpilot_cli.schema.tree_recording import TreeRecording

Recording = LatticeRecording | LatticeFiles

END_OF_OUTPUT = (
    "an end-of-sequence token is predicted like any other; the step that reaches the end of an "
    "output is cut there, and drafts behind it count for nothing"
)
INTERVAL_METHOD = (
    f"{CONFIDENCE:.0%} two-sided t interval of log tau, clustered by request; "
    "gains are paired by request"
)


def replay_document(result: ReplayResult, recording: Recording) -> dict[str, Any]:
    """Everything a reader needs to quote a row: the numbers, the mode and its bias, the source."""
    return _result_document(result, recording_document(recording))


def trees_document(result: ReplayResult, recording: TreeRecording) -> dict[str, Any]:
    """The same for sequential trees; recall is that of the recorded trees' paths."""
    return _result_document(result, tree_recording_document(recording))


def _result_document(result: ReplayResult, about: dict[str, Any]) -> dict[str, Any]:
    outside = result.stock_outside_by_position
    return {
        "mode": result.mode,
        "bias": result.bias,
        "end_of_output": END_OF_OUTPUT,
        "interval_method": INTERVAL_METHOD,
        "positions": result.positions,
        "temperature": result.temperature,
        "recording": about,
        "requests_replayed": result.n_requests,
        "anchors": result.n_anchors,
        "recall_by_position_ratio": result.recall_by_position.tolist(),
        "chain_mismatch_ratio": result.chain_mismatch_ratio,
        "stock_outside_candidates_by_position_ratio": (
            None if outside is None else outside.tolist()
        ),
        "speedups": None
        if result.projected_because is None
        else {
            "basis": "projected" if result.projected_because else "one deployment",
            "projected_because": list(result.projected_because),
        },
        "rows": [row_document(row) for row in result.rows],
    }


def calibration_document(found: Calibration, recording: Recording) -> dict[str, Any]:
    """What was fitted on which half, and predicted against realised tau on the other."""
    return {
        "mode": found.before.mode,
        "bias": found.before.bias,
        "end_of_output": END_OF_OUTPUT,
        "interval_method": INTERVAL_METHOD,
        "recording": recording_document(recording),
        "fitted_requests": half_names(recording.metadata, found.fitted),
        "judged_requests": half_names(recording.metadata, ~found.fitted),
        "temperature": found.fit.temperature,
        "recall_by_position_ratio": list(found.fit.recall),
        "judged_recall_by_position_ratio": list(found.judged_recall),
        "fitted_positions": found.fit.n_positions,
        "prediction_error_ratio": {
            "as_recorded": found.error_before,
            "calibrated": found.error_after,
        },
        "halves_share_benchmarks": found.shared_benchmarks,
        "warning": found.warning,
        "rows": [
            {
                "nodes": before.nodes,
                "as_recorded": _prediction(before),
                "calibrated": _prediction(after),
                "calibrated_over_recorded_ratio": _estimate(found.gain(before.nodes or 0)),
            }
            for before, after in zip(found.before.rows, found.after.rows, strict=True)
        ],
    }


def _prediction(row: ReplayRow) -> dict[str, Any]:
    return {
        "tau_tokens_per_step": _estimate(row.tau),
        "expected_tokens_per_step": row.expected_tau,
    }


def recording_document(recording: Recording) -> dict[str, Any]:
    """Where the lattices come from and how many there are."""
    metadata = recording.metadata
    return {
        "mode": metadata.mode,
        "block": metadata.block,
        "positions": recording.n_positions,
        "candidates": recording.n_candidates,
        **_origin(recording),
        "packed": None if metadata.packed is None else metadata.packed.model_dump(),
    }


def tree_recording_document(recording: TreeRecording) -> dict[str, Any]:
    """Where recorded trees come from and how large they are."""
    metadata = recording.metadata
    return {
        "mode": metadata.mode,
        "depth": metadata.block - 1,
        "nodes": int(recording.node_token.size),
        **_origin(recording),
    }


def _origin(recording: Recording | TreeRecording) -> dict[str, Any]:
    metadata = recording.metadata
    return {
        "drafter_kind": metadata.drafter_kind,
        "engine": metadata.engine,
        "target_sha256": metadata.target_sha256,
        "drafter_sha256": metadata.drafter_sha256,
        "requests": len(metadata.requests),
        "steps": recording.n_steps,
        "output_tokens": recording.n_output_tokens,
    }


def row_document(row: ReplayRow) -> dict[str, Any]:
    """One policy at one budget."""
    return {
        "policy": row.policy,
        "nodes": row.nodes,
        "rows": row.rows,
        "tau_tokens_per_step": _estimate(row.tau),
        "benchmark_mean_tokens_per_step": _estimate(row.benchmark_mean),
        "by_benchmark_tokens_per_step": {
            name: _estimate(estimate) for name, estimate in row.benchmarks.items()
        },
        "gain_over_chain_ratio": _estimate(row.gain),
        "expected_tokens_per_step": row.expected_tau,
        "tokens": int(row.tokens.sum()),
        "steps": int(row.steps.sum()),
        "steps_by_tokens_committed": None if row.lengths is None else row.lengths.tolist(),
        "mean_nodes_per_step": row.mean_nodes,
        "step_s": row.step_s,
        "step_basis": row.step_basis,
        "speedup_over_ar_ratio": row.speedup,
    }


def _estimate(estimate: Estimate) -> dict[str, Any]:
    return {
        "value": estimate.value,
        "low": estimate.low,
        "high": estimate.high,
        "requests": estimate.n_requests,
    }
