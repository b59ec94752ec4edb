"""Shapes read from configurations: against real models' parameters, and what is refused."""

from __future__ import annotations

import json
import os
from collections import Counter
from typing import Any

import pytest

from specpilot_cli.errors import InputError
from specpilot_cli.models.coverage import FAMILIES
from specpilot_cli.models.hf_config import profile_of_config, read_hf_config
from specpilot_cli.models.shapes import head, projections
from specpilot_cli.models.work import kv_bytes, state_bytes
from specpilot_cli.schema.model_profile import AttentionShape, ExpertsShape, ModelProfile

SIZES: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 128,
}  # fmt: skip
GDN = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
    "linear_value_head_dim": 16, "linear_conv_kernel_dim": 4, "full_attention_interval": 4,
}  # fmt: skip
BASE = SIZES | {"model_type": "llama"}
NO_DIM = {key: value for key, value in SIZES.items() if key != "head_dim"}
FINE = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
COARSE = {"num_local_experts": 4, "num_experts_per_tok": 2}
WIDE = {"global_head_dim": 64, "num_global_key_value_heads": 1, "attention_k_eq_v": True}
# What each family is tried with, beside `SIZES`; windows where the family has them.
MODELS: dict[str, dict[str, Any]] = {
    **dict.fromkeys((
        "cohere2", "cwm", "ernie4_5", "exaone", "gemma", "gemma2", "glm", "glm4", "internlm3",
        "llama", "ministral3", "olmo3", "qwen3", "qwen3_vl_text", "seed_oss",
    ), SIZES),
    **dict.fromkeys((
        "cohere", "exaone4", "granite", "olmo", "olmo2", "phi3", "qwen2", "qwen2_5_vl_text",
        "qwen2_vl_text", "smollm3", "stablelm",
    ), NO_DIM),
    "mistral": SIZES | {"sliding_window": 16},
    "qwen3_moe": SIZES | FINE | {"decoder_sparse_step": 2},
    "qwen3_vl_moe_text": SIZES | FINE | {"mlp_only_layers": [1]},
    "glm4_moe": SIZES | FINE | {"n_routed_experts": 8, "n_shared_experts": 2,
                                "first_k_dense_replace": 1},
    "mixtral": SIZES | COARSE,
    "minimax_m2": SIZES | COARSE,
    "phimoe": NO_DIM | COARSE,
    "granitemoe": NO_DIM | COARSE,
    "olmoe": NO_DIM | {"num_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": NO_DIM | FINE | {"shared_expert_intermediate_size": 80},
    "qwen3_next": SIZES | GDN | FINE | {"shared_expert_intermediate_size": 80},
    "qwen3_5_moe_text": SIZES | GDN | FINE | {"shared_expert_intermediate_size": 80},
    "gpt_oss": SIZES | COARSE,
    "qwen3_5_text": SIZES | GDN,
    "muse_glimmer_text": SIZES | {"eos_token_id": 1, "bos_token_id": 2},
    "gemma3_text": SIZES | {"num_hidden_layers": 12},
    "gemma4_text": SIZES | WIDE | {"num_hidden_layers": 6, "hidden_size_per_layer_input": 0},
    "gemma4_unified_text": SIZES | WIDE | {"num_hidden_layers": 6},
}  # fmt: skip


@pytest.fixture(scope="module")
def transformers() -> Any:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    if os.environ.get("CI") == "true":
        import transformers

        return transformers
    return pytest.importorskip("transformers")


def test_every_family_is_tried() -> None:
    # Muse-Glimmer's checkpoints say the name of the whole model; its text part is the family.
    assert set(MODELS) == FAMILIES - {"muse_glimmer"}


@pytest.mark.parametrize("model_type", MODELS)
def test_weights_are_those_of_the_model_that_transformers_builds(
    transformers: Any, model_type: str
) -> None:
    import torch

    # This padding token lies outside of so small a vocabulary in some families.
    settings = MODELS[model_type] | {"pad_token_id": 0}
    config = transformers.AutoConfig.for_model(model_type, **settings)
    with torch.device("meta"):
        try:
            model = transformers.AutoModelForCausalLM.from_config(config)
        except ValueError:  # a text model that is only registered as such
            model = transformers.AutoModel.from_config(config)
    expected = sum(
        weight.numel()
        for name, weight in model.named_parameters()
        if "layers." in name
        and weight.ndim > 1
        # Convolutions, biases and a single row are no matrices that a step's bytes are made of.
        and not any(part in name for part in ("conv1d", "bias", "shared_expert_gate"))
        and weight.shape[-1] != 1
        and not name.endswith("norm.weight")
    )
    document = json.loads(config.to_json_string())
    profile = profile_of_config(document, name="m", where="config.json")
    assert sum(item.weights for item in projections(profile)) == expected
    assert _kinds(profile) == Counter(getattr(config, "layer_types", None) or _plain(config))


def _kinds(profile: ModelProfile) -> Counter[str]:
    found: Counter[str] = Counter()
    for group in profile.layers:
        mixer = group.mixer
        if not isinstance(mixer, AttentionShape):
            kind = "linear_attention"
        else:
            kind = "full_attention" if mixer.window is None else "sliding_attention"
        found[kind] += group.count.value
    return found


def _plain(config: Any) -> list[str]:
    windowed = getattr(config, "sliding_window", None) is not None
    windowed &= getattr(config, "use_sliding_window", True)
    return ["sliding_attention" if windowed else "full_attention"] * config.num_hidden_layers


@pytest.mark.parametrize("model_type", MODELS)
def test_a_key_left_out_is_its_familys_default_or_is_refused(
    transformers: Any, model_type: str
) -> None:
    """A configuration without a key means what transformers makes of it, never our own guess."""
    config = transformers.AutoConfig.for_model(model_type, **MODELS[model_type])
    whole = json.loads(config.to_json_string()) | {"model_type": model_type}
    refused = tried = 0
    for key in sorted(whole.keys() - {"model_type"}):
        document = {name: value for name, value in whole.items() if name != key}
        settings = {n: v for n, v in document.items() if n not in ("model_type", "architectures")}
        try:
            read = profile_of_config(document, name="m", where="x")
        except InputError as error:
            tried += 1
            refused += f"`{key}`" in str(error)
            continue
        again = transformers.AutoConfig.for_model(model_type, **settings)
        spelled = json.loads(again.to_json_string(use_diff=False))
        spelled |= {k: v for k, v in document.items() if k in ("mlp_only_layers",)}
        assert _sizes(read) == _sizes(profile_of_config(spelled, name="m", where="x")), key
    assert refused == tried >= 4


def _sizes(profile: ModelProfile) -> tuple[Any, ...]:
    return (projections(profile), kv_bytes(profile, 10_000), state_bytes(profile), _kinds(profile))


def _profile(**changes: Any):
    return profile_of_config(BASE | changes, name="some/Model", where="config.json")


def test_active_and_total_experts() -> None:
    """Qwen3-30B-A3B as published: 29.9 B without embeddings, 3.3 B of them and the rest active."""
    profile = profile_of_config(
        {
            "model_type": "qwen3_moe", "hidden_size": 2048, "num_hidden_layers": 48,
            "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
            "intermediate_size": 6144, "moe_intermediate_size": 768, "num_experts": 128,
            "num_experts_per_tok": 8, "decoder_sparse_step": 1, "vocab_size": 151936,
        },
        name="m", where="x.json",
    )  # fmt: skip
    matrices = projections(profile)
    assert sum(item.weights for item in matrices) / 1e9 == pytest.approx(29.9, abs=0.05)
    active = sum(item.weights_per_row for item in matrices) + 2 * head(profile).weights
    assert active / 1e9 == pytest.approx(3.3, abs=0.1)
    mlp = profile.layers[0].mlp
    assert isinstance(mlp, ExpertsShape)
    assert (mlp.active.value, mlp.experts.value) == (8, 128)


def test_more_rows_touch_more_experts_but_never_more_than_there_are() -> None:
    profile = _profile(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=48)
    routed = next(item for item in projections(profile) if item.name == "expert_down")
    read = [routed.weights_read(rows) for rows in (1, 2, 4, 64)]
    assert read[0] == routed.weights * 2 / 8
    assert read[1] == pytest.approx(routed.weights * (1 - 0.75**2))
    assert read == sorted(read)
    assert read[-1] == pytest.approx(routed.weights)


def test_windows_gates_and_ties() -> None:
    mixer = _profile(sliding_window=16, model_type="mistral").layers[0].mixer
    assert isinstance(mixer, AttentionShape)
    assert mixer.window is not None
    assert mixer.window.value == 16
    off = _profile(sliding_window=16, use_sliding_window=False).layers[0].mixer
    assert isinstance(off, AttentionShape)
    assert off.window is None
    assert _profile(tie_word_embeddings=True).tied_head.value
    assert _profile().tied_head.kind == "derived"
    plain, gated = (_profile(attn_output_gate=gate) for gate in (False, True))
    added = sum(p.weights for p in projections(gated)) - sum(p.weights for p in projections(plain))
    assert added == 4 * 64 * 4 * 32


def test_a_text_part_is_read_and_its_path_named() -> None:
    whole = {"text_config": BASE, "vision_config": {}, "tie_word_embeddings": True}
    whole["model_type"] = "llava"
    assert profile_of_config(whole, name="m", where="x").tied_head.value
    with pytest.raises(InputError, match=r"text_config\.vocab_size"):
        profile_of_config(
            whole | {"text_config": {**BASE, "vocab_size": None}}, name="m", where="x"
        )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": None}, "missing: `hidden_size`"),
        ({"hidden_size": "64"}, "not a whole number"),
        ({"num_hidden_layers": True}, "not a whole number"),
        ({"num_hidden_layers": 0}, "not a whole number"),
        ({"num_hidden_layers": 10**8}, "more than any model has"),
        ({"head_dim": None, "num_attention_heads": 7}, "no multiple of 7 heads"),
        ({"layer_types": ["full_attention"]}, "one entry for each of 4 layers"),
        ({"layer_types": ["mamba"] * 4}, "unknown kind of layer `mamba`"),
        ({"kv_lora_rank": 512}, "mixers of another kind are not counted: `kv_lora_rank`"),
        ({"hidden_size_per_layer_input": 256}, "further matrices are not counted"),
        ({"per_layer_config": {"0": {"head_dim": 8}}}, "per_layer_config"),
        ({"num_experts": 4}, "missing: `num_experts_per_tok`"),
        ({"num_experts": 4, "num_experts_per_tok": 8}, "8 active of 4 experts"),
        ({"dtype": "int3"}, "no known size"),
        ({"linear_num_value_heads": 2}, "missing: `linear_num_key_heads`"),
    ],
)
def test_a_shape_that_is_left_open_is_refused_by_key(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message.replace(".", r"\.")):
        _profile(**changes)


