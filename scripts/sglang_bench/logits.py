"""Do two servers compute the same? Log-probabilities of the same tokens, compared by size.

The yardstick is stock against itself: the same prompt alone and beside others. Its sums are then
added in another order, which is all that an exact weight format may change.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from sglang_bench.load import Ids, generate, prompts_of

PROMPTS, LENGTH, NEW, TOP = 6, 48, 12, 5


def collect(url: str, vocabulary: int) -> dict[str, Any]:
    """Scores of fixed prompts, each alone and all at once, and greedy continuations.

    alone, together: log-probabilities [PROMPTS][LENGTH - 1] of the prompts' own tokens. top: the
    best TOP (token id, log-probability) at each of those positions, alone. output: greedy ids.
    """
    prompts = prompts_of(PROMPTS, LENGTH, vocabulary, seed=20261130)
    alone = [_score(url, ids) for ids in prompts]
    with ThreadPoolExecutor(PROMPTS) as pool:
        together = list(pool.map(lambda ids: _score(url, ids), prompts))
    return {
        "alone": [one["own"] for one in alone],
        "together": [one["own"] for one in together],
        "top": [one["top"] for one in alone],
        "output": [generate(url, ids, NEW)["output_ids"] for ids in prompts],
    }


def _score(url: str, ids: Ids) -> dict[str, Any]:
    meta = generate(url, ids, 1, return_logprob=True, logprob_start_len=0, top_logprobs_num=TOP)[
        "meta_info"
    ]
    return {
        "own": [round(row[0], 6) for row in meta["input_token_logprobs"][1:]],
        "top": [
            [[row[1], round(row[0], 6)] for row in rows] for rows in meta["input_top_logprobs"][1:]
        ],
    }


def as_text(found: Mapping[str, Any]) -> dict[str, Any]:
    """What `collect` found with every row as one line of text, so that a file of it stays short."""
    rows = {name: [" ".join(map(str, row)) for row in found[name]]
            for name in ("alone", "together", "output")}  # fmt: skip
    top = [
        [" ".join(f"{token}:{value}" for token, value in place) for place in row]
        for row in found["top"]
    ]
    return {**rows, "top": [", ".join(row) for row in top]}


def compare(stock: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """How far `other` is from stock, in nats, beside how far stock is from itself.

    argmax_parts: positions whose best token differs although stock's first two are further apart
    than four times the largest difference that stock shows against itself: rounding cannot do it.
    """
    itself = rms(stock["alone"], stock["together"])
    largest_itself = largest(stock["alone"], stock["together"])
    parts = differ = 0
    for ours, theirs in zip(_flat(stock["top"]), _flat(other["top"]), strict=True):
        if ours[0][0] != theirs[0][0]:
            differ += 1
            parts += ours[0][1] - ours[1][1] > 4 * largest_itself
    flat = _flat(stock["alone"])
    mean = math.fsum(flat) / len(flat)
    return {
        "positions": len(flat),
        "logprob_std_nats": math.sqrt(math.fsum((x - mean) ** 2 for x in flat) / len(flat)),
        "rms_nats": rms(stock["alone"], other["alone"]),
        "largest_nats": largest(stock["alone"], other["alone"]),
        "stock_itself_rms_nats": itself,
        "stock_itself_largest_nats": largest_itself,
        "argmax_differs": differ,
        "argmax_parts": parts,
        "equal_outputs": sum(a == b for a, b in zip(stock["output"], other["output"], strict=True)),
        "outputs": len(stock["output"]),
    }


def rms(left: Sequence[Sequence[float]], right: Sequence[Sequence[float]]) -> float:
    """Root mean square of the differences of two tables of one form."""
    found = [a - b for a, b in zip(_flat(left), _flat(right), strict=True)]
    return math.sqrt(math.fsum(d * d for d in found) / len(found))


def largest(left: Sequence[Sequence[float]], right: Sequence[Sequence[float]]) -> float:
    """Largest difference of two tables of one form."""
    return max(abs(a - b) for a, b in zip(_flat(left), _flat(right), strict=True))


def _flat(rows: Sequence[Sequence[Any]]) -> list[Any]:
    return [value for row in rows for value in row]
