"""Tensors of a tree step at fixed addresses: what captured graphs read and write.

A draft pass ends by building the trees into them, the verify pass reads them in every layer, and
its end writes what was accepted. One step runs at a time, so one set serves all batches.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import NamedTuple

import torch

from specpilot_cli.schema.plugin_config import TreePlugin
from specpilot_kernels.trees.gpu import AcceptedPaths, DeviceTrees, build_trees


@dataclass(slots=True)
class TreeBuffers:
    """For up to `batch` requests.

    trees: [batch, rows] each. accepted: see `Accepted`. enabled int32 [1]: 0 keeps a verify graph
    from accepting anything, because something it does not know of chooses the tokens.
    """

    trees: DeviceTrees
    accepted: Accepted
    enabled: torch.Tensor


class Outcome(NamedTuple):
    """What outlives a step, of `AcceptedPaths`."""

    committed: torch.Tensor
    bonus: torch.Tensor
    length: torch.Tensor
    n_committed: torch.Tensor

    @staticmethod
    def lay_out(memory: torch.Tensor, batch: int) -> Outcome:
        """Dense views of int64 memory made for `batch` requests."""
        width = (len(memory) - (batch + 1) // 2) // batch - 2
        ends = [batch * width, batch * (width + 1), batch * (width + 2)]
        committed, bonus, length, rest = memory.tensor_split(ends)
        counts = rest.view(torch.int32)[:batch]
        return Outcome(committed.view(batch, width), bonus, length, counts)

    @staticmethod
    def words(batch: int, width: int) -> int:
        """How much memory `lay_out` takes for paths of up to `width` rows."""
        return batch * (width + 2) + (batch + 1) // 2


@dataclass(slots=True)
class Accepted:
    """The longest accepted path of each request.

    paths: as `accept_path` fills them. memory int64: what lies in it outlives the step, and is one
    piece so that one operation copies it.
    """

    paths: AcceptedPaths
    memory: torch.Tensor

    @staticmethod
    def allocate(batch: int, width: int, device: torch.device) -> Accepted:
        """For up to `batch` requests and paths of up to `width` rows; nothing is accepted yet."""
        memory = torch.zeros(Outcome.words(batch, width), dtype=torch.int64, device=device)
        paths = AcceptedPaths.empty(batch, width, device)
        paths = paths._replace(**Outcome.lay_out(memory, batch)._asdict())
        paths.path.fill_(-1)
        paths.n_accepted.fill_(-1)
        paths.place.zero_()
        return Accepted(paths, memory)

    def first(self, batch: int) -> AcceptedPaths:
        """Views of the first requests."""
        return AcceptedPaths(*(tensor[:batch] for tensor in self.paths))

    def outcome(self, batch: int) -> Outcome:
        """A copy of the first requests' outcome."""
        copied = Outcome.lay_out(self.memory.clone(), self.paths.path.shape[0])
        return Outcome(*(tensor[:batch] for tensor in copied))


def make_buffers(settings: TreePlugin, batch: int, device: torch.device) -> TreeBuffers:
    """Buffers with trees in them already: a warm-up pass before the first draft walks those."""
    lattice = torch.zeros((batch, settings.block - 1, 2), dtype=torch.int64, device=device)
    return TreeBuffers(
        trees=build_trees(
            lattice,
            torch.zeros((*lattice.shape[:2], 1, 2), dtype=torch.float32, device=device),
            torch.zeros(batch, dtype=torch.int64, device=device),
            settings.nodes,
            max_depth=settings.depth,
        ),
        accepted=Accepted.allocate(batch, settings.depth + 1, device),
        enabled=torch.ones(1, dtype=torch.int32, device=device),
    )


def first(trees: DeviceTrees, batch: int) -> DeviceTrees:
    """Views of the trees of the first requests."""
    names = [field.name for field in fields(trees) if field.name != "max_depth"]
    return replace(trees, **{name: getattr(trees, name)[:batch] for name in names})
