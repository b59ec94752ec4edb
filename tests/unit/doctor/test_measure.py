"""`doctor --measure`: what a GPU reached becomes a local profile that `ceiling` finds by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="torch is not installed")

from specpilot_cli.ceiling.peaks import Peaks
from specpilot_cli.doctor.measure import ROWS, keep, local_profile, measure
from specpilot_cli.errors import InputError, MachineError, MeasurementInvalid
from specpilot_cli.io.gpu_profiles import gpu_files, load_gpu, local_folder
from specpilot_cli.main import main
from specpilot_cli.ui import SilentReporter
from specpilot_kernels.probe import measure as probe

MODEL = "Llama-3.1-8B"
H200 = probe.Device("NVIDIA H200", (9, 0), 150_000_000_000, 132, 232_448, 50 << 20)
READ = tuple(1e-3 * (1 + 0.001 * (i % 5)) for i in range(20))


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., None]:
    """`gpu(device=, reads=, free=)`: a GPU that reads 4.5 GB in a millisecond."""

    def pretend(
        *,
        device: probe.Device = H200,
        reads: tuple[float, ...] = READ,
        free: int = 10**12,
    ) -> None:
        def rows(shapes: list[tuple[int, int]], counts: tuple[int, ...]) -> list[probe.RowTimes]:
            n_bytes = sum(2 * out * inner for out, inner in shapes)
            # 48 rows cost a fifth more than 32: one stair, above any noise of these times
            return [
                probe.RowTimes(
                    n, probe.Times(tuple(s * (1.2 if n > 32 else 1) for s in READ), n_bytes, 7 * n)
                )
                for n in counts
            ]

        monkeypatch.setattr(probe, "device", lambda: device)
        monkeypatch.setattr(probe, "read_times", lambda: probe.Times(reads, 4_500_000_000, 0))
        monkeypatch.setattr(probe, "square_times", lambda: probe.Times(READ, 1, 800_000_000_000))
        monkeypatch.setattr(probe, "row_times", rows)
        monkeypatch.setattr(probe, "free_bytes", lambda: free)
        monkeypatch.setenv("SPECPILOT_GPU_PROFILES", str(tmp_path / "gpus"))

    return pretend


def test_a_known_gpu_keeps_its_data_sheet_and_gets_measured_numbers(gpu: Callable[..., None]):
    gpu()
    measured = measure(MODEL, reporter=SilentReporter())
    assert measured.read.value == pytest.approx(4.5e12, rel=0.005)
    assert measured.square.value == pytest.approx(8e14, rel=0.005)
    path = keep(local_profile(measured, day="2026-01-02"))
    assert path == local_folder() / "h200.yaml"
    found = load_gpu("NVIDIA H200")
    assert "this machine" in found.title
    assert found.peaks.bandwidth("datasheet").value == 4.8e12
    assert found.peaks.bandwidth("measured").value == pytest.approx(4.5e12, rel=0.005)
    assert "2026-01-02" in found.peaks.bandwidth("measured").source
    kept = Peaks(found.title, found.peaks)
    assert kept.compute("bfloat16").kind == "datasheet"
    assert kept.as_measured().compute("bfloat16").value == pytest.approx(8e14, rel=0.005)
    assert kept.as_measured().compute("float8").kind == "datasheet"  # not measured


def test_measuring_again_replaces_the_first_measurement(gpu: Callable[..., None]):
    gpu()
    keep(local_profile(measure(MODEL, reporter=SilentReporter())))
    gpu(reads=tuple(2 * s for s in READ))
    keep(local_profile(measure(MODEL, reporter=SilentReporter())))
    assert load_gpu("h200").peaks.bandwidth("measured").value == pytest.approx(2.25e12, rel=0.005)


def test_an_unknown_gpu_gets_a_name_of_its_own(gpu: Callable[..., None]):
    gpu(device=replace(H200, name="NVIDIA Next 9000", capability=(12, 1)))
    profile = local_profile(measure(MODEL, reporter=SilentReporter()))
    assert (profile.name, profile.architecture) == ("next-9000", "sm_121a")
    keep(profile)
    assert load_gpu("NVIDIA Next 9000") == load_gpu("next-9000") == profile
    assert profile.peaks.bandwidth("datasheet") is None
    assert profile.memory_bytes.value == 150e9


def test_a_busy_gpu_is_no_measurement(gpu: Callable[..., None]):
    gpu(reads=tuple(1e-3 * (1 + i % 2) for i in range(20)))
    with pytest.raises(MeasurementInvalid, match="scatter"):
        measure(MODEL, reporter=SilentReporter())
    assert not local_folder().exists()


def test_a_model_that_does_not_fit_leaves_the_rest(gpu: Callable[..., None]):
    gpu(free=10**9)
    measured = measure(MODEL, reporter=SilentReporter())
    assert measured.skinny == ()
    assert measured.read.value > 0


def test_without_a_gpu_the_machine_lacks_something(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(MachineError, match="no CUDA device"):
        measure(MODEL, reporter=SilentReporter())
    with pytest.raises(InputError, match="no shapes are known"):
        measure("Llama", reporter=SilentReporter())


def test_the_command_writes_the_profile_and_says_where(
    gpu: Callable[..., None], capsys: pytest.CaptureFixture[str]
):
    gpu()
    assert main(["doctor", "--measure", "--model", MODEL]) == 0
    out = capsys.readouterr().out
    assert str(local_folder() / "h200.yaml") in out
    assert "flat from 1 to 32 rows (next measured: 48)" in out
    assert "flat from 48 to 256 rows or more" in out
    assert main(["ceiling", "--list", "--json"]) == 0
    devices = json.loads(capsys.readouterr().out)["results"]["devices"]
    assert [d["title"] for d in devices if d["name"] == "h200"] == [
        "NVIDIA H200 SXM, measured on this machine"
    ]


def test_the_json_answer_holds_every_replay(
    gpu: Callable[..., None], capsys: pytest.CaptureFixture[str]
):
    gpu()
    assert main(["doctor", "--measure", "--model", MODEL, "--json"]) == 0
    results = json.loads(capsys.readouterr().out)["results"]
    assert [row["rows"] for row in results["measured"]["skinny"]] == list(ROWS)
    assert len(results["measured"]["skinny"][0]["seconds"]) == len(READ)
    assert [p["last_rows"] for p in results["plateaus"]] == [32, 256]


def test_measure_and_kernels_do_not_mix(capsys: pytest.CaptureFixture[str]):
    assert main(["doctor", "--measure", "--kernels"]) == 2
    assert "exclude each other" in capsys.readouterr().err


def test_local_profiles_are_ignored_when_configuration_is(tmp_path: Path):
    folder = tmp_path / "specpilot" / "gpus"
    folder.mkdir(parents=True)
    (folder / "h200.yaml").write_text("name: local\n")
    base = {"XDG_CONFIG_HOME": str(tmp_path)}
    assert gpu_files(base)["h200"] == folder / "h200.yaml"
    assert gpu_files({**base, "SPECPILOT_NO_CONFIG": "1"})["h200"] != folder / "h200.yaml"
    named = {"SPECPILOT_NO_CONFIG": "1", "SPECPILOT_GPU_PROFILES": str(folder)}
    assert gpu_files(named)["h200"] == folder / "h200.yaml"
    with pytest.raises(InputError, match=r"h200.yaml"):
        load_gpu("h200", base)
