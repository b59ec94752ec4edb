from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from specpilot_cli.doctor import checks
from specpilot_cli.doctor.cuda_driver import CudaDevice


def _fake_versions(monkeypatch: pytest.MonkeyPatch, found: dict[str, str]) -> None:
    monkeypatch.setattr(checks, "_version", found.get)


def test_missing_device_counts_only_when_required(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "cuda_devices", list)
    found = checks.run_checks()
    assert "cuda device" in {c.name for c in checks.missing_for(found, ["gpu"])}
    assert not checks.missing_for(found, [])


def test_a_complete_gpu_machine_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    device = CudaDevice("NVIDIA H200", (9, 0), 150_000_000_000)
    monkeypatch.setattr(checks, "cuda_devices", lambda: [device])
    _fake_versions(
        monkeypatch,
        {"cuda-bindings": "13.1.0", "nvidia-cuda-nvrtc": "13.5.37", "sglang": "0.5.23.post1"},
    )
    found = checks.run_checks()
    assert not checks.missing_for(found, ["gpu", "sglang"])
    details = {check.name: check.detail for check in found}
    assert details["cuda device"] == "NVIDIA H200, sm_90, 150 GB"


@pytest.mark.parametrize(
    ("version", "ok"),
    [
        ("0.5.19", False),
        ("0.5.20", True),
        ("0.5.23.post1", True),
        ("0.5.24", False),
        ("1.0", False),
    ],
)
def test_sglang_outside_the_checked_range_is_missing(
    version: str, ok: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    _fake_versions(monkeypatch, {"sglang": version})
    assert checks._sglang().ok is ok


def test_sglang_range_is_the_one_of_the_extra(repo: Path) -> None:
    project = tomllib.loads((repo / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lowest, below = (".".join(map(str, v)) for v in (checks.SGLANG_FROM, checks.SGLANG_BELOW))
    assert project["optional-dependencies"]["sglang"] == [f"sglang>={lowest},<{below}"]


def test_a_broken_package_is_missing_with_its_last_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "brokenpkg.py").write_text("import os\nos.abort()\n", encoding="utf-8")
    (tmp_path / "halfpkg.py").write_text("raise ImportError('libfoo missing')\n", encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert not checks._imported("brokenpkg", "x", ("torch",)).ok
    half = checks._imported("halfpkg", "x", ("torch",))
    assert half.detail == "ImportError: libfoo missing"


def test_container_limit_caps_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    values = {"memory.max": 3_000_000, "memory.current": 1_000_000}
    monkeypatch.setattr(checks, "_cgroup_bytes", values.get)
    assert checks.memory_bytes() == 2_000_000


def test_cache_folder_below_a_file_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "file" / "cache"))
    check = checks._numba_cache()
    assert not check.ok
    assert "NUMBA_CACHE_DIR" in (check.fix or "")
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "not" / "yet"))
    assert checks._numba_cache().ok
