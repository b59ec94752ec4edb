"""Stage 2: train the DFlash2 drafter on the target's own greedy text.

The target (rounded to BF16, as it will be served) continues random prefixes of the training text.
Blocks start at random anchors of these continuations. Two losses, both over the full vocabulary:
the unary cross-entropy of every predicted position, and the same after adding the selector's pair
score with the true predecessor. Early positions weigh more, since a miss ends the accepted path.
Blocks of 8 and 16 alternate at random, so that the trained block stays 8 and 16 is usable.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812
from demo_pair.data import TokenMixture
from demo_pair.sampling import BatchGreedy
from demo_pair.shapes import CAPTURE, DRAFTER, EOS, TARGET, TRAINED_BLOCK, WIDE_BLOCK
from demo_pair.train_target import Checkpoint, initialise, learning_rate, parameter_groups
from torch import Tensor, nn

from specpilot_cli.engines.reference.drafter import Drafter
from specpilot_cli.engines.reference.model import TargetModel


@dataclass(frozen=True)
class DrafterSettings:
    steps: int = 7000
    batch: int = 64
    anchors: int = 24
    peak_lr: float = 2e-3
    warmup: int = 150
    weight_decay: float = 0.05
    greedy_batch: int = 2048
    greedy_rounds: int = 24
    greedy_length: int = 192
    seed: int = 20261201


def rounded_target(checkpoint: Path, device: torch.device) -> TargetModel:
    """The trained target with its weights rounded to BF16 and held in float32."""
    model = TargetModel(TARGET, CAPTURE)
    model.load_state_dict(torch.load(checkpoint, weights_only=False, map_location="cpu")["model"])
    for p in model.parameters():
        p.data = p.data.to(torch.bfloat16).float()
    return model.to(device).eval().requires_grad_(False)


@torch.no_grad()
def greedy_corpus(
    target: TargetModel, data: TokenMixture, s: DrafterSettings, g: torch.Generator, rounds: int
) -> tuple[Tensor, Tensor]:
    """Sequences int64 [rounds * greedy_batch, length] and their prefix lengths."""
    decoder = BatchGreedy(target, batch=s.greedy_batch, length=s.greedy_length)
    texts, prefixes = [], []
    for _ in range(rounds):
        prefix = int(torch.randint(20, 80, (1,), generator=g))
        texts.append(decoder(data.windows(s.greedy_batch, prefix, g)).short())
        prefixes.append(torch.full((s.greedy_batch,), prefix))
    return torch.cat(texts), torch.cat(prefixes)


def draw_anchors(
    text: Tensor, prefix: Tensor, count: int, block: int, g: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Anchor positions [B, count] in the greedy part, and labels [B, count, block - 1] (-1 = none)."""
    batch, length = text.shape
    span = (length - 1 - prefix).clamp(min=1).unsqueeze(1)
    draw = torch.rand(batch, count, generator=g).to(text.device)
    at = prefix.unsqueeze(1) + (draw * span).long()
    after = at.unsqueeze(-1) + torch.arange(1, block, device=text.device)
    inside = after < length
    labels = text.unsqueeze(1).expand(-1, count, -1).gather(2, after.clamp(max=length - 1))
    ended = ((torch.cat([text.gather(1, at).unsqueeze(-1), labels[..., :-1]], -1) == EOS).cumsum(-1)) > 0
    return at, labels.masked_fill(~inside | ended, -1)


