"""Time GPU work by CUDA graphs: several works in turns, each piece one after the other.

A graph's launch takes the host about ten microseconds, which would count where a graph is not much
longer. So the GPU is kept busy until the launch is there, and only then does the clock start.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import cache

import torch

Work = Callable[[], object]

_BUSY_CYCLES = 200_000
"""A tenth of a millisecond: more than launching a graph of some hundred kernels takes."""

_WARM_UP, _REPLAYS = 2, 9


def in_turns(
    works: Mapping[str, Sequence[Work]], replays: int = _REPLAYS, *, warm_up: int = _WARM_UP
) -> dict[str, float]:
    """Median seconds of one piece of each work; see `samples`."""
    found = samples(works, replays, warm_up=warm_up)
    return {name: statistics.median(several) for name, several in found.items()}


def samples(
    works: Mapping[str, Sequence[Work]], replays: int = _REPLAYS, *, warm_up: int = _WARM_UP
) -> dict[str, list[float]]:
    """Seconds of one piece of each work, by replay.

    Each work's pieces are one graph, so they wait for each other as the kernels of a step do; the
    graphs are replayed in turns. The first `warm_up` turns do not count.
    """
    graphs = {name: captured(pieces) for name, pieces in works.items()}
    times: dict[str, list[float]] = {name: [] for name in works}
    for turn in range(warm_up + replays):
        for name, graph in graphs.items():
            seconds = replayed(graph)
            if turn >= warm_up:
                times[name].append(seconds / len(works[name]))
    return times


def replayed(graph: torch.cuda.CUDAGraph) -> float:
    """Seconds of one replay on the GPU, without what its launch takes the host."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(_BUSY_CYCLES)
    begin.record()
    graph.replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


def captured(pieces: Sequence[Work]) -> torch.cuda.CUDAGraph:
    """A graph of the pieces, one after the other; the first runs once before, outside of it."""
    stream = _capture_stream(torch.cuda.current_device())
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    # Not `torch.cuda.graph`, which collects garbage and empties the allocator every time.
    with torch.cuda.stream(stream):
        pieces[0]()
        stream.synchronize()
        graph.capture_begin()
        for piece in pieces:
            piece()
        graph.capture_end()
    return graph


@cache
def _capture_stream(device: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
