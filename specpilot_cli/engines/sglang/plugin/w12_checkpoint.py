"""A folder that `convert-w12` wrote, as SGLang's loaders read it: BF16 tensors, decoded one by one.

Each tensor is compared with its checksum, decoded exactly and handed on under the source's name;
the loaders shard and merge it like any other. A few tensors are decoded ahead in threads.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import torch
from transformers.utils.hub import cached_file

from specpilot_cli.engines.sglang.plugin.w12_facts import FACTS
from specpilot_kernels.integrations.w12_tensors import holds_records, open_tensors
from specpilot_kernels.w12.manifest import MANIFEST_NAME, W12FolderError

ITERATORS: Final = (
    "safetensors_weights_iterator",
    "buffered_multi_thread_safetensors_weights_iterator",
)
"""Functions of SGLang's `model_loader.weight_utils` that read safetensors shards."""

_FORMATS: Final = ("auto", "safetensors")

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


def check_load_format(load_config: Any) -> None:
    """Raise W12FolderError for a way of loading that does not go through `ITERATORS`."""
    given = str(getattr(load_config.load_format, "value", load_config.load_format))
    if given not in _FORMATS:
        raise W12FolderError(
            f"a W12 folder is read with --load-format {' or '.join(_FORMATS)}, not {given}"
        )


def fetch_manifest(model_config: Any, load_config: Any) -> None:
    """Put the manifest of a model on the Hub beside its shards: SGLang fetches only those."""
    if not Path(model_config.model_path).is_dir():
        cached_file(
            model_config.model_path,
            MANIFEST_NAME,
            revision=model_config.revision,
            cache_dir=load_config.download_dir,
            _raise_exceptions_for_missing_entries=False,
        )


def _decoded(shards: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
    tensors = open_tensors(shards)
    waiting: deque[tuple[str, Future[torch.Tensor]]] = deque()
    pool = ThreadPoolExecutor(_AHEAD, thread_name_prefix="w12-decode")
    try:
        FACTS.decoded += len(tensors)
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
