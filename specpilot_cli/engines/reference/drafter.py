"""DFlash2: a block-parallel drafter with a candidate selector (paper section 2.2).

One pass over [anchor, mask, ..., mask] predicts the B - 1 tokens after the anchor. The drafter
borrows the target's embedding and head; its attention reads the committed tokens through the
target's own hidden states (projected to keys and values, without queries) and the whole block
without causal order. Around every sublayer runs a two-tap dynamic convolution whose taps stay in
the block. The selector then scores each of the top K tokens of a position given each of the top K
of the position before: the lattice.

    score[t, p, c] = unary[t, c] + <A[p] * (W h_t), B[c]>

Module names equal the public checkpoint's tensor names.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from specpilot_cli.engines.reference.config import DrafterConfig
from specpilot_cli.engines.reference.layers import MLP, RMSNorm, Rotary, attend


@dataclass(frozen=True, slots=True)
class LatticeBatch:
    """Lattices of R anchors: L positions, K candidates.

    candidate_ids int64 [R, L, K] in falling unary order; scores float32 [R, L, K, K] (predecessor,
    candidate; raw selector scores); unary float32 [R, L, K]; unary_logsumexp float32 [R, L] over
    the full vocabulary.
    """

    candidate_ids: Tensor
    scores: Tensor
    unary: Tensor
    unary_logsumexp: Tensor


@dataclass(slots=True)
class DraftState:
    """Keys and values of one request's committed tokens: [n_layers, 2, length, Hkv, D]."""

    kv: Tensor

    @property
    def length(self) -> int:
        return self.kv.shape[2]


