"""The probe reads every byte, takes no longer than it says, and gives rates a GPU can have."""

from __future__ import annotations

import time

import pytest

from specpilot_kernels import launch
from specpilot_kernels.build import GpuError
from specpilot_kernels.probe.modules import STREAM_READ, SUMS, THREADS, TILE_BYTES

torch = pytest.importorskip("torch", reason="no CUDA device: torch is not installed")
probe = pytest.importorskip("specpilot_kernels.probe.measure")

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("pieces", [1, 31, TILE_BYTES // 16, TILE_BYTES // 16 + 1, 3_000_001])
def test_the_kernel_sums_every_piece_once(pieces: int):
    reader = launch.prepare(STREAM_READ, "stream_read", block=(THREADS, 1, 1))
    buffer = torch.empty(4 * pieces, dtype=torch.int32, device="cuda").random_()
    sums = torch.zeros(SUMS, dtype=torch.int32, device="cuda")
    blocks = -(-pieces * 16 // TILE_BYTES)
    reader((blocks, 1, 1), buffer.data_ptr(), pieces, sums.data_ptr())
    difference = sums.sum(dtype=torch.int64) - buffer.sum(dtype=torch.int64)
    assert int(difference.item()) % 2**32 == 0


def test_a_read_that_is_left_out_is_no_measurement(monkeypatch: pytest.MonkeyPatch):
    prepared = launch.prepare

    def half(*args: object, **options: object) -> object:
        reader = prepared(*args, **options)
        return lambda grid, source, n, sums: reader(grid, source, n // 2, sums)

    monkeypatch.setattr(launch, "prepare", half)
    with pytest.raises(GpuError, match="every byte once"):
        probe.read_times(1 << 28)


def test_reads_come_from_memory_not_from_the_cache():
    device = probe.device()
    times = probe.read_times()
    assert times.bytes > 20 * device.l2_bytes
    whole = times.bytes / sorted(times.seconds)[len(times.seconds) // 2]
    small = probe.read_times(device.l2_bytes // 4 // TILE_BYTES * TILE_BYTES)
    cached = small.bytes / sorted(small.seconds)[len(small.seconds) // 2]
    if device.multiprocessors >= 100:  # small devices cannot fill a replay with so few bytes
        assert cached > whole
    assert 1e11 < whole < 2e13


def test_the_whole_measurement_fits_in_half_a_minute():
    for package in ("pydantic", "yaml"):  # of the CLI; the other tests need kernels alone
        pytest.importorskip(package)
    from specpilot_cli.doctor.measure import ROWS, local_profile, measure
    from specpilot_cli.ui import SilentReporter

    begin = time.perf_counter()
    measured = measure("Qwen3.8-27B", reporter=SilentReporter())
    assert time.perf_counter() - begin < 30
    assert measured.read.spread_ratio < 0.05
    assert 0.3 < measured.square.value / 1e15 < 3 or measured.device.multiprocessors < 100
    profile = local_profile(measured)
    sheet = profile.peaks.bandwidth("datasheet")
    if sheet is not None:
        assert 0.75 < measured.read.value / sheet.value < 1.0
    if measured.skinny:
        assert [row.rows for row in measured.skinny] == list(ROWS)
        assert measured.skinny[0].bytes / measured.skinny[0].median_s < 1.02 * measured.read.value
