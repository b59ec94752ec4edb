"""Who is served when: interleaved order that cancels drift.

Two systems on one device never work at the same moment, so a request is served by one and right
after by the other. Whatever drifts meanwhile (clock, temperature, other load) favours the first
or the second place; the order therefore alternates from request to request and is swapped in the
next run, and a linear drift leaves the mean log-ratio untouched.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, slots=True)
class Slot:
    """One system serves one block of requests while all other systems wait.

    block: index of the block in its run; position: place in the block's order of systems (0 =
    first); requests: indices into the serving order.
    """

    block: int
    position: int
    system: str
    requests: tuple[int, ...]


def serving_order(benchmarks: Sequence[str]) -> list[int]:
    """Indices of the requests, taken from the benchmarks in turn, so that each spans the run."""
    queues: dict[str, list[int]] = {}
    for index, name in enumerate(benchmarks):
        queues.setdefault(name, []).append(index)
    order: list[int] = []
    for turn in range(max((len(queue) for queue in queues.values()), default=0)):
        order.extend(queue[turn] for queue in queues.values() if turn < len(queue))
    return order


def system_order(systems: Sequence[str], turn: int, *, swapped: bool) -> tuple[str, ...]:
    """Order of the systems at the `turn`-th block of a cell.

    Forward at even turns, backward at odd ones (A B, B A); `swapped` exchanges the two. With
    three or more systems each pair of turns also starts one system later, so that no system keeps
    the middle.
    """
    shift = (turn // 2) % len(systems) if len(systems) > 2 else 0
    rotated = (*systems[shift:], *systems[:shift])
    return rotated[::-1] if (turn % 2 == 1) != swapped else rotated


def run_schedule(
    benchmarks: Sequence[str], systems: Sequence[str], *, run: int, block_requests: int
) -> list[Slot]:
    """All slots of one run, in time order.

    benchmarks: the benchmark of each request, in serving order. With one request per block each
    benchmark alternates on its own, so no benchmark sees one order more often than the other by
    chance. Larger blocks (several requests in flight) mix benchmarks and alternate block by
    block.
    """
    first_seen = {name: index for index, name in enumerate(dict.fromkeys(benchmarks))}
    served: dict[str, int] = {}
    slots: list[Slot] = []
    blocks = _blocks(len(benchmarks), block_requests)
    for index, block in enumerate(blocks):
        turn = index
        if block_requests == 1:
            name = benchmarks[block[0]]
            turn = served.get(name, 0) + first_seen[name]
            served[name] = served.get(name, 0) + 1
        order = system_order(systems, turn, swapped=run % 2 == 1)
        slots.extend(Slot(index, position, name, block) for position, name in enumerate(order))
    return slots


def together(n_requests: int, systems: Sequence[str]) -> list[Slot]:
    """Every system serves all requests at the same time, each on a device of its own."""
    return [Slot(0, 0, name, tuple(range(n_requests))) for name in systems]


def _blocks(n_requests: int, block_requests: int) -> list[tuple[int, ...]]:
    """Even blocks of at most `block_requests`: a last block of a few would run under-filled."""
    n_blocks = max(1, -(-n_requests // block_requests)) if n_requests else 0
    edges = [round(b * n_requests / n_blocks) for b in range(n_blocks + 1)] if n_blocks else [0]
    return [tuple(range(a, b)) for a, b in pairwise(edges)]
