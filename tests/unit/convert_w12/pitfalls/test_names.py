"""Pitfalls 13 to 17: what a tensor's name does and does not say."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from specpilot_cli.io.safetensors_stream import bf16_data
from tests.unit.convert_w12.conftest import MakeCheckpoint, weights
from tests.unit.convert_w12.pitfalls.conftest import Cli, ThereAndBack


def kept_tensors(folder: Path) -> set[str]:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return set(config["quantization_config"]["kept_tensors"])


@pytest.mark.parametrize(
    ("tied", "with_head", "encoding"),
    [(True, False, None), (True, True, "stored"), (False, True, "w12")],
    ids=["tied, no head in the file", "tied, head in the file", "not tied"],
)
def test_pitfall_13_tied_heads_neither_vanish_nor_appear(
    tied: bool,
    with_head: bool,
    encoding: str | None,
    make_checkpoint: MakeCheckpoint,
    there_and_back: ThereAndBack,
    tmp_path: Path,
) -> None:
    """The embedding served as output head too; the converted model had no head, or a second one."""
    table = weights(0, 512, 128)
    tensors = {"model.embed_tokens.weight": table, "layers.0.up.weight": weights(1, 256, 256)}
    if with_head:
        tensors["lm_head.weight"] = table
    config = json.dumps({"model_type": "x", "tie_word_embeddings": tied})
    answer = there_and_back(make_checkpoint(tensors, config=config))
    assert set(answer.tensors) == set(tensors)
    assert answer.tensors["model.embed_tokens.weight"]["encoding"] == "stored"
    assert answer.tensors.get("lm_head.weight", {}).get("encoding") == encoding
    written = json.loads((tmp_path / "w12" / "config.json").read_text(encoding="utf-8"))
    assert written["tie_word_embeddings"] is tied


def test_pitfall_14_experts_convert_in_both_forms_or_are_named(
    make_checkpoint: MakeCheckpoint, there_and_back: ThereAndBack
) -> None:
    """Stacked experts went by another name than single ones, were skipped, and served garbage."""
    tensors = {
        "layers.0.mlp.experts.gate_up_proj": weights(0, 4, 256, 128),
        "layers.0.mlp.experts.down_proj": weights(1, 4, 128, 128),
        **{f"layers.1.mlp.experts.{i}.up_proj.weight": weights(i, 128, 256) for i in range(4)},
        "layers.1.mlp.shared_expert.up_proj.weight": weights(9, 128, 256),
        "layers.0.mlp.gate.weight": weights(5, 128, 128),
        "layers.0.mlp.unheard_of.stack": weights(6, 4, 128, 128),
        "layers.0.mlp.experts.gate_up_proj_bias": weights(7, 4, 256),
    }
    rows = there_and_back(make_checkpoint(tensors)).tensors
    assert set(rows) == set(tensors)
    stays = {name for name, row in rows.items() if row["encoding"] == "stored"}
    assert stays == set(list(tensors)[-3:])
    assert all(rows[name]["reason"] for name in stays)


def test_pitfall_14_kept_stacks_are_listed_for_the_engine(
    make_checkpoint: MakeCheckpoint, cli: Cli, tmp_path: Path
) -> None:
    """The configuration did not say that a stack was left alone, so the engine looked for codes."""
    tensors = {"moe.stack": weights(0, 4, 128, 128), "moe.experts.up": weights(1, 4, 128, 128)}
    assert cli("convert-w12", make_checkpoint(tensors), "-o", tmp_path / "w12").code == 0
    assert kept_tensors(tmp_path / "w12") == {"moe.stack"}


def test_pitfall_15_a_name_inside_another_is_another_tensor(
    make_checkpoint: MakeCheckpoint, there_and_back: ThereAndBack
) -> None:
    """Looking for `q_proj` found `q_proj.bias`, and the weight itself was lost."""
    tensors = {
        "attn.q_proj.bias": weights(0, 256),
        "attn.q_proj.weight": weights(1, 256, 256),
        "attn.q_proj.weight_scale": weights(2, 256, 256),
        "cross_attn.q_proj.weight": weights(3, 256, 256),
        "attn.q_proj": weights(4, 256),
        "attn.q_proj.weight.weight": weights(5, 256, 256),
    }
    rows = there_and_back(make_checkpoint(tensors)).tensors
    assert [name for name, row in rows.items() if row["encoding"] == "w12"] == [
        "attn.q_proj.weight", "cross_attn.q_proj.weight", "attn.q_proj.weight.weight",
    ]  # fmt: skip


def test_pitfall_15_patterns_match_whole_names(make_checkpoint: MakeCheckpoint, cli: Cli) -> None:
    """Excluding one layer also excluded every layer whose name began alike."""
    tensors = {f"layers.{i}.up.weight": weights(i, 256, 256) for i in (1, 10, 11)}
    words = ("convert-w12", make_checkpoint(tensors), "--dry-run", "--json")
    rows = cli(*words, "--exclude", "layers.1.*").tensors
    assert {name: row["encoding"] for name, row in rows.items()} == {
        "layers.1.up.weight": "stored", "layers.10.up.weight": "w12", "layers.11.up.weight": "w12",
    }  # fmt: skip
    assert cli(*words, "--exclude", "layers.1").code == 2


@pytest.mark.parametrize(
    "prefix",
    ["model.", "model.language_model.", "language_model.model.", "transformer.h.", "thinker.", ""],
)
def test_pitfall_16_any_prefix_converts(
    prefix: str, make_checkpoint: MakeCheckpoint, cli: Cli
) -> None:
    """The same layers under another prefix stayed as they were, and no word was said."""
    names = ["layers.0.self_attn.q_proj.weight", "layers.0.mlp.w13.weight", "layers.0.zeta.weight"]
    source = make_checkpoint({prefix + name: weights(0, 256, 256) for name in names})
    rows = cli("convert-w12", source, "--dry-run", "--json").tensors
    assert {row["encoding"] for row in rows.values()} == {"w12"}


def test_pitfall_16_what_is_not_recognised_is_said(
    make_checkpoint: MakeCheckpoint, cli: Cli
) -> None:
    """A tensor was left alone because its name was unknown, and the report did not mention it."""
    source = make_checkpoint({"layers.0.kernel": weights(0, 256, 256)})
    answer = cli("convert-w12", source, "--dry-run")
    assert "layers.0.kernel" in answer.out
    assert "not the weight of a Linear layer by its name" in answer.out
    rows = cli("convert-w12", source, "--dry-run", "--json").tensors
    assert rows["layers.0.kernel"]["encoding"] == "stored"


def test_pitfall_17_extra_prediction_layers_agree_with_the_config(
    make_checkpoint: MakeCheckpoint, cli: Cli, tmp_path: Path
) -> None:
    """The `mtp` layers stayed BF16 while the configuration said otherwise; the drafter broke."""
    tensors = {
        "model.layers.0.mlp.up_proj.weight": weights(0, 256, 256),
        "mtp.layers.0.mlp.up_proj.weight": weights(1, 256, 256),
        "mtp.fc.weight": weights(2, 256, 512),
        "mtp.embed_tokens.weight": weights(3, 256, 128),
        "mtp.norm.weight": bf16_data(np.full(256, 0x3F80, np.uint16)),
    }
    source = make_checkpoint(tensors)
    rows = cli("convert-w12", source, "-o", tmp_path / "all", "--json").tensors
    converted = {name for name, row in rows.items() if row["encoding"] == "w12"}
    assert converted == set(list(tensors)[:3])
    assert kept_tensors(tmp_path / "all") == {"mtp.embed_tokens.weight"}
    words = ("convert-w12", source, "-o", tmp_path / "some", "--exclude", "mtp.*", "--json")
    rows = cli(*words).tensors
    assert rows["mtp.fc.weight"]["reason"] == "excluded by `mtp.*`"
    assert kept_tensors(tmp_path / "some") == set(list(tensors)[1:4])
