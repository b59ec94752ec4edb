"""The tree kernels, compiled as C++ and run by an emulator of one CTA."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from pathlib import Path

import torch
from cuda_emulator import compile_kernel
from tree_cases import poisoned, tensors_of

from specpilot_kernels.registry import KernelModule
from specpilot_kernels.trees import modules
from specpilot_kernels.trees.gpu import AcceptedPaths, DeviceTrees

THREADS = 64  # fewer than on a GPU: two warps meet every barrier, and a row is a loop of several

_BUILD_DRIVER = """
#include "gpu_emulator.h"
KERNEL
static void* pointer[13];
static int number[6];

// 1: the kernel wrote beyond its shared memory.
extern "C" int run(void** pointers, const int* numbers, int requests, int dynamic_bytes) {
  std::copy(pointers, pointers + 13, pointer);
  std::copy(numbers, numbers + 6, number);
  emulator::kernel = [] {
    build_trees(pointer[0], (const float*)pointer[1], (const i64*)pointer[2],
                (const float*)pointer[3], (const double*)pointer[4], (const i64*)pointer[5],
                (i64*)pointer[6], (int*)pointer[7], (int*)pointer[8], (float*)pointer[9],
                (u64*)pointer[10], (int4*)pointer[11], (i64*)pointer[12], number[0], number[1],
                number[2], number[3], number[4], number[5]);
  };
  for (int i = 0; i < requests; ++i) {
    emulator::run_cta(i, THREADS, dynamic_bytes);
    for (size_t at = dynamic_bytes; at < sizeof shared; ++at)
      if (shared[at] != 0xA5) return 1;
  }
  return 0;
}
"""

_ACCEPT_DRIVER = """
#include "gpu_emulator.h"
KERNEL
static void* pointer[12];
static int number[2];

extern "C" int run(void** pointers, const int* numbers, int requests) {
  std::copy(pointers, pointers + 12, pointer);
  std::copy(numbers, numbers + 2, number);
  emulator::kernel = [] {
    accept_path((const i64*)pointer[0], (const int*)pointer[1], (const i64*)pointer[2],
                (const i64*)pointer[3], (const int*)pointer[4], (int*)pointer[5],
                (int*)pointer[6], (i64*)pointer[7], (i64*)pointer[8], (i64*)pointer[9],
                (i64*)pointer[10], (int*)pointer[11], number[0], number[1]);
  };
  for (int i = 0; i < requests; ++i) emulator::run_cta(i, 32, 0);
  return 0;
}
"""


class EmulatedTrees:
    """`build_trees` and `accept_path` of `gpu.py`, with the CUDA sources behind them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._builders: dict[int, ctypes.CDLL] = {}
        self._accept = compile_kernel(modules.ACCEPT_PATH, _ACCEPT_DRIVER, folder)

    def build(
        self,
        candidate_ids: torch.Tensor,
        scores: torch.Tensor,
        anchor: torch.Tensor,
        n_nodes: int,
        *,
        max_depth: int | None = None,
        logsumexp: torch.Tensor | None = None,
        calibration: torch.Tensor | None = None,
        prefix_lens: torch.Tensor | None = None,
    ) -> DeviceTrees:
        """Build into poisoned outputs."""
        batch, positions, predecessors, candidates = scores.shape
        variant = next(size for size in modules.CANDIDATES if candidates <= size)
        cap = positions if max_depth is None else min(max_depth, positions)
        out = poisoned(DeviceTrees.empty(batch, n_nodes, cap, torch.device("cpu")))
        status = self._builder(variant).run(
            _pointers([candidate_ids, scores, anchor, logsumexp, calibration, prefix_lens,
                       *tensors_of(out).values()]),
            _numbers([candidate_ids.dtype == torch.int64, positions, predecessors, candidates,
                      n_nodes, cap]),
            batch,
            modules.build_shared_bytes(positions, predecessors, variant),
        )  # fmt: skip
        assert status == 0
        return out

    def accept(
        self,
        trees: DeviceTrees,
        target: torch.Tensor,
        prefix_lens: torch.Tensor | None = None,
        enabled: torch.Tensor | None = None,
    ) -> AcceptedPaths:
        """Accept into poisoned outputs."""
        batch, rows = trees.token.shape
        width = trees.max_depth + 1
        out = AcceptedPaths.empty(batch, width, torch.device("cpu"))
        for tensor in out:
            tensor.fill_(77)
        given = [trees.token, trees.parent, target, prefix_lens, enabled, *out]
        assert self._accept.run(_pointers(given), _numbers([rows, width]), batch) == 0
        return out

    def _builder(self, variant: int) -> ctypes.CDLL:
        if variant not in self._builders:
            module = with_threads(modules.build_trees(variant), THREADS)
            self._builders[variant] = compile_kernel(module, _BUILD_DRIVER, self._folder)
        return self._builders[variant]


def with_threads(module: KernelModule, threads: int) -> KernelModule:
    """The module with another number of threads per block."""
    macros = tuple((n, threads if n == "THREADS" else value) for n, value in module.macros)
    return replace(module, macros=macros)


def _pointers(tensors: list[torch.Tensor | None]) -> ctypes.Array[ctypes.c_void_p]:
    assert all(tensor is None or tensor.is_contiguous() for tensor in tensors)
    addresses = [None if tensor is None else tensor.data_ptr() for tensor in tensors]
    return (ctypes.c_void_p * len(addresses))(*addresses)


def _numbers(values: list[int]) -> ctypes.Array[ctypes.c_int]:
    return (ctypes.c_int * len(values))(*map(int, values))
