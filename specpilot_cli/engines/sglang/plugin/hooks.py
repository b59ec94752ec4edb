"""What the plugin uses of SGLang's insides, pinned by signature, and the check of it.

Every function that is hooked, overridden or relied on is listed with its parameters. They are read
from the source text, so nothing of SGLang is imported to find out, and a test reads the wheels of
all supported versions with the same function. One difference refuses the whole configuration.
"""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

FIRST, LAST = (0, 5, 20), (0, 5, 23)
SUPPORTED: Final = "0.5.20 to 0.5.23"

SourceOf = Callable[[str], str | None]
"""Path inside the distribution, such as "sglang/srt/server_args.py" -> its text, None if absent."""


@dataclass(frozen=True, slots=True)
class Hook:
    """One place in SGLang.

    mechanism: what needs it; "status" is needed by all.
    target: "module:Name" or "module:Class.method".
    signature: parameters as `signature_of` writes them; None for a class or another name of a
        module, which must only be there.
    since: the first version in which it is used.
    """

    mechanism: Literal["status", "w12", "recorder", "tree"]
    target: str
    signature: str | None = None
    since: tuple[int, ...] = FIRST

    @property
    def path(self) -> str:
        """The target as SGLang's `HookRegistry` wants it."""
        return self.target.replace(":", ".")


_DFLASH = "sglang.srt.speculative.dflash_worker_v2"
_DFLASH_MODEL = "sglang.srt.models.dflash"
_DSPARK = "sglang.srt.speculative.dspark_components"

STATUS: Final = Hook(
    "status", "sglang.srt.managers.scheduler:Scheduler.get_internal_state", "(self, recv_req)"
)

_BASE = "sglang.srt.layers.quantization.base_config"
_STOCK = "sglang.srt.layers.quantization.unquant"
_WEIGHTS = "sglang.srt.model_loader.weight_utils"
_CREATE = (
    "(self, layer, input_size_per_partition, output_partition_sizes, input_size, output_size, "
    "params_dtype, **extra_weight_attrs)"
)
_QWEN = "sglang.srt.models.qwen3_5:Qwen3_5GatedDeltaNet"
_READ = "disable_mmap=, prefetch=, prefetch_num_threads=, drop_cache_after_load="
_SPEC = "sglang.srt.speculative"
_CACHE = "sglang.srt.mem_cache"
_ATTENTION = "sglang.srt.layers.attention"
_BATCH = "(self, batch, on_publish=, grammar_barrier=, pp_proxy_tensors=)"
_TREE_SINCE = (0, 5, 23)


def _tree(target: str, signature: str | None = None) -> Hook:
    return Hook("tree", target, signature, since=_TREE_SINCE)


