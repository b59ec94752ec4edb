"""Tiny models for the real engine: a Qwen3 target and a DFlash2 drafter that fits it a little.

Nothing is trained. The target's head is built from its embeddings so that each of a few
tokens has two likely successors; the random layers, which see the context, choose among them.
Greedy outputs are therefore varied and depend on the whole prompt. The drafter's selector knows
the successors but not the choice, so it is right often enough to exercise acceptance.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from specpilot_cli.io.safetensors_stream import SafetensorsFile, bf16_data, write_safetensors

Array = npt.NDArray[np.float64]

VOCAB, HIDDEN, LAYERS = 2560, 256, 4
BLOCK, TOP_K, RANK = 8, 16, 64
TARGET_LAYER_IDS = (0, 1, 2)
MASK_ID, EOS_ID = 1, 0
LIVELY = range(40, 64)
SUCCESSORS = 2
UNENCODABLE = "model.layers.0.mlp.down_proj"
"""Has more weights of rare exponents than W12 sets apart, so it stays BF16."""

_HEADS, _KV_HEADS, _HEAD_DIM, _INTERMEDIATE = 4, 2, 64, 512
_DRAFT_LAYERS = 2


@dataclass(frozen=True, slots=True)
class TinyPair:
    """Folders of the two checkpoints, both BF16."""

    target: Path
    drafter: Path


def build_tiny_pair(folder: Path, *, tokenizer: Path, seed: int = 3) -> TinyPair:
    """Write target and drafter below `folder`; `tokenizer` is a folder with 2560 tokens or fewer.

    The same seed writes the same bytes.
    """
    rng = np.random.default_rng(seed)
    pair = TinyPair(folder / "target", folder / "drafter")
    embedding = rng.normal(size=(VOCAB, HIDDEN))
    follows = np.zeros((VOCAB, VOCAB), dtype=bool)  # [token, may come next]
    for place in range(len(LIVELY)):  # always onward in a ring, so that no two tokens alternate
        steps = rng.choice(np.arange(1, len(LIVELY) // 2), SUCCESSORS, replace=False)
        follows[LIVELY[place], [LIVELY[(place + step) % len(LIVELY)] for step in steps]] = True
    head = 0.02 * rng.normal(size=(VOCAB, HIDDEN))
    lively = list(LIVELY)
    head[lively] = 0.1 * (follows.T[lively].astype(np.float64) @ embedding)

    target = _decoder(rng, "model.layers", LAYERS)
    target["model.embed_tokens.weight"] = embedding
    target["model.norm.weight"] = np.ones(HIDDEN)
    target["lm_head.weight"] = head
    _with_rare_exponents(rng, target["model.layers.1.mlp.gate_proj.weight"], 6)
    _with_rare_exponents(rng, target[f"{UNENCODABLE}.weight"], 96)
    _write(pair.target, _target_config(), target)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer / name, pair.target / name)

    drafter = _decoder(rng, "layers", _DRAFT_LAYERS)
    drafter["fc.weight"] = _linear(rng, HIDDEN, len(TARGET_LAYER_IDS) * HIDDEN)
    drafter["hidden_norm.weight"] = drafter["norm.weight"] = np.ones(HIDDEN)
    drafter |= _selector(rng, follows, embedding[MASK_ID])
    _write(pair.drafter, _drafter_config(), drafter)
    return pair


def build_dspark_drafter(dflash: Path, folder: Path) -> Path:
    """Write a DSPARK drafter into `folder`: the DFlash2 drafter's layers, and a Markov head.

    The selector's codebooks are such a head, so tokens draw their successors here too.
    """
    with SafetensorsFile(dflash / "model.safetensors") as file:
        weights = {name: bf16_data(file.read_array(name)) for name in file.names}
    for ours, selectors in (("1", "predecessor_codebook"), ("2", "successor_codebook")):
        weights[f"markov_head.markov_w{ours}.weight"] = weights[f"candidate_selector.{selectors}"]
    folder.mkdir(parents=True)
    write_safetensors(
        folder / "model.safetensors",
        {name: data for name, data in weights.items() if not name.startswith("candidate_")},
    )
    config = _drafter_config()
    head = {"markov_rank": RANK, "markov_head_type": "vanilla"}
    own = {key: config["dflash_config"][key] for key in config["dflash_config"] if "sel" not in key}
    config |= {"architectures": ["DSparkDraftModel"], "dflash_config": own | head, **head}
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    return folder


def _linear(rng: np.random.Generator, rows: int, columns: int, scale: float = 1.0) -> Array:
    return rng.normal(scale=scale / np.sqrt(columns), size=(rows, columns))


def _decoder(rng: np.random.Generator, prefix: str, layers: int) -> dict[str, Array]:
    """Random Qwen3 decoder layers whose outputs are small beside the residual stream."""
    weights: dict[str, Array] = {}
    for layer in range(layers):
        name = f"{prefix}.{layer}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{name}.{norm}.weight"] = np.ones(HIDDEN)
        attention = f"{name}.self_attn"
        weights[f"{attention}.q_proj.weight"] = _linear(rng, _HEADS * _HEAD_DIM, HIDDEN)
        weights[f"{attention}.k_proj.weight"] = _linear(rng, _KV_HEADS * _HEAD_DIM, HIDDEN)
        weights[f"{attention}.v_proj.weight"] = _linear(rng, _KV_HEADS * _HEAD_DIM, HIDDEN)
        weights[f"{attention}.o_proj.weight"] = _linear(rng, HIDDEN, _HEADS * _HEAD_DIM, 0.5)
        weights[f"{attention}.q_norm.weight"] = weights[f"{attention}.k_norm.weight"] = np.full(
            _HEAD_DIM, 1.5
        )
        weights[f"{name}.mlp.gate_proj.weight"] = _linear(rng, _INTERMEDIATE, HIDDEN)
        weights[f"{name}.mlp.up_proj.weight"] = _linear(rng, _INTERMEDIATE, HIDDEN)
        weights[f"{name}.mlp.down_proj.weight"] = _linear(rng, HIDDEN, _INTERMEDIATE, 0.5)
    return weights


def _selector(
    rng: np.random.Generator, follows: npt.NDArray[np.bool_], mask_embedding: Array
) -> dict[str, Array]:
    """A selector that prefers successors: code(previous) . sum of codes of a token's predecessors.

    The projection of a drafted position's hidden state, which keeps much of the mask token's
    embedding, is about one in every component.
    """
    codes = np.zeros((VOCAB, RANK))
    codes[list(LIVELY)] = rng.choice([-1.0, 1.0], size=(len(LIVELY), RANK)) / np.sqrt(RANK)
    name = "candidate_selector"
    return {
        f"{name}.predecessor_codebook": 16 * codes,
        f"{name}.successor_codebook": follows.T.astype(np.float64) @ codes,
        f"{name}.hidden_projection.weight": np.tile(mask_embedding / HIDDEN, (RANK, 1)),
    }


def _with_rare_exponents(rng: np.random.Generator, weight: Array, count: int) -> None:
    """Put zeros, subnormals and huge values into `weight`: a codec has to set these apart."""
    flat = weight.reshape(-1)
    places = rng.choice(flat.size, count, replace=False)
    flat[places] = np.resize([0.0, -0.0, 1e-39, 3e-12, -2e-7, 4.0], count)


def _target_config() -> dict[str, Any]:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": _INTERMEDIATE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _KV_HEADS,
        "head_dim": _HEAD_DIM,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "rope_theta": 1e4,
        "max_position_embeddings": 4096,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": EOS_ID,
        "dtype": "bfloat16",
    }


def _drafter_config() -> dict[str, Any]:
    return {
        **_target_config(),
        "architectures": ["DFlash2DraftModel"],
        "num_hidden_layers": _DRAFT_LAYERS,
        "is_causal": False,
        "block_size": BLOCK,
        "num_target_layers": LAYERS,
        "dflash_config": {
            "block_size": BLOCK,
            "num_target_layers": LAYERS,
            "target_layer_ids": list(TARGET_LAYER_IDS),
            "mask_token_id": MASK_ID,
            "selector_rank": RANK,
            "selector_top_k": TOP_K,
        },
    }


def _write(folder: Path, config: dict[str, Any], weights: dict[str, Array]) -> None:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    tensors = {
        name: bf16_data(weight.astype(ml_dtypes.bfloat16).view(np.uint16))
        for name, weight in weights.items()
    }
    write_safetensors(folder / "model.safetensors", tensors)
