"""Stage 2: train the DFlash2 drafter on the target's own greedy text.

The target (rounded to BF16, as it will be served) continues random prefixes of the training text.
Blocks start at random anchors of these continuations. Two losses, both over the full vocabulary:
the unary cross-entropy of every predicted position, and the same after adding the selector's pair
score with the true predecessor. Early positions weigh more, since a miss ends the accepted path.
Blocks of 8 and 16 alternate at random, so that the trained block stays 8 and 16 is usable.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from demo_pair.data import TokenMixture
from demo_pair.loop import (
    Clock,
    Run,
    adamw,
    initialise,
    learning_rate,
    pick_device,
    save_by_rename,
)
from demo_pair.sampling import BatchGreedy
from demo_pair.shapes import CAPTURE, DRAFTER, EOS, TARGET, TRAINED_BLOCK, WIDE_BLOCK
from torch import Tensor, nn

from specpilot_cli.engines.reference.drafter import Drafter
from specpilot_cli.engines.reference.model import TargetModel
from specpilot_cli.io.hashing import sha256_file

HELD_OUT_ROWS = 32  # greedy texts of each kind
LOSS_DECAY_POSITIONS = 5.0  # the losses of position j count exp(-j / 5)


@dataclass(frozen=True, slots=True)
class DrafterSettings:
    """Stage 2. Lengths in tokens; the defaults are those of the shipped weights."""

    steps: int = 7400
    batch: int = 64
    anchors: int = 24  # in each sequence of the batch
    peak_lr: float = 2e-3
    warmup: int = 150
    weight_decay: float = 0.05
    greedy_batch: int = 2048
    greedy_rounds: int = 20
    greedy_length: int = 192  # prefix included
    seed: int = 20261201


@dataclass(frozen=True, slots=True)
class GreedyText:
    """Greedy continuations: tokens int16 [n, greedy_length], prefix lengths int64 [n].

    Rows are grouped by kind within each round of greedy_batch rows.
    """

    tokens: Tensor
    prefix: Tensor


def train(folder: Path, out: Path, settings: DrafterSettings, clock: Clock) -> None:
    """Train on greedy text of `out`/target.ckpt until done or the clock is over; resumable."""
    s, device = settings, pick_device()
    g = torch.Generator().manual_seed(s.seed)
    target = rounded_target(out / "target.ckpt", device)
    n_features = len(CAPTURE) * TARGET.hidden_size
    drafter = Drafter(DRAFTER, target.embed_tokens, target.lm_head, n_features)
    initialise(drafter, DRAFTER.n_layers, g)
    drafter.to(device)
    optimizer = adamw(drafter, lr=s.peak_lr, weight_decay=s.weight_decay)
    held_data = TokenMixture(folder, "heldout", device, eos=EOS)
    text, held = kept_greedy_texts(folder, out, target, held_data, s, g)
    print(f"{text.tokens.numel():,} greedy tokens after {clock.spent_s:.1f} s", flush=True)
    # after the texts, whose drawing moves the generator: the checkpoint then sets it
    run = Run(
        out, "drafter", model=drafter, optimizer=optimizer, generator=g, settings=s, clock=clock
    )
    for step in run.steps(s.steps):
        run.set_learning_rate(learning_rate(step, steps=s.steps, warmup=s.warmup, peak=s.peak_lr))
        pick = torch.randint(len(text.tokens), (s.batch,), generator=g).to(device)
        block = WIDE_BLOCK if float(torch.rand(1, generator=g)) < 0.5 else TRAINED_BLOCK
        rows = text.tokens[pick].long()
        at, labels = draw_anchors(rows, text.prefix[pick], s.anchors, block, g)
        loss, figures = draft_loss(drafter, target, rows, at, labels)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(drafter.parameters(), 1.0)
        optimizer.step()
        if (step + 1) % 250 == 0 or step == 4:
            run.log(loss=round(float(loss.detach()), 4), block=block, **figures)
    kinds = held_data.rows_by_kind(s.greedy_batch)
    run.finish(s.steps, held_out=held_out_figures(drafter, target, held, kinds, s))


def rounded_target(checkpoint: Path, device: torch.device) -> TargetModel:
    """The trained target with its weights rounded to BF16 and held in float32."""
    if not checkpoint.is_file():
        raise SystemExit(f"no {checkpoint}: train the target first")
    model = TargetModel(TARGET, CAPTURE)
    # own file, and the log in it is plain Python
    model.load_state_dict(torch.load(checkpoint, weights_only=False, map_location="cpu")["model"])
    for p in model.parameters():
        p.data = p.data.to(torch.bfloat16).float()
    return model.to(device).eval().requires_grad_(False)


def kept_greedy_texts(
    folder: Path,
    out: Path,
    target: TargetModel,
    held_data: TokenMixture,
    s: DrafterSettings,
    g: torch.Generator,
) -> tuple[GreedyText, GreedyText]:
    """Training and held-out texts, from `out`/drafter_text.pt if an earlier call left them there.

    A GPU would not write the same text twice, so a continued run must read what it began with.
    Raises `SystemExit` if the file belongs to another target or other settings.
    """
    path, device = out / "drafter_text.pt", held_data.device
    made_from = {**dataclasses.asdict(s), "target": sha256_file(out / "target.ckpt")}
    if path.is_file():
        kept = torch.load(path, weights_only=True, map_location=device)
        if kept["made_from"] != made_from:
            raise SystemExit(f"{path} is of another target or other settings: give another --out")
        g.set_state(kept["rng"].cpu())
        return GreedyText(*kept["train"]), GreedyText(*kept["held"])
    data = TokenMixture(folder, "train", device, eos=EOS)
    text = greedy_texts(target, data, s, g, rounds=s.greedy_rounds)
    held = greedy_texts(target, held_data, s, g, rounds=1)
    state = {
        "made_from": made_from,
        "rng": g.get_state(),
        "train": (text.tokens, text.prefix),
        "held": (held.tokens, held.prefix),
    }
    save_by_rename(state, path)
    return text, held


@torch.no_grad()
def greedy_texts(
    target: TargetModel, data: TokenMixture, s: DrafterSettings, g: torch.Generator, *, rounds: int
) -> GreedyText:
    """`rounds` batches of greedy text, each with one prefix length of 20 to 79 tokens."""
    decoder = BatchGreedy(target, batch=s.greedy_batch, length=s.greedy_length)
    texts, prefixes = [], []
    for _ in range(rounds):
        prefix = int(torch.randint(20, min(80, s.greedy_length), (1,), generator=g))
        texts.append(decoder(data.windows(s.greedy_batch, prefix, g)).short())
        prefixes.append(torch.full((s.greedy_batch,), prefix, device=data.device))
    return GreedyText(torch.cat(texts), torch.cat(prefixes))


def draw_anchors(
    text: Tensor, prefix: Tensor, count: int, block: int, g: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Random anchors in the greedy part of text int64 [B, T], prefix lengths int64 [B].

    Returns positions [B, count] and labels [B, count, block - 1]: the tokens after the anchor,
    -1 behind the end of the text and behind an end-of-text token (at the anchor or later).
    """
    batch, length = text.shape
    span = (length - 1 - prefix).clamp(min=1).unsqueeze(1)
    draw = torch.rand(batch, count, generator=g).to(text.device)
    at = prefix.unsqueeze(1) + (draw * span).long()
    after = at.unsqueeze(-1) + torch.arange(1, block, device=text.device)
    inside = after < length
    index = after.clamp(max=length - 1)
    labels = text.unsqueeze(1).expand(-1, count, -1).gather(2, index)
    before = torch.cat([text.gather(1, at).unsqueeze(-1), labels[..., :-1]], dim=-1)
    ended = (before == EOS).cumsum(-1) > 0
    return at, labels.masked_fill(~inside | ended, -1)


