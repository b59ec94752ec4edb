"""The page of a recipe run, for every verdict: what a reader must see, and must not."""

from __future__ import annotations

import re
import sys
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from specpilot_cli.apply.reference.measure import Measurements, Projection
from specpilot_cli.apply.reference.systems import SystemPlan
from specpilot_cli.ceiling.factors import measure_ceiling
from specpilot_cli.ceiling.peaks import Peaks
from specpilot_cli.ceiling.speedup import TauPoint, best_budget, speedup_at, speedup_curve
from specpilot_cli.ceiling.step_times import load_step_times
from specpilot_cli.convert_w12.plan import Outcome
from specpilot_cli.engines.base import ForcedScores
from specpilot_cli.engines.reference.faults import LogitFault
from specpilot_cli.engines.reference.spec import SpecConfig
from specpilot_cli.paired_bench.run import run_paired_bench
from specpilot_cli.paired_bench.types import PairedBenchSettings, PairedBenchSummary
from specpilot_cli.replay.intervals import Estimate
from specpilot_cli.replay.result import ReplayResult, ReplayRow
from specpilot_cli.report.json_out import build_envelope
from specpilot_cli.report.recipe_page import render_recipe_page
from specpilot_cli.report.recipe_words import fault_text, projection_notes
from specpilot_cli.schema.gpu_profile import PeakRates
from specpilot_cli.schema.outputs import OutputRecord
from specpilot_cli.schema.step_profile import StepProfile, StepTimeCurve
from specpilot_cli.token_force.audit import AuditedEvent, Event
from specpilot_cli.token_force.config import TokenForceSettings
from specpilot_cli.token_force.coverage import coverage
from specpilot_cli.token_force.result import EventInContext, TokenForceResult
from specpilot_cli.token_force.rules import EventTally, event_rule, rate_rule, rate_summary
from specpilot_cli.token_force.scorer import ScoredOutput
from specpilot_cli.token_force.threshold import Threshold

sys.path.insert(0, str(Path(__file__).parents[1] / "paired_bench"))
from virtual_engines import FakeClock, FakeEngine, constant, prompts

_ENGINE = {"name": "specpilot-reference", "version": "1"}


def _bench(candidate_rate: float, *, broken: bool = False) -> PairedBenchSummary:
    clock = FakeClock()
    systems = {
        "baseline": FakeEngine(clock, constant(100.0)),
        "candidate": FakeEngine(clock, constant(candidate_rate), tokens_per_step=4),
        "ar": FakeEngine(clock, constant(50.0), tokens_per_step=None),
    }
    if broken:
        systems["candidate"].outputs = lambda request: (1,)
    settings = PairedBenchSettings(aa_sessions=1)
    return run_paired_bench(systems, prompts(6), settings=settings, clock=clock).summary


def _scored(n_mismatches: int, name: str, n_tokens: int = 100) -> ScoredOutput:
    best = np.full(n_tokens, -0.5)
    own = best - 0.3 * (np.arange(n_tokens) < n_mismatches)
    record = OutputRecord(
        request_id=name, benchmark="code", prompt_ids=(1,), output_ids=tuple(range(n_tokens)),
        finish_reason="length",
    )  # fmt: skip
    return ScoredOutput(record, ForcedScores(own, np.arange(n_tokens), best))


def _tally(requests: int) -> EventTally:
    return EventTally(1000, 3 * requests, 2 * requests, 2 * requests, 2 * requests, requests, 1.0)


