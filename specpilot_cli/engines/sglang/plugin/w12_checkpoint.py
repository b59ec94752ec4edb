"""A folder that `convert-w12` wrote, as SGLang's loaders read it: BF16 tensors, decoded one by one.

Each tensor is compared with its checksum, decoded exactly and handed on under the source's name;
the loaders shard and merge it like any other. A few tensors are decoded ahead in threads.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final

import torch

from specpilot_kernels.integrations.w12_tensors import holds_records, open_tensors

ITERATORS: Final = (
    "safetensors_weights_iterator",
    "buffered_multi_thread_safetensors_weights_iterator",
)
"""Functions of SGLang's `model_loader.weight_utils` that read safetensors shards."""

_AHEAD = 4
"""Tensors decoded ahead; so many wait in host memory at most, besides the one being loaded."""


def decoding(
    original: Callable[..., Iterator[tuple[str, torch.Tensor]]],
    hf_weights_files: Sequence[str],
    *args: Any,
    **kwargs: Any,
) -> Iterator[tuple[str, torch.Tensor]]:
    """AROUND one of `ITERATORS`: yield (name, tensor on the CPU) of a W12 folder's shards.

    The files decide: other folders go to the original. W12FolderError names what is damaged.
    """
    if holds_records(hf_weights_files):
        return _decoded(hf_weights_files)
    return original(hf_weights_files, *args, **kwargs)


def _decoded(shards: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
    tensors = open_tensors(shards)
    waiting: deque[tuple[str, Future[torch.Tensor]]] = deque()
    pool = ThreadPoolExecutor(_AHEAD, thread_name_prefix="w12-decode")
    try:
        for name, tensor in tensors.items():
            waiting.append((name, pool.submit(tensor.__getitem__, ...)))
            if len(waiting) > _AHEAD:
                first, ready = waiting.popleft()
                yield first, ready.result()
        while waiting:
            first, ready = waiting.popleft()
            yield first, ready.result()
    finally:
        pool.shutdown(cancel_futures=True)
