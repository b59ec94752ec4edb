"""Eq. 4 and the advice drawn from it."""

from __future__ import annotations

import pytest

from specpilot_cli.ceiling.advice import REFERENCE_ENGINE, BestTree, advise, overhead_note
from specpilot_cli.ceiling.factors import Factors, ceiling_factors, measure_ceiling
from specpilot_cli.ceiling.floors import FULL_PEAK
from specpilot_cli.ceiling.peaks import Peaks
from specpilot_cli.errors import InputError, MeasurementInvalid


def _ceiling(profile, rates, **kwargs):
    return measure_ceiling(profile, Peaks("test", rates), **kwargs)


def test_factors_of_a_hand_made_profile(make_profile, round_rates):
    ceiling = _ceiling(make_profile(), round_rates, tau_best=6.0)
    # Floors 3 + 1 + 1 ms; profile 10 ms; step 12 ms; tau 4 -> 6.
    assert ceiling.t_floor_s == pytest.approx(0.005)
    assert ceiling.factors.tau == pytest.approx(1.5)
    assert ceiling.factors.kernel == pytest.approx(2.0)
    assert ceiling.factors.overhead == pytest.approx(1.2)
    assert ceiling.factors.product == pytest.approx(3.6)
    assert ceiling.factors.step_cost == pytest.approx(2.4)
    assert ceiling.factors.leading == "kernel"
    assert ceiling.unattributed_s == pytest.approx(0.001)


def test_product_is_tau_ratio_times_step_over_floor():
    factors = ceiling_factors(0.024, 0.020, 0.016, tau=4.0, tau_best=5.0)
    assert factors.product == pytest.approx((5.0 / 4.0) * (0.024 / 0.016))


@pytest.mark.parametrize(
    ("tau", "kernel", "overhead", "leading"),
    [
        (1.83, 1.39, 1.01, "tau"),
        (1.34, 1.45, 1.00, "kernel"),
        (1.10, 1.20, 1.50, "overhead"),
        (None, 1.05, 1.02, "kernel"),
        (1.20, 1.20, 1.20, "tau"),
    ],
)
def test_leading_factor(tau, kernel, overhead, leading):
    assert Factors(tau, kernel, overhead).leading == leading


def test_without_a_better_tree_the_product_is_the_step_cost(make_profile, round_rates):
    ceiling = _ceiling(make_profile(), round_rates)
    assert ceiling.factors.tau is None
    assert ceiling.factors.product == pytest.approx(2.4)
    assert any("--tau-best" in note for note in advise(ceiling).notes)


def test_full_peak_floors_are_lower(make_profile, round_rates):
    paper = _ceiling(make_profile(), round_rates)
    full = _ceiling(make_profile(), round_rates, rule=FULL_PEAK)
    assert full.t_floor_s == pytest.approx(0.0027 + 0.0006 + 0.001)
    assert full.factors.kernel > paper.factors.kernel


def test_best_tau_without_a_measured_one_is_refused(make_profile, round_rates):
    with pytest.raises(InputError, match="measured tau"):
        _ceiling(make_profile(tau=None), round_rates, tau_best=5.0)


def test_a_profile_without_counts_has_no_floor(make_profile, round_rates, kernel):
    with pytest.raises(InputError, match="no floor"):
        _ceiling(make_profile(classes=[kernel("rest", 0.01, None, None)]), round_rates)


@pytest.mark.parametrize(
    ("times", "taus"),
    [
        ((0.0, 0.01, 0.01), {}),
        ((0.01, 0.01, 0.0), {}),
        ((0.01, float("nan"), 0.01), {}),
        ((0.01, 0.01, 0.01), {"tau": 0.5, "tau_best": 2.0}),
    ],
    ids=["no step", "no floor", "nan profile", "tau below one"],
)
def test_impossible_quantities_carry_no_verdict(times, taus):
    with pytest.raises(MeasurementInvalid):
        ceiling_factors(*times, **taus)


def test_advice_for_tokens_names_the_budget(make_profile, round_rates):
    ceiling = _ceiling(make_profile(), round_rates, tau_best=12.0)
    advice = advise(ceiling, tree=BestTree(nodes=32))
    assert "32 nodes" in advice.next_step
    assert "12.00 tokens per step against 4.00" in advice.next_step