HOOKS: Final[tuple[Hook, ...]] = (
    STATUS,
    Hook("status", "sglang.srt.plugins.hook_registry:HookRegistry.register",
         "(cls, target, hook, hook_type=, *, source=)"),
    Hook("status", "sglang.srt.plugins.hook_registry:HookType"),
    Hook("status", "sglang.srt.managers.io_struct:GetInternalStateReqOutput"),
    # Registration of the quantization method.
    Hook("w12", "sglang.srt.arg_groups.choices:add_quantization_method_choices"),
    Hook("w12", "sglang.srt.layers.quantization:QUANTIZATION_METHODS"),
    Hook("w12", "sglang.srt.layers.quantization:BASE_QUANTIZATION_METHODS"),
    Hook("w12", "sglang.srt.layers.quantization:CPU_QUANTIZATION_METHODS"),
    # What it derives from, and the stock methods that it calls.
    Hook("w12", f"{_BASE}:QuantizationConfig.__init__", "(self)"),
    Hook("w12", f"{_BASE}:QuantizationConfig.get_config_filenames", "()"),
    Hook("w12", f"{_BASE}:QuantizationConfig.from_config", "(cls, config)"),
    Hook("w12", f"{_BASE}:QuantizationConfig.get_quant_method", "(self, layer, prefix)"),
    Hook("w12", f"{_BASE}:QuantizeMethodBase.process_weights_after_loading", "(self, layer)"),
    Hook("w12", f"{_BASE}:LinearMethodBase.create_weights", _CREATE),
    Hook("w12", f"{_BASE}:LinearMethodBase.apply", "(self, layer, x, bias=)"),
    *(
        Hook("w12", f"{_STOCK}:{method}.{name}", signature)
        for method in ("UnquantizedEmbeddingMethod", "UnquantizedLinearMethod")
        for name, signature in (
            ("create_weights", _CREATE),
            ("apply", "(self, layer, x, bias=)"),
        )
    ),
    Hook("w12", f"{_STOCK}:UnquantizedLinearMethod.process_weights_after_loading",
         "(self, layer)"),
    # How layers ask for a method, and how the head's is called.
    Hook("w12", "sglang.srt.layers.linear:LinearBase.__init__",
         "(self, input_size, output_size, skip_bias_add=, params_dtype=, quant_config=, prefix=)"),
    Hook("w12", "sglang.srt.layers.vocab_parallel_embedding:ParallelLMHead"),
    Hook("w12", "sglang.srt.layers.logits_processor:should_apply_lm_head_quant_method",
         "(lm_head, quant_method)"),
    # Hooked: what is called before a model is built, and what reads its files.
    Hook("w12", "sglang.srt.model_loader.loader:_get_quantization_config",
         "(model_config, load_config)"),
    Hook("w12", f"{_WEIGHTS}:safetensors_weights_iterator", f"(hf_weights_files, {_READ})"),
    Hook("w12", f"{_WEIGHTS}:buffered_multi_thread_safetensors_weights_iterator",
         f"(hf_weights_files, max_workers, {_READ})"),
    Hook("w12", "sglang.srt.model_executor.model_runner:ModelRunner.load_model", "(self)"),
    Hook("w12", f"{_STOCK}:UnquantizedEmbeddingMethod.embedding", "(self, layer, input_)"),
    # Built as without a configuration; see `w12_models`.
    Hook("w12", "sglang.srt.models.muse_glimmer:MuseGlimmerAttention.__init__",
         "(self, config, layer_id, quant_config=, prefix=)"),
    Hook("w12", "sglang.srt.utils.common:is_cpu", "()"),
    # Its two projections become one weight; see `w12_models`. Not with adapters.
    Hook("w12", f"{_QWEN}.__init__",
         "(self, config, layer_id, quant_config=, alt_stream=, prefix=)"),
    Hook("w12", f"{_QWEN}._forward_input_proj", "(self, hidden_states)"),
    Hook("w12", "sglang.srt.layers.linear:ColumnParallelLinear.forward", "(self, input_)"),
    Hook("w12", "sglang.srt.runtime_context:get_lora", "()"),
    # Asked whether prompts and answers share the GPU's multiprocessors.
    Hook("w12", "sglang.srt.runtime_context:get_disagg", "()"),
    # Their `forward` is replaced where they feed W12 layers; see `w12_chained`.
    Hook("w12", "sglang.srt.layers.layernorm:RMSNorm.forward_cuda",
         "(self, x, residual=, post_residual_addition=, quant_linear=)"),
    Hook("w12", "sglang.srt.layers.layernorm:RMSNorm.__init__",
         "(self, hidden_size, eps=, var_hidden_size=, cast_x_before_out_mul=, fp32_residual=, "
         "has_weight=, weight_dtype=, override_orig_dtype=, x_pad_to_multiple=, force_native=)"),
    Hook("w12", "sglang.srt.layers.layernorm:GemmaRMSNorm.forward_cuda",
         "(self, x, residual=, post_residual_addition=)"),
    Hook("w12", "sglang.kernels.ops.attention.fla.layernorm_gated:RMSNorm.__init__",
         "(self, hidden_size, eps=, group_size=, norm_before_gate=, device=, dtype=, activation=)"),
    Hook("w12", "sglang.kernels.ops.attention.fla.layernorm_gated:RMSNorm.forward",
         "(self, x, z=)"),
    Hook("w12", "sglang.srt.layers.activation:SiluAndMul.forward_cuda", "(self, x)"),
    Hook("w12", "sglang.srt.layers.activation:GeluAndMul.__init__", "(self, approximate=)"),
    Hook("w12", "sglang.srt.layers.activation:GeluAndMul.forward_cuda", "(self, x)"),
    # Asked whether a drafter needs the head.
    Hook("w12", "sglang.srt.runtime_context:get_exec", "()"),
    Hook("w12", "sglang.srt.runtime_context:get_parallel", "()"),
    Hook("w12", "sglang.srt.runtime_context:get_spec", "()"),
    # The recorder: DFLASH's worker and selector, then DSPARK's.
    Hook("recorder", f"{_DFLASH}:DFlashWorkerV2.init_cuda_graphs", "(self)"),
    Hook("recorder", f"{_DFLASH}:DFlashWorkerV2.forward_batch_generation",
         "(self, batch, on_publish=, grammar_barrier=, pp_proxy_tensors=)"),
    Hook("recorder", f"{_DFLASH}:_selector_lattice",
         "(draft_model, pred_hidden, anchor_token_ids)"),
    Hook("recorder", f"{_DFLASH_MODEL}:_project_candidate_logits",
         "(hidden, lm_head, *, num_org, use_quant_head)"),
    Hook("recorder", f"{_DFLASH_MODEL}:_radix_topk", "(scores, k)"),
    Hook("recorder", f"{_DFLASH_MODEL}:DFlash2DraftModel.compute_candidates", "(self, hidden)"),
    Hook("recorder", f"{_DFLASH_MODEL}:DFlash2DraftModel._transform_unary_logits",
         "(self, logits)"),
    Hook("recorder", f"{_DFLASH_MODEL}:CandidateSelector.sample_path",
         "(self, *, candidate_ids, scores, uniforms, temperatures, greedy_mask)"),
    Hook("recorder",
         "sglang.srt.distributed.communication_op:tensor_model_parallel_all_gather",
         "(input_, dim=)"),
    Hook("recorder", "sglang.srt.runtime_context:get_parallel", "()"),
    Hook("recorder", "sglang.srt.runtime_context:get_exec", "()"),
    Hook("recorder", f"{_DSPARK}.dspark_worker_v2:DSparkWorkerV2.init_cuda_graphs", "(self)"),
    Hook("recorder", f"{_DSPARK}.dspark_worker_v2:DSparkWorkerV2.forward_batch_generation",
         "(self, batch, on_publish=, grammar_barrier=, *, pp_proxy_tensors=)", since=(0, 5, 22)),
    Hook("recorder", f"{_DSPARK}.dspark_draft:draft_markov_block",
         "(*, markov_head, base_logits, anchor_tokens, draft_hidden, step_temperatures, noise, "
         "tp_sync, logits_out=, greedy_draft=)", since=(0, 5, 22)),
    Hook("recorder", "sglang.srt.models.dspark:VanillaMarkov.step_bias",
         "(self, prev_tokens, *, hidden_states, state)", since=(0, 5, 22)),
    # Trees. The algorithm, and what is sized for it.
    _tree("sglang.srt.model_executor.forward_batch_info:ForwardMode"),
    _tree("sglang.srt.model_executor.forward_batch_info:CaptureHiddenMode"),
    _tree("sglang.srt.lora.layers:unwrap_lora_layer", "(module)"),
    _tree(f"{_SPEC}.spec_utils:draft_tp_context", "(layout)"),
    _tree(f"{_SPEC}.ragged_verify:RaggedVerifyMode"),
    _tree(f"{_SPEC}.spec_info:SpeculativeAlgorithm.register",
          "(cls, name, *, supports_overlap=, validate_server_args=, spec_class=)"),
    _tree(f"{_SPEC}.spec_info:SpeculativeAlgorithm.create_future_map",
          "(self, device, req_to_token_pool, needs_cpu_seq_lens=, needs_confidence_relay=)"),
    _tree(f"{_SPEC}.spec_info:create_dummy_verify_input",
          "(spec_algorithm, custom_mask, num_tokens_per_req, is_draft_worker)"),
    _tree(f"{_SPEC}.spec_registry:CustomSpecAlgo.handle_server_args", "(self, server_args)"),
    _tree(f"{_SPEC}.spec_registry:CustomSpecAlgo.resolve_max_speculative_num_draft_tokens",
          "(self, server_args)"),
    _tree(f"{_SPEC}.spec_registry:CustomSpecAlgo.get_num_tokens_per_req_for_target_verify",
          "(self, num_draft_tokens, is_draft_worker)"),
    _tree(f"{_CACHE}.kv_cache_configurator:KVCacheConfigurator._handle_max_mamba_cache",
          "(self, total_rest_memory)"),
    _tree(f"{_CACHE}.kv_cache_configurator:KVCacheConfigurator._build_hybrid_req_pool",
          "(self, *, max_num_reqs, extra_max_context_len)"),
    # Of both workers: what surrounds a step, and what it is made of.
    _tree("sglang.srt.managers.tp_worker:TpModelWorker.forward_batch_generation",
          "(self, batch, forward_batch=, pp_proxy_tensors=, is_verify=, skip_attn_backend_init=, "
          "*, capture_hidden_mode=, return_kv_loc_plan=)"),
    _tree("sglang.srt.managers.utils:GenerationBatchResult"),
    _tree("sglang.srt.model_executor.forward_batch_info:ForwardBatch"),
    _tree(f"{_SPEC}.dflash_info:DFlashVerifyInput.prepare_for_verify",
          "(self, batch, target_worker, *, defer_metadata_init=)"),
    _tree(f"{_SPEC}.dflash_info_v2:DFlashDraftInputV2.prepare_for_decode", "(self, batch)"),
    _tree(f"{_SPEC}.dflash_utils:apply_dflash_verify_logits_adjustments",
          "(*, next_token_logits, sampling_info, draft_token_num)"),
    _tree(f"{_SPEC}.spec_utils:GrammarTree.from_device",
          "(cls, retrieve_next_token, retrieve_next_sibling, draft_token)"),
    _tree(f"{_SPEC}.spec_utils:build_grammar_vocab_mask",
          "(*, reqs, tree, sampling_info, device, barrier)"),
    _tree("sglang.srt.layers.logprob_processor:compute_spec_logprobs",
          "(batch, logits_output, predict, *, accept_index=, chain_stride=)"),
    _tree("sglang.srt.layers.sampler:top_k_top_p_min_p_sampling_from_probs_torch",
          "(probs, top_ks, top_ps, min_ps, need_min_p_sampling, sampling_seed, positions, *, "
          "return_filtered_probs=, max_top_k=)"),
    _tree(f"{_CACHE}.kv_index_translator:KVIndexTranslator.plan_uniform_extend",
          "(self, *, req_pool_indices, seq_lens, seq_lens_cpu, width, positions_out=, "
          "anchor_src=, anchor_out=)"),
    _tree(f"{_CACHE}.kv_loc_plan:KVLocPlan.bind", "(self, batch, reader, *, cols=)"),
    _tree(f"{_CACHE}.kv_loc_plan:KVLocPlan.write_ids", "(self, reader, *, kind=, cols=)"),
    _tree(f"{_CACHE}.memory_pool:KVWriteLoc.for_batch",
          "(cls, forward_batch, *, swa_loc=, full_loc=)"),
    # The target's layers.
    _tree(f"{_CACHE}.memory_pool:HybridReqToTokenPool.mamba2_layer_cache", "(self, layer_id)"),
    _tree(f"{_ATTENTION}.hybrid_attn_backend:HybridAttnBackend._select_backend",
          "(self, forward_mode)"),
    _tree(f"{_ATTENTION}.triton_backend:TritonAttnBackend.forward_extend",
          "(self, q, k, v, layer, forward_batch, save_kv_cache=, sinks=, score_mod=, "
          "aux_tensors=)"),
    _tree(f"{_ATTENTION}.linear.gdn_backend:GDNAttnBackend.forward_extend",
          "(self, layer, forward_batch, mixed_qkv, a, b, **kwargs)"),
    _tree(f"{_ATTENTION}.hybrid_linear_attn_backend:MambaAttnBackendBase._translate_mamba_indices",
          "(self, mamba_indices)"),
    _tree("sglang.srt.runtime_context:mamba_track_grid", "(tree_page)"),
    # DFLASH's worker and drafter.
    _tree(f"{_DFLASH}:DFlashWorkerV2.__init__",
          "(self, server_args, gpu_id, nccl_port, target_worker)"),
    _tree(f"{_DFLASH}:DFlashWorkerV2.init_attention_backends", "(self)"),
    _tree(f"{_DFLASH}:DFlashWorkerV2.forward_batch_generation", _BATCH),
    _tree(f"{_DFLASH}:DFlashWorkerV2._maybe_build_draft_sampler", "(self)"),
    _tree(f"{_DFLASH}:DFlashWorkerV2._append_target_hidden_to_draft_kv_by_loc",
          "(self, *, target_hidden, cache_loc, positions, cache_loc_2d=, commit_lens=, "
          "extend_lens=)"),
    _tree(f"{_DFLASH}:_resolve_dflash_embedding_module", "(draft_model, target_model)"),
    _tree(f"{_DFLASH}:_selector_lattice", "(draft_model, pred_hidden, anchor_token_ids)"),
    _tree(f"{_DFLASH_MODEL}:_project_candidate_logits",
          "(hidden, lm_head, *, num_org, use_quant_head)"),
    _tree(f"{_DFLASH_MODEL}:_radix_topk", "(scores, k)"),
    _tree(f"{_DFLASH_MODEL}:DFlash2DraftModel.compute_candidates", "(self, hidden)"),
    _tree(f"{_DFLASH_MODEL}:DFlash2DraftModel._transform_unary_logits", "(self, logits)"),
    # DSPARK's.
    _tree(f"{_DSPARK}.dspark_worker_v2:DSparkWorkerV2.__init__",
          "(self, server_args, gpu_id, nccl_port, target_worker, draft_worker_cls=)"),
    _tree(f"{_DSPARK}.dspark_worker_v2:DSparkWorkerV2.init_attention_backends", "(self)"),
    _tree(f"{_DSPARK}.dspark_worker_v2:DSparkWorkerV2.forward_batch_generation",
          "(self, batch, on_publish=, grammar_barrier=, *, pp_proxy_tensors=)"),
    _tree(f"{_DSPARK}.dspark_worker_v2:DSparkWorkerV2._maybe_build_draft_sampler", "(self)"),
    _tree(f"{_DSPARK}.dspark_draft:DraftBlockProposer.draft_block_ids_view",
          "(self, *, bs, device)"),
    _tree(f"{_DSPARK}.dspark_draft:DraftBlockProposer._run_forward",
          "(self, *, batch, draft_input, verify_window, bs, device, embed_module, "
          "draft_sampler=, sampling_info=, anchor_prepared=)"),
    _tree(f"{_DSPARK}.dspark_planner:VerifyWindow"),
    _tree(f"{_DSPARK}.dspark_kv_inject:TargetHiddenKvInjector.ids_for", "(self, plan, *, cols=)"),
    _tree(f"{_DSPARK}.dspark_kv_inject:TargetHiddenKvInjector.inject_target_hidden",
          "(self, *, target_hidden, cache_loc, positions, cache_loc_2d=, commit_lens=, "
          "state_slot=, final_pos=, target_hidden_is_projected=)"),
    _tree(f"{_SPEC}.ragged_verify:read_ragged_verify_mode", "()"),
)  # fmt: skip


