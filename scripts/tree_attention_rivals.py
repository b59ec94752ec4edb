"""What `bench_tree_attention.py` compares with: other people's attention on the same problem.

Every rival gets its inputs in the form it likes best, made off the clock: torch's kernels read
gathered, contiguous keys, FlashInfer its plan. One that cannot run is skipped, with the reason.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

Work = Callable[[], torch.Tensor]
_SGLANG_FILES = ("score_mod", "decode_attention", "extend_attention")


@dataclass(frozen=True, slots=True, eq=False)
class Problem:
    """Requests of one shape: B requests with R rows, each after `context` tokens.

    pools: (k, v) of as many layers as keep L2 cold. mask [B, R, R] bool: which row sees which.
    The other tensors are `tree_attention`'s.
    """

    q: torch.Tensor
    pools: list[tuple[torch.Tensor, torch.Tensor]]
    kv_indptr: torch.Tensor
    kv_indices: torch.Tensor
    row_slots: torch.Tensor
    ancestors: torch.Tensor
    depth: torch.Tensor
    mask: torch.Tensor
    context: int
    scale: float

    @property
    def batch(self) -> int:
        """Requests."""
        return int(self.depth.shape[0])

    @property
    def rows(self) -> int:
        """Rows of a request."""
        return int(self.depth.shape[1])

    def own(self, pool: torch.Tensor) -> torch.Tensor:
        """The rows' own keys or values [B * R, KV heads, D]."""
        return pool[self.row_slots]

    def all_slots(self) -> torch.Tensor:
        """Slots of prefix and rows [B, context + R]."""
        prefix = self.kv_indices.view(self.batch, self.context)
        return torch.cat([prefix, self.row_slots.view(self.batch, self.rows)], dim=1)

    def dense_mask(self) -> torch.Tensor:
        """[B, R, context + R] bool."""
        prefix = self.mask.new_ones((self.batch, self.rows, self.context))
        return torch.cat([prefix, self.mask], dim=2)


class Sglang:
    """SGLang's Triton extend kernel with a custom mask, which its Triton backend runs for trees.

    folder: of the package `sglang`; its kernel files are loaded by path, with stand-ins for what
    they import, since the package itself needs much that a kernel does not.
    """

    def __init__(self, folder: Path) -> None:
        self._kernel = _sglang_kernel(folder)

    def works(self, problem: Problem) -> list[Work]:
        """One piece for each pair of pools."""
        batch, rows = problem.batch, problem.rows
        device = problem.q.device
        qo_indptr = torch.arange(batch + 1, dtype=torch.int32, device=device) * rows
        dense = problem.dense_mask()
        mask = dense.flatten()
        mask_indptr = torch.arange(batch + 1, dtype=torch.int64, device=device) * dense[0].numel()

        def work(k: torch.Tensor, v: torch.Tensor) -> Work:
            own_k, own_v = problem.own(k), problem.own(v)
            out = torch.empty_like(problem.q)

            def run() -> torch.Tensor:
                self._kernel.extend_attention_fwd(
                    problem.q, own_k, own_v, out, k, v, qo_indptr, problem.kv_indptr,
                    problem.kv_indices, mask, True, mask_indptr, rows, 1.0, 1.0, problem.scale,
                )  # fmt: skip
                return out

            return run

        return [work(k, v) for k, v in problem.pools]


class Sdpa:
    """torch's scaled_dot_product_attention; heads of a group are rows, keys are read once."""

    def works(self, problem: Problem) -> list[Work]:
        """One piece for each pair of pools."""
        batch, rows, (heads, dim) = problem.batch, problem.rows, problem.q.shape[1:]
        kv_heads = problem.pools[0][0].shape[1]
        group = heads // kv_heads
        q = problem.q.view(batch, rows, kv_heads, group, dim).permute(0, 2, 1, 3, 4)
        q = q.reshape(batch, kv_heads, rows * group, dim)
        mask = problem.dense_mask().repeat_interleave(group, dim=1)[:, None]
        slots = problem.all_slots()

        def work(k: torch.Tensor, v: torch.Tensor) -> Work:
            keys, values = (pool[slots].transpose(1, 2).contiguous() for pool in (k, v))

            def run() -> torch.Tensor:
                out = scaled_dot_product_attention(q, keys, values, mask, scale=problem.scale)
                out = out.view(batch, kv_heads, rows, group, dim).permute(0, 2, 1, 3, 4)
                return out.reshape(batch * rows, heads, dim)

            return run

        return [work(k, v) for k, v in problem.pools]


