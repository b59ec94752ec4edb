"""Verify and commit of a case on the GPU, into poisoned memory."""

from __future__ import annotations

from typing import Any

import torch
from gdn_cases import Case
from torch import Tensor

from specpilot_kernels.tree_verify.commit import GdnCommit
from specpilot_kernels.tree_verify.records import ReplayRecord
from specpilot_kernels.tree_verify.verify import gdn_tree_verify


def options_of(method: str) -> dict[str, Any]:
    """Of `gdn_tree_verify`: "direct" is the other form of WY verify."""
    return {"method": "wy", "form": "direct"} if method == "direct" else {"method": method}


def run(case: Case, method: str, **options: Any) -> tuple[Tensor, ReplayRecord]:
    """Outputs [requests, R, Hv, V] and the record, from poisoned memory."""
    requests, rows = case.trees.parent.shape
    record = ReplayRecord.allocate(case.shape, requests, rows, "cuda")
    for tensor in (record.kv, record.k_scale, record.g, record.beta, record.mixed):
        tensor.fill_(torch.nan)
    heads = (case.shape.value_heads, case.shape.value_dim)
    out = torch.full((requests * rows, *heads), torch.nan, dtype=torch.bfloat16, device="cuda")
    gdn_tree_verify(
        case.mixed, case.a, case.b, case.weights, case.states, case.windows, case.slot, case.trees,
        record, out=out, **options_of(method), **options,
    )  # fmt: skip
    return out.view(requests, rows, *heads), record


def accepted(paths: list[list[int]], length: int = 20) -> tuple[Tensor, Tensor]:
    """Padded paths and how many rows besides the anchor, as the acceptance kernel gives them."""
    length = max(length, *map(len, paths))
    padded = [path + [-1] * (length - len(path)) for path in paths]
    counts = [len(path) - 1 for path in paths]
    return tuple(torch.tensor(x, dtype=torch.int32, device="cuda") for x in (padded, counts))  # type: ignore[return-value]


def commit(case: Case, record: ReplayRecord, paths: list[list[int]]) -> None:
    """Replay each request's path in place."""
    GdnCommit([record], [case.states], [case.windows])(case.slot, *accepted(paths))
