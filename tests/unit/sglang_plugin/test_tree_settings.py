"""What a tree may be asked for, and what a recipe with one has to say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from specpilot_cli.schema.plugin_config import PluginConfig, RecorderPlugin, TreePlugin
from specpilot_cli.schema.sglang_recipe import SglangRecipe

CALIBRATION = {"temperature": 1.5, "recall_by_position_ratio": [0.9] * 7}


def test_sizes_of_a_step() -> None:
    tree = TreePlugin(block=16, nodes=32)
    assert (tree.rows, tree.depth, tree.window) == (33, 15, 33)
    assert TreePlugin(block=16, nodes=8).depth == 8
    assert TreePlugin(block=16, nodes=8).window == 16
    assert TreePlugin(block=16, nodes=32, max_depth=4).depth == 4
    assert [TreePlugin(block=8, nodes=n).record_states for n in (8, 63, 64, 128)] == [1, 1, 2, 3]


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"block": 1}, "greater than or equal to 2"),
        ({"nodes": 0}, "greater than or equal to 1"),
        ({"nodes": 129}, "less than or equal to 128"),
        ({"drafter": "EAGLE3"}, "DFLASH"),
        ({"scoring": "marginal", "calibration": CALIBRATION}, "of conditional scores"),
        ({"block": 16, "calibration": CALIBRATION}, "7 positions, the block drafts 15"),
    ],
)
def test_what_is_no_tree(more: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValidationError, match=reason):
        TreePlugin.model_validate({"block": 8, "nodes": 8, **more})


def test_a_calibration_of_a_longer_block_will_do() -> None:
    tree = TreePlugin.model_validate({"block": 8, "nodes": 8, "calibration": CALIBRATION})
    assert tree.calibration is not None


def test_a_chain_is_recorded_not_a_tree() -> None:
    recorder = RecorderPlugin(mode="dense", folder="/tmp/recording")
    with pytest.raises(ValidationError, match="records the steps of a chain"):
        PluginConfig(recorder=recorder, tree=TreePlugin(block=8, nodes=8))


def _recipe(repo: Path) -> dict[str, Any]:
    path = repo / "recipes/qwen3.8-27b-h200-dflash2-tree-w12/recipe.yaml"
    return dict(yaml.safe_load(path.read_text(encoding="utf-8")))


def test_the_plugin_is_told_what_the_recipe_says(repo: Path) -> None:
    recipe = SglangRecipe.model_validate(_recipe(repo))
    assert recipe.plugin_config.asked() == ("w12", "tree")
    assert recipe.plugin_config.tree == TreePlugin(block=16, nodes=32)


@pytest.mark.parametrize(
    ("part", "value", "reason"),
    [
        ("tensor_parallel", 2, "tensor parallelism"),
        ("algorithm", "SPECPILOT_TREE", "through the mechanism"),
        ("algorithm", "DSPARK", "stock does not serve"),
        ("drafter", None, "go together"),
    ],
)
def test_what_a_recipe_with_a_tree_may_not_say(
    repo: Path, part: str, value: Any, reason: str
) -> None:
    recipe = _recipe(repo)
    if part == "algorithm":
        recipe["arguments"]["common"]["speculative-algorithm"] = value
    elif part == "drafter":
        recipe["models"].pop("drafter")
        recipe["models"].pop("drafter_profile", None)
    else:
        recipe[part] = value
    with pytest.raises(ValidationError, match=reason):
        SglangRecipe.model_validate(recipe)
