"""Runs the tree kernels' sources on the CPU, block by block."""

from __future__ import annotations

import ctypes
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from cuda_emulator import compile_kernel
from gdn_cases import Case
from torch import Tensor

from specpilot_kernels import launch, registry
from specpilot_kernels.tree_verify import conv, wy
from specpilot_kernels.tree_verify import path as path_kernel
from specpilot_kernels.tree_verify.records import ReplayRecord

_DRIVER = f"""
#include "{Path(__file__).parent / "gdn_emulator.h"}"
KERNEL
static Params params;
static Index block;

extern "C" int run(const void* packed, int bytes, int x, int y, int z, int threads, int dynamic) {{
  if (bytes != sizeof params) return 1;
  std::memcpy(&params, packed, sizeof params);
  emulator::kernel = [] {{ blockIdx = block; ENTRY(params); }};
  for (int i = 0; i < x * y * z; ++i) {{
    block = {{unsigned(i % x), unsigned(i / x % y), unsigned(i / x / y)}};
    emulator::run_cta(0, threads, dynamic);
  }}
  return 0;
}}

extern "C" int shared_bytes() {{ return SHARED_BYTES; }}
"""


class EmulatedGpu:
    """Stands for `launch.prepare`: what it returns runs the kernel's source on CPU tensors."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._libraries: dict[str, ctypes.CDLL] = {}

    def library(self, module: registry.KernelModule, entry: str) -> ctypes.CDLL:
        """The kernel, compiled as C++."""
        if module.name not in self._libraries:
            shared = "sizeof(Shared)" if entry == "gdn_wy" else "0"
            driver = _DRIVER.replace("ENTRY", entry).replace("SHARED_BYTES", shared)
            self._libraries[module.name] = compile_kernel(module, driver, self._folder)
        return self._libraries[module.name]

    def prepare(
        self, module: registry.KernelModule, entry: str, *, block: launch.Dim3,
        device: int | None = None, options: launch.Options,
    ):  # fmt: skip
        library = self.library(module, entry)

        def launcher(grid: launch.Dim3, packed: bytes) -> None:
            assert len(packed) == launch.parameter_sizes(module.entry(entry).signature)[0]
            assert library.run(packed, len(packed), *grid, block[0], options.shared_bytes) == 0

        return launcher


@pytest.fixture(scope="session")
def emulated_gpu(tmp_path_factory: pytest.TempPathFactory) -> EmulatedGpu:
    """The emulator; compiled kernels are shared by all tests."""
    if shutil.which("g++") is None:
        pytest.skip("the emulator needs g++")
    return EmulatedGpu(tmp_path_factory.mktemp("gdn_emulator"))


@pytest.fixture
def gpu(emulated_gpu: EmulatedGpu, monkeypatch: pytest.MonkeyPatch) -> EmulatedGpu:
    """The emulator in the place of the GPU."""
    monkeypatch.setattr(launch, "prepare", emulated_gpu.prepare)
    return emulated_gpu


@dataclass(frozen=True)
class Verified:
    """What verify gave: outputs bfloat16 [requests, R, Hv, V], the record, and its queries."""

    out: Tensor
    record: ReplayRecord
    queries: conv.Queries


def verify(case: Case, method: str) -> Verified:
    """Run the kernels through their launchers, into poisoned memory.

    method: "path", "wy", or "direct", the other form of WY verify.
    """
    requests, rows = case.trees.parent.shape
    record = ReplayRecord.allocate(case.shape, requests, rows, "cpu")
    for tensor in (record.kv, record.k_scale, record.g, record.beta, record.mixed):
        tensor.fill_(torch.nan)
    out = torch.full(
        (requests * rows, case.shape.value_heads, case.shape.value_dim), torch.nan
    ).bfloat16()
    queries = conv.prepare_rows(
        case.mixed, case.a, case.b, case.weights, case.windows, case.slot, case.trees, record,
        case.shape,
    )  # fmt: skip
    tensors = (queries, record, case.states, case.slot, case.trees, out, case.shape)
    if method == "path":
        path_kernel.path(*tensors)
    else:
        wy.wy(*tensors, form="direct" if method == "direct" else "solve")
    return Verified(out.view(requests, rows, *out.shape[1:]), record, queries)