class Flex:
    """torch's flex_attention, compiled for the shape, with a block mask made off the clock."""

    def works(self, problem: Problem) -> list[Work]:
        """One piece for each pair of pools."""
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        batch, rows, (heads, dim) = problem.batch, problem.rows, problem.q.shape[1:]
        q = problem.q.view(batch, rows, heads, dim).transpose(1, 2).contiguous()
        context, mask, slots = problem.context, problem.mask, problem.all_slots()

        def seen(b: Any, _: Any, row: Any, key: Any) -> Any:
            return (key < context) | mask[b, row, (key - context).clamp(min=0)]

        blocks = create_block_mask(seen, batch, None, rows, context + rows, device=q.device)
        compiled = torch.compile(flex_attention, dynamic=False)

        def work(k: torch.Tensor, v: torch.Tensor) -> Work:
            keys, values = (pool[slots].transpose(1, 2).contiguous() for pool in (k, v))

            def run() -> torch.Tensor:
                out = compiled(
                    q, keys, values, block_mask=blocks, scale=problem.scale, enable_gqa=True
                )
                return out.transpose(1, 2).reshape(batch * rows, heads, dim)

            return run

        return [work(k, v) for k, v in problem.pools]


class Flashinfer:
    """FlashInfer's paged prefill with a custom mask and pages of one token."""

    def works(self, problem: Problem) -> list[Work]:
        """One piece for each pair of pools."""
        from flashinfer import BatchPrefillWithPagedKVCacheWrapper

        batch, rows, (heads, dim) = problem.batch, problem.rows, problem.q.shape[1:]
        device = problem.q.device
        count = torch.arange(batch + 1, dtype=torch.int32, device=device)
        workspace = torch.empty(256 << 20, dtype=torch.uint8, device=device)
        wrapper = BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
        wrapper.plan(
            count * rows, count * (problem.context + rows),
            problem.all_slots().flatten().to(torch.int32),
            torch.ones(batch, dtype=torch.int32, device=device), heads,
            problem.pools[0][0].shape[1], dim, 1, custom_mask=problem.dense_mask().flatten(),
            sm_scale=problem.scale, q_data_type=problem.q.dtype,
        )  # fmt: skip

        def work(k: torch.Tensor, v: torch.Tensor) -> Work:
            pages = (k[:, None], v[:, None])
            return lambda: wrapper.run(problem.q, pages)

        return [work(k, v) for k, v in problem.pools]


def _sglang_kernel(folder: Path) -> Any:
    """`extend_attention` of an SGLang checkout or installation."""
    package = "sglang.kernels.ops.attention"
    if not (folder / "kernels/ops/attention/extend_attention.py").is_file():
        raise FileNotFoundError(f"no kernels/ops/attention/extend_attention.py under {folder}")
    for name in ("sglang", "sglang.srt", "sglang.kernels", "sglang.kernels.ops", package):
        sys.modules.setdefault(name, ModuleType(name))
    environment = ModuleType("sglang.srt.environ")
    environment.envs = _Unset()  # type: ignore[attr-defined]
    sys.modules.setdefault(environment.__name__, environment)
    sys.modules.setdefault("sglang.srt.utils", _Utilities("sglang.srt.utils"))
    for name in _SGLANG_FILES:
        path = folder / f"kernels/ops/attention/{name}.py"
        spec = importlib.util.spec_from_file_location(f"{package}.{name}", path)
        if spec is None or spec.loader is None:
            raise ImportError(f"{path} cannot be loaded")
        module = importlib.util.module_from_spec(spec)
        sys.modules[f"{package}.{name}"] = module
        spec.loader.exec_module(module)
    return module


class _Utilities(ModuleType):
    """`sglang.srt.utils`: the platform is CUDA, and every other question is answered no."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_: name == "is_cuda"


class _Unset:
    """`sglang.srt.environ.envs`: whatever the variable, it is not set."""

    def __getattr__(self, name: str) -> _Unset:
        return self

    def get(self) -> bool:
        """The value of any variable."""
        return False


def available(sglang: Path | None, *, flex: bool) -> tuple[dict[str, Any], dict[str, str]]:
    """Rivals that can run, by name, and why the others cannot."""
    makers: dict[str, Callable[[], Any]] = {"sdpa": Sdpa}
    skipped = {} if flex else {"flex": "not asked for"}
    if flex:
        makers["flex"] = Flex
    if sglang is None:
        skipped["sglang"] = "no --sglang FOLDER"
    else:
        makers["sglang"] = lambda: Sglang(sglang)
    if importlib.util.find_spec("flashinfer") is None:
        skipped["flashinfer"] = "not installed"
    else:
        makers["flashinfer"] = Flashinfer
    found = {}
    for name, maker in makers.items():
        try:
            found[name] = maker()
        except Exception as error:  # noqa: BLE001 - whatever a foreign kernel cannot do
            skipped[name] = f"{type(error).__name__}: {error}"
    return found, skipped
