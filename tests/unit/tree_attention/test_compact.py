"""Compaction leaves a request's accepted path in order, and every other slot alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest

torch = pytest.importorskip("torch")

from specpilot_kernels.tree_attention.compact import KvPools, compact_kv  # noqa: E402

ROWS = 17


def _pools(count: int = 4, *, slots: int = 90, row: tuple[int, ...] = (2, 8)) -> list[torch.Tensor]:
    """Every element tells its pool, slot and place."""
    size = slots * torch.Size(row).numel()
    return [(torch.arange(size) + 10_000 * n).float().view(slots, *row) for n in range(count)]


def _slots(batch: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(batch)
    return torch.randperm(90, generator=generator)[: batch * ROWS].view(batch, ROWS)


@pytest.mark.parametrize(
    "paths",
    [
        [[0]],
        [[0, 1, 2, 3]],  # a chain: nothing moves
        [[0, 2, 3, 4, 5]],  # each row lies where the next one must go
        [[0, 16]],
        [[0, 3, 4, 9, 16], [0], [0, 2], [0, 1, 5, 6, 7]],
        [list(range(17))],
        [[0, *range(2, 17)]],
    ],
    ids=str,
)
def test_the_path_lies_in_order_and_nothing_else_moved(paths: list[list[int]]) -> None:
    pools, slots = _pools(), _slots(len(paths))
    before = [pool.clone() for pool in pools]
    length = max(map(len, paths)) + 1 if max(map(len, paths)) < ROWS else ROWS
    path = torch.tensor([p + [-1] * (length - len(p)) for p in paths], dtype=torch.int32)
    counts = torch.tensor([len(p) - 1 for p in paths], dtype=torch.int32)
    compact_kv(KvPools.of(pools), slots, path, counts)
    for pool, old in zip(pools, before, strict=True):
        expected = old.clone()
        for request, rows in enumerate(paths):
            for place, row in enumerate(rows):
                expected[slots[request, place]] = old[slots[request, row]]
        assert torch.equal(pool, expected)


@pytest.mark.parametrize(("path", "accepted"), [([0, 1, 900, -7], 1), ([0, 2, 3, 4], -1)])
def test_rows_beyond_the_accepted_ones_are_not_read(path: list[int], accepted: int) -> None:
    """A path may hold anything behind its accepted rows."""
    pools = _pools()
    before = [pool.clone() for pool in pools]
    counts = torch.tensor([accepted], dtype=torch.int32)
    compact_kv(KvPools.of(pools), _slots(1), torch.tensor([path], dtype=torch.int32), counts)
    assert all(torch.equal(pool, old) for pool, old in zip(pools, before, strict=True))


@pytest.mark.parametrize(
    ("tensors", "word"),
    [
        (list, "no pools"),
        (lambda: [*_pools(1), *_pools(1, row=(2, 4))], "one call each"),
        (lambda: _pools(row=(1, 3)), "multiples of 16"),
        (lambda: [pool[:, :, 1:5] for pool in _pools()], "one row after the other"),
        (lambda: [torch.zeros(1025, dtype=torch.int8)[1:].view(64, 16)], "multiples of 16"),
    ],
)
def test_pools_that_do_not_fit_are_refused(
    tensors: Callable[[], list[torch.Tensor]], word: str
) -> None:
    with pytest.raises(ValueError, match=word):
        KvPools.of(tensors())


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda s, p, n: (s.flatten(), p, n), "row_slots"),
        (lambda s, p, n: (s[:, :2].contiguous(), p, n), "row_slots"),
        (lambda s, p, n: (s, p.long(), n), "path is"),
        (lambda s, p, n: (s, p, n[:1]), "n_accepted is"),
        (lambda s, p, n: (s.T.contiguous().T, p, n), "contiguous"),
        (lambda s, p, n: (s.to("meta"), p, n), "contiguous on cpu"),
    ],
)
def test_tables_that_do_not_fit_are_refused(change: Callable[..., tuple], word: str) -> None:
    path = torch.tensor([[0, 1, 2], [0, 2, 3]], dtype=torch.int32)
    arguments = change(_slots(2), path, torch.tensor([2, 2], dtype=torch.int32))
    with pytest.raises(ValueError, match=word):
        compact_kv(KvPools.of(_pools()), *arguments)
