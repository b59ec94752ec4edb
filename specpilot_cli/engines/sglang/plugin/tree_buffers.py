"""Tensors of a tree step at fixed addresses: what captured graphs read and write.

A draft pass ends by building the trees into them, the verify pass reads them in every layer, and
its end writes what was accepted. One step runs at a time, so one set serves all batches.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch

from specpilot_cli.schema.plugin_config import TreePlugin
from specpilot_kernels.trees.gpu import DeviceTrees, build_trees


@dataclass(slots=True)
class TreeBuffers:
    """For up to `batch` requests.

    trees: [batch, rows] each. positions int64 [batch, rows]: of every row in its request. accepted:
    see `Accepted`. enabled int32 [1]: 0 keeps a verify graph from committing what it accepted,
    because something it does not know of chooses the tokens.
    """

    trees: DeviceTrees
    positions: torch.Tensor
    accepted: Accepted
    enabled: torch.Tensor


@dataclass(slots=True)
class Accepted:
    """The longest accepted path of each request, with D = depth + 1.

    path int32 [B, D]: rows from the root down, -1 beyond. count int32 [B]: drafted tokens on it.
    packed int64 [B, D + 3]: the committed tokens (0 beyond), the last of them, the sequence length
    after the step, how many are committed; in one tensor, because the host takes a copy.
    """

    path: torch.Tensor
    count: torch.Tensor
    packed: torch.Tensor

    def first(self, batch: int) -> Accepted:
        """Views of the first requests."""
        return Accepted(self.path[:batch], self.count[:batch], self.packed[:batch])


def make_buffers(settings: TreePlugin, batch: int, device: torch.device) -> TreeBuffers:
    """Buffers with trees in them already: a warm-up pass before the first draft walks those."""
    width = settings.depth + 1
    lattice = torch.zeros((batch, settings.block - 1, 2), dtype=torch.int64, device=device)
    return TreeBuffers(
        trees=build_trees(
            lattice,
            torch.zeros((*lattice.shape[:2], 1, 2), dtype=torch.float32, device=device),
            torch.zeros(batch, dtype=torch.int64, device=device),
            settings.nodes,
            max_depth=settings.depth,
        ),
        positions=torch.zeros((batch, settings.rows), dtype=torch.int64, device=device),
        accepted=Accepted(
            path=torch.full((batch, width), -1, dtype=torch.int32, device=device),
            count=torch.zeros(batch, dtype=torch.int32, device=device),
            packed=torch.zeros((batch, width + 3), dtype=torch.int64, device=device),
        ),
        enabled=torch.ones(1, dtype=torch.int32, device=device),
    )


def first(trees: DeviceTrees, batch: int) -> DeviceTrees:
    """Views of the trees of the first requests."""
    names = [field.name for field in fields(trees) if field.name != "max_depth"]
    return replace(trees, **{name: getattr(trees, name)[:batch] for name in names})
