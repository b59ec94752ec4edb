"""Which tensors convert, and what is said about those that do not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specpilot_cli.convert_w12.convert import survey_folder
from specpilot_cli.convert_w12.plan import Selection, reason_to_keep
from specpilot_cli.convert_w12.restore import restore_folder
from specpilot_cli.convert_w12.verify import verify_folder
from specpilot_cli.errors import InputError
from specpilot_cli.io.hf_folder import open_hf_folder
from specpilot_cli.io.safetensors_stream import TensorInfo, bf16_data
from tests.unit.convert_w12.conftest import MakeCheckpoint, convert, digests, weights


def reason(
    name: str,
    shape: tuple[int, ...] = (256, 256),
    dtype: str = "BF16",
    config: dict[str, Any] | None = None,
) -> str | None:
    return reason_to_keep(TensorInfo(name, dtype, shape, 0, 0), config or {}, Selection())


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("model.layers.0.self_attn.q_proj.weight", (256, 256)),
        ("model.language_model.layers.0.linear_attn.in_proj_qkvz.weight", (256, 256)),
        ("model.layers.0.mlp.gate_proj.weight", (256, 256)),
        ("model.layers.3.mlp.experts.7.down_proj.weight", (256, 256)),
        ("model.layers.3.mlp.experts.gate_up_proj", (8, 256, 256)),
        ("mtp.layers.0.mlp.up_proj.weight", (256, 256)),
        ("visual.patch_embed.proj.weight", (256, 256)),
        ("lm_head.weight", (256, 256)),
        ("embed_out.weight", (256, 256)),
        ("block.norm1.linear.weight", (256, 256)),
    ],
)
def test_converts(name: str, shape: tuple[int, ...]) -> None:
    assert reason(name, shape) is None


@pytest.mark.parametrize(
    ("name", "shape", "dtype", "why"),
    [
        ("model.embed_tokens.weight", (9, 9), "BF16", "embedding"),
        ("transformer.wte.weight", (9, 9), "BF16", "embedding"),
        ("bert.embeddings.word_embeddings.weight", (9, 9), "BF16", "embedding"),
        ("model.tok_embeddings.weight", (9, 9), "BF16", "embedding"),
        ("model.norm.weight", (9,), "BF16", "1-D"),
        ("x.layer_norm.weight", (9, 9), "BF16", "norm"),
        ("x.conv1d.weight", (9, 1, 4), "BF16", "convolution"),
        ("x.other", (9, 9, 9), "BF16", "not a stack of experts"),
        ("mlp.experts.gate_up_proj_bias", (9, 9, 9), "BF16", "not a stack of experts"),
        ("patch_embed.proj.weight", (9, 3, 2, 4, 4), "BF16", "5-D"),
        ("scale", (), "BF16", "0-D"),
        ("x.A_log", (9, 9), "BF16", "not the weight of a Linear"),
        ("model.layers.0.mlp.gate.weight", (9, 9), "BF16", "router"),
        ("model.layers.0.mlp.up_proj.weight", (9, 9), "F32", "F32"),
        ("model.layers.0.mlp.up_proj.weight", (9, 9), "F16", "F16"),
        ("model.layers.0.mlp.up_proj.weight", (0, 9), "BF16", "no elements"),
    ],
)
def test_stays_with_a_reason(name: str, shape: tuple[int, ...], dtype: str, why: str) -> None:
    assert why in (reason(name, shape, dtype) or "")


@pytest.mark.parametrize(
    "config", [{"tie_word_embeddings": True}, {"text_config": {"tie_word_embeddings": True}}]
)
def test_tied_lm_head_stays(config: dict[str, Any]) -> None:
    assert "tied" in (reason("lm_head.weight", config=config) or "")


def test_tensors_that_would_grow_stay(make_checkpoint: MakeCheckpoint) -> None:
    zeros = np.array(weights(0, 256, 256).data)
    zeros[np.random.default_rng(1).random(zeros.shape) < 0.1] = 0
    source = make_checkpoint(
        {
            "zeros.weight": bf16_data(zeros),
            "thin.weight": weights(2, 4, 256),
            "narrow.weight": weights(3, 256, 2),
            "good.weight": weights(4, 256, 256),
        }
    )
    found = {o.name: o for o in survey_folder(open_hf_folder(source), Selection()).outcomes}
    assert "zeros or lie outside" in (found["zeros.weight"].reason or "")
    assert "16." in (found["zeros.weight"].reason or "")
    assert "4 × 256 pads to 128 × 256 (records are 128 × 64)" in (found["thin.weight"].reason or "")
    assert "256 × 2 pads to 256 × 64 " in (found["narrow.weight"].reason or "")
    assert found["good.weight"].converted
    for outcome in found.values():
        assert outcome.stored_bytes <= outcome.raw_bytes


def test_survey_foretells_conversion_exactly(
    make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    source = make_checkpoint()
    surveyed = survey_folder(open_hf_folder(source), Selection())
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model"]
    assert surveyed.outcomes == convert(source, tmp_path / "w12").outcomes


def test_include_and_exclude(make_checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    done = convert(
        make_checkpoint(), tmp_path / "w12", include=("*.layers.*",), exclude=("*.q_proj.*",)
    )
    assert [o.name for o in done.outcomes if o.converted] == [
        "model.layers.0.mlp.experts.gate_up_proj",
        "model.layers.1.mlp.up_proj.weight",
    ]
    reasons = {o.name: o.reason for o in done.outcomes}
    assert reasons["lm_head.weight"] == "not among the included"
    assert reasons["model.layers.0.self_attn.q_proj.weight"] == "excluded by `*.q_proj.*`"


@pytest.mark.parametrize("option", ["include", "exclude"])
def test_pattern_without_a_match_is_a_slip(
    option: str, make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match="matches no tensor") as caught:
        convert(make_checkpoint(), tmp_path / "w12", **{option: ("lm_haed*",)})
    assert caught.value.where == f"--{option}"
    assert not (tmp_path / "w12").exists()


@pytest.mark.parametrize(
    "config",
    [
        {"quantization_config": {"quant_method": "fp8"}},
        {"quantization_config": {"quant_method": "w12"}},
        {"text_config": {"quantization_config": {"quant_method": "awq"}}},
        {"compression_config": {"format": "x"}},
    ],
)
def test_quantised_source_is_refused(
    config: dict[str, Any], make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    source = make_checkpoint(config=json.dumps(config))
    with pytest.raises(InputError, match="already quantised"):
        convert(source, tmp_path / "w12")


def test_quantised_tensors_are_refused(make_checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    source = make_checkpoint({"a.qweight": np.zeros((4, 4), np.int32)})
    with pytest.raises(InputError, match=r"a\.qweight"):
        convert(source, tmp_path / "w12")


def test_w12_folder_is_not_converted_again(make_checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    convert(make_checkpoint(), tmp_path / "w12")
    with pytest.raises(InputError, match="W12 folder"):
        convert(tmp_path / "w12", tmp_path / "again")


def test_name_of_a_part_already_taken(make_checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    source = make_checkpoint(
        {"a.weight": weights(0, 256, 256), "a.weight_w12_window": np.zeros(3, np.uint8)}
    )
    with pytest.raises(InputError, match="name W12 gives"):
        convert(source, tmp_path / "w12")


def test_taken_names_matter_only_to_tensors_that_convert(
    make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    """The hint of the refusal works, and two tensors of another dtype never clash."""
    window = np.zeros(3, np.uint8)
    source = make_checkpoint({"a.weight": weights(0, 256, 256), "a.weight_w12_window": window})
    with pytest.raises(InputError) as caught:
        convert(source, tmp_path / "w12")
    assert caught.value.hint == "exclude the other one: --exclude 'a.weight'"
    convert(source, tmp_path / "w12", exclude=("a.weight",))
    restore_folder(tmp_path / "w12", tmp_path / "back")
    assert digests(tmp_path / "back") == digests(source)
    floats = np.zeros((256, 256), np.float32)
    convert(
        make_checkpoint({"a.weight": floats, "a.weight_w12": floats}, name="floats"),
        tmp_path / "floats_w12",
    )
    assert verify_folder(tmp_path / "floats_w12", tmp_path / "floats").verdict == "identical"
