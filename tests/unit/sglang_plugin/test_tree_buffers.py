"""A step's outcome: one piece of memory, read by tensors that kernels take as they are."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from specpilot_cli.engines.sglang.plugin.tree_buffers import (  # noqa: E402
    Accepted,
    first,
    make_buffers,
)
from specpilot_cli.schema.plugin_config import TreePlugin  # noqa: E402
from specpilot_kernels.trees.gpu import accept_path  # noqa: E402

TREE = TreePlugin(block=5, nodes=6)


@pytest.mark.parametrize("batch", [1, 2, 5])
@pytest.mark.parametrize("running", [1, 2])
def test_an_outcome_is_a_copy_of_what_was_accepted(batch: int, running: int) -> None:
    running = min(running, batch)
    buffers = make_buffers(TREE, batch, torch.device("cpu"))
    trees = first(buffers.trees, running)
    target = trees.token + 3
    target[:, 0] = trees.token[:, 1]  # the first child is right, what follows it is not
    lengths = torch.arange(10, 10 + running)
    found = accept_path(trees, target, prefix_lens=lengths, out=buffers.accepted.first(running))
    outcome = buffers.accepted.outcome(running)
    wanted = accept_path(trees, target, prefix_lens=lengths)
    for name in outcome._fields:
        tensor = getattr(outcome, name)
        assert tensor.is_contiguous()
        assert tensor.dtype == getattr(wanted, name).dtype
        assert torch.equal(tensor, getattr(wanted, name))
    assert outcome.n_committed.tolist() == [2] * running
    assert outcome.length.tolist() == (lengths + 2).tolist()
    found.committed.fill_(99)
    found.n_committed.fill_(99)
    assert torch.equal(outcome.committed, wanted.committed)
    assert torch.equal(outcome.n_committed, wanted.n_committed)


def test_nothing_is_accepted_at_first() -> None:
    """What a pass before the first step reads must not be memory of anything else."""
    accepted = Accepted.allocate(3, 5, torch.device("cpu"))
    assert (accepted.paths.path == -1).all()
    assert (accepted.paths.n_accepted == -1).all()
    assert not accepted.paths.place.any()
    assert not accepted.memory.any()
