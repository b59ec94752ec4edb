"""SGLang plugin for tests: the places where stock DFLASH and DSPARK assume a GPU, made for a CPU.

The hooks change where code runs, not what it computes: the draft model, the selector, the verify
pass and the acceptance are SGLang's own.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable
from typing import Any

import torch

_SCHEDULER = "sglang.srt.managers.scheduler"
IN_PROCESS = "CPU_ENGINE_IN_PROCESS"
"""Set where one process is a whole server: see `in_process`."""


def register() -> None:
    """Entry point `sglang.srt.plugins`; SGLang calls it in each of its processes."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    from sglang.srt.server_args import add_draft_attention_backend_choices

    add_draft_attention_backend_choices(["torch_native"])
    for algorithm in ("dflash", "dspark"):
        HookRegistry.register(
            f"sglang.srt.arg_groups.speculative_hook._handle_{algorithm}",
            _resolve,
            HookType.REPLACE,
        )
    HookRegistry.register(
        "sglang.srt.arg_groups.mamba_hook._platform_supports_mamba_cache_extra_buffer",
        _yes,
        HookType.REPLACE,
    )
    in_child = multiprocessing.parent_process() is not None or IN_PROCESS in os.environ
    if not in_child or _SCHEDULER not in sys.modules:
        return  # SGLang imports the modules of all hooks, seconds lost where no model runs
    torch.Tensor.record_stream = _record_stream(torch.Tensor.record_stream)  # type: ignore[method-assign]
    HookRegistry.register(
        "sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend.forward_extend",
        _extend_lengths,
        HookType.AROUND,
    )
    HookRegistry.register(
        "sglang.srt.models.dflash.DFlashAttention.__init__", _without_fused_norm, HookType.AFTER
    )
    HookRegistry.register(
        "sglang.kernels.ops.attention.fla.layernorm_gated.RMSNorm.forward",
        _gated_norm,
        HookType.REPLACE,
    )
    HookRegistry.register(
        "sglang.srt.models.dflash.DFlashDraftModel.forward", _own_type, HookType.AROUND
    )
    HookRegistry.register(
        "sglang.srt.models.dspark.DSparkDraftMixin._build_fused_kv_write_bundle",
        _no_fused_write,
        HookType.REPLACE,
    )


def _yes() -> bool:
    """A prefix cache of recurrent states on the way is served, if prefills are short enough."""
    return True


def _no_fused_write(_model: Any, _pool: Any) -> None:
    """The fused write of DSPARK's context into the KV cache is a Triton kernel as well."""


def _resolve(server_args: Any) -> None:
    """`_handle_dflash` and `_handle_dspark` without their check of the device."""
    from sglang.srt.arg_groups.overrides import declare_resolution

    declare_resolution(
        server_args,
        "cpu_engine",
        speculative_num_steps=1,
        speculative_eagle_topk=1,
        speculative_num_draft_tokens=server_args.speculative_num_draft_tokens or 8,
        speculative_draft_attention_backend="torch_native",
        disable_overlap_schedule=True,
    )


def _extend_lengths(
    original: Callable[..., torch.Tensor], backend: Any, *args: Any, **kwargs: Any
) -> torch.Tensor:
    """Give a verify pass the lengths that `torch_native` knows only from prefills."""
    batch = kwargs.get("forward_batch") or args[4]
    if not batch.forward_mode.is_target_verify():
        return original(backend, *args, **kwargs)
    saved = (batch.seq_lens, batch.extend_prefix_lens, batch.extend_seq_lens)
    width = batch.spec_info.draft_token_num
    batch.extend_prefix_lens = batch.seq_lens
    batch.extend_seq_lens = torch.full_like(batch.seq_lens, width)
    batch.seq_lens = batch.seq_lens + width
    try:
        return original(backend, *args, **kwargs)
    finally:
        batch.seq_lens, batch.extend_prefix_lens, batch.extend_seq_lens = saved


def _without_fused_norm(_result: None, attention: Any, *_args: Any, **_kwargs: Any) -> None:
    """The fused norm and rotation is a Triton kernel; SGLang's own PyTorch path is the other."""
    attention.use_table_qk_norm_rope = False


def _gated_norm(norm: Any, x: torch.Tensor, z: torch.Tensor | None = None) -> torch.Tensor:
    """The norm after a recurrent layer, gated last; a Triton kernel without AMX."""
    assert norm.norm_before_gate
    assert norm.group_size is None
    rows = x.float()
    rows = rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + norm.eps)
    rows = rows * norm.weight.float()
    if z is not None:
        rows = rows * torch.nn.functional.silu(z.float())
    return rows.to(x.dtype)


def _own_type(original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
    """A pass without a graph gets its embeddings in BF16, whatever the model's type is."""
    if kwargs.get("input_embeds") is not None:
        kwargs["input_embeds"] = kwargs["input_embeds"].to(next(model.parameters()).dtype)
    return original(model, *args, **kwargs)


def _record_stream(original: Callable[..., None]) -> Callable[..., None]:
    def record_stream(tensor: torch.Tensor, stream: Any) -> None:
        if tensor.is_cuda:
            original(tensor, stream)

    return record_stream
