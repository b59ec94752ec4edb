"""Bytes and FLOPs that one step must cost at least, per kernel class (paper §3.1).

Counted from shapes, not measured: every weight is read once per pass, however many rows share it;
every state is read once to verify, and read and written once to commit; every cached key and value
is read once. A multiply and an add are two FLOPs. Activations count where a class does nothing
else (`rest`); next to weights they are small.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

from specpilot_cli.engines.reference.config import TargetConfig
from specpilot_cli.schema.step_profile import KernelClassName

if TYPE_CHECKING:
    from specpilot_cli.engines.reference.drafter import Drafter
    from specpilot_cli.engines.reference.model import TargetModel

STATE_BYTES = 4  # recurrent states are float32 whatever the weights are


@dataclass(frozen=True, slots=True)
class StepShape:
    """Average shape of one step.

    `requests` in flight, `rows` verified and `committed` rows replayed per request, `context`
    tokens committed before the step, draft `block` (0 = no drafting).
    """

    requests: float
    rows: float
    committed: float
    context: float
    block: int


@dataclass(frozen=True, slots=True)
class Work:
    """Least traffic in bytes and arithmetic in FLOPs of one class in one step."""

    bytes: float
    flops: float


def step_work(
    target: TargetModel, drafter: Drafter | None, shape: StepShape
) -> dict[KernelClassName, Work]:
    """Work of each class in one step of `shape`; `drafter` only where the step drafts."""
    config = target.config
    item = target.embed_tokens.weight.element_size()
    weights = linear_weights(target.layers)
    head = target.lm_head.weight.numel()
    all_rows = shape.requests * shape.rows
    found: dict[KernelClassName, Work] = {
        "target_gemm": Work(weights * item, 2 * all_rows * weights),
        "head": Work(head * item, 2 * all_rows * head),
        "recurrent": _recurrent(config, shape, item),
        "attention": _attention(config, shape, item),
        "rest": _rest(config, all_rows, item),
    }
    if drafter is not None and shape.block:
        found["drafter"] = _drafter(drafter, shape, item, head)
    return found


def linear_weights(module: nn.Module) -> int:
    """Weights of all linear layers below `module`."""
    return sum(m.weight.numel() for m in module.modules() if isinstance(m, nn.Linear))


def _recurrent(c: TargetConfig, shape: StepShape, item: int) -> Work:
    """Verify reads each state once; commit reads and writes it. WY form of `gdn.tree_scan`."""
    n_layers = c.layer_types.count("linear_attention")
    state = c.n_value_heads * c.key_dim * c.value_dim
    window = c.conv_channels * (c.conv_width - 1)
    n, m = shape.rows, shape.committed
    per_head = (
        4 * n * c.key_dim * c.value_dim  # keys and queries times the state
        + 4 * n * n * c.key_dim  # keys and queries times keys
        + 3 * n * n * c.value_dim  # triangular solve (n² V) and scores times writes (2 n² V)
        + 7 * m * c.key_dim * c.value_dim  # replay: decay, read, rank-one write
    )
    conv = 2 * c.conv_width * c.conv_channels * n
    n_bytes = 3 * (state * STATE_BYTES + window * item)
    flops = c.n_value_heads * per_head + conv
    return Work(shape.requests * n_layers * n_bytes, shape.requests * n_layers * flops)


def _attention(c: TargetConfig, shape: StepShape, item: int) -> Work:
    n_layers = c.layer_types.count("full_attention")
    per_token = 2 * c.n_kv_heads * c.head_dim * item
    read = (shape.context + shape.rows) * per_token
    written = shape.committed * per_token
    flops = 4 * shape.rows * (shape.context + shape.rows) * c.n_heads * c.head_dim
    return Work(shape.requests * n_layers * (read + written), shape.requests * n_layers * flops)


def _rest(c: TargetConfig, rows: float, item: int) -> Work:
    """Norms, gates and residual adds: two passes over the stream per layer, one over the MLP."""
    values = c.n_layers * (4 * c.hidden_size + 3 * c.intermediate_size) + 2 * c.hidden_size
    return Work(rows * values * item, rows * values * 4)


def _drafter(drafter: Drafter, shape: StepShape, item: int, head: int) -> Work:
    """Layers and head once for the block; context keys and values of the rows committed before."""
    c = drafter.config
    layers = linear_weights(drafter.layers)
    key_value = 2 * c.n_kv_heads * c.head_dim
    projection = drafter.fc.weight.numel()
    selector = drafter.candidate_selector.hidden_projection.weight.numel()
    length = shape.block - 1
    pairs = length * c.top_k * c.top_k * c.selector_rank
    gathered = 2 * length * c.top_k * c.selector_rank
    context = c.n_layers * key_value * shape.context
    new_rows = projection + c.n_layers * c.hidden_size * key_value
    weights = layers + projection + selector + head
    n_bytes = (weights + shape.requests * (context + gathered)) * item
    flops = (
        2
        * shape.requests
        * (
            shape.block * layers
            + length * (head + selector)
            + pairs
            + shape.committed * new_rows
            + 2 * shape.block * (shape.context + shape.block) * c.n_layers * c.n_heads * c.head_dim
        )
    )
    return Work(n_bytes, flops)