def draft_loss(
    drafter: Drafter, target: TargetModel, text: Tensor, at: Tensor, labels: Tensor
) -> tuple[Tensor, dict[str, float]]:
    """Weighted unary and selector cross-entropy of all blocks, with progress figures."""
    block = labels.shape[-1] + 1
    with torch.no_grad():
        _, features = target.forward_sequences(text)
    anchors = text.gather(1, at)
    with torch.autocast(text.device.type, dtype=torch.bfloat16):
        context = drafter.context(features)
        context = context.repeat_interleave(at.shape[1], dim=2)
        flat_at = at.flatten()
        mask = torch.arange(text.shape[1], device=text.device) < flat_at[:, None, None]
        hidden = drafter.block_hidden(anchors.flatten(), flat_at, context, mask, block)[:, 1:]
        unary = target.lm_head(hidden).float()
        flat_labels = labels.flatten(0, 1)
        before = torch.cat([anchors.flatten().unsqueeze(1), flat_labels[:, :-1].clamp(min=0)], dim=1)
        selector = drafter.candidate_selector
        state = selector.predecessor_codebook[before] * selector.hidden_projection(hidden)
        pair = unary + (state @ selector.successor_codebook.t()).float()
    weight = torch.exp(-torch.arange(block - 1, device=text.device) / 5.0).expand_as(flat_labels)
    valid = flat_labels >= 0
    weight = weight * valid
    losses = [
        F.cross_entropy(x.flatten(0, 1), flat_labels.clamp(min=0).flatten(), reduction="none")
        for x in (unary, pair)
    ]
    loss = sum((l * weight.flatten()).sum() for l in losses) / weight.sum()  # noqa: E741
    with torch.no_grad():
        hit = (pair.argmax(-1) == flat_labels) & valid
        chain = 1 + hit[:, : TRAINED_BLOCK - 1].long().cumprod(1).sum(1).float().mean()
        recall = (unary.topk(DRAFTER.top_k, -1).indices == flat_labels.unsqueeze(-1)).any(-1)
        figures = {"chain": float(chain), "recall1": float(recall[:, 0].float().mean()),
                   "recall7": float(recall[:, 6][valid[:, 6]].float().mean())}  # fmt: skip
    return loss, figures


def train(folder: Path, out: Path, settings: DrafterSettings, *, minutes: float) -> None:
    """Train until done or until `minutes` are over; run again to resume."""
    began, device = time.monotonic(), torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_float32_matmul_precision("high")
    s = settings
    g = torch.Generator().manual_seed(s.seed)
    target = rounded_target(out / "target.ckpt", device)
    drafter = Drafter(DRAFTER, target.embed_tokens, target.lm_head, len(CAPTURE) * TARGET.hidden_size)
    initialise(drafter, DRAFTER.n_layers, g)
    drafter.to(device)
    optimizer = torch.optim.AdamW(
        parameter_groups(drafter, s.weight_decay), lr=s.peak_lr, betas=(0.9, 0.95), fused=device.type == "cuda"
    )
    text, prefix = greedy_corpus(target, TokenMixture(folder, "train", device, eos=EOS), s, g, s.greedy_rounds)
    held = greedy_corpus(target, TokenMixture(folder, "heldout", device, eos=EOS), s, g, 1)
    prefix = prefix.to(device)
    print(json.dumps({"greedy_tokens": text.numel(), "s": round(time.monotonic() - began, 1)}), flush=True)
    checkpoint, step, log = Checkpoint(out / "drafter.ckpt"), 0, []
    if (saved := checkpoint.load()) is not None:
        drafter.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        step, log = int(saved["step"]), list(saved["log"])
        g.set_state(saved["rng"])
    while step < s.steps and time.monotonic() - began < minutes * 60:
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, steps=s.steps, warmup=s.warmup, peak=s.peak_lr)
        pick = torch.randint(len(text), (s.batch,), generator=g).to(device)
        block = WIDE_BLOCK if float(torch.rand(1, generator=g)) < 0.5 else TRAINED_BLOCK
        rows = text[pick].long()
        at, labels = draw_anchors(rows, prefix[pick], s.anchors, block, g)
        loss, figures = draft_loss(drafter, target, rows, at, labels)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(drafter.parameters(), 1.0)
        optimizer.step()
        step += 1
        if step % 250 == 0 or step == 5:
            entry = {"step": step, "loss": round(float(loss.detach()), 4), "block": block, **figures,
                     "s": round(time.monotonic() - began, 1)}  # fmt: skip
            log.append(entry)
            print(json.dumps(entry), flush=True)
    checkpoint.save(model=drafter.state_dict(), optimizer=optimizer.state_dict(), step=step,
                    rng=g.get_state(), log=log)  # fmt: skip
    with torch.no_grad():
        rows, starts = held[0][:256].long(), held[1][:256].to(device)
        figures = {
            f"block{b}": draft_loss(drafter, target, rows, *draw_anchors(rows, starts, s.anchors, b, g))[1]
            for b in (TRAINED_BLOCK, WIDE_BLOCK)
        }
    report = {"done": step >= s.steps, "step": step, "held_out": figures}
    (out / "drafter.json").write_text(json.dumps({**report, "settings": vars(s), "log": log}, indent=1))
    print(json.dumps(report), flush=True)
