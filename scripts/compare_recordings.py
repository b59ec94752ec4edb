"""Compares two lattice recordings of the same prompts, such as the reference engine's and SGLang's.

    python scripts/compare_recordings.py reference.safetensors sglang.safetensors -o compared.json

Requests are paired by request id. Steps are paired where both have a lattice at the same output
position behind the same tokens. Candidates are compared as sets, scores where both have the token.
Then the stock chain's tokens per step of both, replayed on the paired requests. JSON on stdout, or
in the file.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from specpilot_cli.io.lattice_file import read_lattice
from specpilot_cli.schema.lattice import LatticeRecording

Steps = dict[tuple[str, int], int]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("first", type=Path)
    parser.add_argument("second", type=Path)
    parser.add_argument("-o", "--output", type=Path)
    given = parser.parse_args()
    text = json.dumps(compare(read_lattice(given.first), read_lattice(given.second)), indent=1)
    if given.output is None:
        print(text)
    else:
        given.output.write_text(text + "\n", encoding="utf-8")


def compare(first: LatticeRecording, second: LatticeRecording) -> dict[str, Any]:
    """All numbers, as JSON values. Exits if the two have no request in common."""
    names = [{r.request_id: n for n, r in enumerate(x.metadata.requests)} for x in (first, second)]
    common = [name for name in names[0] if name in names[1]]
    if not common:
        sys.exit("the recordings have no request id in common")
    shared = {
        name: _shared(first.output(names[0][name]), second.output(names[1][name]))
        for name in common
    }
    pairs = _pairs(first, second, shared)
    length = min(first.n_positions, second.n_positions)
    equal = sum(
        np.array_equal(first.output(names[0][name]), second.output(names[1][name]))
        for name in common
    )
    return {
        "engines": [first.metadata.engine, second.metadata.engine],
        "modes": [first.metadata.mode, second.metadata.mode],
        "same_models": [
            first.metadata.target_sha256 == second.metadata.target_sha256,
            first.metadata.drafter_sha256 == second.metadata.drafter_sha256,
        ],
        "requests": len(common),
        "equal_outputs": equal,
        "paired_steps": len(pairs),
        **_differences(first, second, pairs, length),
        "chain_tokens_per_step": [_chain_tau(x, set(common)) for x in (first, second)],
    }


def _shared(first: npt.NDArray[np.int32], second: npt.NDArray[np.int32]) -> int:
    """Length of the common beginning."""
    length = min(len(first), len(second))
    differs = first[:length] != second[:length]
    return int(np.argmax(differs)) if differs.any() else length


def _steps(recording: LatticeRecording, shared: dict[str, int]) -> Steps:
    """Steps whose anchor lies in the common beginning, by request id and output position."""
    found: Steps = {}
    for step, (request, position) in enumerate(
        zip(recording.step_request, recording.step_position, strict=True)
    ):
        name = recording.metadata.requests[request].request_id
        if position < shared.get(name, 0):
            found[name, int(position)] = step
    return found


def _pairs(
    first: LatticeRecording, second: LatticeRecording, shared: dict[str, int]
) -> list[tuple[int, int]]:
    ours, theirs = _steps(first, shared), _steps(second, shared)
    return [(step, theirs[key]) for key, step in ours.items() if key in theirs]


def _differences(
    first: LatticeRecording,
    second: LatticeRecording,
    pairs: list[tuple[int, int]],
    length: int,
) -> dict[str, Any]:
    """Overlap of candidates, and quantiles of the differences in nats where both have them."""
    common = 0
    unary: list[float] = []
    norms: list[float] = []
    edges: list[float] = []
    stock = 0
    for a, b in pairs:
        before: npt.NDArray[np.intp] | None = None
        before_b: npt.NDArray[np.intp] | None = None
        for j in range(length):
            _, i, k = np.intersect1d(
                first.candidate_ids[a, j], second.candidate_ids[b, j], return_indices=True
            )
            common += len(i)
            unary += np.abs(first.unary[a, j, i] - second.unary[b, j, k]).tolist()
            rows_a = np.array([0]) if before is None else before
            rows_b = np.array([0]) if before_b is None else before_b
            ours = first.edge[a, j][np.ix_(rows_a, i)]
            theirs = second.edge[b, j][np.ix_(rows_b, k)]
            likely = ours > np.log(0.01)  # a far tail may move by much and never enter a tree
            edges += np.abs(ours - theirs)[likely].tolist()
            before, before_b = i, k
        norms += np.abs(
            first.unary_logsumexp[a, :length] - second.unary_logsumexp[b, :length]
        ).tolist()
        stock += int((first.stock_choice[a, :length] == second.stock_choice[b, :length]).sum())
    positions = len(pairs) * length
    return {
        "candidates_in_common_ratio": _ratio(
            common, positions * min(first.n_candidates, second.n_candidates)
        ),
        "stock_choice_equal_ratio": _ratio(stock, positions),
        "unary_difference": _quantiles(unary),
        "logsumexp_difference_nats": _quantiles(norms),
        "edge_difference_nats": _quantiles(edges),
    }


def _ratio(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def _quantiles(values: list[float]) -> dict[str, float] | None:
    if not values:
        return None
    return {
        name: float(np.quantile(values, level))
        for name, level in (("median", 0.5), ("p99", 0.99), ("max", 1.0))
    }


def _chain_tau(recording: LatticeRecording, wanted: set[str]) -> float:
    """(T - 1) / steps of stock's own chain, walked along its trajectory, pooled over requests."""
    at = {
        (int(r), int(p)): step
        for step, (r, p) in enumerate(
            zip(recording.step_request, recording.step_position, strict=True)
        )
    }
    tokens = steps = 0
    for number, request in enumerate(recording.metadata.requests):
        output = recording.output(number)
        position = 0
        while request.request_id in wanted and position < len(output) - 1:
            ahead = output[position + 1 :]
            choice = recording.stock_choice[at[number, position]][: len(ahead)]
            misses = choice != ahead[: len(choice)]
            accepted = int(np.argmax(misses)) if misses.any() else len(choice)
            position += min(accepted + 1, len(ahead))
            steps += 1
        tokens += len(output) - 1 if request.request_id in wanted else 0
    return tokens / max(steps, 1)


if __name__ == "__main__":
    main()
