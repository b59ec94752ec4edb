"""Greedy continuations of many prefixes at once, with static buffers and, on a GPU, a CUDA graph.

Training needs tens of millions of the target's own greedy tokens. One step of the batch decoder is
one recurrence step of every layer, written with the reference model's own modules; prefixes are
fed token by token too, which is slow for long ones. Sequences run on after an end-of-text token.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from specpilot_cli.engines.reference.gdn import replay
from specpilot_cli.engines.reference.layers import attend
from specpilot_cli.engines.reference.model import TargetModel


class BatchGreedy:
    """Decodes `batch` sequences of `length` tokens, prefix included, in lock step."""

    def __init__(self, model: TargetModel, *, batch: int, length: int) -> None:
        config, device = model.config, model.embed_tokens.weight.device
        dtype = model.embed_tokens.weight.dtype
        self.model, self.batch, self.length = model, batch, length
        kinds = config.layer_types
        n_gdn = kinds.count("linear_attention")
        channels, width = config.conv_channels, config.conv_width
        self.window = torch.zeros(n_gdn, batch, channels, width - 1, dtype=dtype, device=device)
        self.state = torch.zeros(
            n_gdn, batch, config.n_value_heads, config.key_dim, config.value_dim, device=device
        )
        self.kv = torch.zeros(
            len(kinds) - n_gdn, 2, batch, length, config.n_kv_heads, config.head_dim,
            dtype=dtype, device=device,
        )  # fmt: skip
        self.tokens = torch.zeros(batch, length, dtype=torch.long, device=device)
        self.position = torch.zeros(1, dtype=torch.long, device=device)
        self.prefix = torch.zeros(1, dtype=torch.long, device=device)
        self.graph: torch.cuda.CUDAGraph | None = None

    @torch.no_grad()
    def __call__(self, prefixes: Tensor) -> Tensor:
        """prefixes int64 [batch, P] -> tokens int64 [batch, length], the first P as given.

        Needs 1 <= P <= length.
        """
        self.tokens.zero_()
        self.tokens[:, : prefixes.shape[1]] = prefixes
        self.prefix.fill_(prefixes.shape[1])
        if self.graph is None and self.tokens.is_cuda:
            self._capture()
        for buffer in (self.window, self.state, self.kv, self.position):
            buffer.zero_()
        for _ in range(self.length - 1):
            if self.graph is None:
                self._step()
            else:
                self.graph.replay()
        return self.tokens.clone()

    def _capture(self) -> None:
        saved = self.tokens.clone()  # the warm-up steps write tokens
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                self._step()
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        self.position.zero_()
        with torch.cuda.graph(self.graph):
            self._step()
        self.tokens.copy_(saved)

    def _step(self) -> None:
        """Read the token at `position`, write the greedy successor unless it is given."""
        model = self.model
        current = self.tokens.index_select(1, self.position)
        x = model.embed_tokens(current)  # [B, 1, H]
        angles = model.rotary.angles(self.position)
        readable = (torch.arange(self.length, device=x.device) <= self.position).unsqueeze(0)
        i_gdn = i_attention = 0
        for layer in model.layers:
            h = layer.input_layernorm(x)
            if layer.is_gdn:
                gdn = layer.linear_attn
                mixed = gdn.in_proj_qkv(h).transpose(1, 2)
                extended = torch.cat([self.window[i_gdn], mixed], dim=-1)
                self.window[i_gdn].copy_(extended[..., 1:])
                convolved = F.silu((extended * gdn.conv1d.weight[:, 0]).sum(-1)).unsqueeze(1)
                q, k, v = (t.transpose(1, 2) for t in gdn.heads(convolved))
                g, beta = (t.transpose(1, 2) for t in gdn.gates(h))
                self.state[i_gdn].copy_(replay(k, v, g, beta, self.state[i_gdn]))
                o = q @ self.state[i_gdn]
                mixed = gdn.output(o.transpose(1, 2), h)
                i_gdn += 1
            else:
                q, k, v, gate = layer.self_attn.project(h, model.rotary, angles)
                cache = self.kv[i_attention]
                cache[0].index_copy_(1, self.position, k)
                cache[1].index_copy_(1, self.position, v)
                mixed = layer.self_attn.output(attend(q, cache[0], cache[1], readable), gate)
                i_attention += 1
            x = layer.finish(x, mixed)
        best = model.logits(model.norm(x))[:, 0].argmax(-1, keepdim=True)
        self.position.add_(1)
        given = self.tokens.index_select(1, self.position)
        self.tokens.index_copy_(
            1, self.position, torch.where(self.position < self.prefix, given, best)
        )


def repeated_ngrams(tokens: Tensor, start: int, n: int) -> Tensor:
    """Tokens of int64 [B, T] that complete an n-gram seen earlier in their sequence, bool [B, T].

    Both occurrences must lie at or after `start`: quoting the prompt is not a repetition. They
    may overlap. Needs T >= n.
    """
    batch, length = tokens.shape
    grams = tokens.unfold(1, n, 1)  # [B, T - n + 1, n]
    # one hash each stands for n tokens: among random 8-grams about one pair in 10^13 collides
    weights = torch.tensor([pow(1000003, i, 2**31 - 1) for i in range(n)], device=tokens.device)
    hashes = ((grams + 1) * weights).sum(-1)
    same = hashes.unsqueeze(2) == hashes.unsqueeze(1)
    earlier = torch.ones_like(same[0]).tril(-1)
    earlier[:, :start] = False
    repeated = torch.zeros(batch, length, dtype=torch.bool, device=tokens.device)
    repeated[:, n - 1 :] = (same & earlier).any(-1)
    repeated[:, :start] = False
    return repeated


def until_end(tokens: Tensor, start: int, eos: int) -> Tensor:
    """bool [B, T]: positions up to and including the first `eos` at or after `start`."""
    ended = (tokens == eos) & (torch.arange(tokens.shape[1], device=tokens.device) >= start)
    return (ended.cumsum(1) - ended.long()) == 0