def _audit(mismatches: int, requests_with_event: int) -> TokenForceResult:
    """Ten requests of 100 tokens, `mismatches` in each; stock has one in each."""
    settings = TokenForceSettings(strata=False)
    system = [_scored(mismatches, f"r{i}") for i in range(10)]
    stock = [_scored(1, f"r{i}") for i in range(10)]
    rates = rate_rule(system, stock, settings)
    events = event_rule(_tally(requests_with_event), _tally(0), settings.alpha)
    event = Event("system", "unseen-code-03", "code", 92, 7, 8, 1.99)
    worst = EventInContext(AuditedEvent(event, None), (5, 6), (9,), "close them", " Is", " What")
    rejects = rates.rejects or events.rejects
    return TokenForceResult(
        verdict="reject" if rejects else "accept",
        reasons=("rate rule (pooled): mismatches exceed stock's",) if rejects else (),
        warnings=(), threshold=Threshold(0.125), settings=settings,
        system=rate_summary(system), stock=rate_summary(stock),
        coverage=(coverage([o.record for o in system]), coverage([o.record for o in stock])),
        rate=rates, events=events,
        audited=(), worst=(worst,) if requests_with_event else (), audit_clauses=(),
        detectable_rate_difference=0.0193, detectable_event_rate=0.0065,
    )  # fmt: skip


def _row(policy: str, nodes: int | None, tau: float) -> ReplayRow:
    value = Estimate(tau, tau - 0.1, tau + 0.1, 3)
    ones = np.ones(1, dtype=np.int64)
    rows = None if nodes is None else nodes + 1
    return ReplayRow(policy, nodes, rows, value, {}, value, value, None, ones, ones)


@cache
def _measured() -> Measurements:
    """Profiled steps slower than plain ones; 17 rows are beyond what the H200 recorded."""
    number = [{"value": 1e12, "kind": "measured", "source": "made up"}]
    rates = {"read_bytes_per_s": number, "flops_per_s": {"float32": number}}
    device = {"name": "test processor", "kind": "cpu", "threads": 1, "peaks": rates}
    shared = {"schema_version": 1, "engine": _ENGINE, "device": device, "dtype": "float32",
              "target": {"name": "t"}, "drafter": {"name": "d"}, "source": "made up"}  # fmt: skip
    kernel = {"name": "recurrent", "seconds": 0.006, "bytes": 1.8e9, "flops": 0, "calls": 4}
    profile = StepProfile.model_validate(
        shared
        | {"mode": "chain", "nodes": 7, "rows": 8, "steps": 5, "t_step_s": 0.0096,
           "t_prof_s": 0.010, "classes": [kernel]}
    )  # fmt: skip
    points = [{"rows": n + 1, "step_s": 0.009 + 0.0002 * n} for n in (4, 8, 16)]
    curve = StepTimeCurve.model_validate(
        shared | {"name": "here", "ar_step_s": 0.005, "includes_drafting": True, "points": points}
    )
    stock = _row("chain", 7, 3.0)
    taus = [TauPoint(4, 2.8), TauPoint(8, 3.6), TauPoint(16, 4.4)]
    trees = [_row("best-first", point.n_nodes, point.tau) for point in taus]
    here, h200 = speedup_curve(taus, curve), load_step_times("h200-qwen3.8-27b-dflash2-bf16")
    there = speedup_curve(taus, h200)
    projection = Projection(h200, there, best_budget(there), speedup_at(h200, 7, tau=3.0))
    peaks = Peaks("test processor", PeakRates.model_validate(rates))
    return Measurements(
        stock_row=stock,
        trees=ReplayResult(
            "trajectory", "", 15, 1.0, [*trees, _row("oracle", None, 5.5)], 3, 30, np.ones(15), 0.0
        ),
        profile=profile, curve=curve, stock_point=speedup_at(curve, 7, tau=3.0), points=here,
        chosen=best_budget(here), projection=projection,
        ceiling=measure_ceiling(profile, peaks, tau=3.0, tau_best=4.4),
    )  # fmt: skip


