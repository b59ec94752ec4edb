"""Recipes by name and path, their defaults, and prompts taken benchmark by benchmark."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from pydantic import ValidationError

from specpilot_cli.apply.recipes import (
    find_recipe,
    load_recipe,
    recipe_names,
    take_per_benchmark,
)
from specpilot_cli.errors import InputError
from specpilot_cli.schema import recipe as schema
from specpilot_cli.schema.base import FileModel
from specpilot_cli.schema.prompts import Prompt
from specpilot_cli.schema.recipe import Recipe, TreeMechanism

_LEAST = {
    "schema_version": 1,
    "name": "least",
    "title": "Least",
    "engine": "reference",
    "models": {"target": "t", "drafter": "d"},
    "prompts": {"dev": "d.jsonl", "unseen": "u.jsonl"},
    "stock": {"block": 8},
    "mechanisms": [{"mechanism": "best-first-tree", "block": 16}],
    "gates": {"paired_bench": {"prompts_per_benchmark": 4}},
}


def test_bundled_names_lead_to_their_files() -> None:
    assert "demo-cpu" in recipe_names()
    for name in recipe_names():
        assert find_recipe(name).parent.name == name
        assert load_recipe(name).recipe.name == name


def test_folder_and_file_give_the_same_recipe(
    make_recipe: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_recipe()
    by_file = load_recipe(str(folder / "recipe.yaml"))
    monkeypatch.chdir(folder.parent)
    assert load_recipe("./recipe") == by_file
    assert by_file.target == folder / "target"
    assert by_file.dev == folder / "dev.jsonl"


def test_a_bundled_name_wins_over_a_folder_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "demo-cpu").mkdir()
    monkeypatch.chdir(tmp_path)
    assert find_recipe("demo-cpu").parent.parent.name == "recipes"
    with pytest.raises(InputError, match=r"no recipe at `\./demo-cpu`"):
        find_recipe("./demo-cpu")


def test_what_a_recipe_need_not_say() -> None:
    recipe = Recipe.model_validate(_LEAST)
    assert recipe.regime.requests == 1
    assert recipe.regime.dtype == "float32"
    assert not recipe.uses_w12
    assert recipe.tree is not None
    assert (recipe.tree.nodes, recipe.tree.scoring) == ("auto", "conditional")
    assert recipe.projection is None


def test_recipe_without_gates_is_no_recipe() -> None:
    with pytest.raises(ValidationError, match="gates"):
        Recipe.model_validate({key: _LEAST[key] for key in _LEAST if key != "gates"})


@pytest.mark.parametrize(
    ("nodes", "measured"), [("auto", (4, 8, 63)), (8, (4, 8, 63)), (20, (4, 8, 20, 63))]
)
def test_a_fixed_budget_is_measured_with_the_others(nodes: int, measured: tuple[int, ...]) -> None:
    tree = TreeMechanism.model_validate(
        {"mechanism": "best-first-tree", "block": 16, "nodes": nodes, "budgets": [63, 8, 4, 8]}
    )
    assert tree.measured_nodes == measured


def test_prompts_are_taken_per_benchmark_in_file_order() -> None:
    rows = [("a1", "a"), ("a2", "a"), ("b1", "b"), ("a3", "a"), ("b2", "b"), ("c1", "c")]
    prompts = [
        Prompt(request_id=name, benchmark=kind, text=name, max_new_tokens=1) for name, kind in rows
    ]
    taken = take_per_benchmark(prompts, 2)
    assert [prompt.request_id for prompt in taken] == ["a1", "a2", "b1", "b2", "c1"]


def test_the_page_on_recipes_shows_a_valid_one_and_every_key(repo: Path) -> None:
    page = (repo / "docs" / "apply.md").read_text(encoding="utf-8")
    shown = page.split("```yaml\n")[1].split("```")[0]
    assert Recipe.model_validate(yaml.safe_load(shown)).tree is not None
    models = [value for value in vars(schema).values() if _is_file_model(value)]
    keys = {key for model in models for key in model.model_fields}
    assert {key for key in keys if key not in page} == set()


def _is_file_model(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, FileModel)
