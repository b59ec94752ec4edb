"""Stand-in for SGLang's kernel package, so that its scheduler runs on a CPU; tests only.

The real package is a CUDA library. SGLang imports many names from it and calls few of them on a
CPU without AMX: those are written out here in PyTorch. Every other name can be imported and
raises when it is called.
"""

from __future__ import annotations

import ctypes
import importlib
import sys

import torch
from standin import add_submodules, missing_names

__version__ = "0.4.10"
# SGLang asks for scalar types only if the package has them
__getattr__ = missing_names(__name__, absent=frozenset({"scalar_type"}))


def assign_req_to_token_pool_cpu(
    requests: torch.Tensor,
    table: torch.Tensor,
    starts: torch.Tensor,
    ends: torch.Tensor,
    slots: torch.Tensor,
    _width: int,
) -> None:
    """Write `slots`, one request after the other, to `table[request, start:end]`."""
    done = 0
    for request, start, end in _spans(requests, starts, ends):
        table[request, start:end] = slots[done : done + end - start].to(table.dtype)
        done += end - start


def assign_extend_cache_locs_cpu(
    requests: torch.Tensor,
    table: torch.Tensor,
    starts: torch.Tensor,
    ends: torch.Tensor,
    slots: torch.Tensor,
    _width: int,
) -> None:
    """Read `table[request, start:end]` of every request into `slots`, one after the other."""
    done = 0
    for request, start, end in _spans(requests, starts, ends):
        slots[done : done + end - start] = table[request, start:end].to(slots.dtype)
        done += end - start


def copy_all_layer_kv_cache_cpu(
    addresses: torch.Tensor, row_bytes: torch.Tensor, to: torch.Tensor, source: torch.Tensor
) -> None:
    """Copy rows `source` to rows `to` in each buffer, as if all were read before any is written."""
    targets, sources = to.tolist(), source.tolist()
    for address, size in zip(addresses.tolist(), row_bytes.tolist(), strict=True):
        rows = [ctypes.string_at(address + row * size, size) for row in sources]
        for row, data in zip(targets, rows, strict=True):
            ctypes.memmove(address + row * size, data, size)


def _spans(*columns: torch.Tensor) -> zip[tuple[int, ...]]:
    return zip(*(column.tolist() for column in columns), strict=True)


add_submodules(
    __name__,
    [
        "elementwise", "flash_attn", "kvcacheio", "mamba", "moe", "quantization", "speculative",
        "top_k", "utils",
    ],
)  # fmt: skip

_recurrent = importlib.import_module(f"{__name__}.recurrent")
for _name, _function in vars(_recurrent).items():
    if _name.endswith("_cpu"):
        setattr(torch.ops.sgl_kernel, _name, _function)
        setattr(sys.modules[f"{__name__}.mamba"], _name, _function)
