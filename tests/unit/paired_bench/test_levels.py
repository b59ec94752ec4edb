"""Several batch sizes, calibrations, fresh launches and redaction, in virtual time."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from virtual_engines import FakeClock, FakeEngine, constant, prompts, same_outputs

from specpilot_cli.engines.base import GenerateRequest
from specpilot_cli.errors import InputError, MeasurementInvalid
from specpilot_cli.paired_bench.gpu_watch import Sample, gpu_remarks, summarise, throttle_reasons
from specpilot_cli.paired_bench.journal import read_finished
from specpilot_cli.paired_bench.run import (
    Basis,
    JournalFile,
    run_calibration,
    run_paired_bench,
)
from specpilot_cli.paired_bench.stage import Launched
from specpilot_cli.paired_bench.types import PairedBenchResult, PairedBenchSettings

LEVELS = PairedBenchSettings(aa_sessions=1, batches=(1, 4))


def run(systems: Mapping[str, FakeEngine], settings: PairedBenchSettings, **more: Any) -> Any:
    clock = next(iter(systems.values())).clock
    return run_paired_bench(
        systems, prompts(), settings=settings, clock=clock, cpu_clock=lambda: 0.0, **more
    )


def test_each_level_has_its_own_gain_and_a_request_stays_one_cluster() -> None:
    clock = FakeClock()

    def faster_alone(t: float, request: GenerateRequest) -> float:
        return 121.0 if candidate.in_flight == 1 else 100.0

    candidate = FakeEngine(clock, constant(100.0))
    candidate.rate = faster_alone
    result = run({"baseline": FakeEngine(clock, constant(100.0)), "candidate": candidate}, LEVELS)
    gains = {level.batch: level.gain.gain_ratio for level in result.summary.levels}
    assert gains == {1: pytest.approx(1.21), 4: pytest.approx(1.0)}
    assert result.summary.gain.gain_ratio == pytest.approx(1.1)
    assert result.summary.gain.n_requests == result.summary.levels[0].gain.n_requests == 12
    assert {row.batch for row in result.rows} == {1, 4}
    assert [level.batch for level in result.summary.noise.levels] == [1, 4]
    for level in result.summary.levels:
        assert [b.name for b in level.benchmarks] == ["chat", "code"]


def test_one_level_needs_no_table_of_levels() -> None:
    clock = FakeClock()
    pair = {name: FakeEngine(clock, constant(100.0)) for name in ("baseline", "candidate")}
    assert run(pair, PairedBenchSettings(aa_sessions=1)).summary.levels == ()


def calibrated(rates: tuple[float, float]) -> PairedBenchResult:
    clock = FakeClock()
    pair = {
        name: FakeEngine(clock, constant(rate))
        for name, rate in zip(("baseline", "baseline_again"), rates, strict=True)
    }
    settings = PairedBenchSettings(aa_sessions=8)
    return run_calibration(pair, prompts(), settings=settings, clock=clock, cpu_clock=lambda: 0.0)


def test_a_calibration_measures_noise_and_judges_nothing() -> None:
    summary = calibrated((100.0, 101.0)).summary
    assert summary.verdict == "ok"
    assert (summary.gain, summary.decision) == (None, None)
    assert summary.noise is not None
    assert len(summary.noise.sessions) == 8
    assert summary.noise.nu_log == pytest.approx(math.log(1.01))
    assert not summary.noise.provisional
    assert "the lower bound has to exceed" in summary.reasons[0]


def test_the_noise_of_a_calibration_bounds_later_comparisons() -> None:
    noise = calibrated((100.0, 102.0)).summary.noise
    assert noise is not None
    basis = Basis(noise=dataclasses.replace(noise, source="a" * 64))
    clock = FakeClock()
    engines = {"baseline": FakeEngine(clock, constant(100.0))}
    engines["candidate"] = FakeEngine(clock, constant(104.0))
    result = run(engines, PairedBenchSettings(aa_sessions=0), basis=basis)
    assert {row.session for row in result.rows} == {"ab"}
    assert result.summary.decision.bound_ratio == pytest.approx(1.01 + 2 * math.log(1.02))
    assert result.verdict == "no"
    assert result.summary.plan.assumed_nu_log == pytest.approx(math.log(1.02))


def test_noise_of_another_baseline_is_refused() -> None:
    clock = FakeClock()
    engines = {name: FakeEngine(clock, constant(100.0)) for name in ("baseline", "candidate")}
    noise = calibrated((100.0, 101.0)).summary.noise
    basis = Basis(noise=noise, calibrated={"version": "another", "port": 9})
    with pytest.raises(InputError, match="another baseline; changed: version"):
        run(engines, PairedBenchSettings(aa_sessions=0), basis=basis)


@pytest.mark.parametrize("noise", [True, False])
def test_noise_comes_from_one_place(noise: bool) -> None:
    clock = FakeClock()
    engines = {name: FakeEngine(clock, constant(100.0)) for name in ("baseline", "candidate")}
    known = calibrated((100.0, 101.0)).summary.noise if noise else None
    with pytest.raises(InputError, match="sessions here, or one calibration"):
        run(engines, PairedBenchSettings(aa_sessions=3 if noise else 0), basis=Basis(noise=known))


class Launcher:
    """A stage of virtual servers: GPU 1 is 10 % faster; every run starts its own."""

    fresh = True

    def __init__(self, rates: Mapping[str, float], *, concurrent: bool = True) -> None:
        self.clock, self.rates, self.concurrent = FakeClock(), dict(rates), concurrent
        self.names = tuple(rates)
        self.placed: list[dict[str, str | None]] = []
        self.info: dict[str, Any] = {"version": "fake"}

    def describe(self) -> dict[str, dict[str, Any]]:
        return {name: {"command": [name]} for name in self.rates}

    @contextmanager
    def run(self, systems: tuple[str, ...], number: int) -> Iterator[Launched]:
        devices = {name: str((i + number) % 2) for i, name in enumerate(systems)}
        self.placed.append(dict(devices))
        engines = {}
        for name in systems:
            own = self.rates["baseline" if name == "baseline_again" else name]
            speed = own * (1.1 if devices[name] == "1" else 1.0)
            engines[name] = FakeEngine(FakeClock(), constant(speed), info=dict(self.info))
        yield Launched(engines, devices)


def fresh(stage: Launcher, path: Path | None = None) -> PairedBenchResult:
    return run_paired_bench(
        stage, prompts(), settings=PairedBenchSettings(aa_sessions=2), clock=stage.clock,
        cpu_clock=lambda: 0.0, journal=None if path is None else JournalFile(path),
    )  # fmt: skip


def test_swapped_devices_cancel_and_every_run_is_a_launch(tmp_path: Path) -> None:
    stage = Launcher({"baseline": 100.0, "candidate": 106.0})
    result = fresh(stage, tmp_path / "bench.jsonl")
    assert result.summary.gain is not None
    assert result.summary.gain.gain_ratio == pytest.approx(1.06)
    assert result.summary.noise is not None
    assert result.summary.noise.nu_log == pytest.approx(0.0, abs=1e-12)
    assert not result.summary.noise.same_launch
    assert len(stage.placed) == 3 * 2
    assert stage.placed[-2:] == [
        {"baseline": "0", "candidate": "1"}, {"baseline": "1", "candidate": "0"}
    ]  # fmt: skip
    lines = [json.loads(line) for line in (tmp_path / "bench.jsonl").read_text().splitlines()]
    launches = [line for line in lines if line["kind"] == "launch"]
    assert len(launches) == 3 * 2 * 2
    assert launches[-1]["server_info"] == {"version": "fake"}


def test_launches_of_one_system_must_be_alike() -> None:
    stage = Launcher({"baseline": 100.0, "candidate": 106.0})
    describe = stage.describe

    def then_change() -> Any:
        return describe()

    stage.describe = then_change  # type: ignore[method-assign]
    original = stage.run

    @contextmanager
    def changing(systems: tuple[str, ...], number: int) -> Iterator[Launched]:
        stage.info["version"] = f"fake {len(stage.placed)}"
        with original(systems, number) as launched:
            yield launched

    stage.run = changing  # type: ignore[method-assign]
    result = fresh(stage)
    assert result.verdict == "invalid"
    assert "started with other settings than before: version" in result.summary.reasons[0]


def test_a_redacted_journal_holds_no_tokens_and_resumes_to_the_same_result(tmp_path: Path) -> None:
    path = tmp_path / "bench.jsonl"

    def engines(candidate_outputs: Any = same_outputs) -> dict[str, FakeEngine]:
        clock = FakeClock()
        return {
            "baseline": FakeEngine(clock, constant(100.0)),
            "candidate": FakeEngine(clock, constant(105.0), outputs=candidate_outputs),
        }

    settings = PairedBenchSettings(aa_sessions=1)
    first = run(engines(), settings, journal=JournalFile(path, redact=True))
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert all(line["output_ids"] == [] for line in lines if line["kind"] == "request")
    again = run(engines(), settings, journal=JournalFile(path, resume=True, redact=True))
    assert again.summary.gain == first.summary.gain
    assert again.summary.decision == first.summary.decision
    assert again.summary.decision.identical
    (run_0, *_) = read_finished(path).values()
    assert run_0.rows[0].output_digest == first.rows[0].output_digest


def sample(at_s: float, clock: str, reasons: str = "0x0000000000000000") -> Sample:
    fields = {
        "uuid": "GPU-1", "name": "H200", "driver_version": "580.1", "clocks.sm": clock,
        "clocks.mem": "3201 MHz", "temperature.gpu": "41", "power.draw": "[N/A]",
        "clocks_throttle_reasons.active": reasons,
    }  # fmt: skip
    return Sample(at_s, fields)


def test_clocks_are_told_apart_by_who_served() -> None:
    clock = FakeClock()
    engines = {name: FakeEngine(clock, constant(100.0)) for name in ("baseline", "candidate")}
    rows = [row for row in run(engines, PairedBenchSettings(aa_sessions=1)).rows
            if row.session == "ab"]  # fmt: skip
    samples = []
    for row in rows:
        middle_s = (row.answer.submit_s + row.answer.last_byte_s) / 2
        fast = row.system == "baseline"
        samples.append(sample(middle_s, "1980 MHz" if fast else "1900 MHz", "0x4"))
    (gpu,) = summarise(samples, rows)
    assert gpu["sm_mhz_by_system"] == {"baseline": 1980.0, "candidate": 1900.0}
    assert gpu["sm_mhz"] == {"min": 1900.0, "median": 1940.0, "max": 1980.0}
    assert gpu["power_w"] is None
    assert gpu["throttle_reasons"] == ["power cap"]
    said = gpu_remarks([gpu])
    assert "throttled while it served: power cap" in said[0]
    assert "other clocks for one system" in said[1]


def test_bits_of_throttling_that_limit_nothing_are_no_remark() -> None:
    assert throttle_reasons("0x0000000000000001") == ["idle"]
    assert throttle_reasons("0x0000000000000060") == [
        "software thermal slowdown", "hardware thermal slowdown"
    ]  # fmt: skip
    assert throttle_reasons("[N/A]") == []
    (gpu,) = summarise([sample(1.0, "1980 MHz", "0x3")], [])
    assert gpu_remarks([gpu]) == []


def test_a_broken_answer_on_one_of_two_devices_voids_the_run() -> None:
    stage = Launcher({"baseline": 100.0, "candidate": 106.0})
    original = stage.run

    @contextmanager
    def breaking(systems: tuple[str, ...], number: int) -> Iterator[Launched]:
        with original(systems, number) as launched:
            if "candidate" in launched.engines:
                engine = launched.engines["candidate"]

                def fail(request: GenerateRequest) -> None:
                    if len(engine.served) == 6:  # type: ignore[attr-defined]
                        raise MeasurementInvalid("the stream broke")

                engine.before = fail  # type: ignore[attr-defined]
            yield launched

    stage.run = breaking  # type: ignore[method-assign]
    result = fresh(stage)
    assert result.verdict == "invalid"
    assert result.summary.reasons == ("comparison run 1/2, candidate: the stream broke",)
