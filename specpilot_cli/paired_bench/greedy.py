"""Whether a server decodes greedily: the same prompt must get the same answer, near ties apart."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from specpilot_cli.errors import MeasurementInvalid
from specpilot_cli.paired_bench.types import TimedRequest

# Kernels that round differently flip a token in a hundred; half the answers differing within the
# first 32 tokens takes a sampler.
_FIRST_TOKENS, _SHARE, _LEAST = 32, 0.5, 4


def check_greedy(rows: Iterable[TimedRequest]) -> None:
    """Raise MeasurementInvalid for a system whose answers differ early from run to run.

    Every request asks for temperature 0; a server that samples nevertheless gives other work in
    every run. Redacted answers (read back from a journal) are passed over.
    """
    beginnings: dict[tuple[str, int], dict[str, set[tuple[int, ...]]]] = defaultdict(
        lambda: defaultdict(set)
    )
    for row in rows:
        if row.answer.output_ids:
            first = row.answer.output_ids[:_FIRST_TOKENS]
            beginnings[row.system, row.batch][row.request_id].add(first)
    for (system, _), by_request in beginnings.items():
        apart = sum(len(found) > 1 for found in by_request.values())
        if apart >= max(_LEAST, _SHARE * len(by_request)):
            raise MeasurementInvalid(
                f"{system} does not decode greedily: {apart} of {len(by_request)} requests had "
                f"other tokens among the first {_FIRST_TOKENS} in another run",
                hint="look at the server's sampling defaults: temperature 0 was asked for",
            )
