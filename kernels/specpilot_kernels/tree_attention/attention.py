"""Attention of the rows of draft trees, over a paged prefix and over their own ancestors.

    out = tree_attention(
        q, k_pool, v_pool, kv_indptr, kv_indices, row_slots, trees.ancestors, trees.depth,
        scale=head_dim**-0.5,
    )

Each row attends to exactly the tokens of its own root path, as if that path were a sequence of its
own: the whole prefix of its request and the row's ancestors, itself included, and under a sliding
window the last `window` of them. Tensors on a GPU use the Triton kernels of `kernels`, tensors on
the CPU the formula in `reference`. Beneath is the operator `specpilot::tree_attention`, which can
be compiled, and captured in a CUDA graph after one call outside of it: the launch depends on shapes
alone, nothing waits for the GPU, and equal inputs give equal bits.
"""

from __future__ import annotations

import torch

from specpilot_kernels.tree_attention import plan as planning
from specpilot_kernels.tree_attention.plan import Plan
from specpilot_kernels.tree_attention.reference import tree_attention_reference

_INT32_MAX = 2**31 - 1
_COMBINE_CHUNK = 8

_library = torch.library.Library("specpilot", "FRAGMENT")
_library.define(
    "tree_attention(Tensor q, Tensor k_pool, Tensor v_pool, Tensor kv_indptr, Tensor kv_indices, "
    "Tensor row_slots, Tensor ancestors, Tensor depth, float scale, int? window, "
    "float? logit_cap, int? n_splits) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def tree_attention(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    row_slots: torch.Tensor,
    ancestors: torch.Tensor,
    depth: torch.Tensor,
    *,
    scale: float,
    window: int | None = None,
    logit_cap: float | None = None,
    n_splits: int | None = None,
) -> torch.Tensor:
    """Return [B * R, query heads, D] like q, FP32 inside; rows that stand for nothing get zeros.

    q [B * R, query heads, D] bfloat16 or float16, on the CPU float32 too, contiguous in D: R rows
    for each of B requests. k_pool, v_pool [slots, KV heads, D] of q's dtype, contiguous in D: the
    rows' own keys and values already in it. kv_indptr [B + 1] and kv_indices, int32 or int64: the
    slots of each request's prefix in order, all of it or, with a window, at least its last
    window - 1 tokens; kv_indices may be longer than they say.
    row_slots [B * R] int64 or int32: the slot of each row. ancestors [B, R, ceil(R / 64)] uint64
    or int64, bit masks with the row itself; depth [B, R] int32: 0 for the anchor, -1 for a row
    that stands for nothing; both as in `trees.gpu.DeviceTrees`. Slots that no row sees, in the
    pools or of such rows, are not read: they may hold anything.

    scale > 0: of the scores. window: tokens that a row sees, itself included, counted along its
    root path. logit_cap: c * tanh(score / c) in place of each score. n_splits: programs that share
    the keys of a KV head and tile of rows; by default as many as fill the GPU once.

    ValueError on shapes, dtypes, layouts, devices and options that do not fit.
    """
    _check(q, k_pool, v_pool, kv_indptr, kv_indices, row_slots, ancestors, depth)
    for name, number in (("scale", scale), ("logit_cap", logit_cap)):
        if number is not None and not 0.0 < number < float("inf"):
            raise ValueError(f"{name} is {number}, not a positive number")
    for name, count in (("window", window), ("n_splits", n_splits)):
        if count is not None and count < 1:
            raise ValueError(f"{name} is {count}, not a positive number")
    out: torch.Tensor = torch.ops.specpilot.tree_attention(
        q, k_pool, v_pool, kv_indptr, kv_indices, row_slots, ancestors, depth,
        scale, window, logit_cap, n_splits,
    )  # fmt: skip
    return out