def version_numbers(version: str) -> tuple[int, ...]:
    """(0, 5, 23) of "0.5.23" or "0.5.23.post1"; () if it has no such form."""
    numbers = re.match(r"(\d+)\.(\d+)\.(\d+)", version)
    return tuple(map(int, numbers.groups())) if numbers else ()


def check_version(version: str) -> str | None:
    """Return what is wrong with this SGLang version, or None."""
    if FIRST <= version_numbers(version) <= LAST:
        return None
    return f"SGLang {version} is not supported: the plugin needs {SUPPORTED}"


def check_hooks(hooks: Sequence[Hook], source_of: SourceOf, *, version: str) -> list[str]:
    """Return one sentence for every target that is not as pinned."""
    problems = []
    numbers = version_numbers(version)
    hooks = [hook for hook in hooks if not FIRST <= numbers < hook.since]
    modules = {hook.target.partition(":")[0] for hook in hooks}
    trees = {module: _parse(module, source_of) for module in modules}
    for hook in hooks:
        module, _, names = hook.target.partition(":")
        found: ast.AST | None = trees[module]
        for name in names.split("."):
            found = found and _member(found, name)
        if found is None:
            problems.append(_mismatch(hook, version, "is missing"))
        elif hook.signature is not None:
            given = signature_of(found)
            if given != hook.signature:
                problems.append(_mismatch(hook, version, f"takes {given}, not {hook.signature}"))
    return problems