def test_advice_for_kernels_names_the_class_with_most_slack(make_profile, round_rates):
    advice = advise(_ceiling(make_profile(), round_rates, tau_best=4.4))
    assert advice.next_step.startswith("`target_gemm` is 3.00 ms above its floor (25.0 %")


def test_advice_for_gaps_when_they_exceed_every_slack(make_profile, round_rates, kernel):
    profile = make_profile(classes=[kernel("target_gemm", 0.0031, 2.7e9, 0)])
    advice = advise(_ceiling(profile, round_rates))
    assert "6.90 ms of the profiled step are gaps" in advice.next_step


def test_advice_for_overhead_states_its_share(make_profile, round_rates):
    advice = advise(_ceiling(make_profile(t_step_s=0.040), round_rates, tau_best=4.4))
    assert advice.next_step.startswith("30.0 ms (75.0 % of the step) lie outside the profile")


def test_advice_near_the_ceiling_is_to_change_the_step(make_profile, round_rates, kernel):
    profile = make_profile(
        t_step_s=0.00305, t_prof_s=0.003, classes=[kernel("target_gemm", 0.003, 2.7e9, 0)]
    )
    advice = advise(_ceiling(profile, round_rates, tau_best=4.0))
    assert "1.7 % of its ceiling" in advice.headline
    assert "two chained drafts" in advice.next_step


def test_advice_warns_of_peaks_set_too_low(make_profile, round_rates, kernel):
    profile = make_profile(classes=[kernel("target_gemm", 0.002, 2.7e9, 0)])
    assert any("too low" in note for note in advise(_ceiling(profile, round_rates)).notes)


def _with_device(make_profile, engine: str, kind: str, **changes):
    profile = make_profile(engine={"name": engine, "version": "1"}, **changes)
    threads = 1 if kind == "cpu" else None
    device = profile.device.model_copy(update={"kind": kind, "threads": threads})
    return profile.model_copy(update={"device": device})


def test_advice_on_recurrent_layers_fits_the_device(make_profile, round_rates, kernel):
    classes = [kernel("recurrent", 0.009, 0.9e9, 0)]
    on_gpu = _with_device(make_profile, "sglang", "gpu", classes=classes)
    on_cpu = _with_device(make_profile, "other", "cpu", classes=classes)
    gpu, cpu = (advise(_ceiling(p, round_rates)).next_step for p in (on_gpu, on_cpu))
    assert "snapshot is kept per node" in gpu
    assert "snapshot" not in cpu
    assert cpu.startswith("`recurrent` is 8.00 ms above its floor")


def test_the_reference_engine_is_not_told_to_change_its_kernels(make_profile, round_rates):
    profile = _with_device(make_profile, "specpilot-reference", "cpu")
    advice = advise(_ceiling(profile, round_rates, tau_best=4.4), tree=BestTree(nodes=16))
    assert "snapshot" not in advice.next_step
    assert "no mechanism changes that" in advice.next_step
    assert advice.next_step.endswith(
        "verify a best-first tree of 16 nodes: the recorded candidates hold 4.40 tokens per step "
        "against 4.00 now"
    )
    worse = advise(_ceiling(profile, round_rates, tau_best=3.9))
    assert "verify" not in worse.next_step


def test_the_reference_engines_name_is_the_one_in_its_profiles():
    pytest.importorskip("torch")
    from specpilot_cli.engines.reference.profiler import ENGINE

    assert ENGINE.name == REFERENCE_ENGINE


@pytest.mark.parametrize(
    ("engine", "cause"),
    [("specpilot-reference", "timing noise, since the timers' own cost is taken out"),
     ("sglang", "timing noise or the profiler's own cost")],
)  # fmt: skip
def test_an_overhead_below_one_is_explained(make_profile, round_rates, engine, cause):
    profile = _with_device(make_profile, engine, "gpu", t_step_s=0.0098)
    ceiling = _ceiling(profile, round_rates)
    note = overhead_note(ceiling)
    assert note is not None
    assert "ran 2.0 % slower than the plain ones" in note
    assert cause in note
    assert note in advise(ceiling).notes
    assert overhead_note(_ceiling(make_profile(), round_rates)) is None
