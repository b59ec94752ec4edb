"""Move the accepted rows' keys and values to where the sequence goes on, in all layers at once.

    pools = KvPools.of([*k_pools, *v_pools])             # once
    compact_kv(pools, row_slots, path, n_accepted)       # each step, also in a CUDA graph

A verify pass writes row i of a request to slot row_slots[i]. Of the accepted path, anchor first,
the i-th token must lie in slot row_slots[i]: there a chain would have put it. Sources and targets
overlap; since every row has a smaller one as its parent, the i-th of a path is never above row i,
and all of a path's rows are read before one is written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

_WORD = 4
_ALIGNMENT = 16
_WORDS_PER_PROGRAM = 4096


@dataclass(frozen=True, slots=True, eq=False)
class KvPools:
    """Pools that share their slots: keys and values of all layers with rows of one size.

    pointers int64 [pools], on their device: the address of each. row_bytes: keys or values of one
    token; slot_bytes: from one token to the next.
    """

    tensors: tuple[torch.Tensor, ...]
    pointers: torch.Tensor
    row_bytes: int
    slot_bytes: int

    @staticmethod
    def of(tensors: Sequence[torch.Tensor]) -> KvPools:
        """Describe pools [slots, ...] of any dtype; synchronises, so make it once.

        ValueError unless all have rows of one size and spacing, without gaps and a multiple of 16
        bytes, on one device.
        """
        if not tensors:
            raise ValueError("no pools")
        shapes = {(_row_bytes(pool), pool.stride(0) * pool.itemsize) for pool in tensors}
        if len(shapes) > 1:
            raise ValueError(f"pools have rows and slots of {sorted(shapes)} bytes: one call each")
        ((row_bytes, slot_bytes),) = shapes
        devices = {pool.device for pool in tensors}
        if len(devices) > 1:
            raise ValueError(f"pools are on {', '.join(sorted(map(str, devices)))}")
        unaligned = [pool.data_ptr() % _ALIGNMENT for pool in tensors]
        if any(unaligned) or row_bytes % _ALIGNMENT or slot_bytes % _ALIGNMENT:
            raise ValueError(f"rows of {row_bytes} bytes do not lie at multiples of {_ALIGNMENT}")
        pointers = torch.tensor([pool.data_ptr() for pool in tensors], dtype=torch.int64)
        return KvPools(tuple(tensors), pointers.to(devices.pop()), row_bytes, slot_bytes)


def compact_kv(
    pools: KvPools, row_slots: torch.Tensor, path: torch.Tensor, n_accepted: torch.Tensor
) -> None:
    """Copy row path[b, i] of request b over row i, for i up to n_accepted[b], in every pool.

    row_slots [B, R] int64 or int32: slots of the rows; no two requests that accepted something
    share one. path [B, P] int32: rows in order, the anchor's row 0 first; n_accepted [B] int32:
    rows after the anchor, -1 to leave a request alone; both as from `trees.gpu.accept_path`. One
    launch on a GPU.

    ValueError on shapes, dtypes and devices.
    """
    _check(pools, row_slots, path, n_accepted)
    if pools.pointers.is_cuda:
        run_kernel(pools, row_slots, path, n_accepted)
    else:
        compact_reference(pools.tensors, row_slots, path, n_accepted)


def compact_reference(
    tensors: Sequence[torch.Tensor],
    row_slots: torch.Tensor,
    path: torch.Tensor,
    n_accepted: torch.Tensor,
) -> None:
    """The same by indexing, which reads all before it writes."""
    for slots, rows, count in zip(row_slots.long(), path.long(), n_accepted.tolist(), strict=True):
        source, target = slots[rows[: count + 1]], slots[: count + 1]
        for pool in tensors:
            pool[target] = pool[source]


def run_kernel(
    pools: KvPools, row_slots: torch.Tensor, path: torch.Tensor, n_accepted: torch.Tensor
) -> None:
    """Launch the kernel; `compact_kv` checks what comes here."""
    from specpilot_kernels.tree_attention import kernels  # needs Triton

    batch, length = path.shape
    if batch == 0 or length == 0:
        return
    steps = 1 << (length - 1).bit_length()
    words = pools.row_bytes // _WORD
    chunk = max(4, _WORDS_PER_PROGRAM // steps)
    kernels.compact[(-(-words // chunk), batch, len(pools.tensors))](
        pools.pointers, row_slots, path, n_accepted, row_slots.shape[1], length, words,
        pools.slot_bytes // _WORD, STEPS=steps, CHUNK=chunk, num_warps=4,
    )  # fmt: skip


def _row_bytes(pool: torch.Tensor) -> int:
    if pool.ndim < 2 or (pool.shape[0] and not pool[0].is_contiguous()):
        raise ValueError(f"a pool {list(pool.shape)} does not hold one row after the other")
    return pool.shape[1:].numel() * pool.itemsize


def _check(
    pools: KvPools, row_slots: torch.Tensor, path: torch.Tensor, n_accepted: torch.Tensor
) -> None:
    if row_slots.ndim != 2 or path.ndim != 2 or path.shape[1] > row_slots.shape[1]:
        raise ValueError(
            f"row_slots {list(row_slots.shape)} and path {list(path.shape)} are not [B, R] and "
            f"[B, P] with P up to R"
        )
    batch, indices = row_slots.shape[0], (torch.int64, torch.int32)
    expected = {
        "row_slots": (row_slots, tuple(row_slots.shape), indices),
        "path": (path, (batch, path.shape[1]), (torch.int32,)),
        "n_accepted": (n_accepted, (batch,), (torch.int32,)),
    }
    for name, (tensor, shape, dtypes) in expected.items():
        if tuple(tensor.shape) != shape or tensor.dtype not in dtypes:
            raise ValueError(
                f"{name} is {tensor.dtype} {list(tensor.shape)}, not "
                f"{' or '.join(map(str, dtypes))} {list(shape)}"
            )
        if tensor.device != pools.pointers.device or not tensor.is_contiguous():
            raise ValueError(f"{name} is not contiguous on {pools.pointers.device}")
