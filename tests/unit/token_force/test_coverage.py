"""How far outputs reach and how many requests shared a server."""

from __future__ import annotations

import pytest

from specpilot_cli.schema.outputs import OutputRecord
from specpilot_cli.token_force.coverage import concurrency_warning, coverage


def record(name, n_tokens, start=None, elapsed=None):
    return OutputRecord(
        request_id=name, benchmark="b", prompt_ids=(1,), output_ids=(5,) * n_tokens,
        finish_reason="length", submit_s=start, elapsed_s=elapsed,
    )  # fmt: skip


def test_marks_count_longer_outputs():
    found = coverage([record("a", 512), record("b", 513), record("c", 3000)])
    assert found.longest == 3000
    assert dict(found.reaching) == {512: 2, 1024: 1, 2048: 1, 3072: 0}
    assert found.in_flight is None


def test_requests_in_flight_are_averaged_over_busy_time():
    one_by_one = [record("a", 1, 0.0, 1.0), record("b", 1, 1.0, 1.0), record("c", 1, 5.0, 1.0)]
    assert coverage(one_by_one).in_flight == pytest.approx(1.0)
    together = [record(f"r{i}", 1, 0.0, 2.0) for i in range(8)]
    assert coverage(together).in_flight == pytest.approx(8.0)
    half = [record("a", 1, 0.0, 2.0), record("b", 1, 1.0, 1.0)]
    assert coverage(half).in_flight == pytest.approx(1.5)


def test_very_different_batches_are_warned_of():
    alone = coverage([record("a", 1, 0.0, 1.0), record("b", 1, 1.0, 1.0)])
    together = coverage([record(f"r{i}", 1, 0.0, 2.0) for i in range(8)])
    assert "8.0" in (concurrency_warning(together, alone) or "")
    assert concurrency_warning(together, together) is None
    assert concurrency_warning(together, coverage([record("a", 1)])) is None
