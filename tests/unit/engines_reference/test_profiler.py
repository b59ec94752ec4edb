"""Profiles cover the step they took apart; counted work equals what the shapes say."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from specpilot_cli.engines.reference import scopes
from specpilot_cli.engines.reference.accounting import StepShape, linear_weights, step_work
from specpilot_cli.engines.reference.peaks import measure_peaks
from specpilot_cli.engines.reference.profiler import Plan, profile_steps, step_time_curve
from specpilot_cli.engines.reference.scopes import ScopeTimer, cost_of_one_scope, instrument
from specpilot_cli.engines.reference.spec import SpecConfig
from specpilot_cli.engines.reference.stepping import StepRunner
from specpilot_cli.errors import InputError
from specpilot_cli.schema.gpu_profile import PeakRates, SourcedNumber
from specpilot_cli.schema.step_profile import DeviceInfo

PROMPTS = np.random.default_rng(1).integers(1, 319, size=(4, 24)).tolist()
PEAK = (SourcedNumber(value=1e9, kind="measured", source="a test"),)
DEVICE = DeviceInfo(
    name="test cpu",
    kind="cpu",
    threads=1,
    peaks=PeakRates(read_bytes_per_s=PEAK, flops_per_s={"float32": PEAK}),
)


def _plan(**changes: Any) -> Plan:
    return Plan(**{"prompts": PROMPTS, "steps": 4, "repeats": 3, "new_tokens": 40, **changes})


class TestScopes:
    """Exclusive times of nested scopes."""

    def test_an_inner_scope_stops_the_outer_clock(self, monkeypatch: pytest.MonkeyPatch) -> None:
        timer = ScopeTimer()
        timer.start()
        now = [100.0]
        monkeypatch.setattr(scopes, "time", SimpleNamespace(perf_counter=lambda: now[0]))

        def spend(seconds: float) -> None:
            now[0] += seconds

        inner = timer.wrap("target_gemm", lambda: spend(4.0))

        def work() -> None:
            spend(1.0)
            inner()
            spend(2.0)

        timer.wrap("recurrent", work, "VERIFY")()
        assert timer.class_seconds() == {"recurrent": 3.0, "target_gemm": 4.0}
        assert timer.spans["VERIFY"] == 7.0
        assert timer.calls == {"recurrent": 1, "target_gemm": 1}

    def test_nothing_is_split_inside_the_drafter(self) -> None:
        timer = ScopeTimer()
        timer.start()
        head = timer.wrap("head", lambda: None)
        timer.wrap("drafter", head)()
        assert set(timer.class_seconds()) == {"drafter"}

    def test_counts_only_between_start_and_stop(self) -> None:
        timer = ScopeTimer()
        wrapped = timer.wrap("rest", lambda: 5)
        assert wrapped() == 5
        timer.start()
        wrapped()
        timer.stop()
        wrapped()
        assert timer.calls["rest"] == 1

    def test_a_raising_function_leaves_the_stack_clean(self) -> None:
        timer = ScopeTimer()
        timer.start()

        def fail() -> None:
            raise KeyError("x")

        with pytest.raises(KeyError):
            timer.wrap("head", fail)()
        timer.wrap("rest", lambda: None)()
        assert timer.calls == {"head": 1, "rest": 1}

    def test_one_scope_costs_microseconds(self) -> None:
        assert 0 < cost_of_one_scope() < 2e-5

    def test_instrumenting_leaves_no_trace(self, pair: Any, requests_of: Any) -> None:
        engine = pair.engine("chain")
        expected = engine.generate(requests_of(2))
        before = [dict(vars(module)) for module in engine.model.modules()]
        timer = ScopeTimer()
        with instrument(engine, engine.core(), timer):
            timer.start()
            assert engine.generate(requests_of(2)) == expected
        assert [vars(module) for module in engine.model.modules()] == before
        assert timer.calls["target_gemm"] > 0
        count = timer.calls["target_gemm"]
        engine.generate(requests_of(1))
        assert timer.calls["target_gemm"] == count


class TestProfile:
    """`profile_steps` on the random pair."""

    @pytest.mark.parametrize(
        ("mode", "nodes", "rows"), [("ar", 0, 1), ("chain", 7, 8), ("tree", 16, 17)]
    )
    def test_classes_cover_the_step(self, pair: Any, mode: str, nodes: int, rows: int) -> None:
        engine = pair.engine(mode)
        profile = profile_steps(engine, _plan(), device=DEVICE)
        assert (profile.mode, profile.nodes, profile.rows) == (mode, nodes, rows)
        names = {entry.name for entry in profile.classes}
        expected = {"target_gemm", "head", "recurrent", "attention", "rest"}
        assert names == (expected if mode == "ar" else expected | {"drafter", "tree"})
        covered = sum(entry.seconds for entry in profile.classes)
        assert 0.6 * profile.t_prof_s < covered <= 1.01 * profile.t_prof_s
        assert profile.unattributed_s < 0.4 * profile.t_prof_s
        assert 0.5 < profile.t_step_s / profile.t_prof_s < 2
        calls = {entry.name: entry.calls for entry in profile.classes}
        n_linear = sum(isinstance(m, torch.nn.Linear) for m in engine.model.layers.modules())
        assert calls["target_gemm"] == n_linear
        assert calls["head"] == 1
        assert {span.name for span in profile.spans} >= {"VERIFY", "COMMIT", "HEAD"}

    def test_reports_no_tau_of_a_few_steps(self, pair: Any) -> None:
        assert profile_steps(pair.engine("chain"), _plan(), device=DEVICE).tau is None

    def test_several_requests_at_once(self, pair: Any) -> None:
        engine = pair.engine("chain")
        one = profile_steps(engine, _plan(), device=DEVICE)
        four = profile_steps(engine, _plan(concurrency=4), device=DEVICE)
        flops = [
            next(c.flops for c in profile.classes if c.name == "target_gemm")
            for profile in (one, four)
        ]
        assert flops[1] == pytest.approx(4 * flops[0])

    def test_a_context_too_short_for_the_prompts(self, pair: Any) -> None:
        with pytest.raises(InputError, match="no prompt leaves room"):
            profile_steps(pair.engine("ar"), _plan(new_tokens=500), device=DEVICE)

    @pytest.mark.parametrize("changes", [{"steps": 0}, {"prompts": []}, {"concurrency": 0}])
    def test_bad_plans(self, changes: dict[str, Any]) -> None:
        with pytest.raises(InputError):
            _plan(**changes)


class TestCurve:
    """`step_time_curve` on the random pair."""

    def test_points(self, pair: Any) -> None:
        curve = step_time_curve(
            pair.engine("ar"), _plan(steps=3), [8, 1, 32, 8], block=16, device=DEVICE
        )
        assert [point.rows for point in curve.points] == [8, 32]
        assert all(point.draft_block == 16 for point in curve.points)
        assert curve.points[0].step_s > curve.ar_step_s

    def test_needs_a_drafter(self, pair: Any) -> None:
        with pytest.raises(InputError, match="needs a drafter"):
            step_time_curve(pair.engine("ar", with_drafter=False), _plan(), [8], device=DEVICE)

    def test_needs_a_row_count_above_one(self, pair: Any) -> None:
        with pytest.raises(InputError, match="above 1"):
            step_time_curve(pair.engine("ar"), _plan(), [1], device=DEVICE)


class TestRunner:
    """Blocks of steps on running requests."""

    def test_counts_what_it_ran(self, pair: Any) -> None:
        engine = pair.engine("chain")
        runner = StepRunner(engine, SpecConfig(), _plan(concurrency=3, new_tokens=6))
        stats = runner.block(20)
        assert (stats.steps, stats.request_steps, stats.requests) == (20, 60, 3)
        assert stats.tau == 1
        assert 24 < stats.context < 31
        assert stats.seconds > 0


class TestWork:
    """Counted bytes and FLOPs against hand-made sums for the test pair's shapes."""

    SHAPE = StepShape(requests=2, rows=9, committed=3, context=100, block=8)

    @pytest.fixture
    def engine(self, pair: Any) -> Any:
        """A loaded pair."""
        return pair.engine("chain")

    def test_projections(self, engine: Any) -> None:
        gdn = 64 * (2 * 2 * 16 + 4 * 16) + 64 * 4 * 16 + 2 * 64 * 4 + 4 * 16 * 64
        attention = 64 * (2 * 4 * 16 + 2 * 2 * 16) + 4 * 16 * 64
        weights = 6 * gdn + 2 * attention + 8 * 3 * 64 * 128
        assert linear_weights(engine.model.layers) == weights
        work = step_work(engine.model, None, self.SHAPE)
        assert work["target_gemm"].bytes == 4 * weights
        assert work["target_gemm"].flops == 2 * 18 * weights
        assert work["head"].bytes == 4 * 64 * 320
        assert work["head"].flops == 2 * 18 * 64 * 320
        assert "drafter" not in work

    def test_recurrent(self, engine: Any) -> None:
        work = step_work(engine.model, None, self.SHAPE)["recurrent"]
        state_bytes = 4 * 16 * 16 * 4
        window_bytes = 128 * 3 * 4
        assert work.bytes == 2 * 6 * 3 * (state_bytes + window_bytes)
        head_flops = 4 * 9 * 256 + 4 * 81 * 16 + 3 * 81 * 16 + 7 * 3 * 256
        assert work.flops == 2 * 6 * (4 * head_flops + 2 * 4 * 128 * 9)

    def test_attention(self, engine: Any) -> None:
        work = step_work(engine.model, None, self.SHAPE)["attention"]
        assert work.bytes == 2 * 2 * (109 + 3) * 2 * 2 * 16 * 4
        assert work.flops == 2 * 2 * 4 * 9 * 109 * 4 * 16

    def test_drafter(self, engine: Any) -> None:
        work = step_work(engine.model, engine.drafter, self.SHAPE)["drafter"]
        conv = 2 * 64 * 2 * 2 * 4
        layer = 64 * (2 * 64 + 2 * 32) + 3 * 64 * 128 + conv
        weights = 2 * layer + 3 * 64 * 64 + 8 * 64 + 64 * 320
        per_request = 2 * 2 * 2 * 16 * 100 + 2 * 7 * 16 * 8
        assert work.bytes == 4 * (weights + 2 * per_request)
        flops = 8 * 2 * layer + 7 * (64 * 320 + 8 * 64) + 7 * 16 * 16 * 8
        flops += 3 * (3 * 64 * 64 + 2 * 64 * 64) + 2 * 8 * 108 * 2 * 4 * 16
        assert work.flops == 2 * 2 * flops

    def test_no_drafting_no_drafter(self, engine: Any) -> None:
        shape = StepShape(requests=1, rows=1, committed=1, context=10, block=0)
        assert "drafter" not in step_work(engine.model, engine.drafter, shape)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_measured_peaks_are_plausible(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    from specpilot_cli.engines.reference import peaks

    monkeypatch.setattr(peaks, "_BUDGET_S", 0.05)
    monkeypatch.setattr(peaks, "_GEMM_SIZE", 256)
    measured = measure_peaks(dtype, 4 << 20)
    bandwidth = measured.bandwidth("measured")
    name = "float32" if dtype == torch.float32 else "bfloat16"
    rate = measured.compute(name, "measured")  # type: ignore[arg-type]
    assert bandwidth is not None
    assert rate is not None
    assert 1e8 < bandwidth.value < 1e13
    assert 1e7 < rate.value < 1e14
