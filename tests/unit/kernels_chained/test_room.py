"""A block of every small kernel fits on a multiprocessor beside two blocks of the Hopper product.

Where it does not, the next product's blocks are spread unevenly: seen on an H200, where norms of
640 threads between the products made a step of 64 layers 1.6 ms longer.
"""

from __future__ import annotations

import pytest

from specpilot_kernels import build
from specpilot_kernels.chained import modules as chained
from specpilot_kernels.registry import KernelModule
from specpilot_kernels.w12 import modules as w12

SM_REGISTERS, SM_SHARED_BYTES, SM_THREADS = 65536, 228 * 1024, 2048
OF_FEW_ROWS = {chained.NORM_OF_FEW_ROWS.name}


def taken(module: KernelModule, threads: int, architecture: str, dynamic: int = 0) -> list[int]:
    """Registers, shared memory and threads of a block, as they are given out."""
    try:
        binary = build.build(module, architecture)
    except build.MissingGpuPackage as error:
        pytest.skip(f"kernels were not compiled: {error}")
    usage = binary.usage[module.entries[0].name]
    shared = usage.shared_bytes + 1024 + dynamic  # the driver keeps 1 KB of every block
    return [threads * -(-usage.registers // 8) * 8, -(-shared // 128) * 128, threads]


@pytest.mark.parametrize("rows", w12.GEMM_ROWS)
def test_two_products_leave_room_for_a_small_block(rows: int) -> None:
    product = taken(
        w12.gemm_sm90(rows), w12.GEMM_SM90_THREADS, "sm_90a",
        w12.gemm_sm90_shared_bytes(rows, view_only=False),
    )  # fmt: skip
    room = [
        whole - 2 * part
        for whole, part in zip((SM_REGISTERS, SM_SHARED_BYTES, SM_THREADS), product, strict=True)
    ]
    assert min(room) >= 0
    for module in chained.all_modules():
        few = module.name in OF_FEW_ROWS
        if few and rows > chained.FEW_ROWS:
            continue
        needed = taken(module, chained.NORM_THREADS if few else chained.THREADS, "sm_90")
        assert all(a <= b for a, b in zip(needed, room, strict=True)), (module.name, needed, room)