def _check(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    row_slots: torch.Tensor,
    ancestors: torch.Tensor,
    depth: torch.Tensor,
) -> None:
    if depth.ndim != 2 or q.ndim != 3 or k_pool.ndim != 3:
        raise ValueError("depth is [B, R], q [B * R, heads, D] and the pools [slots, KV heads, D]")
    batch, rows = depth.shape
    slots, kv_heads, head_dim = k_pool.shape
    if kv_heads < 1 or q.shape[1] % kv_heads:
        raise ValueError(f"{q.shape[1]} query heads do not share {kv_heads} KV heads evenly")
    indices = (torch.int32, torch.int64)
    floats = (torch.bfloat16, torch.float16, *(() if q.is_cuda else (torch.float32,)))
    expected = {
        "q": (q, (batch * rows, q.shape[1], head_dim), floats),
        "k_pool": (k_pool, (slots, kv_heads, head_dim), (q.dtype,)),
        "v_pool": (v_pool, (slots, kv_heads, head_dim), (q.dtype,)),
        "kv_indptr": (kv_indptr, (batch + 1,), indices),
        "kv_indices": (kv_indices, (kv_indices.numel(),), indices),
        "row_slots": (row_slots, (batch * rows,), indices),
        "ancestors": (ancestors, (batch, rows, -(-rows // 64)), (torch.uint64, torch.int64)),
        "depth": (depth, (batch, rows), (torch.int32,)),
    }
    for name, (tensor, shape, dtypes) in expected.items():
        if tuple(tensor.shape) != shape or tensor.dtype not in dtypes:
            raise ValueError(
                f"{name} is {tensor.dtype} {list(tensor.shape)}, not "
                f"{' or '.join(map(str, dtypes))} {list(shape)}"
            )
        if tensor.device != q.device:
            raise ValueError(f"{name} is on {tensor.device}, q on {q.device}")
        dense = tensor.stride(-1) == 1 if name in ("q", "k_pool", "v_pool") else None
        if not (tensor.is_contiguous() if dense is None else dense or tensor.numel() == 0):
            raise ValueError(f"{name} is not contiguous")


def run_kernels(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    row_slots: torch.Tensor,
    ancestors: torch.Tensor,
    depth: torch.Tensor,
    *,
    scale: float,
    window: int | None,
    logit_cap: float | None,
    plan: Plan,
) -> torch.Tensor:
    """Launch both kernels with a plan; else as `tree_attention`, which checks what comes here."""
    from specpilot_kernels.tree_attention import kernels  # needs Triton

    batch, rows = depth.shape
    heads, head_dim = q.shape[1:]
    kv_heads, tile = k_pool.shape[1], plan.tile
    group = heads // kv_heads
    out = torch.empty((batch * rows, heads, head_dim), dtype=q.dtype, device=q.device)
    if out.numel() == 0:
        return out
    shape = (plan.splits + batch - 1, kv_heads, rows * group)
    part = torch.empty((*shape, head_dim), dtype=torch.float32, device=q.device)
    part_log = torch.empty(shape, dtype=torch.float32, device=q.device)
    blocks = kv_indices.numel() // tile.block_n + batch * (-(-rows // planning.TREE_BLOCK) + 1)
    if max(part.numel(), q.shape[0] * q.stride(0), blocks * plan.splits) > _INT32_MAX:
        raise ValueError(f"{batch} requests of {rows} rows exceed what 32-bit offsets reach")
    power = {"BATCH": _next_power(batch), "BLOCK_N": tile.block_n, "HEAD_DIM": head_dim}
    shared = {
        **power, "GROUP": group, "LEAST_BLOCKS": plan.least_blocks, "WINDOWED": window is not None
    }  # fmt: skip
    words = ancestors.view(torch.int32)
    row_tiles = -(-rows * group // tile.block_m)
    kernels.attend[(row_tiles * (head_dim // tile.value_dim), kv_heads, plan.splits)](
        q, k_pool, v_pool, kv_indptr, kv_indices, row_slots, words, depth, part, part_log,
        q.stride(0), q.stride(1), k_pool.stride(0), k_pool.stride(1), v_pool.stride(0),
        v_pool.stride(1), batch, rows, plan.splits, scale, window or 0, logit_cap or 0.0,
        WORDS=words.shape[2], VALUE_DIM=tile.value_dim, BLOCK_M=tile.block_m,
        CAPPED=logit_cap is not None, num_warps=tile.warps, num_stages=tile.stages, **shared,
    )  # fmt: skip
    kernels.combine[(rows * group, kv_heads, batch)](
        part, part_log, kv_indptr, out, batch, rows, plan.splits, window or 0,
        SPLITS=_next_power(plan.splits), CHUNK=_COMBINE_CHUNK, num_warps=4, **shared,
    )  # fmt: skip
    return out


def _next_power(count: int) -> int:
    return 1 << (count - 1).bit_length()


def _on_gpu(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    row_slots: torch.Tensor,
    ancestors: torch.Tensor,
    depth: torch.Tensor,
    scale: float,
    window: int | None,
    logit_cap: float | None,
    n_splits: int | None,
) -> torch.Tensor:
    gpu = torch.cuda.get_device_properties(q.device)
    kv_heads = k_pool.shape[1]
    plan = planning.choose(
        depth.shape[1] * (q.shape[1] // kv_heads), kv_heads, q.shape[2],
        multiprocessors=gpu.multi_processor_count,
        shared_bytes=gpu.shared_memory_per_block_optin, splits=n_splits,
    )  # fmt: skip
    return run_kernels(
        q, k_pool, v_pool, kv_indptr, kv_indices, row_slots, ancestors, depth,
        scale=scale, window=window, logit_cap=logit_cap, plan=plan,
    )  # fmt: skip


def _on_cpu(*tensors: torch.Tensor | float | int | None) -> torch.Tensor:
    *operands, scale, window, logit_cap, _ = tensors
    return tree_attention_reference(*operands, scale=scale, window=window, logit_cap=logit_cap)  # type: ignore[arg-type]


def _fake(q: torch.Tensor, *_: object) -> torch.Tensor:
    """The operator's result without its values."""
    return q.new_empty(q.shape)


_library.impl("tree_attention", _on_gpu, "CUDA")
_library.impl("tree_attention", _on_cpu, "CPU")
torch.library.register_fake("specpilot::tree_attention", _fake, lib=_library)
