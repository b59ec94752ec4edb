"""Stage 1: train the target on the corpus, then against its own repetitions.

Most steps minimise next-token cross-entropy. The last ones add unlikelihood on the model's own
greedy text (Welleck et al., 2020): wherever a greedy continuation completes an n-gram it already
holds, the probability of that token is pushed down. A small model loops without it, and a loop
would inflate every acceptance figure measured with it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from demo_pair.data import TokenMixture
from demo_pair.loop import Clock, Run, adamw, initialise, learning_rate, pick_device
from demo_pair.sampling import BatchGreedy, repeated_ngrams, until_end
from demo_pair.shapes import CAPTURE, EOS, TARGET
from torch import Tensor, nn

from specpilot_cli.engines.reference.model import TargetModel

HELD_OUT_ROWS = 32  # windows of each kind


@dataclass(frozen=True, slots=True)
class TargetSettings:
    """Stage 1. Lengths in tokens; the defaults are those of the shipped weights."""

    steps: int = 7000
    unlikelihood_steps: int = 110  # after those
    batch: int = 64
    length: int = 512
    peak_lr: float = 3e-3
    warmup: int = 150
    weight_decay: float = 0.1
    greedy_batch: int = 512
    greedy_length: int = 176  # prefix included
    ngram: int = 8
    seed: int = 20261130

    @property
    def total(self) -> int:
        """Steps of both parts."""
        return self.steps + self.unlikelihood_steps

    def rate(self, step: int) -> float:
        """Learning rate of `step`: the cosine, then linear from a tenth of the peak to zero."""
        if step < self.steps:
            return learning_rate(step, steps=self.steps, warmup=self.warmup, peak=self.peak_lr)
        return 0.1 * self.peak_lr * (self.total - step) / (self.total - self.steps)


def train(folder: Path, out: Path, settings: TargetSettings, clock: Clock) -> None:
    """Train on the tokens in `folder` until done or the clock is over; call again to continue."""
    device, g = pick_device(), torch.Generator().manual_seed(settings.seed)
    torch.manual_seed(settings.seed)  # the convolutions keep torch's own initial values
    model = TargetModel(TARGET, CAPTURE)
    initialise(model, TARGET.n_layers, g)
    model.to(device)
    optimizer = adamw(model, lr=settings.peak_lr, weight_decay=settings.weight_decay)
    run = Run(
        out, "target", model=model, optimizer=optimizer, generator=g, settings=settings, clock=clock
    )
    data = TokenMixture(folder, "train", device, eos=EOS)
    held = TokenMixture(folder, "heldout", device, eos=EOS)
    likelihood = LikelihoodStep(model, settings.batch, settings.length + 1)
    repetition = RepetitionStep(model, settings)
    for step in run.steps(settings.total):
        run.set_learning_rate(settings.rate(step))
        loss = likelihood.backward(data.windows(settings.batch, settings.length + 1, g))
        repeats = repetition.backward(data, g) if step >= settings.steps else None
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        every = 100 if repeats is None else 10
        if (step + 1) % every == 0 or step == 4:
            run.log(loss=round(float(loss.detach()), 4), repeats=repeats)
    losses = held_out_losses(model, held, settings.length)
    run.finish(settings.total, held_out_nats_per_token=losses)


def token_loss(model: TargetModel, tokens: Tensor) -> Tensor:
    """Mean next-token cross-entropy in nats of windows int64 [B, T + 1]."""
    logits = _logits(model, tokens)
    return F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())


def unlikelihood(model: TargetModel, tokens: Tensor, repeated: Tensor, live: Tensor) -> Tensor:
    """-log(1 - p) on repeated tokens of greedy text int64 [B, T], averaged over all live tokens.

    repeated and live are bool [B, T].
    """
    logits = _logits(model, tokens)
    marked = (repeated & live)[:, 1:]
    rows = logits[marked].float()
    p = rows.log_softmax(-1).gather(1, tokens[:, 1:][marked].unsqueeze(1)).exp()
    return -torch.log1p(-p.clamp(max=1 - 1e-4)).sum() / live[:, 1:].sum()


def _logits(model: TargetModel, tokens: Tensor) -> Tensor:
    """Logits [B, T - 1, V] of the tokens after the first, under bfloat16 autocast."""
    with torch.autocast(tokens.device.type, dtype=torch.bfloat16):
        hidden, _ = model.forward_sequences(tokens[:, :-1])
        return model.lm_head(hidden)


class LikelihoodStep:
    """Gradients of `token_loss` on a batch; on a GPU the pass is captured in a CUDA graph once."""

    def __init__(self, model: TargetModel, batch: int, length: int) -> None:
        device = model.embed_tokens.weight.device
        self.model = model
        self.tokens = torch.zeros(batch, length, dtype=torch.long, device=device)
        self.graph: torch.cuda.CUDAGraph | None = None
        self.loss = torch.zeros((), device=device)

    def backward(self, tokens: Tensor) -> Tensor:
        """Fill every parameter's grad (old content is dropped) and return the mean loss."""
        self.tokens.copy_(tokens)
        if not tokens.is_cuda:
            self.model.zero_grad()
            self._run()
        elif self.graph is None:
            self._capture()
        else:
            self.graph.replay()
        return self.loss

    def _run(self) -> None:
        self.loss = token_loss(self.model, self.tokens)
        self.loss.backward()

    def _capture(self) -> None:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                self._run()
        torch.cuda.current_stream().wait_stream(stream)
        # the graph then allocates the gradients itself and overwrites them on every replay
        self.model.zero_grad(set_to_none=True)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self._run()
        self.graph.replay()


class RepetitionStep:
    """Adds the gradients of `unlikelihood` on fresh greedy text of the model as it is now."""

    def __init__(self, model: TargetModel, settings: TargetSettings) -> None:
        self.model, self.settings = model, settings
        self._greedy: BatchGreedy | None = None

    def backward(self, data: TokenMixture, g: torch.Generator) -> float:
        """Add the gradients; returns the share of live greedy tokens that repeat an n-gram."""
        s = self.settings
        if self._greedy is None:
            self._greedy = BatchGreedy(self.model, batch=s.greedy_batch, length=s.greedy_length)
        prefix = int(torch.randint(16, min(64, s.greedy_length), (1,), generator=g))
        text = self._greedy(data.windows(s.greedy_batch, prefix, g))
        live = until_end(text, prefix, EOS)
        live[:, :prefix] = False
        repeated = repeated_ngrams(text, prefix, s.ngram)
        unlikelihood(self.model, text, repeated, live).backward()
        return float((repeated & live).sum() / live.sum())


@torch.no_grad()
def held_out_losses(model: TargetModel, data: TokenMixture, length: int) -> dict[str, float]:
    """Loss on held-out windows of `length` predicted tokens, nats per token, by kind."""
    count = HELD_OUT_ROWS * len(data.kinds)
    windows = data.windows(count, length + 1, torch.Generator().manual_seed(7))
    return {
        kind: round(float(token_loss(model, windows[rows])), 4)
        for kind, rows in data.rows_by_kind(count).items()
    }
