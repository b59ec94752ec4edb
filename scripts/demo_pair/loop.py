"""What both training stages share: initialisation, schedule, and a loop that can be interrupted.

A stage keeps everything that decides its next step in one checkpoint: weights, optimizer, the state
of its random generator, the step count, the log and the seconds spent. On a CPU a run that was
interrupted and continued therefore ends with the same bits as one that was not; on a GPU, sums run
in no fixed order and no two runs agree to the bit.
"""

from __future__ import annotations

import dataclasses
import json
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from specpilot_cli.engines.reference.layers import RMSNorm

SAVE_EVERY_S = 90.0
_RESIDUAL_OUTPUTS = ("o_proj.weight", "out_proj.weight", "down_proj.weight")


class Clock:
    """The seconds a stage has spent, and whether this call's share of minutes is over."""

    def __init__(self, minutes: float, *, now: Callable[[], float] = time.monotonic) -> None:
        self._now, self._began, self._limit_s = now, now(), 60 * minutes
        self.earlier_s = 0.0  # spent by the calls that this one continues

    @property
    def spent_s(self) -> float:
        """Seconds of this call and of the calls it continues."""
        return self.earlier_s + self._now() - self._began

    @property
    def over(self) -> bool:
        """Whether this call has used up its minutes."""
        return self._now() - self._began >= self._limit_s


class Run:
    """One stage in `folder`: NAME.ckpt to continue from, NAME.json as its report.

    Raises `SystemExit` if the checkpoint there was written under other settings.
    """

    def __init__(
        self,
        folder: Path,
        name: str,
        *,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        generator: torch.Generator,
        settings: Any,
        clock: Clock,
    ) -> None:
        self.checkpoint, self.report = folder / f"{name}.ckpt", folder / f"{name}.json"
        self.model, self.optimizer, self.generator = model, optimizer, generator
        self.settings, self.clock = dataclasses.asdict(settings), clock
        self.step = 0
        self.entries: list[dict[str, Any]] = []
        self._load()

    def steps(self, total: int) -> Iterator[int]:
        """The steps left of `total`, until the clock is over; saves now and then, and at the end.

        The caller does one whole step per value: what it logs belongs to that step. A run that has
        no step left keeps its checkpoint as it is, so that its hash stays what later stages saw.
        """
        first, saved_s = self.step, self.clock.spent_s
        while self.step < total and not self.clock.over:
            yield self.step
            self.step += 1
            if self.clock.spent_s - saved_s > SAVE_EVERY_S:
                self._save()
                saved_s = self.clock.spent_s
        if self.step > first:
            self._save()

    def set_learning_rate(self, value: float) -> None:
        """Use `value` in the next optimizer step, for all parameters."""
        for group in self.optimizer.param_groups:
            group["lr"] = value

    def log(self, **figures: object) -> None:
        """Keep and print the figures of the step under way."""
        entry = {"step": self.step + 1, **figures, "s": round(self.clock.spent_s, 1)}
        self.entries.append(entry)
        print(json.dumps(entry), flush=True)

    def finish(self, total: int, **figures: object) -> None:
        """Write the report: whether all `total` steps are done, figures, settings and the log."""
        result = {"done": self.step >= total, "step": self.step, **figures}
        document = {**result, "settings": self.settings, "log": self.entries}
        self.report.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        print(json.dumps(result), flush=True)

    def _load(self) -> None:
        if not self.checkpoint.is_file():
            return
        # own file, and the log in it is plain Python
        saved = torch.load(self.checkpoint, weights_only=False, map_location="cpu")
        if saved["settings"] != self.settings:
            raise SystemExit(
                f"{self.checkpoint} was written under other settings: {saved['settings']}\n"
                "give the same ones, or another --out"
            )
        self.model.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])
        self.generator.set_state(saved["rng"])
        self.step, self.entries = saved["step"], saved["log"]
        self.clock.earlier_s = saved["spent_s"]

    def _save(self) -> None:
        state = {
            "settings": self.settings,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "rng": self.generator.get_state(),
            "step": self.step,
            "log": self.entries,
            "spent_s": self.clock.spent_s,
        }
        save_by_rename(state, self.checkpoint)


def save_by_rename(state: object, path: Path) -> None:
    """`torch.save` that leaves either the old file or the whole new one."""
    partial = path.with_name(f".{path.name}.partial")
    torch.save(state, partial)
    partial.replace(path)


def initialise(model: nn.Module, n_layers: int, generator: torch.Generator) -> None:
    """Normal(0, 0.02) matrices, those that end a residual branch scaled by 1 / sqrt(2 n_layers).

    Convolutions, norms and gates keep the values their modules gave them.
    """
    for name, p in model.named_parameters():
        if p.dim() >= 2 and "conv1d" not in name and "base_kernel" not in name:
            scale = 0.02 / math.sqrt(2 * n_layers) if name.endswith(_RESIDUAL_OUTPUTS) else 0.02
            p.data.copy_(torch.empty(p.shape).normal_(0, scale, generator=generator))


def adamw(model: nn.Module, *, lr: float, weight_decay: float) -> torch.optim.AdamW:
    """AdamW that decays matrices only: norms, gates and convolutions are left alone."""
    norms = {id(p) for m in model.modules() if isinstance(m, RMSNorm) for p in m.parameters()}
    parameters = list(model.parameters())
    decay = [p for p in parameters if p.dim() == 2 and id(p) not in norms]
    chosen = {id(p) for p in decay}
    groups = [
        {"params": decay, "weight_decay": weight_decay},
        {"params": [p for p in parameters if id(p) not in chosen], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), fused=parameters[0].is_cuda)


def learning_rate(step: int, *, steps: int, warmup: int, peak: float, floor: float = 0.02) -> float:
    """Linear warm-up, then cosine to `floor` of the peak at `steps`."""
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = min(1.0, (step - warmup) / max(1, steps - warmup))
    return peak * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress)))


def pick_device() -> torch.device:
    """The GPU if there is one. Float32 products may use TF32 there, as the shipped runs did."""
    torch.set_float32_matmul_precision("high")
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
