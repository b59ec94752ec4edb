"""Commit: the accepted path replayed into the states and windows of all layers, in one launch."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specpilot_kernels import launch
from specpilot_kernels.tree_verify import checks, gdn_reference, modules
from specpilot_kernels.tree_verify.records import GdnShape, ReplayRecord

_pack = struct.Struct(modules.COMMIT_PARAMS).pack
_pack_layer = struct.Struct(modules.COMMIT_LAYER).pack


@dataclass(frozen=True, slots=True, eq=False)
class Keep:
    """Where states on the way go, for a prefix cache that holds those at every so many tokens.

    slot: int64 [requests], of its own for each; one outside the pool means none. length: int64
    [requests], tokens before the anchor. every: tokens. Of several places that one step passes, the
    last is kept.
    """

    slot: Tensor
    length: Tensor
    every: int


class GdnCommit:
    """The commit of a model: its layers' records and pools, and where the GPU finds them.

    records: one per layer, all of the same rows. state_pools: float32 [slots, Hv, V, K] per layer;
    conv_pools: bfloat16 [slots, C, 3] per layer; both changed in place by a call. All layers must
    have the same shapes and strides. Make it before a graph is captured; a call may be captured.
    """

    def __init__(
        self,
        records: Sequence[ReplayRecord],
        state_pools: Sequence[Tensor],
        conv_pools: Sequence[Tensor],
    ) -> None:
        if not len(records) == len(state_pools) == len(conv_pools) > 0:
            raise ValueError("a commit needs a record, a state pool and windows for every layer")
        self.shape: GdnShape = checks.shape_of(state_pools[0], conv_pools[0])
        self.records, self.state_pools, self.conv_pools = (
            tuple(records), tuple(state_pools), tuple(conv_pools)
        )  # fmt: skip
        like = (state_pools[0].stride(), conv_pools[0].stride())
        for record, state_pool, conv_pool in zip(records, state_pools, conv_pools, strict=True):
            if (state_pool.stride(), conv_pool.stride()) != like or (
                checks.shape_of(state_pool, conv_pool) != self.shape
            ):
                raise ValueError("all layers of a commit must have pools of the same shape")
            checks.check_record(record, self.shape, records[0].requests, records[0].rows)
        self._layers: Tensor | None = None
        if state_pools[0].is_cuda:
            checks.check_kernel(self.shape, *state_pools)
            self._layers = self._table().to(state_pools[0].device)
            warm(self.shape.key_dim, state_pools[0].device.index)

    def __call__(
        self,
        slot: Tensor,
        path: Tensor,
        n_accepted: Tensor,
        *,
        keep: Keep | None = None,
        dependent: bool = True,
    ) -> None:
        """Replay each request's accepted path.

        slot: int64 [requests]; requests with a slot outside the pool are left alone. path: int32
        [requests, length], rows of the tree in order, the anchor (row 0) first, then -1.
        n_accepted: int32 [requests], accepted rows besides the anchor; with -1 a request is left
        alone. keep: also writes states on the way. On chains the states have the bits of the stock
        kernel.
        """
        requests = slot.shape[0]
        if requests > self.records[0].requests:
            raise ValueError(f"{requests} requests, the records have {self.records[0].requests}")
        checks.check_slot(slot, requests)
        checks.check_path(path, n_accepted, requests)
        if keep is not None:
            checks.check_slot(keep.slot, requests, "keep.slot")
            checks.check_slot(keep.length, requests, "keep.length")
            if keep.every < 1:
                raise ValueError(f"states are kept at every {keep.every} tokens")
        if requests == 0:
            return
        if self._layers is None:
            self._on_host(slot, path, n_accepted, keep)
            return
        shape, pool, windows = self.shape, self.state_pools[0], self.conv_pools[0]
        blocks = shape.value_dim // modules.WALK_COLUMNS[shape.value_dim]
        grid = (blocks + 1, shape.value_heads, len(self.records) * requests)
        _launcher(shape.key_dim, pool.device.index, dependent)(
            grid,
            _pack(
                self._layers.data_ptr(), slot.data_ptr(), path.data_ptr(), n_accepted.data_ptr(),
                0 if keep is None else keep.slot.data_ptr(),
                0 if keep is None else keep.length.data_ptr(),
                pool.stride(0), *windows.stride(), self.records[0].rows, path.shape[1],
                shape.key_heads, shape.value_heads, shape.channels, pool.shape[0], requests,
                0 if keep is None else keep.every,
            ),
        )  # fmt: skip

    def _table(self) -> Tensor:
        """`struct Layer` of every layer, as bytes."""
        packed = bytearray()
        for r, pool, windows in zip(self.records, self.state_pools, self.conv_pools, strict=True):
            tensors = (r.kv, r.k_scale, r.g, r.beta, r.mixed, pool, windows)
            packed += _pack_layer(*(tensor.data_ptr() for tensor in tensors))
        return torch.frombuffer(packed, dtype=torch.uint8)

    def _on_host(self, slot: Tensor, path: Tensor, n_accepted: Tensor, keep: Keep | None) -> None:
        slots = self.state_pools[0].shape[0]
        for request, place in enumerate(slot.tolist()):
            if not 0 <= place < slots:
                continue
            rows = path[request, : int(n_accepted[request]) + 1].tolist()
            parts = [(place, len(rows))]
            if keep is not None and 0 <= int(keep.slot[request]) < slots:
                before = int(keep.length[request])
                reached = (before + len(rows)) // keep.every * keep.every
                if reached > before:
                    parts.insert(0, (int(keep.slot[request]), reached - before))
            for layer in zip(self.records, self.state_pools, self.conv_pools, strict=True):
                self._replay(*layer, request, place, rows, parts)

    def _replay(
        self,
        record: ReplayRecord,
        pool: Tensor,
        windows: Tensor,
        request: int,
        place: int,
        rows: list[int],
        parts: list[tuple[int, int]],
    ) -> None:
        """Of one layer and request; parts: (slot, rows up to what goes there), fewest first."""
        one = slice(request, request + 1)
        x = recorded(record.kv[one], record.g[one], record.beta[one], self.shape)
        state, window, done = pool[place].unsqueeze(0), windows[place].clone(), 0
        for to, count in parts:
            state, done = gdn_reference.replay(x, state, rows[done:count]), count
            pool[to] = state[0]
            windows[to] = gdn_reference.next_window(window, record.mixed[request], rows[:count])


def recorded(kv: Tensor, g: Tensor, beta: Tensor, shape: GdnShape) -> gdn_reference.Inputs:
    """Inputs of the recurrence from a record; queries, which no commit reads, are zeros."""
    everything = torch.cat([torch.zeros_like(kv[..., : shape.keys]), kv], dim=-1)
    used = torch.zeros(kv.shape[:2], dtype=torch.int32, device=kv.device)
    return gdn_reference.prepare(everything, g, beta, shape, used)


def warm(dim: int, device: int) -> None:
    """Compile and load the kernel for heads of `dim`."""
    for dependent in (False, True):
        _launcher(dim, device, dependent)


def _launcher(dim: int, device: int, dependent: bool) -> launch.Launcher:
    return launch.prepare(
        modules.commit(dim), "gdn_commit", block=(modules.WALK_THREADS, 1, 1), device=device,
        options=launch.Options(dependent=dependent, carveout=modules.CARVEOUT),
    )  # fmt: skip