def draft_loss(
    drafter: Drafter, target: TargetModel, text: Tensor, at: Tensor, labels: Tensor
) -> tuple[Tensor, dict[str, float]]:
    """Sum of the unary and the selector cross-entropy of all blocks, and `block_figures`.

    text int64 [B, T]; at and labels as from `draw_anchors`. Positions weigh exp(-j / 5).
    """
    with torch.no_grad():
        _, features = target.forward_sequences(text)
    unary, pair = block_scores(drafter, target, features, text.gather(1, at), at, labels)
    flat_labels = labels.flatten(0, 1)
    valid = flat_labels >= 0
    places = torch.arange(labels.shape[-1], device=text.device)
    weight = torch.exp(-places / LOSS_DECAY_POSITIONS).expand_as(flat_labels) * valid
    truth = flat_labels.clamp(min=0).flatten()
    losses = [
        F.cross_entropy(scores.flatten(0, 1), truth, reduction="none") * weight.flatten()
        for scores in (unary, pair)
    ]
    loss = (losses[0].sum() + losses[1].sum()) / weight.sum()
    return loss, block_figures(unary.detach(), pair.detach(), flat_labels)


def block_scores(
    drafter: Drafter,
    target: TargetModel,
    features: Tensor,
    anchors: Tensor,
    at: Tensor,
    labels: Tensor,
) -> tuple[Tensor, Tensor]:
    """Full-vocabulary scores float32 [B * count, block - 1, V] of every block: unary, and selector.

    features [B, T, F] of the sequences, anchors int64 [B, count] at positions `at`. The selector's
    scores take the true predecessors from `labels`.
    """
    block = labels.shape[-1] + 1
    with torch.autocast(features.device.type, dtype=torch.bfloat16):
        context = drafter.context(features).repeat_interleave(at.shape[1], dim=2)
        flat_at, flat_anchors = at.flatten(), anchors.flatten()
        mask = torch.arange(features.shape[1], device=at.device) < flat_at[:, None, None]
        hidden = drafter.block_hidden(flat_anchors, flat_at, context, mask, block)[:, 1:]
        unary = target.lm_head(hidden).float()
        before = labels.flatten(0, 1)[:, :-1].clamp(min=0)
        before = torch.cat([flat_anchors.unsqueeze(1), before], dim=1)
        selector = drafter.candidate_selector
        state = selector.predecessor_codebook[before] * selector.hidden_projection(hidden)
        return unary, unary + (state @ selector.successor_codebook.t()).float()


