"""Step profiles of real traces, and of made-up ones where every number is known."""

from __future__ import annotations

import gzip
import json
import random
import statistics
import tracemalloc
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specpilot_cli.errors import InputError
from specpilot_cli.models.registry import load_model
from specpilot_cli.models.work import StepShape, step_work
from specpilot_cli.profile.build import W12_RATIO, Deployment, profile_of_traces
from specpilot_cli.profile.names import NameTable, load_kernel_classes, short_name
from specpilot_cli.schema.step_profile import StepProfile

Make = Callable[..., Path]
QWEN = Deployment(
    target=load_model("qwen3.8-27b"), drafter=load_model("qwen3.8-27b-dflash2"), block=8
)


def _ms(profile: StepProfile) -> dict[str, float]:
    return {item.name: 1e3 * item.seconds for item in profile.classes}


def test_stock_chain_of_eight_on_the_h200(traces: Path) -> None:
    profile = profile_of_traces([traces / "df8.trace.json.gz"], QWEN)
    assert (profile.mode, profile.rows, profile.draft_block) == ("chain", 8, 8)
    assert profile.device.gpu_profile == "h200"
    assert profile.t_step_s is None
    assert 1e3 * profile.t_prof_s == pytest.approx(18.21, abs=0.01)
    spans = {span.name: 1e3 * span.seconds for span in profile.spans}
    expected = {"DRAFT": 1.775, "VERIFY": 16.174, "outside spans": 0.259}
    assert spans == pytest.approx(expected, abs=1e-3)
    assert _ms(profile) == pytest.approx(
        {"target_gemm": 12.829, "head": 0.620, "recurrent": 1.142, "attention": 0.289,
         "drafter": 1.788, "tree": 0.0015, "rest": 0.774},
        rel=2e-3, abs=1e-4,
    )  # fmt: skip
    # 64 layers of gate_up, down; 48 of in, gates, out; 16 of qkv, o; with 112 reductions.
    calls = {item.name: item.calls for item in profile.classes}
    assert calls["target_gemm"] == 64 * 2 + 48 * 3 + 16 * 2 + 112
    assert calls["head"] == 1


def test_the_classes_and_the_gaps_are_the_profiled_step(traces: Path) -> None:
    for name, block in (("ar", None), ("df8", 8), ("df16", 16)):
        given = Deployment(block=block)
        profile = profile_of_traces([traces / f"{name}.trace.json.gz"], given)
        total = sum(item.seconds for item in profile.classes) + profile.unattributed_s
        assert total == pytest.approx(profile.t_prof_s, rel=1e-12)
        trace = profile.trace
        assert trace is not None
        # Averages of all steps by name are those of the classes, but for the choice of steps.
        assert sum(k.seconds for k in trace.kernels) == pytest.approx(
            sum(item.seconds for item in profile.classes), rel=5e-3
        )
        assert trace.unknown == ()
        assert trace.prefill_spans == 1
        assert trace.overlap_s > 1e-3


def test_plain_decoding_needs_no_block(traces: Path) -> None:
    profile = profile_of_traces([traces / "ar.trace.json.gz"], Deployment(target=QWEN.target))
    assert (profile.mode, profile.rows, profile.drafter) == ("ar", 1, None)
    assert 1e3 * profile.t_prof_s == pytest.approx(14.747, abs=0.005)
    assert "drafter" not in _ms(profile)
    gemm = profile.classes[0]
    assert (gemm.name, gemm.bytes) == ("target_gemm", pytest.approx(48.701e9, rel=1e-4))


def _later(path: Path, folder: Path) -> Path:
    """The same trace, taken a minute later."""
    document = json.loads(gzip.decompress(path.read_bytes()))
    for event in document["traceEvents"]:
        if "ts" in event:
            event["ts"] += 60e6
    found = folder / "later.trace.json"
    found.write_text(json.dumps(document), encoding="utf-8")
    return found


def test_several_files_are_one_profile(traces: Path, tmp_path: Path) -> None:
    path = traces / "df8.trace.json.gz"
    one = profile_of_traces([path], QWEN)
    two = profile_of_traces([path, _later(path, tmp_path)], QWEN)
    assert one.trace is not None
    assert two.trace is not None
    assert two.trace.steps_seen == 2 * one.trace.steps_seen
    assert two.t_prof_s == pytest.approx(one.t_prof_s, rel=1e-4)
    assert two.source_sha256 is None


def test_the_same_trace_twice_is_refused_under_any_name(traces: Path, tmp_path: Path) -> None:
    path = traces / "ar.trace.json.gz"
    plain = tmp_path / "copy.trace.json"
    plain.write_bytes(gzip.decompress(path.read_bytes()))
    for twin in (path, plain):
        with pytest.raises(InputError, match=r"the same trace twice: .*ar\.trace.*and") as caught:
            profile_of_traces([path, twin], Deployment(target=QWEN.target))
        assert str(twin) in str(caught.value)


