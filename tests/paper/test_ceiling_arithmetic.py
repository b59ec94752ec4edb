"""Arithmetic that the paper states, redone with the code that users run, by section.

Printed figures are rounded, so a product is compared as an interval: every value that rounds to
the printed one.
"""

from __future__ import annotations

import json

import pytest

from specpilot_cli.ceiling.factors import Factors
from specpilot_cli.ceiling.floors import FULL_PEAK, floor_s
from specpilot_cli.ceiling.peaks import Peaks, load_gpu
from specpilot_cli.ceiling.speedup import speedup_at
from specpilot_cli.paths import bundled
from specpilot_cli.schema.step_profile import StepTimeCurve

RECORDED = "h200-qwen3.8-27b-dflash2-bf16.json"

# Qwen3.8-27B, text part: the linears of 64 layers and the LM head, in parameters.
HIDDEN, INTERMEDIATE, VOCAB = 5120, 17408, 248320
ATTENTION_LAYERS, GDN_LAYERS = 16, 48
Q_HEADS, KV_HEADS, HEAD_DIM = 24, 4, 256
GDN_KEY_HEADS, GDN_VALUE_HEADS, GDN_DIM = 16, 48, 128


def _weight_bytes() -> int:
    mlp = 3 * HIDDEN * INTERMEDIATE * (ATTENTION_LAYERS + GDN_LAYERS)
    query = Q_HEADS * HEAD_DIM
    attention = HIDDEN * (2 * query + 2 * KV_HEADS * HEAD_DIM + query) * ATTENTION_LAYERS
    value = GDN_VALUE_HEADS * GDN_DIM
    gates = 2 * GDN_VALUE_HEADS
    gdn = HIDDEN * (2 * GDN_KEY_HEADS * GDN_DIM + 2 * value + gates) + value * HIDDEN
    return 2 * (mlp + attention + gdn * GDN_LAYERS + VOCAB * HIDDEN)


def _rounds_to(printed: float, digits: int) -> tuple[float, float]:
    half = 0.5 * 10**-digits
    return printed - half, printed + half


def test_section_3_2_weight_read_takes_15_30_ms():
    h100 = load_gpu("h100-sxm5")
    peaks = Peaks(h100.title, h100.peaks)
    weights = _weight_bytes()
    assert round(weights / 1e9, 2) == 51.24
    seconds = floor_s(
        0,
        weights,
        flops_per_s=peaks.compute("bfloat16").value,
        bytes_per_s=peaks.bandwidth().value,
        rule=FULL_PEAK,
    )
    assert round(1e3 * seconds, 2) == 15.30


def test_section_3_1_byte_floor_uses_90_percent_of_the_bandwidth():
    h100 = load_gpu("h100-sxm5").peaks
    seconds = floor_s(
        0,
        _weight_bytes(),
        flops_per_s=h100.flops_per_s["bfloat16"][0].value,
        bytes_per_s=h100.read_bytes_per_s[0].value,
    )
    assert round(1e3 * seconds, 2) == round(15.297 / 0.9, 2)


def test_section_3_1_few_rows_stay_bound_by_bytes():
    # 64 rows were nearly free: their FLOP time at 60 % lies below the byte time at 90 %.
    h100 = load_gpu("h100-sxm5").peaks
    rates = {
        "flops_per_s": h100.flops_per_s["bfloat16"][0].value,
        "bytes_per_s": h100.read_bytes_per_s[0].value,
    }
    weights = _weight_bytes()
    one, many = (floor_s(weights * rows, weights, **rates) for rows in (1, 64))
    assert one == many
    assert floor_s(weights * 256, weights, **rates) > one


@pytest.mark.parametrize(
    ("printed", "factors", "leading"),
    [
        (2.57, Factors(tau=1.83, kernel=1.39, overhead=1.01), "tau"),
        # The second round states one step-cost factor, kernel and overhead together.
        (1.95, Factors(tau=1.34, kernel=1.45, overhead=1.0), "kernel"),
    ],
    ids=["round one", "round two"],
)
def test_appendix_b_ceilings_are_the_product_of_their_factors(printed, factors, leading):
    low, high = 1.0, 1.0
    for value in (factors.tau, factors.kernel, factors.overhead):
        bounds = (1.0, 1.0) if value == 1.0 else _rounds_to(value, 2)
        low, high = low * bounds[0], high * bounds[1]
    least, most = _rounds_to(printed, 2)
    assert low < most
    assert high > least
    assert low < factors.product < high
    assert factors.leading == leading


@pytest.mark.parametrize("q_pass", [0.80, 0.88])
def test_section_6_5_a_two_pass_cycle_needs_nearly_twice_the_tokens(q_pass):
    # A cycle is one exact step plus a Q pass of 0.80-0.88 steps; with the single-pass step as
    # the unit, c is the factor by which tokens must grow to break even.
    data = json.loads((bundled("profiles") / "step_times" / RECORDED).read_text(encoding="utf-8"))
    data |= {"ar_step_s": 1.0, "ar_range_s": None, "points": [{"rows": 33, "step_s": 1 + q_pass}]}
    curve = StepTimeCurve.model_validate(data)
    factor = speedup_at(curve, 32, tau=1.0).c
    assert 1.75 < factor < 2.0
    # Appendix C: 6.16 tokens in a one-level step, 11.67 with two levels: above break-even.
    assert speedup_at(curve, 32, tau=11.67).speedup > 6.16
