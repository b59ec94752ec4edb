"""Configurations whose floors would be wrong are refused by the key that says so, exit code 2."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from specpilot_cli.errors import InputError
from specpilot_cli.main import main
from specpilot_cli.models.coverage import NOT_COUNTED, QUANTISED
from specpilot_cli.models.hf_config import profile_of_config, read_hf_config
from specpilot_cli.models.registry import load_drafter, load_target

REPO = Path(__file__).parents[3]
DENSE: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 128,
}  # fmt: skip
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
W12 = {"quant_method": "w12", "version": 1}


def _refused(changes: dict[str, Any], key: str, **read: bool) -> InputError:
    with pytest.raises(InputError) as caught:
        profile_of_config(DENSE | changes, name="m", where="config.json", **read)
    assert f"`{key}`" in caught.value.message
    assert caught.value.where == "config.json"
    assert caught.value.hint
    return caught.value


@pytest.mark.parametrize("key", [key for keys in NOT_COUNTED.values() for key in keys])
def test_a_key_that_changes_weights_or_caches_is_refused_by_name(key: str) -> None:
    _refused({key: 2}, key)
    _refused({key: [1]}, key)
    wrapped = {"model_type": "llava", "text_config": DENSE | {key: 2}}
    _refused(wrapped, f"text_config.{key}")
    for unset in (None, False, 0, []):
        profile_of_config(DENSE | {key: unset}, name="m", where="x")


@pytest.mark.parametrize("key", QUANTISED)
@pytest.mark.parametrize(
    "stated", [FP8, {"quant_method": "awq", "bits": 4}, {"quant_method": "mxfp4"}, {"bits": 8}, "4"]
)
def test_quantised_weights_are_refused_whatever_the_method(key: str, stated: object) -> None:
    error = _refused({key: stated}, key)
    assert "unquantised" in (error.hint or "")
    if isinstance(stated, dict) and "quant_method" in stated:
        assert f"({stated['quant_method']})" in error.message
    _refused({"model_type": "llava", "text_config": DENSE, key: stated}, key)
    _refused({key: stated}, key, w12=True)


def test_a_file_beside_the_configuration_says_quantised_too(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(DENSE))
    read_hf_config(tmp_path / "config.json")
    (tmp_path / "hf_quant_config.json").write_text("{}")
    with pytest.raises(InputError, match=r"hf_quant_config\.json"):
        read_hf_config(tmp_path / "config.json")


def test_w12_folders_are_read_only_by_those_who_count_their_bytes() -> None:
    error = _refused({"quantization_config": W12}, "quantization_config")
    assert "folder that was converted" in (error.hint or "")
    plain = profile_of_config(DENSE, name="m", where="x")
    whole = DENSE | {"quantization_config": W12}
    assert profile_of_config(whole, name="m", where="x", w12=True) == plain


@pytest.mark.parametrize(
    "architecture",
    ["BertForMaskedLM", "LlamaModel", "LlamaForSequenceClassification", "T5EncoderModel",
     "LlamaForCausalLMEagle3", "DSparkDraftModel", "ColQwen2ForRetrieval"],
)  # fmt: skip
def test_what_generates_no_text_is_refused_by_its_architecture(architecture: str) -> None:
    _refused({"architectures": [architecture]}, "architectures")
    profile_of_config(
        DENSE | {"architectures": [architecture]}, name="m", where="x", any_drafter=True
    )


@pytest.mark.parametrize("both", [True, "all"])
def test_attention_to_both_sides_is_refused(both: object) -> None:
    _refused({"use_bidirectional_attention": both}, "use_bidirectional_attention")
    # Gemma's only looks ahead inside an image.
    profile_of_config(DENSE | {"use_bidirectional_attention": "vision"}, name="m", where="x")


@pytest.mark.parametrize(
    "family",
    [
        "bert", "deepseek_v3", "lfm2", "recurrent_gemma", "ernie4_5_moe", "llama4_text",
        "diffllama",
        # MLPs without a gate, and ternary weights.
        "gpt_neox", "starcoder2", "phi", "bitnet", None, ["llama"],
    ],
)  # fmt: skip
def test_families_that_were_not_held_against_their_parameters_are_refused(family: object) -> None:
    _refused({"model_type": family}, "model_type")


def test_a_model_around_a_text_model_must_be_known_as_well() -> None:
    text = {"text_config": DENSE}
    profile_of_config(text | {"model_type": "llava"}, name="m", where="x")
    for name in ("gemma4_assistant", "vibevoice", None, ["llava"], {"a": 1}):
        _refused(text | {"model_type": name}, "model_type")


def test_llama_4_is_refused_by_the_key_that_lays_out_its_experts() -> None:
    llama4 = {
        "model_type": "llama4_text", "intermediate_size_mlp": 192, "interleave_moe_layer_step": 2,
        "num_local_experts": 4, "num_experts_per_tok": 1,
    }  # fmt: skip
    _refused(llama4, "interleave_moe_layer_step")
    del llama4["interleave_moe_layer_step"]
    _refused(llama4, "intermediate_size_mlp")
    del llama4["intermediate_size_mlp"]
    _refused(llama4, "model_type")


def test_a_window_without_its_layers_is_refused() -> None:
    _refused({"sliding_window": 16}, "layer_types")
    _refused({"model_type": "mistral", "head_dim": 16}, "sliding_window")
    _refused({"model_type": "qwen2", "sliding_window": 16, "use_sliding_window": True},
             "layer_types")  # fmt: skip
    profile_of_config(DENSE | {"model_type": "qwen2", "sliding_window": 16}, name="m", where="x")


@pytest.mark.parametrize(
    ("changes", "key"),
    [({"quantization_config": FP8}, "quantization_config"),
     ({"is_encoder_decoder": True}, "is_encoder_decoder"), ({"model_type": "t5"}, "model_type")],
)  # fmt: skip
def test_the_command_says_so_and_exits_with_two(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, Any], key: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(DENSE | changes))
    assert main(["ceiling", "--target", str(tmp_path), "--gpu", "h200"]) == 2
    said = capsys.readouterr()
    assert key in said.err
    assert "hint:" in said.err
    assert said.out == ""


def test_targets_and_drafters_are_told_apart() -> None:
    target = load_target("demo-target")
    assert load_drafter("demo-drafter", target).drafter is not None
    with pytest.raises(InputError, match="is a drafter, not a target") as caught:
        load_target("demo-drafter")
    assert caught.value.where == "--target"
    with pytest.raises(InputError, match="is not a DFlash drafter") as caught:
        load_drafter("llama-3.1-8b", target)
    assert caught.value.where == "--drafter"
    with pytest.raises(InputError, match="drafts for another target: its hidden size is 5120"):
        load_drafter("qwen3.8-27b-dflash2", target)
    assert load_drafter("qwen3.8-27b-dflash2", None).name == "qwen3.8-27b-dflash2"


def test_demo_drafter_as_the_target_of_a_ceiling(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ceiling", "--target", "demo-drafter", "--gpu", "h200"]) == 2
    assert "is a drafter" in capsys.readouterr().err
    asked = ["ceiling", "--target", "llama-3.1-8b", "--drafter", "qwen3.8-27b-dflash2"]
    assert main([*asked, "--gpu", "h200"]) == 2
    assert "drafts for another target" in capsys.readouterr().err