def _result(verdict: str, summary: Any, audit: Any, fault: LogitFault | None = None) -> Any:
    """Every attribute of a run's result that the page reads."""
    here = Path()
    tuned = SpecConfig("tree", 16, 16)
    reasons = (*(() if audit is None else audit.reasons), *summary.reasons, *summary.reasons)
    tensors = (
        Outcome("a", "BF16", (8, 8), "m", 1000, 760, escapes=0),
        Outcome("b", "F32", (8,), "m", 200, 200, reason="not BF16"),
    )
    return SimpleNamespace(
        loaded=SimpleNamespace(
            recipe=SimpleNamespace(
                title="Demo", name="demo", engine="reference",
                regime=SimpleNamespace(requests=1, dtype="float32", threads=1),
            )
        ),
        settings=SimpleNamespace(fault=fault), conversion=SimpleNamespace(outcomes=tensors),
        measured=_measured(), bench=SimpleNamespace(summary=summary), audit=audit,
        verdict=verdict, reasons=reasons,
        systems=(
            SystemPlan("baseline", "stock chain", here, here, SpecConfig("chain", 8), "bf16"),
            SystemPlan("candidate", "tuned", here, here, tuned, "w12", fault),
            SystemPlan("ar", "plain decoding", here, None, SpecConfig("ar"), "bf16"),
        ),
    )  # fmt: skip


def _page(result: Any) -> str:
    envelope = build_envelope("apply recipe", {"data": "not read here"}, verdict=result.verdict)
    return render_recipe_page(result, envelope)


def _visible(page: str) -> str:
    """What a reader sees: no style, no embedded data, no tags."""
    body = page.split("<body>")[1].split('<script type="application/json"')[0]
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", body))


def _head(page: str) -> str:
    return page.split("<header>")[1].split("</header>")[0]


@pytest.fixture(scope="module")
def promoted() -> str:
    return _page(_result("promote", _bench(150.0), _audit(1, 0)))


@pytest.fixture(scope="module")
def faulty() -> str:
    result = _result("reject", _bench(150.0), _audit(20, 9), LogitFault(48, 7, 2.0))
    return _page(result)


def test_systems_are_stock_and_tuned_everywhere(promoted):
    text = _visible(promoted)
    assert "baseline" not in text
    # Candidates are also what a drafter offers; only the benchmark's role must not appear.
    assert not re.search(r"\bcandidate\b", text)
    assert "one launch of stock on both sides" in text


def test_the_first_table_is_the_gain_with_its_interval_first(promoted):
    first = promoted.split('<section id="numbers">')[1].split("</table>")[0]
    assert "<h3>Tuned over stock, output rate per request</h3>" in first
    assert re.findall(r'<th scope="col" class="\w+">([^<]*)</th>', first) == [
        "benchmark", "gain ×", "95 % interval", "requests", "same tokens", "τ, stock → tuned",
        "tok/s, stock → tuned",
    ]  # fmt: skip
    assert '<td class="num">1.5000</td>' in first
    assert "100.0 → 150.0" in first


def test_no_backtick_is_left_to_the_reader(promoted, faulty):
    assert "`" not in _visible(promoted)
    assert "`" not in _visible(faulty)


def test_the_bound_and_the_leading_factor_stand_under_their_figures(promoted):
    head = _head(promoted)
    assert "must exceed bound 1.010×" in head
    assert "lower bound 1.500×" in head
    # Kernels 10 ms / 2 ms.
    assert "kernels lead with 5.00×" in head


def test_noise_below_the_profile_is_explained_and_never_a_negative_time(promoted):
    text = _visible(promoted)
    assert "The overhead factor is below 1: the profiled steps ran 4.2 % slower" in text
    assert not re.search(r"[-−]\d[\d.]* (ms|µs)", text)
    assert "outside the profile" not in text


def test_advice_fits_the_reference_engine(promoted):
    ceiling = promoted.split("<h3>Ceiling of stock</h3>")[1].split("<h3>")[0]
    assert "no mechanism changes that" in ceiling
    assert "snapshot" not in ceiling
    assert "verify a best-first tree of 16 nodes" in ceiling


