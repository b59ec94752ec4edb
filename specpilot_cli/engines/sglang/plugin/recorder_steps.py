"""What DFLASH and DSPARK share: one call of the worker is one step, and who writes it down."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from specpilot_cli.engines.sglang.plugin.recorder_core import Recorder


def record_step(
    recorder: Recorder, original: Callable[..., Any], worker: Any, batch: Any, *args: Any, **kw: Any
) -> Any:
    """Call a worker's `forward_batch_generation` and record the decode steps among the calls."""
    recorded = False
    if not (batch.forward_mode.is_extend() or batch.is_extend_in_batch):
        try:
            recorded = not batch.forward_mode.is_idle() and recorder.begin(batch.seq_lens)
        except Exception as error:  # noqa: BLE001 - a recording never stops a step
            recorder.fail(f"a step could not be recorded: {error!r}")
    # The scheduler may change the batch's list while the result is on its way.
    requests = [request.rid for request in batch.reqs] if recorded else []
    result = original(worker, batch, *args, **kw)
    if recorded:
        try:
            recorder.finish(requests, result.accept_lens)
        except Exception as error:  # noqa: BLE001
            recorder.fail(f"a step could not be recorded: {error!r}")
    return result


def largest_batch(worker: Any) -> int:
    """The most rows that a draft of `worker` can have, padding of CUDA graphs included."""
    from sglang.srt.runtime_context import get_exec

    running = worker.model_runner.max_running_requests
    graphs = get_exec().graph.cuda_graph_config.decode.bs
    return max(int(running or 0), *(int(size) for size in graphs or ()), 1)


def device_of(worker: Any) -> torch.device:
    """Where the worker's tensors are; SGLang names a GPU without its number."""
    name = str(worker.device)
    return (
        torch.device("cuda", torch.cuda.current_device()) if name == "cuda" else torch.device(name)
    )


def writes_here() -> bool:
    """Whether this rank writes: the first of each group of ranks with equal lattices."""
    from sglang.srt.runtime_context import get_parallel

    return int(get_parallel().attn_tp_rank) == 0
