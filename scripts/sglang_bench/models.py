"""config.json files of the models that are measured, for SGLang's dummy-weight loader.

No checkpoint is needed: a server of such a folder fills its weights with random numbers. Sizes are
those of the published configurations; `projections` says which matrices a layer multiplies, so a
test holds them against `specpilot_kernels.w12.shapes`. What does not change the matrices (token
ids, vision towers, rope) is as small as the engine allows. The head counts of the 27B drafter are
a guess, as its configuration is not public.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

Config = dict[str, Any]

SLIDING, FULL, LINEAR = "sliding_attention", "full_attention", "linear_attention"


def qwen_27b(layers: int = 64) -> Config:
    """Qwen3.8-27B: three Gated-DeltaNet layers, then one of full attention."""
    text = {
        "model_type": "qwen3_5_text", "hidden_size": 5120, "intermediate_size": 17408,
        "num_hidden_layers": layers, "num_attention_heads": 24, "num_key_value_heads": 4,
        "head_dim": 256, "vocab_size": 248320, "rms_norm_eps": 1e-6, "hidden_act": "silu",
        "max_position_embeddings": 262144, "full_attention_interval": 4,
        "layer_types": [LINEAR if (i + 1) % 4 else FULL for i in range(layers)],
        "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
        "linear_num_key_heads": 16, "linear_num_value_heads": 48, "attn_output_gate": True,
        "attention_bias": False, "mamba_ssm_dtype": "float32", "partial_rotary_factor": 0.25,
        "tie_word_embeddings": False, "dtype": "bfloat16", "eos_token_id": 248044,
        "bos_token_id": None, "num_experts": 0,
        "rope_parameters": {
            "rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25,
            "mrope_section": [11, 11, 10], "mrope_interleaved": True,
        },
    }  # fmt: skip
    vision = {
        "depth": 1, "hidden_size": 64, "intermediate_size": 64, "num_heads": 2,
        "out_hidden_size": 5120, "patch_size": 16, "spatial_merge_size": 2,
        "temporal_patch_size": 2, "in_channels": 3, "num_position_embeddings": 16,
        "deepstack_visual_indexes": [], "model_type": "qwen3_5",
    }  # fmt: skip
    return {
        "architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5",
        "language_model_only": True, "text_config": text, "vision_config": vision,
        "tie_word_embeddings": False, "dtype": "bfloat16", "image_token_id": 248056,
        "video_token_id": 248057, "vision_start_token_id": 248053, "vision_end_token_id": 248054,
    }  # fmt: skip


def qwen_27b_dflash2(target_layers: int = 64, block: int = 8) -> Config:
    """A DFlash2 drafter for `qwen_27b(target_layers)`: five layers, top 16 of rank 256."""
    step = max(1, (target_layers - 8) // 4)
    taken = [min(target_layers - 2, 5 + i * step) for i in range(5)]
    head = {"block_size": block, "num_target_layers": target_layers}
    return {
        "architectures": ["DFlash2DraftModel"], "model_type": "qwen3", "hidden_size": 5120,
        "intermediate_size": 17408, "num_hidden_layers": 5, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 248320, "rms_norm_eps": 1e-6,
        "max_position_embeddings": 262144, "rope_theta": 1e7, "hidden_act": "silu",
        "torch_dtype": "bfloat16", "tie_word_embeddings": False, "attention_bias": False,
        "eos_token_id": 248044, **head,
        "dflash_config": {
            "selector_rank": 256, "selector_top_k": 16, "target_layer_ids": taken,
            "mask_token_id": 248070, **head,
        },
    }  # fmt: skip


def muse_30b(layers: int = 52) -> Config:
    """Muse-Glimmer-30B, text part: a gate on the attention output, windows on three of four."""
    return {
        "architectures": ["MuseGlimmerForCausalLM"], "model_type": "muse_glimmer",
        "hidden_size": 6656, "intermediate_size": 19968, "num_hidden_layers": layers,
        "num_attention_heads": 32, "num_key_value_heads": 2, "head_dim": 128,
        "hidden_act": "silu", "vocab_size": 202048, "max_position_embeddings": 16384,
        "rms_norm_eps": 1e-5, "post_norm_eps": 1e-8, "rope_theta": 500000.0,
        "sliding_window": 2048,
        "layer_types": [SLIDING if (i + 1) % 4 else FULL for i in range(layers)],
        "no_rope_layers": [int((i + 1) % 4 != 0) for i in range(layers)],
        "use_qk_norm": True, "use_attn_output_gate": True, "tie_word_embeddings": False,
        "bos_token_id": 200000, "eos_token_id": 200001, "dtype": "bfloat16",
    }  # fmt: skip


def gemma_12b(layers: int = 48) -> Config:
    """Gemma-4-12B, text part: five layers with a window, then one full with wider heads.

    Written as SGLang holds it, full attention first and the windows' sizes as `swa_...`, since it
    reads the published form only below a vision tower. The head is tied to the embedding table.
    """
    return {
        "architectures": ["Gemma4ForCausalLM"],
        "model_type": "gemma4_text",
        "hidden_size": 3840,
        "intermediate_size": 15360,
        "num_hidden_layers": layers,
        "num_attention_heads": 16,
        "num_key_value_heads": 1,
        "head_dim": 512,
        "v_head_dim": 512,
        "swa_num_key_value_heads": 8,
        "swa_head_dim": 256,
        "swa_v_head_dim": 256,
        "per_layer_config": None,
        "attention_k_eq_v": True,
        "hidden_activation": "gelu_pytorch_tanh",
        "vocab_size": 262144,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-6,
        "sliding_window": 1024,
        "layer_types": [SLIDING if (i + 1) % 6 else FULL for i in range(layers)],
        "hidden_size_per_layer_input": 0,
        "num_kv_shared_layers": 0,
        "enable_moe_block": False,
        "final_logit_softcapping": 30.0,
        "tie_word_embeddings": True,
        "bos_token_id": 2,
        "eos_token_id": 1,
        "pad_token_id": 0,
        "dtype": "bfloat16",
        "rope_parameters": {
            SLIDING: {"rope_type": "default", "rope_theta": 1e4},
            FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
        },
    }


def llama_8b(layers: int = 32) -> Config:
    """Llama-3.1-8B."""
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096,
        "intermediate_size": 14336, "num_hidden_layers": layers, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "hidden_act": "silu", "vocab_size": 128256,
        "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
        "attention_bias": False, "mlp_bias": False, "tie_word_embeddings": False,
        "bos_token_id": 128000, "eos_token_id": 128001, "dtype": "bfloat16",
    }  # fmt: skip


def folders(fewer: int = 24) -> dict[str, Config]:
    """Every folder that the measurements use: name -> config.json."""
    return {
        "qwen-27b": qwen_27b(),
        "qwen-27b-dflash2": qwen_27b_dflash2(),
        "qwen-27b-24l": qwen_27b(fewer),
        "qwen-27b-24l-dflash2": qwen_27b_dflash2(fewer),
        "muse-30b": muse_30b(),
        "gemma-12b": gemma_12b(),
        "llama-8b": llama_8b(),
    }


def write_folders(root: Path, configs: dict[str, Config]) -> None:
    """Write `root/NAME/config.json` for every configuration."""
    for name, config in configs.items():
        (root / name).mkdir(parents=True, exist_ok=True)
        (root / name / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")


def vocabulary(folder: Path) -> int:
    """The vocabulary of a model folder."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return int(config.get("text_config", config)["vocab_size"])


