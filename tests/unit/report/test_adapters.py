"""From domain results to figure data: nothing lost, nothing mixed up."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from specpilot_cli.ceiling.factors import measure_ceiling
from specpilot_cli.ceiling.peaks import Peaks
from specpilot_cli.ceiling.speedup import SpeedupPoint
from specpilot_cli.replay.intervals import Estimate
from specpilot_cli.replay.result import ReplayResult, ReplayRow
from specpilot_cli.report import adapters
from specpilot_cli.schema.gpu_profile import PeakRates
from specpilot_cli.schema.step_profile import StepProfile
from specpilot_cli.token_force.rules import RateSummary


def _number(value: float) -> list[dict[str, Any]]:
    return [{"value": value, "kind": "measured", "source": "made up for a test"}]


RATES = {"read_bytes_per_s": _number(1e12), "flops_per_s": {"bfloat16": _number(1e14)}}


@pytest.fixture
def ceiling():
    return _ceiling()


@pytest.fixture
def noisy_ceiling():
    """Profiled steps 25 % slower than the plain ones."""
    return _ceiling(t_step_s=0.008)


def _ceiling(**changes: Any):
    profile = StepProfile.model_validate(
        {
            "schema_version": 1, "engine": {"name": "test", "version": "1"},
            "device": {"name": "d", "kind": "cpu", "threads": 2, "peaks": RATES},
            "target": {"name": "t"}, "drafter": None, "dtype": "bfloat16", "mode": "chain",
            "nodes": 7, "rows": 8, "steps": 5, "t_step_s": 0.012, "t_prof_s": 0.010, "tau": 3.0,
            "classes": [
                {"name": "target_gemm", "seconds": 0.006, "bytes": 2.7e9, "flops": 1e9, "calls": 4},
                {"name": "rest", "seconds": 0.001, "bytes": None, "flops": None, "calls": 9},
            ],
            "source": "made up for a test",
        }
        | changes
    )  # fmt: skip
    return measure_ceiling(profile, Peaks("d", PeakRates.model_validate(RATES)), tau_best=4.5)


def test_waterfall_has_every_class_and_both_times(ceiling):
    data = adapters.waterfall_data(ceiling, "here")
    assert (data.t_step_s, data.t_prof_s, data.condition) == (0.012, 0.010, "here")
    assert [(c.name, c.measured_s) for c in data.classes] == [
        ("target_gemm", 0.006), ("rest", 0.001),
    ]  # fmt: skip
    assert data.floor_s == pytest.approx(ceiling.t_floor_s)


def test_factors_keep_their_places(ceiling):
    data = adapters.factors_data(ceiling, "here")
    assert (data.tau, data.kernel, data.overhead) == (
        pytest.approx(1.5), pytest.approx(2.5), pytest.approx(1.2),
    )  # fmt: skip


def test_peaks_text_states_share_value_and_kind(ceiling):
    assert adapters.peaks_text(ceiling, "bfloat16") == (
        "floors at 90 % of 1.00 TB/s (measured) and 60 % of 100 TFLOP/s (measured)"
    )
    assert adapters.peaks_text(ceiling) == "floors at 90 % of 1.00 TB/s (measured)"


def test_class_rows_account_for_the_whole_step(ceiling):
    shares = [row[-1] for row in adapters.class_rows(ceiling)]
    assert shares == ["50.0 %", "8.3 %", "25.0 %", "16.7 %"]
    assert {len(row) for row in adapters.class_rows(ceiling)} == {len(adapters.CLASS_COLUMNS)}


def test_a_negative_overhead_is_no_part_of_the_step_but_a_note(noisy_ceiling):
    names = [row[0] for row in adapters.class_rows(noisy_ceiling)]
    assert names == ["target_gemm", "rest", "gaps in the profile"]
    assert not any("-" in cell for row in adapters.class_rows(noisy_ceiling) for cell in row[1:])
    factors, _ = adapters.ceiling_tables(noisy_ceiling)
    assert factors.note.startswith("The overhead factor is below 1: the profiled steps ran 25.0 %")
    assert factors.rows[2] == (
        "overhead (step / profile)", "0.800×",
        "8.00 ms plain, 10.0 ms profiled: noise, no overhead seen",
    )  # fmt: skip


def test_an_overhead_above_one_needs_no_note(ceiling):
    factors, classes = adapters.ceiling_tables(ceiling)
    assert factors.note == ""
    assert factors.rows[2][2] == "12.0 ms → 10.0 ms"
    assert classes.rows[-1][0] == "outside the profile"


def test_leading_text_names_the_largest_factor(ceiling):
    assert adapters.leading_text(ceiling) == "kernels lead with 2.50×"
    assert adapters.factor_rows(ceiling)[-1][2] == "kernel time above the floors leads"


def _row(policy: str, nodes: int | None, tau: float, *, bounds: bool = True) -> ReplayRow:
    value = Estimate(tau, tau - 0.1 if bounds else None, tau + 0.1 if bounds else None, 3)
    counts = np.ones(1, dtype=np.int64)
    rows = None if nodes is None else nodes + 1
    return ReplayRow(policy, nodes, rows, value, {}, value, value, None, counts, counts)


def _replayed(rows: list[ReplayRow]) -> ReplayResult:
    return ReplayResult("trajectory", "", 15, 1.0, rows, 3, 30, np.ones(15), 0.0)


def test_tau_curve_takes_trees_and_oracle_and_the_given_stock():
    rows = [
        _row("chain", 15, 3.1), _row("best-first", 8, 3.2), _row("best-first", 16, 3.6),
        _row("marginal", 8, 2.9), _row("marginal", 16, 3.0), _row("oracle", None, 5.0),
    ]  # fmt: skip
    stock = _row("chain", 7, 2.8)
    data = adapters.tau_curve_data(_replayed(rows), "here", stock=stock, chosen_nodes=16)
    assert [(s.label, s.nodes, s.tau) for s in data.series] == [
        ("best-first", (8, 16), (3.2, 3.6)), ("marginal", (8, 16), (2.9, 3.0)),
    ]  # fmt: skip
    assert data.series[0].low == pytest.approx((3.1, 3.5))
    assert (data.stock_tau, data.stock_nodes, data.oracle_tau) == (2.8, 7, 5.0)


def test_tau_curve_without_intervals_draws_none():
    rows = [_row("best-first", 8, 3.2, bounds=False)]
    data = adapters.tau_curve_data(_replayed(rows), "here", stock=_row("chain", 7, 2.8))
    assert data.series[0].low == ()
    assert data.oracle_tau is None


def test_speedup_panel_keeps_basis_and_stock():
    point = SpeedupPoint(8, 9, 3.2, 0.02, 2.0, 1.6, "interpolated")
    stock = SpeedupPoint(7, 8, 2.8, 0.02, 2.0, 1.4, "recorded")
    panel = adapters.speedup_panel([point], stock, heading="H200", projected=True)
    assert (panel.best.nodes, panel.best.speedup, panel.best.basis) == (8, 1.6, "interpolated")
    assert (panel.stock.nodes, panel.projected) == (7, True)


def _forced(rate: float, unexplained: int, verdict: str) -> Any:
    tally = SimpleNamespace(n_unexplained=unexplained)
    return SimpleNamespace(
        verdict=verdict,
        system=RateSummary(10, 1000, int(1000 * rate), rate, rate - 0.001, rate + 0.001),
        stock=RateSummary(10, 2000, 14, 0.007, 0.006, 0.008),
        rate=SimpleNamespace(paper=SimpleNamespace(margin=0.005), rejects=verdict == "reject"),
        events=SimpleNamespace(
            system=tally, stock=SimpleNamespace(n_unexplained=2), rejects=unexplained > 100
        ),
    )


def test_mismatch_bars_show_stock_once_and_its_limit():
    data = adapters.mismatch_data(
        [("tuned", _forced(0.0075, 1, "accept")), ("faulty", _forced(0.02, 190, "reject"))], "here"
    )
    assert [(b.label, b.rate, b.events, b.verdict) for b in data.bars] == [
        ("stock", 0.007, 2, None), ("tuned", 0.0075, 1, "accept"), ("faulty", 0.02, 190, "reject"),
    ]  # fmt: skip
    assert data.limit_rate == pytest.approx(0.012)
    assert data.bars[0].tokens == 2000
    assert [bar.rejected_by for bar in data.bars] == ["", "", "rate rule and the event rule"]


def test_invalid_token_forcing_has_no_bars():
    invalid = SimpleNamespace(rate=None, events=None)
    with pytest.raises(ValueError, match="tuned was invalid"):
        adapters.mismatch_data([("tuned", invalid)], "here")
    with pytest.raises(ValueError, match="no token-forcing result"):
        adapters.mismatch_data([], "here")
