"""The portable GEMM's source, compiled as C++ and run by an emulator of one CTA.

No GPU here: this judges index arithmetic, barriers, the ring of stages, escapes and the joining
of tiles. Speed, the tensor cores' rounding and memory order belong to tests/gpu.
"""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from specpilot_kernels import registry
from specpilot_kernels.w12 import codec, gemm_reference, modules

Bits = npt.NDArray[np.uint16]
Gemm = Callable[..., Bits]

POISON = 0x7FC5  # a NaN
_FUNCTION = re.compile(
    r"^(?:template <[^\n]*>\n)?__device__ __forceinline__ [^{;]*\{.*?^\}\n",
    re.DOTALL | re.MULTILINE,
)
_DRIVER = """
#include "gpu_emulator.h"
#include "kernel.h"

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


def _as_cpp() -> str:
    """The kernel without its helpers in PTX, which the emulator has, in one piece."""
    folder = Path(registry.__file__).parent / "w12/csrc"
    source = (folder / "gemm_mma.cu").read_text()
    source = source.replace('#include "gemm.cuh"', (folder / "gemm.cuh").read_text())
    source = _FUNCTION.sub(
        lambda found: "" if "asm" in found[0] or "__cvta" in found[0] else found[0], source
    )
    assert "asm" not in source
    return re.sub(r"extern __shared__ [^\n]*\n", "", source)


def _compile(folder: Path, cols: int, view_only: bool) -> ctypes.CDLL:
    module = modules.gemm_mma(cols, view_only=view_only)
    (folder / "kernel.h").write_text(_as_cpp())
    (folder / "driver.cpp").write_text(_DRIVER)
    library = folder / f"{module.name}.so"
    subprocess.run(
        ["g++", "-std=c++17", "-O1", "-w", "-fPIC", "-shared", "-ffp-contract=off",
         "-fno-strict-aliasing", f"-I{Path(__file__).parent}",
         *(f"-D{name}={value}" for name, value in module.macros),
         str(folder / "driver.cpp"), "-o", str(library)],
        check=True,
    )  # fmt: skip
    return ctypes.CDLL(str(library))


@pytest.fixture(scope="module")
def gemm(tmp_path_factory: pytest.TempPathFactory) -> Gemm:
    """`gemm(weight, x, ctas=)`: y [rows, out] in bfloat16 patterns, CTAs in a random order."""
    if shutil.which("g++") is None:
        pytest.skip("the emulator needs g++")
    folder = tmp_path_factory.mktemp("emulator")
    libraries: dict[tuple[int, bool], ctypes.CDLL] = {}

    def run(bits: Bits, x: Bits, *, ctas: int, view_only: bool = False) -> Bits:
        cols = next(c for c in modules.GEMM_MMA_COLS if x.shape[0] <= c)
        key = cols, view_only
        if key not in libraries:
            libraries[key] = _compile(folder, *key)
        return _launch(libraries[key], bits, x, cols, ctas, view_only)

    return run


def _launch(
    library: ctypes.CDLL, bits: Bits, x: Bits, cols: int, ctas: int, view_only: bool
) -> Bits:
    encoded = codec.encode(bits)
    parts = gemm_reference.gemm_parts(encoded)
    tiles, blocks = encoded.records.shape[:2]
    (outputs, inputs), rows = bits.shape, x.shape[0]
    wide = _aligned(np.full((rows, -(-inputs // 8) * 8 + 8), POISON, np.uint16))
    wide[:, :inputs] = x
    y = np.full((rows + 1, outputs + 3), POISON, np.uint16)
    partials = _aligned(np.full(2 * ctas * 128 * cols, np.nan, np.float32))
    arrivals = np.zeros(tiles, np.uint32)
    records = _aligned(encoded.records)
    arrays = (records, parts.scale, parts.escape_ptr, parts.escapes, wide)
    packed = modules.GEMM_MMA_PARAMS.pack(
        *(array.ctypes.data for array in arrays), 0,
        *(array.ctypes.data for array in (y, partials, arrivals)),
        wide.shape[1], y.shape[1], rows, inputs, outputs, blocks, *divmod(tiles * blocks, ctas),
    )  # fmt: skip
    order = np.random.default_rng(ctas).permutation(ctas).astype(np.int32)
    shared = modules.gemm_mma_shared_bytes(cols, view_only=view_only)
    pointer = ctypes.c_void_p(order.ctypes.data)
    assert library.run(packed, len(packed), pointer, ctas, shared) == 0
    assert not arrivals.any()
    assert (y[rows:] == POISON).all()
    assert (y[:, outputs:] == POISON).all()
    return y[:rows, :outputs]


def _aligned(array: npt.NDArray[np.generic]) -> npt.NDArray[np.generic]:
    """A copy that begins at a multiple of 16 bytes."""
    room = np.empty(array.nbytes + 16, np.uint8)
    start = -room.ctypes.data % 16
    copy = room[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


def _bf16(values: npt.NDArray[np.float64]) -> Bits:
    bits = values.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def _numbers(bits: Bits) -> npt.NDArray[np.float64]:
    return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def _assert_accurate(y: Bits, x: Bits, weights: npt.NDArray[np.float64]) -> None:
    expected = _numbers(x) @ weights.T
    magnitude = np.abs(_numbers(x)) @ np.abs(weights).T
    error = np.abs(_numbers(y) - expected)
    assert (error <= 2.0**-8 * np.abs(expected) + 2.0**-20 * magnitude + 2.0**-134).all()


_RNG = np.random.default_rng(1)
_NORMAL = _bf16(_RNG.standard_normal((259, 333)) * 0.02)
_X = _bf16(_RNG.standard_normal((64, 333)))


def _hard() -> Bits:
    """Weights at the bottom of their windows beside zeros, and the channels W12 finds hardest."""
    bits = np.full((140, 130), 0x3F80, np.uint16)
    bits[:, ::4] = 0
    bits[5], bits[6], bits[7] = 0, 0x8000, _RNG.integers(1, 128, 130)
    bits[8, ::2], bits[8, 1::2] = 3, 0x0100
    bits[9], bits[10], bits[11] = 0x0080, _RNG.integers(0, 0x6000, 130), 0x6F00
    bits[12] = _RNG.integers(0, 190, 130) << 7
    return bits


@pytest.mark.parametrize("ctas", [1, 4, 18])
@pytest.mark.parametrize("rows", [1, 16, 31, 48, 64])
def test_tiles_cut_anywhere_give_the_product(gemm: Gemm, rows: int, ctas: int) -> None:
    y = gemm(_NORMAL, _X[:rows], ctas=ctas)
    _assert_accurate(y, _X[:rows], _numbers(_NORMAL))


@pytest.mark.parametrize("view_only", [False, True], ids=["full", "view"])
def test_escapes_are_exact(gemm: Gemm, view_only: bool) -> None:
    bits = _hard()
    encoded = codec.encode(bits)
    assert encoded.escapes > 3000
    y = gemm(bits, _X[:9, :130], ctas=3, view_only=view_only)
    weights = gemm_reference.weights(encoded, view_only=view_only)
    _assert_accurate(y, _X[:9, :130], weights)


def test_a_row_has_the_same_bits_in_every_batch(gemm: Gemm) -> None:
    bits = _NORMAL.copy()
    bits[:, 5] = 0
    whole = gemm(bits, _X, ctas=7)
    for rows in (1, 8, 9, 32, 33, 63):
        assert np.array_equal(gemm(bits, _X[:rows], ctas=7), whole[:rows])