def projections(config: Config) -> dict[str, tuple[int, int]]:
    """[out, in] of a model's matrices as engines fuse them; keys as in `w12.shapes`."""
    text = config.get("text_config", config)
    hidden, wide = text["hidden_size"], text["intermediate_size"]
    found = {
        "gate_up": (2 * wide, hidden),
        "down": (hidden, wide),
        "head": (text["vocab_size"], hidden),
    }
    heads, kv, width = text["num_attention_heads"], text["num_key_value_heads"], text["head_dim"]
    query, qkv = heads * width, (heads + 2 * kv) * width
    if text["model_type"] == "gemma4_text":
        narrow, kv_narrow = text["swa_head_dim"], text["swa_num_key_value_heads"]
        return found | {
            "window_qkv": ((heads + 2 * kv_narrow) * narrow, hidden),
            "window_o": (hidden, heads * narrow),
            "full_qk": ((heads + kv) * width, hidden),  # keys are values; SGLang loads them twice
            "full_o": (hidden, query),
        }
    gated = text.get("attn_output_gate", False)  # Qwen fuses the gate into the query projection
    found |= {"attn_qkv": (qkv + gated * query, hidden), "attn_o": (hidden, query)}
    if text.get("use_attn_output_gate"):
        found["attn_gate"] = (query, hidden)
    if "linear_num_value_heads" in text:
        keys = text["linear_num_key_heads"] * text["linear_key_head_dim"]
        values = text["linear_num_value_heads"] * text["linear_value_head_dim"]
        found |= {"gdn_in": (2 * keys + 2 * values, hidden), "gdn_out": (hidden, values)}
    return found
