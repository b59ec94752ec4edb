"""Rows of one ragged pass: several requests, each contributing a tree on its committed state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from specpilot_cli.engines.reference.layers import attend
from specpilot_cli.engines.reference.state import RequestState


@dataclass(frozen=True, slots=True)
class Segment:
    """Rows of one request: tokens and parents [n] in topological order, parent -1 = committed."""

    state: RequestState
    tokens: Sequence[int]
    parents: Sequence[int]


@dataclass(frozen=True, slots=True)
class RowPlan:
    """Index tables shared by all layers of one pass; R rows, S segments of at most N rows.

    taps int64 [R, width]: flat index into [all rows | windows of all segments] for each tap.
    ancestors bool [S, N, N]: row i may read row j (its ancestors and itself).
    """

    tokens: Tensor
    positions: Tensor
    offsets: list[int]
    taps: Tensor
    ancestors: Tensor
    slots: Tensor | None  # [R] place of each row in the padded [S * N] grid; None = no padding

    @property
    def n_segments(self) -> int:
        return self.ancestors.shape[0]

    def pad(self, x: Tensor) -> Tensor:
        """[R, ...] -> [S, N, ...]; padded rows are zero, so they neither write nor decay."""
        shape = (self.n_segments, self.ancestors.shape[1], *x.shape[1:])
        if self.slots is None:
            return x.reshape(shape)
        flat = x.new_zeros(shape[0] * shape[1], *x.shape[1:])
        return flat.index_copy(0, self.slots, x).view(shape)

    def unpad(self, x: Tensor) -> Tensor:
        """[S, N, ...] -> [R, ...]."""
        flat = x.flatten(0, 1)
        return flat if self.slots is None else flat.index_select(0, self.slots)

    def gather_taps(self, rows: Tensor, windows: Tensor) -> Tensor:
        """Convolution inputs [R, width, C], oldest first, along each row's own root path."""
        source = torch.cat([rows, windows.transpose(1, 2).flatten(0, 1)])
        return source[self.taps]

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, states: Sequence[RequestState], layer: int
    ) -> Tensor:
        """Each row reads its request's committed tokens and its ancestors in the tree."""
        out = []
        for s, state in enumerate(states):
            a, b = self.offsets[s], self.offsets[s + 1]
            cached = state.kv[layer, :, : state.length]
            keys = torch.cat([cached[0], k[a:b]]).unsqueeze(0)
            values = torch.cat([cached[1], v[a:b]]).unsqueeze(0)
            mask = self.ancestors.new_ones(b - a, state.length + b - a)
            mask[:, state.length :] = self.ancestors[s, : b - a, : b - a]
            out.append(attend(q[a:b].unsqueeze(0), keys, values, mask)[0])
        return out[0] if len(out) == 1 else torch.cat(out)


def plan_rows(segments: Sequence[Segment], conv_width: int) -> RowPlan:
    """Build the tables on the CPU and move them to the states' device once per pass."""
    device = segments[0].state.recurrent.device
    counts = [len(s.tokens) for s in segments]
    offsets = [0, *np.cumsum(counts).tolist()]
    widest, total = max(counts), offsets[-1]
    ancestors = np.zeros((len(segments), widest, widest), dtype=np.bool_)
    positions = np.empty(total, dtype=np.int64)
    taps = np.empty((total, conv_width), dtype=np.int64)
    slots = np.empty(total, dtype=np.int64)
    window = conv_width - 1
    for s, segment in enumerate(segments):
        start, seen = offsets[s], ancestors[s]
        for i, parent in enumerate(segment.parents):
            if parent >= i:
                raise ValueError(f"row {i} of segment {s} precedes its parent {parent}")
            if parent >= 0:
                seen[i] = seen[parent]
            seen[i, i] = True
            row = start + i
            before = positions[start + parent] if parent >= 0 else segment.state.length - 1
            positions[row] = before + 1
            slots[row] = s * widest + i
            at = i
            for tap in range(conv_width - 1, -1, -1):
                # negative steps walk back through the committed window, newest first
                taps[row, tap] = start + at if at >= 0 else total + (s + 1) * window + at
                at = segment.parents[at] if at >= 0 else at - 1
    tokens = [t for segment in segments for t in segment.tokens]
    return RowPlan(
        tokens=torch.tensor(tokens, device=device),
        positions=torch.from_numpy(positions).to(device),
        offsets=offsets,
        taps=torch.from_numpy(taps).to(device),
        ancestors=torch.from_numpy(ancestors).to(device),
        slots=None if total == widest * len(segments) else torch.from_numpy(slots).to(device),
    )
