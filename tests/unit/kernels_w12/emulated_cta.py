"""Prepares what an emulated GEMM kernel reads, and judges what it wrote."""

from __future__ import annotations

import ctypes
import math
import mmap
import shutil
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
import torch
from cuda_emulator import compile_kernel
from w12_cases import exact

from specpilot_kernels import registry
from specpilot_kernels.w12 import modules
from specpilot_kernels.w12.weight import W12Weight

Bits = npt.NDArray[np.uint16]
Array = npt.NDArray[np.generic]

POISON = 0x7FC5  # a NaN


class Compiled:
    """The variants of a kernel, each compiled when it is first asked for; skips without g++."""

    def __init__(
        self, variant: Callable[..., registry.KernelModule], driver: str,
        folders: pytest.TempPathFactory,
    ) -> None:  # fmt: skip
        if shutil.which("g++") is None:
            pytest.skip("the emulator needs g++")
        self._variant, self._driver = variant, driver
        self._folder = folders.mktemp("emulator")
        self._libraries: dict[tuple[int, bool], ctypes.CDLL] = {}

    def of(self, rows: int, *, view_only: bool) -> tuple[int, ctypes.CDLL]:
        """The variant for so many rows: how many it takes, and its library."""
        size = next(size for size in modules.GEMM_ROWS if rows <= size)
        key = size, view_only
        if key not in self._libraries:
            module = self._variant(size, view_only=view_only)
            self._libraries[key] = compile_kernel(module, self._driver, self._folder)
        return size, self._libraries[key]


def encode(bits: Bits) -> W12Weight:
    """The weight with these patterns [out, in], on the CPU."""
    return exact(torch.from_numpy(bits.view(np.int16)))


def parts(weight: W12Weight) -> list[Array]:
    """Records, scale, escape_ptr and escapes, aligned as on a GPU."""
    tensors = (weight.records, weight.scale, weight.escape_ptr, weight.escapes)
    return [aligned(tensor.numpy()) for tensor in tensors]


def aligned(array: Array) -> Array:
    """A copy that begins at a multiple of 16 bytes."""
    room = np.empty(array.nbytes + 16, np.uint8)
    start = -room.ctypes.data % 16
    copy = room[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


def shared_by_processes(shape: tuple[int, ...], value: float, dtype: type[np.generic]) -> Array:
    """An array full of `value` in memory that forked processes write to together."""
    array = np.frombuffer(mmap.mmap(-1, math.prod(shape) * np.dtype(dtype).itemsize), dtype)
    array[...] = value
    return array.reshape(shape)


def wide_inputs(x: Bits) -> Bits:
    """x [rows, in] in longer rows, aligned, with NaN between them."""
    room = aligned(np.full((x.shape[0], -(-x.shape[1] // 8) * 8 + 8), POISON, np.uint16))
    room[:, : x.shape[1]] = x
    return room


def bf16(values: npt.NDArray[np.float64]) -> Bits:
    """The nearest patterns."""
    bits = values.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def numbers(bits: Bits) -> npt.NDArray[np.float64]:
    """What patterns are worth."""
    return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def assert_accurate(y: Bits, x: Bits, weights: npt.NDArray[np.float64]) -> None:
    """Compare y [rows, out] with x times weights [out, in], element by element."""
    expected = numbers(x) @ weights.T
    magnitude = np.abs(numbers(x)) @ np.abs(weights).T
    error = np.abs(numbers(y) - expected)
    assert (error <= 2.0**-8 * np.abs(expected) + 2.0**-20 * magnitude + 2.0**-134).all()


def hard_weights(rng: np.random.Generator) -> Bits:
    """Weights at the bottom of their windows beside zeros, and the channels W12 finds hardest."""
    bits = np.full((140, 130), 0x3F80, np.uint16)
    bits[:, ::4] = 0
    bits[5], bits[6], bits[7] = 0, 0x8000, rng.integers(1, 128, 130)
    bits[8, ::2], bits[8, 1::2] = 3, 0x0100
    bits[9], bits[10], bits[11] = 0x0080, rng.integers(0, 0x6000, 130), 0x6F00
    bits[12] = rng.integers(0, 190, 130) << 7
    return bits
