"""SGLang's own Gated DeltaNet kernels, loaded from their source files: what ours are compared with.

The files are found in `$SPECPILOT_SGLANG_SOURCE` (a folder that holds `kernels/ops`), else in an
installed sglang, which is not imported. They need torch and Triton alone, apart from a few
questions about the platform, which are answered here.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from specpilot_kernels.tree_verify.conv import LayerWeights
from specpilot_kernels.tree_verify.records import GdnShape

SOURCE: Final = "SPECPILOT_SGLANG_SOURCE"

_RECURRENCE: Final = "kernels/ops/attention/linear/fused_sigmoid_gating_recurrent.py"
_CONVOLUTION: Final = "kernels/ops/mamba/causal_conv1d_triton.py"


class StockMissing(RuntimeError):
    """SGLang's sources are not there, or do not load; the message says why."""


@dataclass(frozen=True, slots=True)
class Snapshots:
    """What stock verify keeps per row: states float32 [requests, R, Hv, V, K] and windows."""

    states: Tensor
    windows: Tensor

    @classmethod
    def allocate(cls, shape: GdnShape, requests: int, rows: int) -> Snapshots:
        """Room on the current GPU; contents undefined."""
        inner = (shape.value_heads, shape.value_dim, shape.key_dim)
        return cls(
            torch.empty((requests, rows, *inner), dtype=torch.float32, device="cuda"),
            torch.empty((requests, rows, shape.channels, 3), dtype=torch.bfloat16, device="cuda"),
        )


@dataclass(frozen=True, slots=True)
class Batch:
    """Requests of equal length: their slots int64, where each begins int32, and 0, 1, 2, .."""

    slot: Tensor
    starts: Tensor
    index: Tensor

    @classmethod
    def of(cls, slot: Tensor, rows: int) -> Batch:
        """From slots int64 [requests] and the rows of each request."""
        index = torch.arange(slot.shape[0] + 1, dtype=torch.int64, device=slot.device)
        return cls(slot, (index * rows).int(), index[:-1])


@dataclass(frozen=True, slots=True)
class StockTree:
    """Trees as SGLang describes them: int64 [requests, R], -1 where there is none."""

    next_token: Tensor
    next_sibling: Tensor
    parent: Tensor

    @classmethod
    def of(cls, parent: Tensor) -> StockTree:
        """From parents int [requests, R]."""
        child, sibling = torch.full_like(parent, -1), torch.full_like(parent, -1)
        for request, tree in enumerate(parent.tolist()):
            last: dict[int, int] = {}
            for row, above in enumerate(tree):
                if above < 0:
                    continue
                if above in last:
                    sibling[request, last[above]] = row
                else:
                    child[request, above] = row
                last[above] = row
        return cls(child.long(), sibling.long(), parent.clamp(min=0).long())


