"""Pieces of the benchmark that need no run: split, plan, refill gaps, rule, saved results."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from virtual_engines import prompts

from specpilot_cli.engines.base import Generation
from specpilot_cli.errors import InputError
from specpilot_cli.io.prompts_file import read_prompts
from specpilot_cli.paired_bench.client import refill_gaps
from specpilot_cli.paired_bench.machine import parse_gpu_lines
from specpilot_cli.paired_bench.plan import Session, make_plan, split_warmup
from specpilot_cli.paired_bench.promotion import decide
from specpilot_cli.paired_bench.ratios import log_ratios
from specpilot_cli.paired_bench.types import PairedBenchSettings, TimedRequest

SETTINGS = PairedBenchSettings(aa_sessions=1)


def answer(request_id: str, submit_s: float, last_byte_s: float, tokens: int = 10) -> Generation:
    return Generation(
        request_id, tuple(range(tokens)), "length", 3, tokens, None, submit_s, submit_s, last_byte_s
    )


def test_warm_up_takes_from_the_largest_benchmark_and_leaves_two_everywhere() -> None:
    uneven = [*prompts(6, ["chat"]), *prompts(3, ["x", "code"])[3:]]
    warmup, timed = split_warmup(uneven, n_warmup=5, limit=None)
    assert [p.benchmark for p in warmup] == ["chat", "chat", "chat", "chat", "code"]
    assert [p.request_id for p in timed] == ["chat-0", "code-0", "chat-1", "code-1"]


def test_detectable_gain_of_the_plan_shrinks_with_more_requests_only_down_to_the_base() -> None:
    few, many = (
        make_plan([Session("ab", ("baseline", "candidate"), tuple(prompts(n)))], SETTINGS)
        for n in (10, 1000)
    )
    assert few.detectable_diverging_ratio > many.detectable_diverging_ratio > 1.03
    assert few.detectable_identical_ratio > many.detectable_identical_ratio > 1.01
    assert few.n_answers == 2 * 2 * 20


def test_refill_gaps_follow_the_earliest_open_answer() -> None:
    served = [answer("a", 0.0, 4.0), answer("b", 0.0, 2.0), answer("c", 2.5, 3.0)]
    served.append(answer("d", 3.25, 5.0))
    assert refill_gaps(served, 2) == (0.5, 0.25)
    assert refill_gaps(served[:2], 2) == ()


@pytest.mark.parametrize(
    ("lower", "identical", "nu", "verdict"),
    [
        (1.0101, True, 0.0, "promote"),
        (1.0101, True, 0.001, "no"),
        (1.0101, False, 0.0, "no"),
        (1.0301, False, 0.0, "promote"),
        (1.01, True, 0.0, "no"),
    ],
)
def test_the_lower_bound_must_exceed_base_and_twice_the_noise(
    lower: float, identical: bool, nu: float, verdict: str
) -> None:
    decision = decide(lower, nu_log=nu, identical=identical, settings=SETTINGS)
    assert decision.verdict == verdict
    assert decision.bound_ratio == pytest.approx(1 + (0.01 if identical else 0.03) + 2 * nu)


def test_log_ratios_average_runs_of_a_request_and_refuse_a_missing_partner() -> None:
    rows = [
        TimedRequest("ab", run, 0, 0, system, "chat", answer("q", 0.0, seconds))
        for run, system, seconds in [
            (0, "candidate", 1.0), (0, "baseline", 2.0), (1, "candidate", 1.0), (1, "baseline", 8.0)
        ]
    ]  # fmt: skip
    assert log_ratios(rows, "candidate", "baseline") == {
        "chat": {"q": pytest.approx((math.log(2) + math.log(8)) / 2)}
    }
    with pytest.raises(ValueError, match="no complete pair in run 1"):
        log_ratios(rows[:3], "candidate", "baseline")


def test_prompt_files_name_the_line_or_the_repeated_id(tmp_path: Path) -> None:
    row = '{"request_id": "a", "benchmark": "chat", "text": "Hi", "max_new_tokens": 8}\n'
    path = tmp_path / "prompts.jsonl"
    path.write_text(row + row)
    with pytest.raises(InputError, match="`a` occurs twice"):
        read_prompts(path)
    path.write_text(row + row.replace("8}", "0}"))
    with pytest.raises(InputError) as caught:
        read_prompts(path)
    assert caught.value.where == f"{path}:2"


def test_gpu_lines_of_another_shape_are_skipped() -> None:
    line = "GPU-1, H200, 580.1, 1980 MHz, 3201 MHz, 41, 90.1 W, 0x0000000000000000\n"
    assert parse_gpu_lines(line + "No devices were found\n")[0]["clocks.sm"] == "1980 MHz"
    assert parse_gpu_lines("No devices were found\n") == []
