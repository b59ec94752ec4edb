"""Which spans form a step, and how its time is shared out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from specpilot_cli.errors import InputError
from specpilot_cli.profile.attribute import OUTSIDE, StepUsage, covered_us, use_of_step
from specpilot_cli.profile.names import NameTable, load_kernel_classes
from specpilot_cli.profile.steps import Window, find_steps
from specpilot_cli.profile.trace import GpuTrace, read_gpu_trace

Make = Callable[..., Path]
GEMM, HEAD, GDN = "nvjet_sm90_tst_384x8", "nvjet_sm90_tst_512x8", "fused_recurrent_gated_delta_rule"


@pytest.fixture(scope="module")
def table() -> NameTable:
    return NameTable(load_kernel_classes())


def _steps(path: Path, table: NameTable) -> tuple[GpuTrace, list[Window]]:
    trace = read_gpu_trace(path)
    return trace, find_steps(trace, table)[0]


def _use(path: Path, table: NameTable, index: int = 0) -> StepUsage:
    trace, windows = _steps(path, table)
    return use_of_step(trace, windows[index], table)


def _micros(use: StepUsage) -> dict[str, float]:
    return {name: round(1e6 * item.seconds, 6) for name, item in use.classes.items()}


def test_a_drafting_step_begins_with_its_draft(make_trace: Make, table: NameTable) -> None:
    marks = []
    for start in (0, 100, 200):
        marks += [("DRAFT bs=1", start, 10, 7), ("VERIFY bs=1", start + 12, 60, 7)]
    _, windows = _steps(make_trace([(GEMM, 1, 5, 7)], marks), table)
    assert [(w.start_us, w.end_us) for w in windows] == [(0, 100), (100, 200)]
    assert all(w.drafts for w in windows)


def test_plain_steps_run_from_target_to_target(make_trace: Make, table: NameTable) -> None:
    marks = [("DECODE bs=2", start, 40, 7) for start in (0, 50, 100)]
    _, windows = _steps(make_trace([(GEMM, 1, 5, 7)], marks), table)
    assert [(w.start_us, w.end_us) for w in windows] == [(0, 50), (50, 100)]
    assert windows[0].target.fact("bs") == 2
    assert not windows[0].drafts


def test_a_prompt_interrupts_a_step(make_trace: Make, table: NameTable) -> None:
    marks = [("DECODE bs=1", start, 40, 7) for start in (0, 50, 200, 250)]
    marks.append(("EXTEND bs=1 toks=9", 100, 90, 7))
    trace = read_gpu_trace(make_trace([(GEMM, 1, 5, 7)], marks))
    windows, prefills = find_steps(trace, table)
    assert [w.start_us for w in windows] == [0, 200]
    assert [span.fact("toks") for span in prefills] == [9]


def test_spans_of_several_streams_are_one_pass(make_trace: Make, table: NameTable) -> None:
    marks = []
    for start in (0, 100):
        marks += [("DECODE bs=1", start, 40, 13), ("DECODE bs=1", start + 3, 45, 142)]
    use = _use(make_trace([(GEMM, 1, 5, 13)], marks), table)
    assert use.spans["DECODE"] == pytest.approx(48e-6)


@pytest.mark.parametrize(
    ("marks", "message"),
    [
        ([("DECODE bs=1", 0, 40, 7)], "no whole step"),
        ([("EXTEND bs=1", 0, 40, 7)], "1 EXTEND"),
        ([("DRAFT bs=1", 0, 4, 7), ("DRAFT bs=1", 9, 4, 7)], "2 DRAFT"),
        ([("WARP bs=1", 0, 40, 7), ("WARP bs=1", 50, 40, 7)], "unknown kind `WARP`"),
        ([], "no step spans"),
    ],
)
def test_a_trace_without_steps_is_refused(
    make_trace: Make, table: NameTable, marks: list[tuple[str, float, float, int]], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        _steps(make_trace([(GEMM, 1, 5, 7)], marks), table)


def test_the_span_decides_before_the_name(make_trace: Make, table: NameTable) -> None:
    kernels = [
        (GEMM, 1, 4, 7), (GDN, 6, 2, 7),  # in DRAFT
        (GEMM, 12, 20, 7), (GDN, 33, 7, 7), (HEAD, 41, 9, 7), ("_fwd_kernel", 51, 1, 7),
        (GEMM, 60, 3, 7), ("_fused_mamba_state_scatter_with_mask_kernel", 64, 2, 7),  # after it
        ("_dflash_accept_bonus_contig_kernel", 67, 1, 7),
    ]  # fmt: skip
    marks = []
    for start in (0, 100):
        marks += [("DRAFT bs=1", start, 10, 7), ("VERIFY bs=1", start + 11, 45, 7)]
    use = _use(make_trace(kernels, marks), table)
    assert _micros(use) == {
        "drafter": 4 + 2 + 3, "target_gemm": 20, "recurrent": 7 + 2, "head": 9, "attention": 1,
        "tree": 1,
    }  # fmt: skip
    assert use.spans == pytest.approx({"DRAFT": 10e-6, "VERIFY": 45e-6, OUTSIDE: 6e-6})
    assert use.prof_s == pytest.approx(61e-6)
    assert use.busy_s == pytest.approx(49e-6)
    assert use.period_s == pytest.approx(100e-6)


def test_the_head_is_the_last_product_with_its_reduction(
    make_trace: Make, table: NameTable
) -> None:
    reduce = "void cublasLt::splitKreduce_kernel<32>"
    kernels = [
        (GEMM, 1, 4, 7), (reduce, 5, 1, 7), (HEAD, 10, 8, 7), (reduce, 18, 2, 7),
        (reduce, 21, 1, 9), ("softcap_inplace_logits_kernel", 24, 1, 7),
    ]  # fmt: skip
    use = _use(make_trace(kernels, [("DECODE bs=1", s, 30, 7) for s in (0, 50)]), table)
    assert _micros(use) == {"target_gemm": 6, "head": 10, "rest": 1}


def test_concurrent_kernels_share_their_time(make_trace: Make, table: NameTable) -> None:
    kernels = [(GEMM, 0, 10, 13), (GDN, 4, 10, 142), (HEAD, 20, 5, 13)]
    use = _use(make_trace(kernels, [("DECODE bs=1", s, 30, 13) for s in (0, 50)]), table)
    # 0-4 the product alone, 4-10 both, 10-14 the recurrence alone.
    assert _micros(use) == {"target_gemm": 4 + 3, "recurrent": 3 + 4, "head": 5}
    assert use.busy_s == pytest.approx(19e-6)
    assert use.overlap_s == pytest.approx(6e-6)
    assert sum(item.seconds for item in use.kernels.values()) == pytest.approx(use.busy_s)


def test_an_empty_kernel_takes_no_time(make_trace: Make, table: NameTable) -> None:
    kernels = [(GEMM, 0, 10, 13), (GDN, 4, 0, 13), (GDN, 12, 0, 13)]
    use = _use(make_trace(kernels, [("DECODE bs=1", s, 30, 13) for s in (0, 50)]), table)
    assert use.busy_s == pytest.approx(10e-6)
    assert use.classes["recurrent"].calls == 2
    assert use.classes["recurrent"].seconds == 0


def test_covered_counts_overlaps_once() -> None:
    assert covered_us([(5, 9), (0, 3), (2, 4), (6, 7)]) == 8
    assert covered_us([]) == 0


@pytest.mark.parametrize(
    ("event", "message"),
    [
        ({"ts": 1}, "lacks its name, start or duration"),
        ({"ts": "1", "dur": 2}, "lacks its name"),
        ({"ts": 1, "dur": -2}, "lacks its name"),
        ({"ts": 1, "dur": float("nan")}, "lacks its name"),
        ({"ts": True, "dur": 2}, "lacks its name"),
    ],
)
def test_a_kernel_without_its_time_is_refused_by_number(
    make_trace: Make, event: dict[str, object], message: str
) -> None:
    bad = {"ph": "X", "cat": "kernel", "name": "k"} | event
    path = make_trace([], [], traceEvents=[{"ph": "M"}, bad])
    with pytest.raises(InputError, match=message) as caught:
        read_gpu_trace(path)
    assert caught.value.where == f"{path}: event 2"


def test_several_devices_or_none_are_refused(make_trace: Make) -> None:
    marks = [("DECODE bs=1", s, 30, 13) for s in (0, 50)]
    with pytest.raises(InputError, match="no GPU kernels"):
        read_gpu_trace(make_trace([], marks))
    two = [
        {"ph": "X", "cat": "kernel", "name": "k", "ts": 1, "dur": 1, "args": {"device": d}}
        for d in (0, 1)
    ]
    with pytest.raises(InputError, match="mixes 2 GPUs"):
        read_gpu_trace(make_trace([], [], traceEvents=two))
