"""Least bytes and FLOPs of one step per kernel class, from shapes (paper §3.1).

Every weight is read once a pass however many rows share it; a recurrent state is read once to
verify, and read and written once to commit; a cached key and value is read once. A multiply and
an add are two FLOPs. Nothing here is measured.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from specpilot_cli.models.shapes import (
    Projection,
    context_projections,
    draft_extras,
    head,
    projections,
)
from specpilot_cli.schema.model_profile import (
    AttentionShape,
    ExpertsShape,
    ModelProfile,
    RecurrentShape,
)
from specpilot_cli.schema.step_profile import KernelClassName


@dataclass(frozen=True, slots=True)
class StepShape:
    """Average shape of one step.

    `requests` in flight, `rows` verified and `committed` rows per request, `context` tokens
    committed before the step, draft `block` (0 = no drafting). One row without a block is plain
    decoding.
    """

    requests: float = 1
    rows: float = 1
    committed: float = 1
    context: float = 0
    block: int = 0


@dataclass(frozen=True, slots=True)
class Work:
    """Least traffic in bytes and arithmetic in FLOPs of one class in one step."""

    bytes: float
    flops: float

    def __add__(self, other: Work) -> Work:
        return Work(self.bytes + other.bytes, self.flops + other.flops)


_NOTHING = Work(0.0, 0.0)


def step_work(
    target: ModelProfile, drafter: ModelProfile | None, shape: StepShape
) -> dict[KernelClassName, Work]:
    """Work of each class in one step of `shape`; `drafter` only where the step drafts."""
    rows = shape.requests * shape.rows
    item = target.weight_bytes.value
    found: dict[KernelClassName, Work] = {
        "target_gemm": weight_work(projections(target), rows, item),
        "head": weight_work((head(target),), rows, item),
    }
    if target.is_hybrid:
        found["recurrent"] = _recurrent(target, shape)
    found["attention"] = _attention(target, shape)
    found["rest"] = _rest(target, rows)
    if drafter is not None and shape.block:
        found["drafter"] = _draft(drafter, target, shape)
    return found


def weight_work(matrices: Iterable[Projection], rows: float, item: int) -> Work:
    """Reading `matrices` of `item` bytes a weight once for `rows` rows, and their products."""
    work = _NOTHING
    for matrix in matrices:
        work += Work(item * matrix.weights_read(rows), 2 * rows * matrix.weights_per_row)
    return work


def state_bytes(target: ModelProfile) -> int:
    """Bytes of all recurrent states and convolution windows of one request."""
    return sum(
        group.count.value * _state(group.mixer, target.weight_bytes.value)
        for group in target.layers
        if isinstance(group.mixer, RecurrentShape)
    )


def kv_bytes(target: ModelProfile, context: float) -> float:
    """Bytes of keys and values that one request of `context` tokens holds within its windows."""
    return sum(
        group.count.value * _seen(group.mixer, context) * _kv_token(group.mixer, target)
        for group in target.layers
        if isinstance(group.mixer, AttentionShape)
    )


def _state(mixer: RecurrentShape, item: int) -> int:
    heads = mixer.value_heads.value
    state = heads * mixer.key_dim.value * mixer.value_dim.value * mixer.state_bytes.value
    return state + _channels(mixer) * (mixer.conv_width.value - 1) * item


def _channels(mixer: RecurrentShape) -> int:
    keys = 2 * mixer.key_heads.value * mixer.key_dim.value
    return keys + mixer.value_heads.value * mixer.value_dim.value


def _recurrent(target: ModelProfile, shape: StepShape) -> Work:
    """Plain decoding reads and writes each state once; verifying reads it once more."""
    plain = shape.rows == 1 and not shape.block
    flops = 0.0
    for group in target.layers:
        mixer = group.mixer
        if not isinstance(mixer, RecurrentShape):
            continue
        key, value = mixer.key_dim.value, mixer.value_dim.value
        n, m = shape.rows, shape.committed
        # One token costs decay, read, rank-one write and output. A verify pass in its WY form
        # multiplies keys and queries with the state and with the keys, solves a triangle, and
        # applies scores to writes; the accepted rows are then replayed.
        scan = 4 * n * key * value + 4 * n * n * key + 3 * n * n * value
        per_head = 7 * key * value if plain else scan + 7 * m * key * value
        conv = 2 * mixer.conv_width.value * _channels(mixer) * n
        flops += group.count.value * (mixer.value_heads.value * per_head + conv)
    times = 2 if plain else 3
    return Work(shape.requests * times * state_bytes(target), shape.requests * flops)


def _seen(mixer: AttentionShape, context: float) -> float:
    return context if mixer.window is None else min(context, mixer.window.value)


def _kv_token(mixer: AttentionShape, model: ModelProfile) -> int:
    """Bytes of one token's keys and values in one layer; both are cached even if they are one."""
    return 2 * mixer.kv_heads.value * mixer.head_dim.value * model.weight_bytes.value


def _attention(target: ModelProfile, shape: StepShape) -> Work:
    work = _NOTHING
    for group in target.layers:
        mixer = group.mixer
        if isinstance(mixer, AttentionShape):
            seen = _seen(mixer, shape.context) + shape.rows
            moved = (seen + shape.committed) * _kv_token(mixer, target)
            flops = 4 * shape.rows * seen * mixer.heads.value * mixer.head_dim.value
            n = shape.requests * group.count.value
            work += Work(n * moved, n * flops)
    return work


def _rest(target: ModelProfile, rows: float) -> Work:
    """Norms, gates and residual adds: two passes over the stream per layer, one over the MLP."""
    hidden = target.hidden.value
    values = 2 * hidden
    for group in target.layers:
        mlp = group.mlp
        wide = mlp.intermediate.value
        if isinstance(mlp, ExpertsShape):
            shared = mlp.shared_intermediate
            wide = wide * mlp.active.value + (0 if shared is None else shared.value)
        values += group.count.value * (4 * hidden + 3 * wide)
    return Work(rows * values * target.weight_bytes.value, rows * values * 4)


def _draft(drafter: ModelProfile, target: ModelProfile, shape: StepShape) -> Work:
    """One pass over the block, the borrowed head on its open positions, and the context update."""
    item, n = drafter.weight_bytes.value, shape.requests
    block, open_rows = shape.block, shape.block - 1
    layers = weight_work((*projections(drafter), *draft_extras(drafter)), n * block, item)
    borrowed = weight_work((head(target),), n * open_rows, target.weight_bytes.value)
    update = weight_work(context_projections(drafter), n * shape.committed, item)
    # The update's keys and values come from the same matrices as the block's: read once more
    # only as a second pass over them, which is how it runs, outside of the draft pass.
    work = layers + borrowed + update
    for group in drafter.layers:
        mixer = group.mixer
        if isinstance(mixer, AttentionShape):
            seen = _seen(mixer, shape.context)
            flops = 4 * block * (seen + block) * mixer.heads.value * mixer.head_dim.value
            times = n * group.count.value
            work += Work(times * seen * _kv_token(mixer, drafter), times * flops)
    return work + _selector(drafter, open_rows, n)


def _selector(drafter: ModelProfile, open_rows: int, requests: float) -> Work:
    """Edge scores of every pair of candidates; the tables' rows are gathered, not streamed."""
    shape = drafter.drafter
    if shape is None or shape.selector_rank is None or shape.selector_top_k is None:
        return _NOTHING
    rank, k = shape.selector_rank.value, shape.selector_top_k.value
    gathered = 2 * open_rows * k * rank * drafter.weight_bytes.value
    return Work(requests * gathered, requests * 2 * open_rows * k * k * rank)
