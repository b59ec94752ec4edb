"""Stage 1: train the target on the corpus, then against its own repetitions.

Most steps minimise next-token cross-entropy. The last ones add unlikelihood on the model's own
greedy text (Welleck et al., 2020): wherever a greedy continuation completes an n-gram it already
holds, the probability of that token is pushed down. A small model loops without it, and a loop
would inflate every acceptance figure measured with it.
"""

from __future__ import annotations

import json
import math
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812
from demo_pair.data import TokenMixture
from demo_pair.sampling import BatchGreedy, repeated_ngrams, until_end
from demo_pair.shapes import CAPTURE, EOS, TARGET
from torch import Tensor, nn

from specpilot_cli.engines.reference.layers import RMSNorm
from specpilot_cli.engines.reference.model import TargetModel


@dataclass(frozen=True)
class TargetSettings:
    steps: int = 7000
    unlikelihood_steps: int = 110
    batch: int = 64
    length: int = 512
    peak_lr: float = 3e-3
    warmup: int = 150
    weight_decay: float = 0.1
    greedy_batch: int = 512
    greedy_length: int = 176
    ngram: int = 8
    seed: int = 20261130


def initialise(model: nn.Module, n_layers: int, generator: torch.Generator) -> None:
    """Normal(0, 0.02) matrices, residual outputs scaled down by depth."""
    for name, p in model.named_parameters():
        if p.dim() >= 2 and "conv1d" not in name and "base_kernel" not in name:
            scale = 0.02 / math.sqrt(2 * n_layers) if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")) else 0.02
            p.data.copy_(torch.empty(p.shape).normal_(0, scale, generator=generator))


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, object]]:
    """Matrices decay; norms, gates and convolutions do not."""
    norms = {id(p) for m in model.modules() if isinstance(m, RMSNorm) for p in m.parameters()}
    decay = [p for p in model.parameters() if p.dim() == 2 and id(p) not in norms]
    chosen = {id(p) for p in decay}
    rest = [p for p in model.parameters() if id(p) not in chosen]
    return [
        {"params": decay, "weight_decay": weight_decay},
        {"params": rest, "weight_decay": 0.0},
    ]


def learning_rate(step: int, *, steps: int, warmup: int, peak: float, floor: float = 0.02) -> float:
    """Linear warm-up, then cosine to `floor` of the peak."""
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = min(1.0, (step - warmup) / max(1, steps - warmup))
    return peak * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress)))


def token_loss(model: TargetModel, tokens: Tensor) -> Tensor:
    """Mean next-token cross-entropy in nats of windows int64 [B, T + 1]."""
    with torch.autocast(tokens.device.type, dtype=torch.bfloat16):
        hidden, _ = model.forward_sequences(tokens[:, :-1])
        logits = model.lm_head(hidden)
    return F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())


def unlikelihood(model: TargetModel, tokens: Tensor, repeated: Tensor, live: Tensor) -> Tensor:
    """-log(1 - p) on repeated tokens of greedy text, averaged over all live tokens."""
    with torch.autocast(tokens.device.type, dtype=torch.bfloat16):
        hidden, _ = model.forward_sequences(tokens[:, :-1])
        logits = model.lm_head(hidden)
    marked = (repeated & live)[:, 1:]
    rows = logits[marked].float()
    p = rows.log_softmax(-1).gather(1, tokens[:, 1:][marked].unsqueeze(1)).exp()
    return -torch.log1p(-p.clamp(max=1 - 1e-4)).sum() / live[:, 1:].sum()


class LikelihoodStep:
    """Gradients of `token_loss` on one batch; on a GPU the pass is captured in a CUDA graph once."""

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
        self.model.zero_grad(set_to_none=True)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self._run()
        self.graph.replay()


class Checkpoint:
    """Everything a resumed run needs, written by rename."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def save(self, **state: object) -> None:
        partial = self.path.with_suffix(".partial")
        torch.save(state, partial)
        partial.replace(self.path)

    def load(self) -> dict[str, object] | None:
        return torch.load(self.path, weights_only=False) if self.path.is_file() else None


@torch.no_grad()
def held_out(model: TargetModel, data: TokenMixture, length: int) -> dict[str, float]:
    """Held-out loss in nats per token, by kind."""
    g = torch.Generator().manual_seed(7)
    windows = data.windows(32 * len(data.kinds), length + 1, g)
    return {
        kind: round(float(token_loss(model, windows[i * 32 : (i + 1) * 32])), 4)
        for i, kind in enumerate(data.kinds)
    }


def train(folder: Path, out: Path, settings: TargetSettings, *, minutes: float) -> None:
    """Train until done or until `minutes` are over; run again to resume."""
    began, device = time.monotonic(), torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_float32_matmul_precision("high")
    s = settings
    g = torch.Generator().manual_seed(s.seed)
    model = TargetModel(TARGET, CAPTURE)
    initialise(model, TARGET.n_layers, g)
    model.to(device)
    optimizer = torch.optim.AdamW(
        parameter_groups(model, s.weight_decay), lr=s.peak_lr, betas=(0.9, 0.95), fused=device.type == "cuda"
    )
    data = TokenMixture(folder, "train", device, eos=EOS)
    held = TokenMixture(folder, "heldout", device, eos=EOS)
    checkpoint, step, log = Checkpoint(out / "target.ckpt"), 0, []
    if (saved := checkpoint.load()) is not None:
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        step, log = int(saved["step"]), list(saved["log"])
        g.set_state(saved["rng"])
    total = s.steps + s.unlikelihood_steps
    likelihood = LikelihoodStep(model, s.batch, s.length + 1)
    greedy: BatchGreedy | None = None
    last_save = began
    while step < total and time.monotonic() - began < minutes * 60:
        lr = learning_rate(step, steps=s.steps, warmup=s.warmup, peak=s.peak_lr)
        for group in optimizer.param_groups:
            group["lr"] = lr if step < s.steps else 0.1 * s.peak_lr * (total - step) / (total - s.steps)
        loss = likelihood.backward(data.windows(s.batch, s.length + 1, g))
        rate = None
        if step >= s.steps:
            greedy = greedy or BatchGreedy(model, batch=s.greedy_batch, length=s.greedy_length)
            prefix = int(torch.randint(16, 64, (1,), generator=g))
            text = greedy(data.windows(s.greedy_batch, prefix, g))
            live = until_end(text, prefix, EOS)
            live[:, :prefix] = False
            repeated = repeated_ngrams(text, prefix, s.ngram)
            rate = float((repeated & live).sum() / live.sum())
            unlikelihood(model, text, repeated, live).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        step += 1
        if step % 100 == 0 or (rate is not None and step % 10 == 0) or step == 5:
            entry = {"step": step, "loss": round(float(loss.detach()), 4), "repeats": rate,
                     "s": round(time.monotonic() - began, 1)}  # fmt: skip
            log.append(entry)
            print(json.dumps(entry), flush=True)
        if time.monotonic() - last_save > 90:
            checkpoint.save(model=model.state_dict(), optimizer=optimizer.state_dict(), step=step,
                            rng=g.get_state(), log=log)  # fmt: skip
            last_save = time.monotonic()
    checkpoint.save(model=model.state_dict(), optimizer=optimizer.state_dict(), step=step,
                    rng=g.get_state(), log=log)  # fmt: skip
    report = {"done": step >= total, "step": step, "held_out_nats_per_token": held_out(model, held, s.length)}
    (out / "target.json").write_text(json.dumps({**report, "settings": vars(s), "log": log}, indent=1))
    print(json.dumps(report), flush=True)