@torch.no_grad()
def block_figures(unary: Tensor, pair: Tensor, labels: Tensor) -> dict[str, float]:
    """Progress figures of blocks; unary and pair [n, L, V], labels [n, L] with -1 for none.

    `chain`: tokens a block of 8 commits if each position's best selector score given the TRUE
    predecessor is drafted, the bonus token included; a label of -1 counts as a miss, so blocks at
    the end of a text lower it. `recall1`, `recall7`: how often the true token of position 1 or 7
    is among the K candidates, where there is one (left out if there is none).
    """
    valid = labels >= 0
    hit = (pair.argmax(-1) == labels) & valid
    accepted = hit[:, : TRAINED_BLOCK - 1].long().cumprod(1).sum(1).float()
    among = (unary.topk(DRAFTER.top_k, -1).indices == labels.unsqueeze(-1)).any(-1)
    figures = {"chain": float(1 + accepted.mean())}
    for place in (1, TRAINED_BLOCK - 1):
        recall = float(among[:, place - 1][valid[:, place - 1]].float().mean())
        if math.isfinite(recall):
            figures[f"recall{place}"] = recall
    return figures


@torch.no_grad()
def held_out_figures(
    drafter: Drafter,
    target: TargetModel,
    held: GreedyText,
    rows_by_kind: dict[str, slice],
    s: DrafterSettings,
) -> dict[str, dict[str, dict[str, float]]]:
    """`block_figures` on held-out greedy text: block size, then kind (`mean`: of the kinds)."""
    g = torch.Generator().manual_seed(7)
    out: dict[str, dict[str, dict[str, float]]] = {}
    for block in (TRAINED_BLOCK, WIDE_BLOCK):
        by_kind = {}
        for kind, rows in rows_by_kind.items():
            chosen = slice(rows.start, min(rows.start + HELD_OUT_ROWS, rows.stop))
            text = held.tokens[chosen].long()
            at, labels = draw_anchors(text, held.prefix[chosen], s.anchors, block, g)
            by_kind[kind] = draft_loss(drafter, target, text, at, labels)[1]
        names = set.intersection(*(set(figures) for figures in by_kind.values()))
        mean = {
            name: sum(figures[name] for figures in by_kind.values()) / len(by_kind)
            for name in sorted(names)
        }
        out[f"block{block}"] = {**by_kind, "mean": mean}
    return out
