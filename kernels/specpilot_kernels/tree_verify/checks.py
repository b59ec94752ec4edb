"""What the tree kernels ask of their tensors, said in words."""

from __future__ import annotations

import torch
from torch import Tensor

from specpilot_kernels.tree_verify.modules import HEAD_DIMS
from specpilot_kernels.tree_verify.records import WIDTH, GdnShape, ReplayRecord, Trees


def shape_of(state_pool: Tensor, conv_pool: Tensor) -> GdnShape:
    """Read a layer's heads off its pools: float32 [slots, Hv, V, K], bfloat16 [slots, C, 3].

    ValueError if they do not belong together, or a kernel cannot read them.
    """
    _require(
        state_pool.dim() == 4 and state_pool.dtype == torch.float32,
        f"the state pool must be float32 [slots, heads, V, K], not {_say(state_pool)}",
    )
    slots, value_heads, value_dim, key_dim = state_pool.shape
    inner = (value_dim * key_dim, key_dim, 1)
    _require(state_pool.stride()[1:] == inner, "the heads of the state pool must be contiguous")
    _require(
        conv_pool.dim() == 3
        and conv_pool.dtype == torch.bfloat16
        and conv_pool.shape[0] == slots
        and conv_pool.shape[2] == WIDTH - 1,
        f"the windows must be bfloat16 [{slots}, channels, {WIDTH - 1}], not {_say(conv_pool)}",
    )
    keys = conv_pool.shape[1] - value_heads * value_dim
    key_heads = keys // (2 * key_dim)
    _require(
        key_heads > 0 and keys == 2 * key_heads * key_dim and value_heads % key_heads == 0,
        f"{conv_pool.shape[1]} channels do not fit {value_heads} value heads of "
        f"{value_dim} x {key_dim}",
    )
    return GdnShape(key_heads, value_heads, key_dim, value_dim)


def check_rows(
    mixed: Tensor,
    a: Tensor,
    b: Tensor,
    slot: Tensor,
    trees: Trees,
    record: ReplayRecord,
    shape: GdnShape,
) -> tuple[int, int]:
    """Return (requests, rows) of a verify pass; ValueError naming the tensor that does not fit."""
    requests, rows = trees.parent.shape
    total = requests * rows
    for name, tensor, width in (
        ("mixed", mixed, shape.channels),
        ("a", a, shape.value_heads),
        ("b", b, shape.value_heads),
    ):
        _require(
            tensor.shape == (total, width)
            and tensor.dtype == torch.bfloat16
            and tensor.stride(1) == 1,
            f"{name} must be bfloat16 [{total}, {width}] with contiguous rows, not {_say(tensor)}",
        )
    _int32("parent", trees.parent, (requests, rows))
    _int32("tap", trees.tap, (requests, rows, WIDTH))
    check_slot(slot, requests)
    check_record(record, shape, requests, rows)
    return requests, rows


def check_layer(
    conv_weight: Tensor, conv_bias: Tensor | None, a_log: Tensor, dt_bias: Tensor, shape: GdnShape
) -> None:
    """ValueError unless a layer's parameters fit."""
    _require(
        conv_weight.shape == (shape.channels, WIDTH)
        and conv_weight.is_contiguous()
        and conv_weight.dtype == torch.bfloat16,
        f"conv_weight must be bfloat16 [{shape.channels}, {WIDTH}], not {_say(conv_weight)}",
    )
    if conv_bias is not None:
        _require(
            conv_bias.shape == (shape.channels,)
            and conv_bias.dtype == torch.bfloat16
            and conv_bias.is_contiguous(),
            f"conv_bias must be bfloat16 [{shape.channels}], not {_say(conv_bias)}",
        )
    for name, tensor, dtypes in (
        ("A_log", a_log, (torch.float32,)),
        ("dt_bias", dt_bias, (torch.float32, torch.bfloat16)),
    ):
        _require(
            tensor.shape == (shape.value_heads,)
            and tensor.dtype in dtypes
            and tensor.is_contiguous(),
            f"{name} must be {' or '.join(str(d) for d in dtypes)} [{shape.value_heads}], "
            f"not {_say(tensor)}",
        )


def check_record(record: ReplayRecord, shape: GdnShape, requests: int, rows: int) -> None:
    """ValueError unless the record has room for `requests` trees of exactly `rows` rows."""
    expected = (
        ("kv", record.kv, shape.keys + shape.values, torch.bfloat16),
        ("k_scale", record.k_scale, shape.key_heads, torch.float32),
        ("g", record.g, shape.value_heads, torch.float32),
        ("beta", record.beta, shape.value_heads, torch.float32),
        ("mixed", record.mixed, shape.channels, torch.bfloat16),
    )
    for name, tensor, width, dtype in expected:
        _require(
            tensor.dim() == 3
            and tensor.shape[0] >= requests
            and tensor.shape[1:] == (rows, width)
            and tensor.dtype == dtype
            and tensor.is_contiguous(),
            f"record.{name} must be {dtype} [at least {requests}, {rows}, {width}], "
            f"not {_say(tensor)}",
        )


def check_slot(slot: Tensor, requests: int, name: str = "slot") -> None:
    """ValueError unless `slot` is int64 [requests]."""
    _require(
        slot.shape == (requests,) and slot.dtype == torch.int64 and slot.is_contiguous(),
        f"{name} must be int64 [{requests}], not {_say(slot)}",
    )


def check_path(path: Tensor, n_accepted: Tensor, requests: int) -> None:
    """ValueError unless path is int32 [requests, any], n_accepted int32 [requests]."""
    _require(
        path.dim() == 2
        and path.shape[0] == requests
        and path.dtype == torch.int32
        and path.is_contiguous(),
        f"path must be int32 [{requests}, length], not {_say(path)}",
    )
    _int32("n_accepted", n_accepted, (requests,))


def check_kernel(shape: GdnShape, *pitched: Tensor, others: tuple[Tensor, ...] = ()) -> None:
    """ValueError if no kernel exists for these heads, or it could not load 16 bytes at once.

    pitched: tensors whose first dimension is strided, too.
    """
    _require(
        shape.key_dim == shape.value_dim and shape.key_dim in HEAD_DIMS,
        f"kernels exist for heads of {' or '.join(map(str, HEAD_DIMS))} squared, "
        f"not {shape.value_dim} x {shape.key_dim}",
    )
    steps = [(t, t.data_ptr() | t.stride(0) * t.element_size()) for t in pitched]
    for tensor, step in [*steps, *((t, t.data_ptr()) for t in others)]:
        _require(
            step % 16 == 0,
            f"{tensor.dtype} {list(tensor.shape)} must have 16-byte aligned rows, "
            f"not {_say(tensor)}",
        )


def _int32(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    _require(
        tensor.shape == shape and tensor.dtype == torch.int32 and tensor.is_contiguous(),
        f"{name} must be int32 {list(shape)}, not {_say(tensor)}",
    )


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def _say(tensor: Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)} with strides {list(tensor.stride())}"
