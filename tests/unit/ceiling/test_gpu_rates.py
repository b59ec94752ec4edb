"""Bundled rates are dense and belong to their board: they imply its own boost clock."""

from __future__ import annotations

import pytest

from specpilot_cli.ceiling.peaks import load_gpu
from specpilot_cli.io.gpu_profiles import bundled_files

# Dense BF16 FLOP per clock and multiprocessor with FP32 accumulation, and the boost clock in GHz.
# GeForce boards run at half of what their chips can. A rate with 2:4 sparsity, or with FP16
# accumulation, or of another board, would imply a clock that is far off.
_BOARDS = {
    "a10": (1024, 1.695),
    "a100-pcie-40gb": (2048, 1.41),
    "a100-pcie-80gb": (2048, 1.41),
    "a100-sxm-40gb": (2048, 1.41),
    "a100-sxm-80gb": (2048, 1.41),
    "a40": (1024, 1.74),
    "b200": (8192, 1.85),
    "gh200-144gb": (4096, 1.83),
    "gh200-96gb": (4096, 1.83),
    "h100-nvl": (4096, 1.545),
    "h100-pcie": (4096, 1.62),
    "h100-sxm5": (4096, 1.83),
    "h200": (4096, 1.83),
    "l4": (1024, 2.04),
    "l40s": (1024, 2.49),
    "rtx-3090": (512, 1.695),
    "rtx-4090": (512, 2.52),
    "rtx-5090": (512, 2.407),
    "rtx-pro-6000-server": (1024, 2.43),
    "rtx-pro-6000-workstation": (1024, 2.617),
}
_LIMITED = {"h20"}  # sold below what its clock and multiprocessors would give
_SHARED = {"80": 163, "86": 99, "89": 99, "90a": 227, "100a": 227, "120a": 99}


def test_every_board_is_checked():
    assert {path.stem for path in bundled_files()} == {*_BOARDS, *_LIMITED}


@pytest.mark.parametrize("name", _BOARDS)
def test_the_dense_rate_implies_the_boost_clock(name: str):
    profile = load_gpu(name)
    rate = profile.peaks.compute("bfloat16", "datasheet")
    per_clock, boost_ghz = _BOARDS[name]
    clock_ghz = rate.value / profile.multiprocessors.value / per_clock / 1e9
    assert clock_ghz == pytest.approx(boost_ghz, rel=0.02)


@pytest.mark.parametrize("name", sorted({*_BOARDS, *_LIMITED}))
def test_narrower_types_are_twice_as_fast_and_float32_is_slower(name: str):
    peaks = load_gpu(name).peaks
    bf16 = peaks.compute("bfloat16", "datasheet").value
    assert peaks.compute("float16", "datasheet").value == bf16
    assert peaks.compute("float32", "datasheet").value < bf16
    float8, int8 = (peaks.compute(dtype, "datasheet") for dtype in ("float8", "int8"))
    if float8 is not None:
        assert float8.value == pytest.approx(2 * bf16, rel=0.02)
    if int8 is not None:
        assert int8.value / bf16 == pytest.approx(4 if name.startswith("rtx-") else 2, rel=0.02)


@pytest.mark.parametrize("name", sorted({*_BOARDS, *_LIMITED}))
def test_architecture_memory_and_bandwidth_fit_each_other(name: str):
    profile = load_gpu(name)
    number = profile.architecture.removeprefix("sm_")
    assert profile.shared_memory_per_block_bytes.value == _SHARED[number] * 1024
    assert ("wgmma" in profile.mma) == (number == "90a")
    assert ("tcgen05" in profile.mma) == (number == "100a")
    assert (profile.peaks.compute("float8", "datasheet") is None) == number.startswith("8") or (
        number == "89"
    )
    # No board reads its memory in less than 15 ms or more than 90 ms.
    sweep_s = profile.memory_bytes.value / profile.peaks.bandwidth("datasheet").value
    assert 0.015 < sweep_s < 0.09


def test_the_bandwidth_of_b200_is_the_one_that_its_bus_gives():
    """NVIDIA prints 7.7 and a rounded 8 TB/s; drivers report 7,680 bits at 3,996 MHz."""
    number = load_gpu("b200").peaks.bandwidth("datasheet")
    assert number.value == pytest.approx(7680 / 8 * 3.996e9 * 2, rel=0.01)
    assert "rounds to 8" in number.source
    assert "7.7" in number.source
