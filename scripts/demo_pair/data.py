"""Training windows and prefixes from the flat token arrays that `corpus.py` wrote."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor


class TokenMixture:
    """Draws windows of equal length, equally many from every kind of text.

    Reads `folder`/corpus.npz, or `folder`/SPLIT_KIND.npy where that is missing. Raises
    `SystemExit` if the folder has no tokens of `split`.
    """

    def __init__(self, folder: Path, split: str, device: torch.device, *, eos: int) -> None:
        flat = _read_split(folder, split)
        if not flat:
            raise SystemExit(f"no {split} tokens in {folder}: run scripts/demo_pair/corpus.py")
        self.kinds = sorted(flat)
        self.device = device
        self.tokens = [torch.from_numpy(flat[k].astype(np.int32)).to(device) for k in self.kinds]
        self.starts = [(t[:-1] == eos).nonzero()[:, 0] + 1 for t in self.tokens]

    def rows_by_kind(self, count: int) -> dict[str, slice]:
        """Where each kind's rows lie in `windows(count, ...)`; the first kinds get the odd ones."""
        out, stop = {}, 0
        for i, kind in enumerate(self.kinds):
            start, stop = stop, stop + count // len(self.kinds) + (i < count % len(self.kinds))
            out[kind] = slice(start, stop)
        return out

    def windows(self, count: int, length: int, generator: torch.Generator) -> Tensor:
        """int64 [count, length]; every other window of a kind starts at a document's first token.

        Rows are NOT mixed: they are grouped by kind, as `rows_by_kind` says. Whoever takes some of
        the rows must take them by kind.
        """
        out = []
        shares = self.rows_by_kind(count).values()
        for tokens, starts, rows in zip(self.tokens, self.starts, shares, strict=True):
            share = rows.stop - rows.start
            limit = len(tokens) - length
            at = torch.randint(limit, (share,), generator=generator)
            usable = starts[starts < limit]
            pick = usable[torch.randint(len(usable), (share,), generator=generator).to(self.device)]
            at = at.to(self.device)
            at[::2] = pick[::2]
            out.append(tokens[at.unsqueeze(1) + torch.arange(length, device=self.device)])
        return torch.cat(out).long()


def _read_split(folder: Path, split: str) -> dict[str, np.ndarray]:
    prefix, archive = f"{split}_", folder / "corpus.npz"
    if archive.is_file():
        with np.load(archive) as arrays:
            return {n.removeprefix(prefix): arrays[n] for n in arrays if n.startswith(prefix)}
    return {p.stem.removeprefix(prefix): np.load(p) for p in folder.glob(f"{prefix}*.npy")}