def test_a_drafter_says_what_it_adds(tmp_path: Any) -> None:
    folder = tmp_path / "My-Drafter"
    folder.mkdir()
    config = BASE | {
        "architectures": ["DFlash2DraftModel"], "block_size": 8,
        "dflash_config": {"target_layer_ids": [1, 2, 3], "selector_rank": 16, "selector_top_k": 8},
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    profile = read_hf_config(folder / "config.json")
    assert profile.name == "my-drafter"
    assert profile.drafter is not None
    assert profile.drafter.features.value == 3
    assert profile.drafter.conv_group is None
    (folder / "config.json").write_text(json.dumps(config | {"dflash_config": {}}))
    with pytest.raises(InputError, match="target_layer_ids"):
        read_hf_config(folder / "config.json")


@pytest.mark.parametrize("text", ["[]", "{", "3", '{"a": 1, "a": 2}'])
def test_a_file_that_is_no_configuration(tmp_path: Any, text: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(InputError) as caught:
        read_hf_config(path)
    assert str(path) in str(caught.value)


def test_values_that_no_configuration_has_are_refused() -> None:
    """Keys of a hybrid, a mixture and a drafter replaced by every kind of value."""
    odd = (None, True, -1, 0, 1.5, "", "x", [], [1], ["full_attention"] * 4, {}, {"0": 1}, 10**40)
    full = BASE | GDN | {
        "model_type": "qwen3_5_text", "num_experts": 4, "num_experts_per_tok": 2,
        "dtype": "float16", "moe_intermediate_size": 8, "shared_expert_intermediate_size": 8,
        "sliding_window": 4,
        "layer_types": ["linear_attention", "sliding_attention"] * 2, "mamba_ssm_dtype": "float32",
        "attention_k_eq_v": True, "tie_word_embeddings": False, "mlp_only_layers": [1],
        "architectures": ["DFlash2DraftModel"], "per_layer_config": None, "text_config": None,
        "decoder_sparse_step": 1, "first_k_dense_replace": 0, "n_shared_experts": 1,
        "dflash_config": {"target_layer_ids": [1], "block_size": 8},
    }  # fmt: skip
    profile_of_config(full, name="m", where="x.json")
    refused = 0
    for key in full:
        for value in odd:
            try:
                profile = profile_of_config(full | {key: value}, name="m", where="x.json")
            except InputError as error:
                refused += error.where == "x.json"
            else:
                assert sum(item.weights for item in projections(profile)) > 0
    assert refused > 200