def test_the_projection_is_labelled_with_what_it_rests_on(promoted):
    head = _head(promoted)
    assert "projected, not measured" in head
    assert "no recorded step time beyond 16 rows" in head
    assert "pessimistic for kernels without snapshots" in head
    assert '<dd class="basis">projected</dd>' in head
    table = promoted.split("<h3>Projected, not measured")[1].split("</table>")[0]
    assert re.findall(r">(recorded|interpolated|extrapolated)<", table) == [
        "recorded", "extrapolated", "interpolated", "extrapolated",
    ]  # fmt: skip


def test_weights_are_said_to_change_no_speed_here(promoted):
    text = _visible(promoted)
    assert "W12 weights: 1.20 kB → 960 B (−20.0 %), 1 of 2 tensors converted" in text
    assert "they change no speed here" in text


def test_a_promotion_has_no_alert_and_no_reasons_against_it(promoted):
    assert 'class="alert"' not in promoted
    assert 'class="reasons"' not in promoted
    assert "<title>promote: Demo</title>" in promoted
    assert "Lossless" in _visible(promoted)


def test_a_fault_and_its_rejection_are_unmistakable(faulty):
    head, text = _head(faulty), _visible(faulty)
    assert "<title>reject: Demo</title>" in faulty
    assert head.index('class="alert"') < head.index("<h1>")
    assert "+2 on the logits of one in 7 token ids, from output position 48 on" in text
    assert 'class="verdict no"' in head
    assert "rate rule (pooled): mismatches exceed stock&#39;s" in head
    # Fast, but nothing to claim.
    assert "1.500×" in head
    assert "not claimed: rejected" in head
    assert "Faulty over stock" in text
    assert "tuned over" not in text


def test_figures_of_a_rejected_run_say_so_in_their_titles(faulty):
    titles = re.findall(r'role="img" aria-label="([^"]*)"', faulty)
    assert titles[0].startswith("Faulty is 1.500× as fast as stock")
    assert titles[0].endswith("token forcing rejects it, so no gain is claimed")
    assert titles[1].startswith("Faulty: reject by the rate rule and the event rule")
    # The condition wraps, so only words stay whole.
    assert faulty.count("DELIBERATE") == 2


def test_a_rejected_run_shows_rules_and_worst_events(faulty):
    rules = faulty.split("<h3>Losslessness rules</h3>")[1].split("</table>")[0]
    assert re.findall(r">(reject|pass)<", rules) == ["reject", "reject"]
    assert "+19.00 points" in rules
    assert "9 requests against 0" in rules
    worst = faulty.split("<h3>Largest events of faulty</h3>")[1].split("</table>")[0]
    for words in ("unseen-code-03", "92", "1.99", "close them", " Is", " What"):
        assert words in worst


def test_a_gain_below_the_bound_is_told_with_its_reason_once():
    page = _page(_result("no", _bench(100.5), _audit(1, 0)))
    head = _head(page)
    assert 'class="verdict no"' in head
    assert head.count("does not exceed") == 1
    titles = re.findall(r'role="img" aria-label="([^"]*)"', page)
    assert "is not above the promotion bound" in titles[0]
    assert titles[1].startswith("Tuned: accept")


def test_an_invalid_run_shows_no_gain_but_says_why():
    summary = _bench(150.0, broken=True)
    assert summary.verdict == "invalid"
    page = _page(_result("invalid", summary, None))
    head = _head(page)
    assert 'class="verdict invalid"' in head
    assert 'class="reasons"' in head
    assert "gain, tuned over stock" not in head
    assert 'id="figure-forest"' not in page
    assert 'id="figure-mismatch"' not in page
    assert 'id="figure-tau-curve"' in page


def test_fault_text_keeps_the_sign_of_the_bias():
    assert fault_text(LogitFault(0, 3, -1.5)).startswith("-1.5 on the logits of one in 3 token ids")


def test_a_projection_inside_the_recorded_rows_needs_no_warning():
    projection = _measured().projection
    assert projection is not None
    inside = Projection(
        projection.curve, projection.points[:2], projection.points[1], projection.stock
    )
    assert len(projection_notes(inside)) == 1
    assert len(projection_notes(projection)) == 2
