"""Dense recordings: the target's greedy outputs, and a drafter lattice at every output position.

The drafter reads only features of committed tokens, so what it would have drafted at any output
position follows from the finished output: one decode without speculation gives the features, and
the lattices of all positions are then drafted in batches. Trajectory replay on such a recording
sees what a live server with any tree would have seen, up to rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from specpilot_cli import __version__
from specpilot_cli.engines.base import GenerateRequest
from specpilot_cli.engines.reference.scheduler import DEFAULT_MAX_RUNNING
from specpilot_cli.engines.reference.spec import EngineResult, SpecConfig
from specpilot_cli.errors import InputError
from specpilot_cli.schema.lattice import (
    LatticeMetadata,
    LatticeRecording,
    LatticeRequest,
    join_ids,
)
from specpilot_cli.schema.outputs import OutputRecord
from specpilot_cli.schema.prompts import Prompt
from specpilot_cli.ui import Reporter, SilentReporter
from specpilot_kernels.trees import chain, edge_log_probs

if TYPE_CHECKING:
    from specpilot_cli.engines.reference.engine import ReferenceEngine

# Full-vocabulary logits of one batch of anchors: 2^24 float32 are 64 MiB.
_LOGITS_PER_BATCH = 1 << 24
_MAX_ANCHORS = 64


@dataclass(frozen=True, slots=True)
class Recorded:
    """A dense recording and the same outputs as records, in the order of the prompts."""

    recording: LatticeRecording
    outputs: list[OutputRecord]


def record_dense(
    engine: ReferenceEngine,
    prompts: Sequence[Prompt],
    block: int,
    *,
    concurrency: int = DEFAULT_MAX_RUNNING,
    reporter: Reporter = SilentReporter(),
) -> Recorded:
    """Decode `prompts` greedily without speculation and draft a lattice at every output position.

    `block` counts the anchor: lattices have `block - 1` positions. Raises `InputError` if the
    engine has no drafter, the prompts are empty or repeat an id, or a prompt does not fit.
    """
    if engine.drafter is None:
        raise InputError("recording lattices needs a drafter", hint="give --drafter DIR")
    if not prompts:
        raise InputError(
            "there is no prompt to record", hint="give --prompts FILE with prompts in it"
        )
    if block < 2:
        raise InputError(
            f"block must be at least 2, got {block}",
            hint="a block of B holds the anchor and B - 1 drafted positions",
        )
    engine.check_block(block)
    results = _decode(engine, prompts, concurrency, reporter)
    parts = []
    for index, result in enumerate(results):
        parts.append(_lattices(engine, result, block))
        reporter.progress("drafting lattices", index + 1, len(results))
    return Recorded(
        recording=_assemble(engine, prompts, results, parts, block),
        outputs=[_output(prompt, result) for prompt, result in zip(prompts, results, strict=True)],
    )


def _decode(
    engine: ReferenceEngine, prompts: Sequence[Prompt], concurrency: int, reporter: Reporter
) -> list[EngineResult]:
    requests = [
        GenerateRequest(p.request_id, engine.encode(p.text), p.max_new_tokens) for p in prompts
    ]
    done = 0

    def count(_result: EngineResult) -> None:
        nonlocal done
        done += 1
        reporter.progress("greedy outputs", done, len(requests))

    return engine.generate(
        requests,
        concurrency=concurrency,
        spec=SpecConfig(mode="ar"),
        keep_features=True,
        on_done=count,
    )


@torch.inference_mode()
def _lattices(
    engine: ReferenceEngine, result: EngineResult, block: int
) -> dict[str, npt.NDArray[Any]]:
    """Lattices of one request at output positions 0 .. n - 2, in the recording's dtypes."""
    drafter = engine.drafter
    assert drafter is not None  # checked by the caller
    n_anchors = len(result.output_ids) - 1
    if n_anchors == 0:  # ended with its first token: nothing was left to draft
        return _no_lattices(block - 1, drafter.config.top_k)
    first = len(result.prompt_ids)
    per_logit = (block - 1) * engine.vocab_size
    batch = max(1, min(_MAX_ANCHORS, _LOGITS_PER_BATCH // per_logit))
    chunks: list[dict[str, npt.NDArray[Any]]] = []
    for start in range(0, n_anchors, batch):
        positions = torch.arange(first + start, first + min(start + batch, n_anchors))
        anchors = torch.tensor(result.output_ids[start : start + len(positions)], dtype=torch.long)
        drafted = drafter.dense_lattices(result.features, anchors, positions, block=block)
        edge = edge_log_probs(drafted.scores.numpy())
        ids = drafted.candidate_ids.numpy().astype(np.int32)
        chunks.append(
            {
                "candidate_ids": ids,
                "edge": edge,
                "unary": drafted.unary.numpy(),
                "unary_logsumexp": drafted.unary_logsumexp.numpy(),
                "stock_choice": _stock_choice(ids, edge),
            }
        )
    return {name: np.concatenate([chunk[name] for chunk in chunks]) for name in chunks[0]}


def _no_lattices(length: int, top_k: int) -> dict[str, npt.NDArray[Any]]:
    return {
        "candidate_ids": np.empty((0, length, top_k), dtype=np.int32),
        "edge": np.empty((0, length, top_k, top_k), dtype=np.float32),
        "unary": np.empty((0, length, top_k), dtype=np.float32),
        "unary_logsumexp": np.empty((0, length), dtype=np.float32),
        "stock_choice": np.empty((0, length), dtype=np.int32),
    }


def _stock_choice(
    candidate_ids: npt.NDArray[np.int32], edge: npt.NDArray[np.float32]
) -> npt.NDArray[np.int32]:
    tokens = np.empty(candidate_ids.shape[:2], dtype=np.int32)
    for step in range(len(tokens)):
        tokens[step] = chain(candidate_ids[step], edge[step]).token
    return tokens


def _assemble(
    engine: ReferenceEngine,
    prompts: Sequence[Prompt],
    results: Sequence[EngineResult],
    parts: Sequence[dict[str, npt.NDArray[Any]]],
    block: int,
) -> LatticeRecording:
    hashes = engine.hashes
    assert hashes["target"] is not None
    assert hashes["drafter"] is not None
    counts = [len(part["candidate_ids"]) for part in parts]
    prompt_ids, prompt_offsets = join_ids(result.prompt_ids for result in results)
    output_ids, output_offsets = join_ids(result.output_ids for result in results)
    return LatticeRecording(
        metadata=LatticeMetadata(
            mode="dense",
            block=block,
            engine=f"specpilot-reference {__version__}",
            requests=[
                LatticeRequest(request_id=p.request_id, benchmark=p.benchmark) for p in prompts
            ],
            target_sha256=hashes["target"],
            drafter_sha256=hashes["drafter"],
        ),
        prompt_ids=prompt_ids,
        prompt_offsets=prompt_offsets,
        output_ids=output_ids,
        output_offsets=output_offsets,
        step_request=np.repeat(np.arange(len(counts), dtype=np.int32), counts),
        step_position=np.concatenate([np.arange(count, dtype=np.int64) for count in counts]),
        **{name: np.concatenate([part[name] for part in parts]) for name in parts[0]},
    )


def _output(prompt: Prompt, result: EngineResult) -> OutputRecord:
    return OutputRecord(
        request_id=prompt.request_id,
        benchmark=prompt.benchmark,
        prompt_ids=result.prompt_ids,
        output_ids=result.output_ids,
        finish_reason=result.finish_reason["type"],
        max_new_tokens=prompt.max_new_tokens,
        verify_steps=None,
    )
