"""Tokens of lattices beside the profile and the step times of another deployment, or block."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from specpilot_cli.ceiling.answer import CeilingAnswer, answer_ceiling
from specpilot_cli.ceiling.peaks import Peaks
from specpilot_cli.ceiling.replayed import ReplayedTaus
from specpilot_cli.ceiling.speedup import TauPoint
from specpilot_cli.schema.deployment import Deployment, block_note, projected_because
from specpilot_cli.schema.gpu_profile import PeakRates
from specpilot_cli.schema.step_profile import StepProfile, StepTimeCurve

TARGET, DRAFTER = {"name": "t", "sha256": "a" * 64}, {"name": "d", "sha256": "b" * 64}
OWN = Deployment("test", "a" * 64, "b" * 64, (8,), "dflash2")
TAUS = ReplayedTaus(
    trees=(TauPoint(7, 4.4), TauPoint(15, 5.0)), current=TauPoint(7, 3.0), source="a replay",
    recorded=OWN,
)  # fmt: skip


@pytest.fixture
def ask(
    make_profile: Callable[..., StepProfile],
    make_curve: Callable[..., StepTimeCurve],
    round_rates: PeakRates,
) -> Callable[..., CeilingAnswer]:
    """The answer for a profile and step times of this deployment, changed as told."""

    def run(taus: ReplayedTaus, curve_changes: object = None, **profile: object) -> CeilingAnswer:
        step = make_profile(target=TARGET, drafter=DRAFTER, draft_block=8, **profile)
        curve = make_curve([(8, 0.012), (16, 0.016)])
        own = {"target": TARGET, "drafter": DRAFTER, **(curve_changes or {})}  # type: ignore[dict-item]
        curve = StepTimeCurve.model_validate(curve.model_dump() | own)
        return answer_ceiling(step, Peaks("test", round_rates), replayed=taus, curve=curve)

    return run


def test_one_deployment_is_no_projection(ask: Callable[..., CeilingAnswer]) -> None:
    answer = ask(TAUS)
    assert answer.projected_because == ()
    assert not [note for note in answer.advice.notes if "block" in note or "projected" in note]
    assert answer.now is not None
    assert (answer.now.tau, answer.now.step_s) == (3.0, 0.012)


@pytest.mark.parametrize(
    ("recorded", "reason"),
    [
        (replace(OWN, engine="sglang"), "τ is of sglang, the step times of test"),
        (replace(OWN, target_sha256="c" * 64), "the step times are of another target"),
        (replace(OWN, drafter_sha256="c" * 64), "the step times are of another drafter"),
    ],
)
def test_another_engine_or_other_weights_are(
    ask: Callable[..., CeilingAnswer], recorded: Deployment, reason: str
) -> None:
    answer = ask(replace(TAUS, recorded=recorded))
    assert answer.projected_because == (reason,)
    [note] = [note for note in answer.advice.notes if "tokens factor is projected" in note]
    assert reason.replace("the step times", "the profiled step") in note


def test_step_times_of_another_device_are(ask: Callable[..., CeilingAnswer]) -> None:
    device = {"name": "another", "kind": "gpu"}
    answer = ask(TAUS, {"device": device})
    assert answer.projected_because == (
        "the step times are of another, the profile of test device",
    )


def test_weights_that_nobody_named_count_as_other_ones(ask: Callable[..., CeilingAnswer]) -> None:
    answer = ask(TAUS, {"target": {"name": "t"}})
    assert answer.projected_because == ("the step times do not say which target's weights ran",)


def test_lattices_of_a_longer_block_leave_the_profiles_own_tokens_and_step(
    ask: Callable[..., CeilingAnswer],
) -> None:
    """A chain cut from longer drafts is another chain: τ 4 and 12 ms were measured."""
    longer = replace(TAUS, recorded=replace(OWN, blocks=(16,)))
    answer = ask(longer)
    assert answer.now is not None
    assert (answer.now.tau, answer.now.step_s) == (4.0, 0.012)
    assert answer.now.speedup == pytest.approx(4.0 * 0.010 / 0.012)
    assert any("block 16, the profiled step of block 8: the best tree" in note
               for note in answer.advice.notes)  # fmt: skip
    unmeasured = ask(longer, tau=None)
    assert unmeasured.now is not None
    assert unmeasured.now.tau == 3.0
    assert any("τ now is replayed on the recorded block" in note
               for note in unmeasured.advice.notes)  # fmt: skip


def test_step_times_of_another_block_are_noted(ask: Callable[..., CeilingAnswer]) -> None:
    points = [{"rows": 8, "step_s": 0.012, "draft_block": 16}]
    notes = ask(TAUS, {"points": points}).advice.notes
    assert any("the step times of block 16: drafting takes another time" in note for note in notes)


def test_a_tree_that_brings_no_speed_is_not_advised(ask: Callable[..., CeilingAnswer]) -> None:
    """Now: 4 tokens in 12 ms, measured. A tree of 7 nodes: 4.8 in 12 ms, or in 20 ms."""
    longer = replace(TAUS, trees=(TauPoint(7, 4.8),), recorded=replace(OWN, blocks=(16,)))
    gemm = {"name": "target_gemm", "seconds": 0.012, "bytes": 1.05e10, "flops": 1e9, "calls": 1}
    quick = {"t_prof_s": 0.012, "classes": [gemm]}
    cheap = [{"rows": 8, "step_s": 0.012}, {"rows": 16, "step_s": 0.03}]
    steep = [{"rows": 8, "step_s": 0.02}, {"rows": 16, "step_s": 0.03}]
    pays = ask(longer, {"points": cheap}, **quick).advice.next_step
    assert pays == (
        "verify a best-first tree of 7 nodes: the recorded candidates hold 4.80 tokens per step "
        "against 4.00 now"
    )
    assert ask(longer, {"points": steep}, **quick).advice.next_step == (
        "a best-first tree of 7 nodes commits 4.80 tokens per step against 4.00 now and brings no "
        "speed at these step times (0.72×)"
    )
    assert not any("plain decoding" in note for note in ask(longer).advice.notes)
    slow = ask(longer, {"points": [{"rows": 8, "step_s": 0.06}]}).advice.notes
    assert "at these step times plain decoding beats every tree: the best reaches 0.80×" in slow
    marginal = ask(replace(longer, policy="marginal"), {"points": cheap}, **quick)
    assert marginal.advice.next_step.startswith("verify a marginal tree of 7 nodes")


def test_an_eagle_drafter_has_no_block() -> None:
    trees = replace(OWN, kind="eagle", blocks=(6,))
    assert block_note(trees, OWN, what="x", consequence="y") is None
    assert projected_because(trees, OWN, what="x") == ()


def test_a_marginal_tree_is_called_one(ask: Callable[..., CeilingAnswer]) -> None:
    answer = ask(replace(TAUS, policy="marginal"))
    assert answer.tokens.tau_best_source.startswith("marginal tree with the largest tau / c")
