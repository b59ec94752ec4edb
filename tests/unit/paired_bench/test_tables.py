"""Tables and figure data show the result's own numbers."""

from __future__ import annotations

import pytest
from virtual_engines import FakeClock, FakeEngine, constant, prompts

from specpilot_cli.paired_bench.run import run_paired_bench
from specpilot_cli.paired_bench.types import PairedBenchSettings, PairedBenchSummary
from specpilot_cli.report.paired_bench_tables import (
    SystemNames,
    basis_rows,
    benchmark_table,
    forest_data,
    latency_table,
    over_ar_table,
    system_table,
)
from specpilot_cli.report.paired_bench_text import print_summary


@pytest.fixture(scope="module")
def summary() -> PairedBenchSummary:
    """Uneven benchmarks: 8 and 4 prompts, twice as fast on the smaller one only."""
    clock = FakeClock()
    systems = {
        "baseline": FakeEngine(clock, constant(100.0)),
        "candidate": FakeEngine(
            clock, lambda t, request: 200.0 if request.request_id.startswith("code") else 100.0
        ),
        "ar": FakeEngine(clock, constant(50.0), tokens_per_step=None),
    }
    asked = [*prompts(8, ["chat"]), *prompts(4, ["chat", "code"])[4:]]
    return run_paired_bench(
        systems, asked, settings=PairedBenchSettings(aa_sessions=1), clock=clock
    ).summary


def test_the_last_row_weighs_benchmarks_equally_in_gain_and_in_rates(
    summary: PairedBenchSummary,
) -> None:
    table = benchmark_table(summary)
    last = dict(zip(table.columns, table.rows[-1], strict=True))
    assert last["gain ×"] == "1.4142"
    assert last["tok/s, baseline → candidate"] == "100.0 → 141.4"
    assert last["τ, baseline → candidate"] == "3.00 → 3.00"
    assert last["requests"] == last["same tokens"] == "10"
    assert {s.name: s.rate_tok_per_s for s in summary.systems}["candidate"] == pytest.approx(
        100 * 2**0.5
    )


def test_gain_and_interval_come_first(summary: PairedBenchSummary) -> None:
    table = benchmark_table(summary)
    assert table.columns[:3] == ("benchmark", "gain ×", "95 % interval")
    assert [row[1] for row in table.rows] == ["1.0000", "2.0000", "1.4142"]


def test_tables_call_the_systems_by_the_given_names(summary: PairedBenchSummary) -> None:
    names = SystemNames("stock", "tuned", "plain")
    table = benchmark_table(summary, names=names)
    assert table.title == "Tuned over stock, output rate per request"
    assert table.columns[-2:] == ("τ, stock → tuned", "tok/s, stock → tuned")
    assert [row[0] for row in system_table(summary, names=names).rows] == [
        "stock", "tuned", "plain",
    ]  # fmt: skip
    over = over_ar_table(summary, names=names)
    assert "`" not in over.title
    assert over.columns == (
        "benchmark", "stock ×", "interval of stock", "tuned ×", "interval of tuned",
    )  # fmt: skip
    assert names.in_words("the baseline of candidate 2, candidates") == (
        "stock of tuned 2, candidates"
    )


def test_speedups_over_ar_have_a_row_per_benchmark(summary: PairedBenchSummary) -> None:
    table = over_ar_table(summary)
    assert [(row[0], row[1], row[3]) for row in table.rows] == [
        ("chat", "2.000", "2.000"),
        ("code", "2.000", "4.000"),
        ("all, equal weights", "2.000", "2.828"),
    ]


def test_latency_has_a_column_per_percentile(summary: PairedBenchSummary) -> None:
    table = latency_table(summary)
    first = next(s for s in summary.systems if s.name == "baseline")
    assert table.rows[0][:4] == (
        "baseline", f"{1000 * first.ttft_p50_s:.1f}", f"{1000 * first.ttft_p90_s:.1f}",
        f"{1000 * first.ttft_p99_s:.1f}",
    )  # fmt: skip
    assert all("/" not in cell for row in table.rows for cell in row)


def test_systems_without_speculation_show_no_tau(summary: PairedBenchSummary) -> None:
    table = system_table(summary)
    tau = {row[0]: row[table.columns.index("τ")] for row in table.rows}
    assert tau == {"baseline": "3.000", "candidate": "3.000", "ar": "–"}


def test_forest_data_carries_every_gain_and_the_bound(summary: PairedBenchSummary) -> None:
    data = forest_data(summary, condition="virtual", names=SystemNames("stock", "tuned"))
    assert (data.system, data.baseline, data.remark) == ("tuned", "stock", "")
    assert [(row.label, row.n_requests) for row in data.rows] == [("chat", 6), ("code", 4)]
    assert [row.gain for row in data.rows] == pytest.approx([1.0, 2.0])
    assert data.overall.gain == pytest.approx(2**0.5)
    assert data.bound == pytest.approx(1.01)
    assert data.lower_bound == pytest.approx(2**0.5)


def test_the_basis_says_what_the_noise_leaves_out(summary: PairedBenchSummary) -> None:
    noise = dict(basis_rows(summary))["A/A noise"]
    assert "provisional, fewer than 3 sessions" in noise
    assert "launch noise is not in it" in noise


def test_the_verdict_and_its_reason_are_the_last_lines(
    summary: PairedBenchSummary, capsys: pytest.CaptureFixture[str]
) -> None:
    print_summary(summary)
    *_, verdict, reason = capsys.readouterr().out.splitlines()
    assert verdict.startswith("verdict: promote · candidate is 1.4142× the baseline")
    assert reason.strip() == summary.reasons[0]
