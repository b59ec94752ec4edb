"""Architecture of the demo pair and the Hugging Face config files that describe it."""

from __future__ import annotations

from typing import Any

from specpilot_cli.engines.reference.config import DrafterConfig, TargetConfig

VOCAB, HIDDEN, EOS, MASK, PAD = 2560, 256, 0, 1, 2
LAYER_TYPES = (("linear_attention",) * 3 + ("full_attention",)) * 2
CAPTURE = (1, 3, 6)
TRAINED_BLOCK, WIDE_BLOCK = 8, 16
MAX_POSITIONS = 4096

TARGET = TargetConfig(
    vocab_size=VOCAB,
    hidden_size=HIDDEN,
    intermediate_size=256,
    layer_types=LAYER_TYPES,
    rms_norm_eps=1e-6,
    tie_word_embeddings=True,
    eos_token_id=EOS,
    max_positions=MAX_POSITIONS,
    n_heads=4,
    n_kv_heads=1,
    head_dim=64,
    rotary_dim=16,
    rope_theta=1e6,
    n_key_heads=2,
    n_value_heads=2,
    key_dim=64,
    value_dim=64,
    conv_width=4,
)

DRAFTER = DrafterConfig(
    vocab_size=VOCAB,
    hidden_size=HIDDEN,
    intermediate_size=128,
    n_layers=2,
    n_heads=2,
    n_kv_heads=1,
    head_dim=64,
    rms_norm_eps=1e-6,
    rope_theta=1e4,
    block_size=TRAINED_BLOCK,
    mask_token_id=MASK,
    target_layer_ids=CAPTURE,
    selector_rank=24,
    top_k=16,
    conv_group_size=16,
    conv_taps=2,
)


def target_json() -> dict[str, Any]:
    """`config.json` of the target: loads in transformers and SGLang (vision part never built)."""
    return {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "language_model_only": True,
        "text_config": _text_json(),
        "vision_config": _vision_json(),
        "tie_word_embeddings": TARGET.tie_word_embeddings,
        "dtype": "bfloat16",
        # ids the text model never meets; inside the vocabulary because loaders check
        "image_token_id": 3,
        "video_token_id": 4,
        "vision_start_token_id": 5,
        "vision_end_token_id": 6,
    }


def _text_json() -> dict[str, Any]:
    c = TARGET
    return {
        "model_type": "qwen3_5_text",
        "vocab_size": c.vocab_size,
        "hidden_size": c.hidden_size,
        "intermediate_size": c.intermediate_size,
        "num_hidden_layers": c.n_layers,
        "num_attention_heads": c.n_heads,
        "num_key_value_heads": c.n_kv_heads,
        "head_dim": c.head_dim,
        "rms_norm_eps": c.rms_norm_eps,
        "hidden_act": "silu",
        "max_position_embeddings": c.max_positions,
        "full_attention_interval": 4,
        "layer_types": list(c.layer_types),
        "linear_conv_kernel_dim": c.conv_width,
        "linear_key_head_dim": c.key_dim,
        "linear_value_head_dim": c.value_dim,
        "linear_num_key_heads": c.n_key_heads,
        "linear_num_value_heads": c.n_value_heads,
        "attn_output_gate": True,
        "attention_bias": False,
        "mamba_ssm_dtype": "float32",
        "partial_rotary_factor": 0.25,
        "tie_word_embeddings": c.tie_word_embeddings,
        "dtype": "bfloat16",
        "eos_token_id": EOS,
        "bos_token_id": None,
        "pad_token_id": PAD,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": c.rope_theta,
            "partial_rotary_factor": 0.25,
            "mrope_section": [3, 3, 2],
            "mrope_interleaved": True,
        },
    }


def _vision_json() -> dict[str, Any]:
    # SGLang's loader wants a vision section even where language_model_only skips the tower
    return {
        "model_type": "qwen3_5",
        "depth": 1,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_heads": 2,
        "out_hidden_size": TARGET.hidden_size,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "in_channels": 3,
        "num_position_embeddings": 16,
        "deepstack_visual_indexes": [],
    }


def drafter_json() -> dict[str, Any]:
    """`config.json` of the DFlash2 drafter, in the public checkpoints' keys."""
    c = DRAFTER
    return {
        "architectures": ["DFlash2DraftModel"],
        "model_type": "qwen3",
        "vocab_size": c.vocab_size,
        "hidden_size": c.hidden_size,
        "intermediate_size": c.intermediate_size,
        "num_hidden_layers": c.n_layers,
        "num_attention_heads": c.n_heads,
        "num_key_value_heads": c.n_kv_heads,
        "head_dim": c.head_dim,
        "rms_norm_eps": c.rms_norm_eps,
        "hidden_act": "silu",
        "rope_theta": c.rope_theta,
        "max_position_embeddings": MAX_POSITIONS,
        "attention_bias": False,
        "is_causal": False,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        "eos_token_id": EOS,
        "block_size": c.block_size,
        "num_target_layers": TARGET.n_layers,
        "dflash_config": {
            "block_size": c.block_size,
            "mask_token_id": c.mask_token_id,
            "target_layer_ids": list(c.target_layer_ids),
            "num_target_layers": TARGET.n_layers,
            "selector_rank": c.selector_rank,
            "selector_top_k": c.top_k,
            "conv_group_size": c.conv_group_size,
            "conv_kernel_size": c.conv_taps,
        },
    }
