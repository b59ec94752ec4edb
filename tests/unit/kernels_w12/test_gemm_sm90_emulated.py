"""The Hopper GEMM's source, compiled as C++ and run by an emulator of one CTA.

Judged are index arithmetic, the barriers and rings of the roles,
corrections with and without a place in shared memory, and the joining of tiles; not speed, nor
memory order between CTAs, nor the hand-over between kernels.
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
    shared_by_processes,
    wide_inputs,
)

from specpilot_kernels.w12 import modules, reference_gemm
from specpilot_kernels.w12.split import split

pytestmark = pytest.mark.slow

Gemm = Callable[..., Bits]

# Each CTA is a process of its own, since those that share a tile wait for each other's sums.
_DRIVER = """
#include <sys/wait.h>
#include <unistd.h>

#include "hopper_emulator.h"
KERNEL
static TensorMap map;
static Params params;

extern "C" int run(const void* packed, int bytes, const void* x, int cols, int pitch, int ctas,
                   int dynamic_bytes) {
  if (bytes != sizeof params) return 1;
  std::memcpy(&params, packed, sizeof params);
  emulator::inputs = {static_cast<const unsigned short*>(x), params.rows, cols, pitch};
  emulator::kernel = [] { w12_gemm(map, params); };
  std::vector<pid_t> children;
  for (int cta = 0; cta < ctas; ++cta) {
    const pid_t child = fork();
    if (child < 0) return 2;
    if (child == 0) {
      alarm(100);  // nobody waits for ever for a CTA that failed
      emulator::begin_cta();
      emulator::run_cta(cta, kThreads, dynamic_bytes);
      emulator::end_cta();
      _exit(0);
    }
    children.push_back(child);
  }
  int failed = 0, status;
  for (const pid_t child : children)
    failed |= waitpid(child, &status, 0) != child || status != 0;
  return failed ? 3 : 0;
}
"""


@pytest.fixture(scope="module")
def gemm(tmp_path_factory: pytest.TempPathFactory) -> Gemm:
    """`gemm(weight, x, sms=)`: y [rows, out] in bfloat16 patterns; `workers` as in `split`."""
    compiled = Compiled(modules.gemm_sm90, _DRIVER, tmp_path_factory)

    def run(
        bits: Bits, x: Bits, *, sms: int, workers: int | None = None, view_only: bool = False
    ) -> Bits:
        size, library = compiled.of(x.shape[0], view_only=view_only)
        shared = modules.gemm_sm90_shared_bytes(size, view_only=view_only)
        return _launch(library, bits, x, size, sms, workers, shared)

    return run


def _launch(
    library: ctypes.CDLL, bits: Bits, x: Bits, size: int, sms: int, workers: int | None, shared: int
) -> Bits:
    weight = encode(bits)
    tiles, blocks, _ = weight.records.shape
    (outputs, inputs), rows = bits.shape, x.shape[0]
    shares = split(tiles, blocks, sms, workers=workers)
    y = shared_by_processes((rows + 1, outputs + 3), POISON, np.uint16)
    partials = shared_by_processes((2 * sms * 128 * size,), 0xFFFFFFFF, np.uint32)
    overflow = shared_by_processes((sms * 128 * size,), np.nan, np.float32)
    issuing = np.zeros(16, np.uint32)
    wide = wide_inputs(x)
    arrays = parts(weight)
    bias = aligned(np.full(outputs, 0x8000, np.uint16))  # changes nothing, no zero's sign either
    packed = struct.pack(
        modules.GEMM_SM90_PARAMS,
        *(array.ctypes.data for array in (*arrays, bias)),
        *(array.ctypes.data for array in (y, partials, overflow, issuing)),
        y.shape[1], rows, outputs, blocks, shares.workers, 0, shares.split_tiles, shares.share,
        shares.longer, shares.whole_tiles,
    )  # fmt: skip
    pointer = ctypes.c_void_p(wide.ctypes.data)
    status = library.run(
        packed, len(packed), pointer, inputs, wide.shape[1], shares.workers, shared
    )
    assert status == 0
    assert (partials == 0xFFFFFFFF).all()
    assert not issuing.any()
    assert (y[rows:] == POISON).all()
    assert (y[:, outputs:] == POISON).all()
    return y[:rows, :outputs]


_RNG = np.random.default_rng(1)
_NORMAL = bf16(_RNG.standard_normal((700, 333)) * 0.02)
_X = bf16(_RNG.standard_normal((64, 700)))


@pytest.mark.parametrize("sms", [1, 2, 4, 11])
@pytest.mark.parametrize("rows", [1, 16, 31, 48, 64])
def test_every_split_gives_the_product(gemm: Gemm, rows: int, sms: int) -> None:
    y = gemm(_NORMAL, _X[:rows, :333], sms=sms)
    assert_accurate(y, _X[:rows, :333], numbers(_NORMAL))


@pytest.mark.parametrize("view_only", [False, True], ids=["full", "view"])
@pytest.mark.parametrize("rows", [8, 9, 40, 64])
def test_escapes_are_exact(gemm: Gemm, rows: int, view_only: bool) -> None:
    bits = hard_weights(_RNG)
    weight = encode(bits)
    assert weight.escape_count > 3000
    x = _X[:rows, :130]
    y = gemm(bits, x, sms=3, view_only=view_only)
    weights = reference_gemm.weights(weight, view_only=view_only).numpy().astype(np.float64)
    assert_accurate(y, x, weights)


def _with_escapes(count: int) -> Bits:
    """Weights [700, 700], the last `count` places of a random order being zeros."""
    bits = np.full((700, 700), 0x3C00, np.uint16)
    bits[:, 1::2] = 0xBC55
    places = np.random.default_rng(count).permutation(bits.size)[:count]
    bits.reshape(-1)[places] = 0
    return bits


# Around the 32 escapes that a warp holds; six tiles for two and four CTAs: shared ones and whole
# ones.
@pytest.mark.parametrize("sms", [1, 2, 4])
@pytest.mark.parametrize("count", [0, 1, 31, 32, 33, 63, 64, 65, 1000])
def test_every_number_of_escapes_is_added(gemm: Gemm, count: int, sms: int) -> None:
    bits = _with_escapes(count)
    assert encode(bits).escape_count == count
    x = _X[:3]
    assert_accurate(gemm(bits, x, sms=sms), x, numbers(bits))


# Outputs, inputs, CTAs. Who finishes a tile depends on where its last CTA ends, and on whether
# there are more CTAs than groups of rows; a CTA may be the last of one tile and the first of
# another.
_SHARED = {
    "three or four CTAs a tile, some going on": (360, 400, 8),
    "more CTAs than groups of rows": (100, 700, 11),
    "fewer CTAs than tiles": (1100, 200, 8),
}


@pytest.mark.parametrize("view_only", [False, True], ids=["full", "view"])
@pytest.mark.parametrize("shape", _SHARED.values(), ids=_SHARED)
def test_a_row_has_the_same_bits_in_every_batch(
    gemm: Gemm, shape: tuple[int, int, int], view_only: bool
) -> None:
    outputs, inputs, ctas = shape
    bits = bf16(_RNG.standard_normal((outputs, inputs)) * 0.02)
    bits[:, 5] = 0
    bits[70], bits[71] = 0x8003, 0  # a scale of 0 makes zeros of either sign
    x = _X[:, :inputs].copy()
    x[::3] |= 0x8000
    whole = gemm(bits, x, sms=ctas, workers=ctas, view_only=view_only)
    weights = reference_gemm.weights(encode(bits), view_only=view_only).numpy().astype(np.float64)
    assert_accurate(whole, x, weights)
    for rows in (1, 9, 33, 41):
        part = gemm(bits, x[:rows], sms=ctas, workers=ctas, view_only=view_only)
        assert np.array_equal(part, whole[:rows])