@dataclass(frozen=True, slots=True)
class Stock:
    """The loaded kernels."""

    recurrence: Callable[..., Tensor]
    convolution: Callable[..., Tensor]

    def convolve(
        self,
        mixed: Tensor,
        weights: LayerWeights,
        conv_pool: Tensor,
        batch: Batch,
        *,
        snapshots: Snapshots | None = None,
        tree: StockTree | None = None,
    ) -> Tensor:
        """Convolution and SiLU of mixed [requests * R, C]; windows are moved in place."""
        x = mixed.view(batch.slot.shape[0], -1, mixed.shape[1]).transpose(1, 2)
        keep: dict[str, Any] = {}
        if snapshots is not None:
            keep = {
                "intermediate_conv_window": snapshots.windows,
                "intermediate_state_indices": batch.index,
            }
        if tree is not None:
            keep |= {
                "retrieve_next_token": tree.next_token,
                "retrieve_next_sibling": tree.next_sibling,
                "retrieve_parent_token": tree.parent,
            }
        y = self.convolution(
            x, conv_pool, weights.conv_weight, weights.conv_bias, "silu",
            conv_state_indices=batch.slot, **keep,
        )  # fmt: skip
        return y.transpose(1, 2).reshape(mixed.shape)

    def recur(
        self,
        convolved: Tensor,
        a: Tensor,
        b: Tensor,
        weights: LayerWeights,
        state_pool: Tensor,
        batch: Batch,
        shape: GdnShape,
        *,
        snapshots: Snapshots | None = None,
        tree: StockTree | None = None,
    ) -> Tensor:
        """Outputs [requests * R, Hv, V]; without snapshots, states move on in place."""
        total = convolved.shape[0]
        q, k, v = torch.split(convolved, [shape.keys, shape.keys, shape.values], dim=-1)
        keep: dict[str, Any] = {}
        if snapshots is not None:
            keep = {
                "disable_state_update": True,
                "intermediate_states_buffer": snapshots.states,
                "intermediate_state_indices": batch.index,
                "cache_steps": total // batch.slot.shape[0],
                "retrieve_parent_token": None if tree is None else tree.parent,
            }
        keys = (1, total, shape.key_heads, shape.key_dim)
        return self.recurrence(
            A_log=weights.a_log, a=a, dt_bias=weights.dt_bias, softplus_beta=1.0,
            softplus_threshold=20.0, q=q.view(keys), k=k.view(keys),
            v=v.view(1, total, shape.value_heads, shape.value_dim), b=b,
            initial_state_source=state_pool, initial_state_indices=batch.slot,
            cu_seqlens=batch.starts, use_qk_l2norm_in_kernel=True, **keep,
        ).view(total, shape.value_heads, shape.value_dim)  # fmt: skip


def load(*, dependent: bool = True) -> Stock:
    """Load the kernels for torch's current GPU. StockMissing if that cannot be done.

    dependent: with programmatic dependent launch where the GPU has it, as SGLang itself does.
    """
    folder = _folder()
    with _platform(dependent):
        recurrence = _module(folder / _RECURRENCE, "specpilot_stock_recurrence")
        convolution = _module(folder / _CONVOLUTION, "specpilot_stock_convolution")
    return Stock(
        recurrence.fused_sigmoid_gating_delta_rule_update, convolution.causal_conv1d_update
    )


def _folder() -> Path:
    named = os.environ.get(SOURCE)
    if named:
        folder = Path(named)
    else:
        try:
            found = importlib.util.find_spec("sglang")
        except ValueError:  # a stub without a spec
            found = None
        if found is None or not found.submodule_search_locations:
            raise StockMissing(f"sglang is not installed, and ${SOURCE} names no source of it")
        folder = Path(next(iter(found.submodule_search_locations)))
    for file in (_RECURRENCE, _CONVOLUTION):
        if not (folder / file).is_file():
            raise StockMissing(f"{folder} has no {file}")
    return folder


@contextmanager
def _platform(dependent: bool) -> Iterator[None]:
    """Modules of sglang that the files ask about the platform, for as long as they load."""
    major, minor = torch.cuda.get_device_capability() if torch.cuda.is_available() else (9, 0)
    answers: dict[str, dict[str, Callable[[], object]]] = {
        "sglang.kernels.jit.utils": {"is_arch_support_pdl": lambda: dependent and major >= 9},
        "sglang.srt.utils": {
            "get_device_sm": lambda: 10 * major + minor,
            "is_cuda": lambda: True,
            "is_gfx95_supported": lambda: False,
            "is_hip": lambda: False,
            "is_sm90_supported": lambda: major == 9,
        },
    }
    names = ["sglang", "sglang.kernels", "sglang.kernels.jit", "sglang.srt", *answers]
    before = {name: sys.modules.get(name) for name in names}
    for name in names:
        stub = types.ModuleType(name)
        stub.__path__ = []
        stub.__dict__.update(answers.get(name, {}))
        sys.modules[name] = stub
    try:
        yield
    finally:
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module


def _module(path: Path, name: str) -> types.ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # Triton looks functions up by their module
    try:
        spec.loader.exec_module(module)
    except ImportError as error:
        del sys.modules[name]
        raise StockMissing(f"{path} does not load: {error}") from error
    return module
