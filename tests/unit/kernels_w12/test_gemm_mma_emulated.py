"""The portable GEMM's source, compiled as C++ and run by an emulator of one CTA.

No GPU here: this judges index arithmetic, barriers, the ring of stages, escapes and the joining
of tiles. Speed, the tensor cores' rounding and memory order belong to tests/gpu.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is not installed")

from emulated_cta import (
    POISON,
    Bits,
    Compiled,
    aligned,
    assert_accurate,
    bf16,
    encode,
    hard_weights,
    numbers,
    parts,
    wide_inputs,
)

from specpilot_kernels.w12 import modules, reference_gemm

Gemm = Callable[..., Bits]

_DRIVER = """
#include "gpu_emulator.h"
KERNEL
static Params params;

extern "C" int run(const void* packed, int bytes, const int* ctas, int count, int dynamic_bytes) {
  if (bytes != sizeof params) return 1;
  if (dynamic_bytes != kTileRows * COLS * 4 + STAGES * kStageBytes) return 2;
  std::memcpy(&params, packed, sizeof params);
  emulator::kernel = [] { w12_gemm_mma(params); };
  for (int i = 0; i < count; ++i) emulator::run_cta(ctas[i], kThreads, dynamic_bytes);
  return 0;
}
"""


@pytest.fixture(scope="module")
def gemm(tmp_path_factory: pytest.TempPathFactory) -> Gemm:
    """`gemm(weight, x, ctas=)`: y [rows, out] in bfloat16 patterns, CTAs in a random order."""
    compiled = Compiled(modules.gemm_mma, _DRIVER, tmp_path_factory)

    def run(bits: Bits, x: Bits, *, ctas: int, view_only: bool = False) -> Bits:
        size, library = compiled.of(x.shape[0], view_only=view_only)
        shared = modules.gemm_mma_shared_bytes(size, view_only=view_only)
        return _launch(library, bits, x, size, ctas, shared)

    return run


def _launch(library: ctypes.CDLL, bits: Bits, x: Bits, size: int, ctas: int, shared: int) -> Bits:
    weight = encode(bits)
    tiles, blocks, _ = weight.records.shape
    (outputs, inputs), rows = bits.shape, x.shape[0]
    y = np.full((rows + 1, outputs + 3), POISON, np.uint16)
    partials = aligned(np.full(2 * ctas * 128 * size, np.nan, np.float32))
    arrivals = np.zeros(tiles, np.uint32)
    wide = wide_inputs(x)
    arrays = (*parts(weight), wide)
    packed = struct.pack(
        modules.GEMM_MMA_PARAMS,
        *(array.ctypes.data for array in arrays), 0,
        *(array.ctypes.data for array in (y, partials, arrivals)),
        wide.shape[1], y.shape[1], rows, inputs, outputs, blocks, *divmod(tiles * blocks, ctas),
    )  # fmt: skip
    order = np.random.default_rng(ctas).permutation(ctas).astype(np.int32)
    pointer = ctypes.c_void_p(order.ctypes.data)
    assert library.run(packed, len(packed), pointer, ctas, shared) == 0
    assert not arrivals.any()
    assert (y[rows:] == POISON).all()
    assert (y[:, outputs:] == POISON).all()
    return y[:rows, :outputs]


_RNG = np.random.default_rng(1)
_NORMAL = bf16(_RNG.standard_normal((259, 333)) * 0.02)
_X = bf16(_RNG.standard_normal((64, 333)))


@pytest.mark.parametrize("ctas", [1, 4, 18])
@pytest.mark.parametrize("rows", [1, 16, 31, 48, 64])
def test_tiles_cut_anywhere_give_the_product(gemm: Gemm, rows: int, ctas: int) -> None:
    y = gemm(_NORMAL, _X[:rows], ctas=ctas)
    assert_accurate(y, _X[:rows], numbers(_NORMAL))


@pytest.mark.parametrize("view_only", [False, True], ids=["full", "view"])
def test_escapes_are_exact(gemm: Gemm, view_only: bool) -> None:
    bits = hard_weights(_RNG)
    weight = encode(bits)
    assert weight.escape_count > 3000
    y = gemm(bits, _X[:9, :130], ctas=3, view_only=view_only)
    weights = reference_gemm.weights(weight, view_only=view_only).numpy().astype(np.float64)
    assert_accurate(y, _X[:9, :130], weights)


def test_a_row_has_the_same_bits_in_every_batch(gemm: Gemm) -> None:
    bits = _NORMAL.copy()
    bits[:, 5] = 0
    whole = gemm(bits, _X, ctas=7)
    for rows in (1, 8, 9, 32, 33, 63):
        assert np.array_equal(gemm(bits, _X[:rows], ctas=7), whole[:rows])