def test_a_block_that_nobody_states_is_asked_for(traces: Path) -> None:
    with pytest.raises(InputError, match="how many rows") as caught:
        profile_of_traces([traces / "df8.trace.json.gz"], Deployment())
    assert "--block" in (caught.value.hint or "")


def _marks(n: int, *, verify: str = "VERIFY bs=2 g_sq=16 g_sk=200") -> list[tuple]:
    found = []
    for i in range(n):
        found += [("DRAFT bs=2", 100 * i, 10, 7), (verify, 100 * i + 12, 60, 7)]
    return found


def test_labels_give_rows_requests_and_context(make_trace: Make) -> None:
    kernels = [("nvjet_x", start + 100.0 * i, 5, 7) for i in range(4) for start in (13, 20)]
    path = make_trace(kernels, _marks(4))
    profile = profile_of_traces([path], Deployment(target=QWEN.target, drafter=QWEN.drafter))
    assert (profile.requests, profile.rows, profile.draft_block) == (2, 8, 8)
    assert profile.context == 100 - 8  # the label counts the pass's own rows
    shape = StepShape(requests=2, rows=8, committed=4, context=92, block=8)
    assert QWEN.target is not None
    expected = step_work(QWEN.target, QWEN.drafter, shape)
    assert profile.classes[0].name == "target_gemm"
    assert profile.classes[0].flops == expected["target_gemm"].flops


def test_a_labelled_tree_verifies_more_rows_than_it_drafts(make_trace: Make) -> None:
    marks = []
    for i in range(4):
        marks += [
            ("DRAFT bs=1 g_sq=16", 100 * i, 10, 7),
            ("VERIFY bs=1 g_sq=33", 100 * i + 12, 60, 7),
        ]
    profile = profile_of_traces([make_trace([("nvjet_x", 13, 5, 7)], marks)], Deployment())
    assert (profile.mode, profile.nodes, profile.draft_block) == ("tree", 32, 16)
    shifted = [(label.replace("g_sq=33", "g_sq=8").replace("g_sq=16", "g_sq=7"), *rest)
               for label, *rest in marks]  # fmt: skip
    chain = profile_of_traces([make_trace([("nvjet_x", 13, 5, 7)], shifted)], Deployment())
    assert (chain.mode, chain.rows, chain.draft_block) == ("chain", 8, 7)


def test_a_tree_is_what_its_nodes_say(make_trace: Make) -> None:
    path = make_trace([("nvjet_x", 13, 5, 7)], _marks(4, verify="VERIFY bs=1"))
    profile = profile_of_traces([path], Deployment(block=16, nodes=32))
    assert (profile.mode, profile.nodes, profile.rows, profile.draft_block) == ("tree", 32, 33, 16)


def test_steps_of_another_batch_size_are_left_out_and_counted(make_trace: Make) -> None:
    marks = [(f"DECODE bs={bs}", 50 * i, 40, 7) for i, bs in enumerate((1, 1, 4, 1, 1))]
    kernels = [("nvjet_x", 50.0 * i, 5, 7) for i in range(5)]
    profile = profile_of_traces([make_trace(kernels, marks)], Deployment())
    assert profile.requests == 1
    assert profile.trace is not None
    assert profile.trace.steps_seen == 3
    assert "1 steps with another number of requests" in profile.trace.notes[0]


def test_unknown_kernels_are_listed_and_counted(make_trace: Make) -> None:
    kernels = []
    for start in (0, 50, 100):
        kernels += [("nvjet_x", start, 20, 7), ("mystery<int>(float*)", start + 20, 15, 7)]
    marks = [("DECODE bs=1", start, 40, 7) for start in (0, 50, 100)]
    profile = profile_of_traces([make_trace(kernels, marks)], Deployment())
    assert profile.trace is not None
    (unknown,) = profile.trace.unknown
    assert (unknown.name, unknown.kernel_class, unknown.calls) == ("mystery<…>", "rest", 1)
    assert unknown.seconds == pytest.approx(15e-6)
    assert _ms(profile)["rest"] == pytest.approx(15e-3)


def test_the_middle_half_is_averaged_and_all_steps_are_in_the_quartiles(make_trace: Make) -> None:
    durations = [30.0, 10.0, 11.0, 12.0, 13.0, 1.0, 12.0, 11.0]
    kernels = [("nvjet_x", 100.0 * i, dur, 7) for i, dur in enumerate([*durations, 5.0])]
    marks = [("DECODE bs=1", 100.0 * i, dur, 7) for i, dur in enumerate([*durations, 5.0])]
    profile = profile_of_traces([make_trace(kernels, marks)], Deployment())
    assert profile.steps == 4
    assert 1e6 * profile.t_prof_s == pytest.approx(statistics.fmean([11, 11, 12, 12]))
    assert profile.trace is not None
    whole = profile.trace.spread[0]
    q1, median, q3 = statistics.quantiles(durations, n=4, method="inclusive")
    assert (whole.q1_s, whole.median_s, whole.q3_s) == pytest.approx((q1 / 1e6, median / 1e6,
                                                                      q3 / 1e6))  # fmt: skip