def _mismatch(hook: Hook, version: str, what: str) -> str:
    return (
        f"`{hook.path}` of SGLang {version} {what}: this version of specpilot does not know it; "
        f"it supports SGLang {SUPPORTED}"
    )


def installed_source(path: str) -> str | None:
    """`SourceOf` of the installed SGLang, without importing it."""
    spec = importlib.util.find_spec("sglang")
    for folder in (spec and spec.submodule_search_locations) or ():
        file = Path(folder).parent / path
        if file.is_file():
            return file.read_text(encoding="utf-8")
    return None


def signature_of(node: ast.AST) -> str:
    """Return "(self, x, bias=, *, scale, **others)": names, kinds and which have defaults.

    Annotations and the defaults themselves are left out. "not a function" for another node.
    """
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return "not a function"
    given = node.args
    plain = [*given.posonlyargs, *given.args]
    required = len(plain) - len(given.defaults)
    words = [arg.arg + "=" * (number >= required) for number, arg in enumerate(plain)]
    if given.posonlyargs:
        words.insert(len(given.posonlyargs), "/")
    if given.vararg or given.kwonlyargs:
        words.append("*" + (given.vararg.arg if given.vararg else ""))
    words += [
        arg.arg + "=" * (default is not None)
        for arg, default in zip(given.kwonlyargs, given.kw_defaults, strict=True)
    ]
    if given.kwarg:
        words.append("**" + given.kwarg.arg)
    return f"({', '.join(words)})"


def _parse(module: str, source_of: SourceOf) -> ast.Module | None:
    base = module.replace(".", "/")
    for path in (f"{base}.py", f"{base}/__init__.py"):
        text = source_of(path)
        if text is not None:
            return ast.parse(text)
    return None


def _member(node: ast.AST, name: str) -> ast.AST | None:
    """The last definition or assignment of `name` in the body of a module or class."""
    found = None
    for child in getattr(node, "body", ()):
        if getattr(child, "name", None) == name or name in _assigned(child):
            found = child
    return found


def _assigned(node: ast.AST) -> set[str]:
    if isinstance(node, ast.Assign):
        targets = node.targets
    elif isinstance(node, ast.AnnAssign):
        targets = [node.target]
    else:
        return set()
    return {target.id for target in targets if isinstance(target, ast.Name)}
