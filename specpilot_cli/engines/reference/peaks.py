"""What this CPU can do at most, measured with the threads the engine runs with.

A CPU has no data sheet that fits: its usable rates depend on threads, memory channels and on how
much of the weights its caches hold. So both rates are measured here, on the same numeric library,
with a working set as large as the weights (paper §3.1 uses peaks for the byte floor).
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from specpilot_cli.schema.gpu_profile import ComputeType, PeakRates, SourcedNumber

# Long enough to leave timer resolution and frequency ramps behind, short enough for a command.
_MIN_REPEATS = 5
_BUDGET_S = 0.6
# Square products of this size reach the plateau of common CPU libraries.
_GEMM_SIZE = 1024
_MATRIX_COLUMNS = 1024


def measure_peaks(dtype: torch.dtype, working_set_bytes: int) -> PeakRates:
    """Read bandwidth over `working_set_bytes` and dense FLOP/s in `dtype`, on current threads.

    Each is the best of many repeats: a peak is what the machine can do, not what it does while
    others use it.
    """
    name: ComputeType = "bfloat16" if dtype == torch.bfloat16 else "float32"
    threads = torch.get_num_threads()
    bandwidth = read_bytes_per_s(working_set_bytes)
    flops = gemm_flops_per_s(dtype)
    return PeakRates(
        read_bytes_per_s=(
            SourcedNumber(
                value=bandwidth,
                kind="measured",
                source=f"best read of {working_set_bytes / 2**20:.1f} MiB of float32 "
                f"(sum or matrix-vector product), {threads} threads",
            ),
        ),
        flops_per_s={
            name: (
                SourcedNumber(
                    value=flops,
                    kind="measured",
                    source=f"best {_GEMM_SIZE} cubed matrix product in {name}, {threads} threads",
                ),
            )
        },
    )


@torch.inference_mode()
def read_bytes_per_s(working_set_bytes: int) -> float:
    """Best rate at which a buffer of that size is read, bytes per second."""
    rows = max(1, working_set_bytes // (4 * _MATRIX_COLUMNS))
    matrix = torch.ones(rows, _MATRIX_COLUMNS)
    vector = torch.ones(_MATRIX_COLUMNS)
    n_bytes = matrix.numel() * matrix.element_size()
    best_s = min(_best_s(matrix.sum), _best_s(lambda: matrix @ vector))
    return n_bytes / best_s


@torch.inference_mode()
def gemm_flops_per_s(dtype: torch.dtype) -> float:
    """Best rate of a large matrix product, FLOP per second, a multiply and an add as two."""
    generator = torch.Generator().manual_seed(0)
    left = torch.rand(_GEMM_SIZE, _GEMM_SIZE, generator=generator).to(dtype)
    right = torch.rand(_GEMM_SIZE, _GEMM_SIZE, generator=generator).to(dtype)
    return 2.0 * _GEMM_SIZE**3 / _best_s(lambda: left @ right)


def _best_s(work: Callable[[], object]) -> float:
    work()
    best = float("inf")
    started = time.perf_counter()
    repeats = 0
    while repeats < _MIN_REPEATS or time.perf_counter() - started < _BUDGET_S:
        before = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - before)
        repeats += 1
    return best