def test_w12_products_count_twelve_bits(make_trace: Make) -> None:
    def trace(first: str, name: str) -> Path:
        kernels = []
        for start in (0, 50, 100):
            kernels += [(first, start, 30, 7), ("nvjet_head", start + 30, 5, 7)]
        return make_trace(kernels, [("DECODE bs=1", s, 40, 7) for s in (0, 50, 100)], name=name)

    given = Deployment(target=QWEN.target)
    plain = profile_of_traces([trace("nvjet_x", "a.json")], given)
    coded = profile_of_traces([trace("w12_gemm", "b.json")], given)
    assert (plain.weights, coded.weights) == ("plain", "w12")
    assert coded.classes[0].bytes == pytest.approx(plain.classes[0].bytes * W12_RATIO)
    # The head is still a plain product there.
    assert coded.classes[1].bytes == plain.classes[1].bytes
    assert coded.trace is not None
    assert not [note for note in coded.trace.notes if "plain weights" in note]


def test_memory_is_a_few_bytes_a_kernel(make_trace: Make) -> None:
    n = 60_000
    kernels = [("nvjet_x", float(i), 0.5, 7) for i in range(n)]
    marks = [("DECODE bs=1", 600.0 * i, 500.0, 7) for i in range(n // 600)]
    path = make_trace(kernels, marks)
    del kernels
    tracemalloc.start()
    profile = profile_of_traces([path], Deployment())
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert profile.trace is not None
    assert profile.trace.steps_seen == n // 600 - 1
    assert peak < path.stat().st_size * 2.5


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("nvjet_sm90_tst_384x8_64x4", "nvjet_sm90_tst_384x8_64x4"),
        ("void flashinfer::norm::K<8u, T<int> >(int*)", "flashinfer::norm::K<…>"),
        ("void (anonymous namespace)::f<int>(int)", "f<…>"),
        ("Memcpy HtoD (Pinned -> Device)", "Memcpy HtoD (Pinned -> Device)"),
        ("x" * 200, "x" * 95 + "…"),
    ],
)
def test_short_names(name: str, short: str) -> None:
    assert short_name(name) == short


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("void flashinfer::norm::FusedAddRMSNormKernel<8u>", "rest"),
        ("_layer_norm_fwd_1pass_kernel", "recurrent"),
        ("chunk_gated_delta_rule_fwd_kkt_solve_kernel", "recurrent"),
        ("flash::FlashAttnFwdSm90", "attention"),
        ("void cutlass::device_kernel<cutlass::gemm::kernel::GemmUniversal<X>>", "gemm"),
        ("w12_gemm_mma", "gemm"),
        ("void at::native::mbtopk::gatherTopK<c10::BFloat16>", "drafter"),
        ("verify_tree_greedy_kernel_triton", "tree"),
        ("triton_poi_fused_index_1", "rest"),
    ],
)
def test_families(name: str, family: str) -> None:
    table = NameTable(load_kernel_classes())
    assert table.family(name).name == family
    assert table.family(name).known
    assert table.family(name).w12 == name.startswith("w12")


def test_values_that_no_profiler_writes_are_refused_or_skipped(make_trace: Make) -> None:
    """Every field of a few events replaced by every kind of value, 400 times over."""
    odd = (
        None, True, -1, 0, 1e400, 10**30, 1e17, "", "x", "\ud800", [], [1], {}, {"device": []},
        "kernel", "step[DECODE bs=0]", "step[DECODE bs=-3 g_sq=0]", f"step[DECODE bs={'9' * 5000}]",
    )  # fmt: skip
    rng = random.Random(3)
    answers: Counter[str] = Counter()
    for _ in range(400):
        events: list[dict[str, Any]] = []
        for i in range(3):
            events.append({"ph": "X", "cat": "kernel", "name": "nvjet_x", "ts": 50.0 * i,
                           "dur": 20, "tid": 7, "args": {"device": 0, "stream": 7}})  # fmt: skip
            events.append({"ph": "X", "cat": "gpu_user_annotation", "name": "step[DECODE bs=1]",
                           "ts": 50.0 * i, "dur": 40, "tid": 7})  # fmt: skip
        for _ in range(rng.randint(1, 3)):
            event = rng.choice(events)
            event[rng.choice(list(event))] = rng.choice(odd)
        path = make_trace([], [], traceEvents=events, deviceProperties=rng.choice(odd))
        try:
            profile_of_traces([path], Deployment()).model_dump_json().encode("utf-8")
            answers["read"] += 1
        except InputError:
            answers["refused"] += 1
    assert min(answers["read"], answers["refused"]) > 40