class BlockConv(nn.Module):
    """Two-tap depthwise convolution inside a block, its kernel corrected per token and group."""

    def __init__(self, c: DrafterConfig) -> None:
        super().__init__()
        self.taps, self.group = c.conv_taps, c.conv_group_size
        base = torch.zeros(2, c.conv_taps, c.hidden_size)
        base[:, 0] = 1.0
        self.base_kernel = nn.Parameter(base)
        n_groups = c.hidden_size // c.conv_group_size
        self.kernel_projection = nn.Linear(c.hidden_size, 2 * c.conv_taps * n_groups, bias=False)

    def before(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Convolve a sublayer's input [R, B, H]; also the corrections for its output."""
        corrections = self.kernel_projection(x).unflatten(-1, (2, self.taps, -1))
        return self._convolve(x, corrections[..., 0, :, :], 0), corrections[..., 1, :, :]

    def after(self, x: Tensor, corrections: Tensor) -> Tensor:
        """Convolve the sublayer's output [R, B, H]."""
        return self._convolve(x, corrections, 1)

    def _convolve(self, x: Tensor, corrections: Tensor, side: int) -> Tensor:
        kernel = self.base_kernel[side].unflatten(-1, (-1, self.group))
        kernel = kernel + corrections.unsqueeze(-1)  # [R, B, taps, groups, group]
        grouped = x.unflatten(-1, (-1, self.group))
        out = kernel[:, :, 0] * grouped
        for tap in range(1, self.taps):
            shifted = torch.zeros_like(grouped)
            shifted[:, tap:] = grouped[:, :-tap]
            out = out + kernel[:, :, tap] * shifted
        return out.flatten(-2)


class DraftAttention(nn.Module):
    """Attention of a block over [committed context | block]; full rotary embedding."""

    def __init__(self, c: DrafterConfig) -> None:
        super().__init__()
        self.head_dim = c.head_dim
        self.q_proj = nn.Linear(c.hidden_size, c.n_heads * c.head_dim, bias=False)
        self.k_proj = nn.Linear(c.hidden_size, c.n_kv_heads * c.head_dim, bias=False)
        self.v_proj = nn.Linear(c.hidden_size, c.n_kv_heads * c.head_dim, bias=False)
        self.o_proj = nn.Linear(c.n_heads * c.head_dim, c.hidden_size, bias=False)
        self.q_norm = RMSNorm(c.head_dim, c.rms_norm_eps)
        self.k_norm = RMSNorm(c.head_dim, c.rms_norm_eps)

    def keys_values(
        self, x: Tensor, rotary: Rotary, angles: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Rotated keys and values [..., Hkv, D] of rows x [..., H]."""
        k = self.k_norm(self.k_proj(x).unflatten(-1, (-1, self.head_dim)))
        return rotary.apply(k, angles), self.v_proj(x).unflatten(-1, (-1, self.head_dim))

    def queries(self, x: Tensor, rotary: Rotary, angles: tuple[Tensor, Tensor]) -> Tensor:
        q = self.q_norm(self.q_proj(x).unflatten(-1, (-1, self.head_dim)))
        return rotary.apply(q, angles)


class DraftLayer(nn.Module):
    """Pre-norm block with a convolution before and after each sublayer."""

    def __init__(self, c: DrafterConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.self_attn = DraftAttention(c)
        self.mlp = MLP(c.hidden_size, c.intermediate_size)
        self.attention_conv = BlockConv(c)
        self.mlp_conv = BlockConv(c)

    def forward(
        self,
        x: Tensor,
        context: tuple[Tensor, Tensor],
        mask: Tensor,
        rotary: Rotary,
        angles: tuple[Tensor, Tensor],
    ) -> Tensor:
        """x [R, B, H]; context keys, values [R or 1, M, Hkv, D]; mask [R, 1, M]: readable rows."""
        n_blocks, block = x.shape[:2]
        h, corrections = self.attention_conv.before(self.input_layernorm(x))
        k, v = self.self_attn.keys_values(h, rotary, angles)
        q = self.self_attn.queries(h, rotary, angles)
        keys = torch.cat([context[0].expand(n_blocks, -1, -1, -1), k], dim=1)
        values = torch.cat([context[1].expand(n_blocks, -1, -1, -1), v], dim=1)
        full = torch.cat([mask, mask.new_ones(n_blocks, 1, block)], dim=-1)
        attended = attend(q, keys, values, full.expand(-1, block, -1))
        out = self.self_attn.o_proj(attended.flatten(-2))
        x = x + self.attention_conv.after(out, corrections)
        h, corrections = self.mlp_conv.before(self.post_attention_layernorm(x))
        return x + self.mlp_conv.after(self.mlp(h), corrections)


class CandidateSelector(nn.Module):
    """Low-rank scores of adjacent candidate pairs."""

    def __init__(self, c: DrafterConfig) -> None:
        super().__init__()
        self.predecessor_codebook = nn.Parameter(torch.zeros(c.vocab_size, c.selector_rank))
        self.successor_codebook = nn.Parameter(torch.zeros(c.vocab_size, c.selector_rank))
        self.hidden_projection = nn.Linear(c.hidden_size, c.selector_rank, bias=False)

    def forward(self, hidden: Tensor, ids: Tensor, unary: Tensor, anchors: Tensor) -> Tensor:
        """hidden [R, L, H], ids and unary [R, L, K], anchors [R] -> scores [R, L, K, K]."""
        first = anchors[:, None, None].expand(-1, 1, ids.shape[-1])
        before = self.predecessor_codebook[torch.cat([first, ids[:, :-1]], dim=1)]
        state = before * self.hidden_projection(hidden).unsqueeze(2)
        pair = state @ self.successor_codebook[ids].transpose(-1, -2)
        return unary.unsqueeze(2) + pair.float()


class Drafter(nn.Module):
    """DFlash2 drafter bound to a target's embedding and head (not part of its own weights)."""

    def __init__(
        self, config: DrafterConfig, embed: nn.Embedding, head: nn.Linear, n_features: int
    ) -> None:
        super().__init__()
        self.config = config
        self.fc = nn.Linear(n_features, config.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.layers = nn.ModuleList(DraftLayer(config) for _ in range(config.n_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.candidate_selector = CandidateSelector(config)
        self.rotary = Rotary(config.head_dim, config.rope_theta)
        # in a tuple, so that the borrowed modules are not registered as the drafter's own
        self._borrowed = (embed, head)

    def context(self, features: Tensor, start: int = 0) -> Tensor:
        """Keys and values [..., T, F] -> [n_layers, 2, ..., T, Hkv, D] from position start."""
        projected = self.hidden_norm(self.fc(features))
        positions = torch.arange(start, start + features.shape[-2], device=features.device)
        angles = self.rotary.angles(positions)
        pairs = [
            torch.stack(layer.self_attn.keys_values(projected, self.rotary, angles))
            for layer in cast("Iterable[DraftLayer]", self.layers)
        ]
        return torch.stack(pairs)

    def block_hidden(
        self, anchors: Tensor, positions: Tensor, context: Tensor, mask: Tensor, block: int
    ) -> Tensor:
        """Final hidden rows [R, B, H] of the blocks that start at anchors [R], positions [R].

        context [n_layers, 2, R or 1, M, Hkv, D]; mask bool [R, 1, M] marks readable context rows.
        """
        ids = anchors.new_full((len(anchors), block), self.config.mask_token_id)
        ids[:, 0] = anchors
        angles = self.rotary.angles(
            positions.unsqueeze(1) + torch.arange(block, device=positions.device)
        )
        x = self._borrowed[0](ids)
        for layer, pair in zip(self.layers, context, strict=True):
            x = layer(x, (pair[0], pair[1]), mask, self.rotary, angles)
        return self.norm(x)

    def lattice(self, hidden: Tensor, anchors: Tensor) -> LatticeBatch:
        """Lattices from final hidden rows [R, B, H] (row 0, the anchor's, predicts nothing)."""
        predicted = hidden[:, 1:]
        logits = self._borrowed[1](predicted).float()
        unary, ids = logits.topk(self.config.top_k, dim=-1)
        scores = self.candidate_selector(predicted, ids, unary, anchors)
        return LatticeBatch(ids, scores, unary, logits.logsumexp(-1))

    def new_state(self) -> DraftState:
        """Empty drafter state of one request."""
        c, weight = self.config, self.fc.weight
        shape = (c.n_layers, 2, 0, c.n_kv_heads, c.head_dim)
        return DraftState(torch.empty(shape, dtype=weight.dtype, device=weight.device))

    def append_context(self, state: DraftState, features: Tensor) -> None:
        """Add committed rows' target features [n, F], in order, to one request's context."""
        state.kv = torch.cat([state.kv, self.context(features, state.length)], dim=2)

    def draft(
        self, states: Sequence[DraftState], anchors: Sequence[int], *, block: int
    ) -> LatticeBatch:
        """One draft pass for several requests; each block starts after its request's context."""
        device = self.fc.weight.device
        lengths = [s.length for s in states]
        widest = max(lengths)
        if len(states) == 1:
            context = states[0].kv.unsqueeze(2)
        else:
            shape = (*states[0].kv.shape[:2], len(states), widest, *states[0].kv.shape[3:])
            context = states[0].kv.new_zeros(shape)
            for r, s in enumerate(states):
                context[:, :, r, : s.length] = s.kv
        ends = torch.tensor(lengths, device=device)
        mask = torch.arange(widest, device=device) < ends[:, None, None]
        tokens = torch.tensor(list(anchors), device=device)
        return self.lattice(self.block_hidden(tokens, ends, context, mask, block), tokens)

    def dense_lattices(
        self, features: Tensor, anchors: Tensor, positions: Tensor, *, block: int
    ) -> LatticeBatch:
        """Lattices of many anchors of one sequence, as a live request would have drafted them.

        features [T, F] of the sequence; anchor r is token anchors[r] int64 at positions[r] and
        reads the context before it.
        """
        context = self.context(features).unsqueeze(2)
        rows = torch.arange(features.shape[0], device=features.device)
        mask = rows < positions[:, None, None]
        return self.lattice(self.block_hidden(anchors, positions, context, mask, block), anchors)
