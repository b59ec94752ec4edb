"""Inputs and reference answers of the GPU tests; they import `specpilot_kernels` alone.

python -m pytest tests/gpu -m gpu
compute-sanitizer --report-api-errors no \\
    python -m pytest tests/gpu -m gpu -k "codec and (normal or odd or kind)"
compute-sanitizer --report-api-errors no \\
    python -m pytest tests/gpu/test_w12_linear.py -m gpu -k "every_element and -33-"
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import numpy.typing as npt
import pytest

sys.path.insert(0, str(Path(__file__).parent))  # for the modules with cases

Bits = npt.NDArray[np.uint16]


def normal_bits(rng: np.random.Generator, *shape: int) -> Bits:
    """BF16 patterns of N(0, 0.02), truncated."""
    values = (rng.standard_normal(shape, dtype=np.float32) * np.float32(0.02)).view(np.uint32)
    return (values >> 16).astype(np.uint16)


def _sparse(rng: np.random.Generator, share: float, *shape: int) -> Bits:
    bits = normal_bits(rng, *shape)
    bits[rng.random(shape) < share] = 0
    return bits


def _mixed_rows(rng: np.random.Generator) -> Bits:
    """Rows of every kind side by side: zero, denormal, Inf, NaN, constant, full range, normal."""
    bits = normal_bits(rng, 300, 1100)
    bits[0::9] = 0
    bits[1::9] = 0x8000
    bits[2::9] = rng.integers(1, 128, bits[2::9].shape, dtype=np.uint16)
    bits[3::9] = 0x7F80
    bits[4::9] = 0xFFC1
    bits[5::9] = rng.integers(0, 65536, bits[5::9].shape, dtype=np.uint16)
    bits[6::9] = 0x7F7F
    return bits


_EVERY = np.arange(65536, dtype=np.uint16)


@pytest.fixture(params=["chosen", "portable"])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The GEMM that `gemm.gemm` launches: the GPU's own choice, or the portable one."""
    from specpilot_kernels.w12 import gemm, gemm_mma

    own = gemm.kernel(0)
    if request.param == "portable":
        if own is gemm_mma:
            pytest.skip("it is the GPU's own choice")
        monkeypatch.setattr(gemm, "kernel", lambda device: gemm_mma)
        own = gemm_mma
    return own


CONTENTS: dict[str, Callable[[np.random.Generator], Bits]] = {
    "normal": lambda rng: normal_bits(rng, 384, 1024),
    "long rows": lambda rng: normal_bits(rng, 40, 17408),
    "rows end inside a record": lambda rng: normal_bits(rng, 130, 1000),
    "odd": lambda rng: normal_bits(rng, 129, 517),
    "one row": lambda rng: normal_bits(rng, 1, 5000),
    "one column": lambda rng: normal_bits(rng, 700, 1),
    "one weight": lambda rng: normal_bits(rng, 1, 1),
    "stack": lambda rng: normal_bits(rng, 5, 144, 320),
    "odd stack": lambda rng: normal_bits(rng, 3, 17, 99),
    "every pattern": lambda rng: _EVERY.reshape(256, 256),
    "every pattern shuffled": lambda rng: rng.permutation(_EVERY).reshape(64, 1024),
    "every pattern in one row": lambda rng: _EVERY.reshape(1, 65536),
    "every pattern in one column": lambda rng: _EVERY.reshape(65536, 1),
    "uniform patterns": lambda rng: rng.integers(0, 65536, (300, 640), dtype=np.uint16),
    "zeros 1 %": lambda rng: _sparse(rng, 0.01, 256, 2048),
    "zeros 5 %": lambda rng: _sparse(rng, 0.05, 256, 2048),
    "all zero": lambda rng: np.zeros((130, 70), np.uint16),
    "all minus zero": lambda rng: np.full((130, 64), 0x8000, np.uint16),
    "all infinite": lambda rng: np.full((33, 200), 0xFF80, np.uint16),
    "all NaN": lambda rng: np.full((20, 1800), 0x7FC1, np.uint16),
    "rows of every kind": _mixed_rows,
    "no rows": lambda rng: np.zeros((0, 64), np.uint16),
    "no columns": lambda rng: np.zeros((5, 0), np.uint16),
    "no matrices": lambda rng: np.zeros((0, 16, 64), np.uint16),
}


@pytest.fixture(params=CONTENTS, ids=str)
def bits(request: pytest.FixtureRequest) -> Bits:
    """One adversarial tensor of patterns, uint16 [rows, cols] or [matrices, rows, cols]."""
    return CONTENTS[request.param](np.random.default_rng(7))
