"""The hybrid target: Gated DeltaNet and gated attention layers (Qwen3.5 architecture).

Module names equal the public checkpoint's tensor names. Three ways to run it, one set of layers:

* `forward_sequences`: whole sequences [B, T] (training, teacher forcing, prefill of a batch);
* `prefill`: one request's next tokens, committed at once (chunked recurrence);
* `forward_rows`: one ragged pass over rows of several requests, each a tree on its own committed
  state, nothing committed; `commit` then replays the accepted path.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specpilot_cli.engines.reference.config import TargetConfig
from specpilot_cli.engines.reference.gdn import chain_scan, normalise, tree_scan
from specpilot_cli.engines.reference.layers import MLP, RMSNorm, Rotary, attend, rms_norm
from specpilot_cli.engines.reference.rows import RowPlan, Segment, plan_rows
from specpilot_cli.engines.reference.state import RequestState, RowRecord, commit


@dataclass(slots=True)
class RowOutput:
    """Result of one pass. hidden [R, H] after the final norm, features [R, n_capture * H]."""

    hidden: Tensor
    features: Tensor
    record: RowRecord
    offsets: list[int]  # first flat row of every segment, and the total


class GatedDeltaNet(nn.Module):
    """One GDN layer: projections, causal depthwise convolution, recurrence, gated norm."""

    def __init__(self, c: TargetConfig) -> None:
        super().__init__()
        self.config = c
        value_size = c.n_value_heads * c.value_dim
        self.in_proj_qkv = nn.Linear(c.hidden_size, c.conv_channels, bias=False)
        self.in_proj_z = nn.Linear(c.hidden_size, value_size, bias=False)
        self.in_proj_b = nn.Linear(c.hidden_size, c.n_value_heads, bias=False)
        self.in_proj_a = nn.Linear(c.hidden_size, c.n_value_heads, bias=False)
        self.conv1d = nn.Conv1d(
            c.conv_channels, c.conv_channels, c.conv_width, groups=c.conv_channels, bias=False
        )
        self.dt_bias = nn.Parameter(torch.ones(c.n_value_heads))
        self.A_log = nn.Parameter(torch.linspace(1.0, 16.0, c.n_value_heads).log())
        self.norm = RMSNorm(c.value_dim, c.rms_norm_eps)
        self.out_proj = nn.Linear(value_size, c.hidden_size, bias=False)

    def gates(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Log decay g and write strength beta, float32 [..., Hv]."""
        dt = F.softplus(self.in_proj_a(x).float() + self.dt_bias.float())
        return -self.A_log.float().exp() * dt, self.in_proj_b(x).float().sigmoid()

    def heads(self, convolved: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Split convolved channels [..., C] into q, k [..., Hv, K] and v [..., Hv, V], float32."""
        c = self.config
        key_size = c.n_key_heads * c.key_dim
        q, k, v = convolved.float().split(
            [key_size, key_size, c.n_value_heads * c.value_dim], dim=-1
        )
        q, k = q.unflatten(-1, (-1, c.key_dim)), k.unflatten(-1, (-1, c.key_dim))
        q, k = normalise(q, k, c.n_value_heads)
        return q, k, v.unflatten(-1, (-1, c.value_dim))

    def output(self, o: Tensor, x: Tensor) -> Tensor:
        """Gated RMS norm of head outputs o [..., Hv, V] and the output projection."""
        z = self.in_proj_z(x).unflatten(-1, (-1, self.config.value_dim))
        gated = rms_norm(o, self.norm.weight.float(), self.norm.eps) * F.silu(z.float())
        return self.out_proj(gated.flatten(-2).to(x.dtype))

    def sequences(
        self, x: Tensor, window: Tensor | None = None, state: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """x [B, T, H] -> output [B, T, H], window [B, C, width - 1], state [B, Hv, K, V]."""
        mixed = self.in_proj_qkv(x).transpose(1, 2)
        if window is None:
            window = mixed.new_zeros(*mixed.shape[:2], self.config.conv_width - 1)
        extended = torch.cat([window, mixed], dim=-1)
        convolved = F.silu(self.conv1d(extended)).transpose(1, 2)
        q, k, v = (h.transpose(1, 2) for h in self.heads(convolved))
        g, beta = (h.transpose(1, 2) for h in self.gates(x))
        o, state = chain_scan(q, k, v, g, beta, state)
        window = extended[..., extended.shape[-1] - window.shape[-1] :]
        return self.output(o.transpose(1, 2), x), window, state

    def rows(
        self, x: Tensor, plan: RowPlan, windows: Tensor, states: Tensor, record: RowRecord
    ) -> Tensor:
        """x [R, H] over all segments; windows [S, C, width - 1], states [S, Hv, K, V]."""
        mixed = self.in_proj_qkv(x)
        taps = plan.gather_taps(mixed, windows)  # [R, width, C], oldest first
        convolved = F.silu((taps * self.conv1d.weight[:, 0].t()).sum(1))
        q, k, v = self.heads(convolved)
        g, beta = self.gates(x)
        pq, pk, pv, pg, pb = (plan.pad(t).transpose(1, 2) for t in (q, k, v, g, beta))
        o = tree_scan(pq, pk, pv, pg, pb, states, plan.ancestors)
        for rows_of, value in zip(
            (record.mixed, record.key, record.value, record.g, record.beta),
            (mixed, k, v, g, beta),
            strict=True,
        ):
            rows_of.append(value)
        return self.output(plan.unpad(o.transpose(1, 2)), x)


class GatedAttention(nn.Module):
    """Softmax attention with per-head q/k norms, partial rotary embedding and an output gate."""

    def __init__(self, c: TargetConfig) -> None:
        super().__init__()
        self.config = c
        self.q_proj = nn.Linear(c.hidden_size, 2 * c.n_heads * c.head_dim, bias=False)
        self.k_proj = nn.Linear(c.hidden_size, c.n_kv_heads * c.head_dim, bias=False)
        self.v_proj = nn.Linear(c.hidden_size, c.n_kv_heads * c.head_dim, bias=False)
        self.o_proj = nn.Linear(c.n_heads * c.head_dim, c.hidden_size, bias=False)
        self.q_norm = RMSNorm(c.head_dim, c.rms_norm_eps, zero_centered=True)
        self.k_norm = RMSNorm(c.head_dim, c.rms_norm_eps, zero_centered=True)

    def project(
        self, x: Tensor, rotary: Rotary, angles: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """x [..., H] -> rotated q, k, plain v [..., heads, D] and the output gate."""
        d = self.config.head_dim
        q, gate = self.q_proj(x).unflatten(-1, (-1, 2 * d)).chunk(2, dim=-1)
        k = self.k_norm(self.k_proj(x).unflatten(-1, (-1, d)))
        v = self.v_proj(x).unflatten(-1, (-1, d))
        return rotary.apply(self.q_norm(q), angles), rotary.apply(k, angles), v, gate

    def output(self, attended: Tensor, gate: Tensor) -> Tensor:
        return self.o_proj((attended * gate.sigmoid()).flatten(-2))


class DecoderLayer(nn.Module):
    """Pre-norm residual block around a GDN or an attention mixer."""

    def __init__(self, c: TargetConfig, kind: str) -> None:
        super().__init__()
        self.is_gdn = kind == "linear_attention"
        if self.is_gdn:
            self.linear_attn = GatedDeltaNet(c)
        else:
            self.self_attn = GatedAttention(c)
        self.mlp = MLP(c.hidden_size, c.intermediate_size)
        self.input_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps, zero_centered=True)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps, zero_centered=True)

    def finish(self, x: Tensor, mixed: Tensor) -> Tensor:
        """Add the mixer's output and the feed-forward layer to the residual stream."""
        x = x + mixed
        return x + self.mlp(self.post_attention_layernorm(x))


class TargetModel(nn.Module):
    """The target. `capture` names the layers whose outputs feed the drafter (0-based)."""

    def __init__(self, config: TargetConfig, capture: Sequence[int] = ()) -> None:
        super().__init__()
        self.config = config
        self.capture = tuple(capture)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config, kind) for kind in config.layer_types)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, zero_centered=True)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.embed_tokens.weight
        self.rotary = Rotary(config.rotary_dim, config.rope_theta)

    def new_state(self, capacity: int) -> RequestState:
        """Empty state of one request with room for `capacity` tokens."""
        weight = self.embed_tokens.weight
        return RequestState.empty(self.config, capacity, weight.dtype, weight.device)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [..., H] (after the final norm) -> float32 logits [..., V]."""
        return self.lm_head(hidden).float()

    def forward_sequences(
        self, tokens: Tensor, state: RequestState | None = None
    ) -> tuple[Tensor, Tensor]:
        """Run sequences int64 [B, T]; with `state` (B = 1) continue that request and commit.

        Returns hidden [B, T, H] after the final norm and features [B, T, n_capture * H].
        """
        start = state.length if state is not None else 0
        end = start + tokens.shape[1]
        positions = torch.arange(start, end, device=tokens.device)
        angles = self.rotary.angles(positions)
        causal = None
        if start:
            causal = torch.arange(end, device=tokens.device) <= positions.unsqueeze(1)
        x, captured = self.embed_tokens(tokens), []
        i_gdn = i_attention = 0
        for index, layer in enumerate(cast("Iterable[DecoderLayer]", self.layers)):
            h = layer.input_layernorm(x)
            if layer.is_gdn:
                window = state.window[i_gdn].unsqueeze(0) if state is not None else None
                memory = state.recurrent[i_gdn].unsqueeze(0) if state is not None else None
                mixed, window, memory = layer.linear_attn.sequences(h, window, memory)
                if state is not None:
                    state.window[i_gdn], state.recurrent[i_gdn] = window[0], memory[0]
                i_gdn += 1
            else:
                q, k, v, gate = layer.self_attn.project(h, self.rotary, angles)
                if state is not None:
                    state.kv[i_attention, 0, start:end], state.kv[i_attention, 1, start:end] = (
                        k[0],
                        v[0],
                    )
                    k, v = state.kv[i_attention, :, :end].unsqueeze(1)
                mixed = layer.self_attn.output(attend(q, k, v, causal), gate)
                i_attention += 1
            x = layer.finish(x, mixed)
            if index in self.capture:
                captured.append(x)
        if state is not None:
            state.length = end
        features = torch.cat(captured, dim=-1) if captured else x.new_zeros(*x.shape[:2], 0)
        return self.norm(x), features

    def prefill(self, state: RequestState, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Commit tokens int64 [T] to one request; hidden [T, H] and features [T, n_capture * H]."""
        hidden, features = self.forward_sequences(tokens.unsqueeze(0), state)
        return hidden[0], features[0]

    def forward_rows(self, segments: Sequence[Segment]) -> RowOutput:
        """One ragged pass over tree rows of several requests; commits nothing."""
        plan = plan_rows(segments, self.config.conv_width)
        angles = self.rotary.angles(plan.positions)
        windows = torch.stack([s.state.window for s in segments], dim=1)  # [n_gdn, S, C, w]
        states = torch.stack([s.state.recurrent for s in segments], dim=1)
        record = RowRecord()
        x, captured = self.embed_tokens(plan.tokens), []
        i_gdn = i_attention = 0
        for index, layer in enumerate(cast("Iterable[DecoderLayer]", self.layers)):
            h = layer.input_layernorm(x)
            if layer.is_gdn:
                mixed = layer.linear_attn.rows(h, plan, windows[i_gdn], states[i_gdn], record)
                i_gdn += 1
            else:
                q, k, v, gate = layer.self_attn.project(h, self.rotary, angles)
                record.attention_key.append(k)
                record.attention_value.append(v)
                attended = plan.attend(q, k, v, [s.state for s in segments], i_attention)
                mixed = layer.self_attn.output(attended, gate)
                i_attention += 1
            x = layer.finish(x, mixed)
            if index in self.capture:
                captured.append(x)
        features = torch.cat(captured, dim=-1) if captured else x.new_zeros(len(x), 0)
        return RowOutput(self.norm(x), features, record, plan.offsets)

    def commit(self, state: RequestState, output: RowOutput, segment: int, path: list[int]) -> None:
        """Commit rows `path` (indices inside segment number `segment`, root path order)."""
        commit(state, output.record, [output.offsets[segment] + row for row in path])
