"""`doctor --kernels` reports what the self-check found, and its exit code says so."""

from __future__ import annotations

from collections.abc import Callable

import pytest

pytest.importorskip("torch", reason="torch is not installed")

from specpilot_cli.doctor.kernels import check_kernels
from specpilot_cli.errors import InputError, MachineError
from specpilot_cli.main import main
from specpilot_cli.ui import SilentReporter
from specpilot_kernels.w12 import gemm, plans, selfcheck, tune
from specpilot_kernels.w12.plans import Plan
from specpilot_kernels.w12.selfcheck import Finding, Speed

MODEL = "Llama-3.1-8B"


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> Callable[..., None]:
    """`gpu(wrong=, free=)`: a GPU whose kernels are right, but for one shape."""

    def pretend(*, wrong: tuple[int, int] | None = None, free: int = 10**12) -> None:
        def examine(shape: tuple[int, int], rows: tuple[int, ...]) -> Finding:
            errors = ("3 results are wrong",) if shape == wrong else ()
            return Finding(shape, errors, tuple(Speed(n, 1e-5, 1.5e-5) for n in rows))

        monkeypatch.setattr(gemm, "gpu_name", lambda: "a GPU")
        monkeypatch.setattr(gemm, "warm", lambda: None)
        monkeypatch.setattr(selfcheck, "free_bytes", lambda: free)
        monkeypatch.setattr(selfcheck, "examine", examine)
        monkeypatch.setenv("SPECPILOT_CACHE", str(tmp_path))
        plans.plan_for.cache_clear()

    return pretend


def test_right_kernels_are_ok(gpu: Callable[..., None]) -> None:
    gpu()
    report = check_kernels(MODEL, tune=False, reporter=SilentReporter())
    assert report.verdict == "ok"
    assert [row.projection for row in report.rows] == [
        "gate_up", "down", "attn_qkv", "attn_o", "head",
    ]  # fmt: skip
    assert report.rows[0].ratios == {n: pytest.approx(1.5) for n in (1, 8, 32, 64)}


def test_one_wrong_result_is_a_mismatch(gpu: Callable[..., None]) -> None:
    gpu(wrong=(4096, 14336))
    report = check_kernels(MODEL, tune=False, reporter=SilentReporter())
    assert report.verdict == "mismatch"
    assert [row.projection for row in report.rows if row.errors] == ["down"]


def test_shapes_that_do_not_fit_are_left_out(gpu: Callable[..., None]) -> None:
    gpu(free=8 * 10**9)
    rows = check_kernels(MODEL, tune=False, reporter=SilentReporter()).rows
    assert [row.projection for row in rows if row.skipped] == ["head"]
    assert "GB" in (rows[-1].skipped or "")


def test_tuning_stores_a_plan_for_every_shape(
    gpu: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu()
    monkeypatch.setattr(tune, "measure", lambda shape: Plan(48, 256))
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "a GPU")
    report = check_kernels(MODEL, tune=True, reporter=SilentReporter())
    assert {(row.kernel_rows, row.passes_rows) for row in report.rows} == {(48, 256)}
    assert plans.plan_for("a GPU", 4096, 4096) == Plan(48, 256)


def test_without_a_gpu_the_machine_lacks_something(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(MachineError, match="no CUDA device"):
        check_kernels(MODEL, tune=False, reporter=SilentReporter())
    with pytest.raises(InputError, match="no shapes are known"):
        check_kernels("Llama", tune=False, reporter=SilentReporter())


def test_a_plan_follows_from_measurements() -> None:
    always = {8: 1.4, 16: 1.4, 32: 1.3, 48: 1.1, 64: 0.99}
    times = {128: (1.0, 2.0), 192: (1.5, 2.0), 256: (2.0, 1.9), 320: (1.0, 2.0)}
    assert tune.choose(always, times) == Plan(64, 192)
    assert tune.choose({**always, 48: 0.9}, {}) == Plan(32, 64)
    assert tune.choose({8: 0.8}, {128: (2.0, 1.0)}) == Plan(0, 64)


@pytest.mark.parametrize(("wrong", "code"), [(None, 0), ((6144, 4096), 1)], ids=["right", "wrong"])
def test_the_command_prints_every_projection(
    gpu: Callable[..., None],
    capsys: pytest.CaptureFixture[str],
    wrong: tuple[int, int] | None,
    code: int,
) -> None:
    gpu(wrong=wrong)
    assert main(["doctor", "--kernels", "--model", MODEL]) == code
    out = capsys.readouterr().out
    assert "gate_up\t28672 x 4096\tright\t1.50x" in out
    assert ("attn_qkv: 3 results are wrong" in out) == (code == 1)
