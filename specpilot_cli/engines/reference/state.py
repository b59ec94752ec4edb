"""Decoding state of one request on a hybrid target, and how an accepted path is committed to it.

A state holds attention keys and values, the convolution window and the recurrent state of every
GDN layer: nothing per tree node. A pass over tree rows leaves the state alone and returns raw rows;
`commit` replays the rows of the accepted path through the same recurrence that plain decoding uses
(paper section 4.2), so rejected branches leave no trace.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from specpilot_cli.engines.reference.config import TargetConfig
from specpilot_cli.engines.reference.gdn import replay


@dataclass(slots=True)
class RequestState:
    """State of one request; `length` tokens have been committed.

    kv [n_attention, 2, capacity, Hkv, D]; window [n_gdn, C, conv_width - 1] with the newest row
    last; recurrent float32 [n_gdn, Hv, K, V].
    """

    kv: Tensor
    window: Tensor
    recurrent: Tensor
    length: int = 0

    @classmethod
    def empty(
        cls, config: TargetConfig, capacity: int, dtype: torch.dtype, device: torch.device
    ) -> RequestState:
        n_gdn = config.layer_types.count("linear_attention")
        n_attention = config.n_layers - n_gdn
        shape = (n_attention, 2, capacity, config.n_kv_heads, config.head_dim)
        return cls(
            kv=torch.zeros(shape, dtype=dtype, device=device),
            window=torch.zeros(
                n_gdn, config.conv_channels, config.conv_width - 1, dtype=dtype, device=device
            ),
            recurrent=torch.zeros(
                n_gdn, config.n_value_heads, config.key_dim, config.value_dim, device=device
            ),
        )

    @property
    def capacity(self) -> int:
        return self.kv.shape[2]

    @property
    def n_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (self.kv, self.window, self.recurrent))


@dataclass(slots=True)
class RowRecord:
    """Raw rows of one pass, one entry per layer of its kind: all that a commit needs.

    GDN: mixed [R, C] before the convolution, key [R, Hv, K] normalised, value [R, Hv, V], g and
    beta [R, Hv]. Attention: key and value [R, Hkv, D], rotated.
    """

    mixed: list[Tensor] = field(default_factory=list)
    key: list[Tensor] = field(default_factory=list)
    value: list[Tensor] = field(default_factory=list)
    g: list[Tensor] = field(default_factory=list)
    beta: list[Tensor] = field(default_factory=list)
    attention_key: list[Tensor] = field(default_factory=list)
    attention_value: list[Tensor] = field(default_factory=list)


def commit(state: RequestState, record: RowRecord, rows: list[int]) -> None:
    """Append the rows of one accepted root path, in path order, to `state`.

    `rows` index the pass's flat rows. Cost is one read and one write of the state, for all layers
    together; no per-node snapshot exists.
    """
    if not rows:
        return
    index = torch.tensor(rows, device=state.recurrent.device)
    end = state.length + len(rows)
    if record.attention_key:
        state.kv[:, 0, state.length : end] = _take(record.attention_key, index)
        state.kv[:, 1, state.length : end] = _take(record.attention_value, index)
    if record.mixed:
        fresh = _take(record.mixed, index).transpose(1, 2)  # [n_gdn, C, m]
        width = state.window.shape[-1]
        state.window = torch.cat([state.window, fresh], dim=-1)[..., -width:]
        state.recurrent = advanced(state.recurrent, record, rows)
    state.length = end


def advanced(recurrent: Tensor, record: RowRecord, rows: list[int]) -> Tensor:
    """The recurrent state [n_gdn, Hv, K, V] after the given rows of one root path."""
    index = torch.tensor(rows, device=recurrent.device)
    key, value, g, beta = (
        _take(rows_of, index).transpose(1, 2)
        for rows_of in (record.key, record.value, record.g, record.beta)
    )
    return replay(key, value, g, beta, recurrent)


def _take(per_layer: list[Tensor], index: Tensor) -> Tensor:
    """Rows `index` of every layer, stacked: [n_layers, m, ...]."""
    return torch.stack([rows.index_select(0, index) for rows in per_layer])
