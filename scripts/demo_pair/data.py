"""Training windows and prefixes from the flat token arrays that `corpus.py` wrote."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor


class TokenMixture:
    """Draws windows of equal length from several kinds of text, equally often by default."""

    def __init__(self, folder: Path, split: str, device: torch.device, *, eos: int) -> None:
        archive = folder / "corpus.npz"
        if archive.is_file():
            with np.load(archive) as arrays:
                flat = {n.removeprefix(f"{split}_"): arrays[n] for n in arrays if n.startswith(split)}
        else:
            flat = {p.stem.removeprefix(f"{split}_"): np.load(p) for p in folder.glob(f"{split}_*.npy")}
        if not flat:
            raise SystemExit(f"no {split} tokens in {folder}: run scripts/demo_pair/corpus.py first")
        self.kinds = sorted(flat)
        self.device = device
        self.tokens = [torch.from_numpy(flat[k].astype(np.int32)).to(device) for k in self.kinds]
        self.starts = [(t[:-1] == eos).nonzero()[:, 0] + 1 for t in self.tokens]

    def windows(self, count: int, length: int, generator: torch.Generator) -> Tensor:
        """int64 [count, length]; every other window starts at a document's first token."""
        out = []
        for i, (tokens, starts) in enumerate(zip(self.tokens, self.starts, strict=True)):
            share = count // len(self.kinds) + (i < count % len(self.kinds))
            limit = len(tokens) - length
            at = torch.randint(limit, (share,), generator=generator)
            usable = starts[starts < limit]
            pick = usable[torch.randint(len(usable), (share,), generator=generator).to(self.device)]
            at = at.to(self.device)
            at[::2] = pick[::2]
            out.append(tokens[at.unsqueeze(1) + torch.arange(length, device=self.device)])
        return torch.cat(out).long()
