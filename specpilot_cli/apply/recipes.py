"""Finding and reading recipes, and resolving the files they name."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from pathlib import Path

from specpilot_cli.errors import InputError
from specpilot_cli.io.yaml_file import read_yaml_model
from specpilot_cli.paths import bundled
from specpilot_cli.schema.prompts import Prompt
from specpilot_cli.schema.recipe import Recipe, RecipeHead
from specpilot_cli.schema.sglang_recipe import SglangRecipe

RECIPE_FILE = "recipe.yaml"


@dataclass(frozen=True, slots=True)
class LoadedRecipe:
    """A recipe for the reference engine with the absolute paths of what it names."""

    recipe: Recipe
    path: Path
    target: Path
    drafter: Path
    dev: Path
    unseen: Path


@dataclass(frozen=True, slots=True)
class LoadedSglangRecipe:
    """A recipe of an SGLang deployment; its models are looked for later, by path or hub id."""

    recipe: SglangRecipe
    path: Path
    unseen: Path | None


def recipe_names() -> list[str]:
    """Names of the bundled recipes, sorted."""
    return sorted(path.parent.name for path in bundled("recipes").glob(f"*/{RECIPE_FILE}"))


def find_recipe(name: str) -> Path:
    """The recipe file of a bundled name, or of a path that the user gave.

    Anything with a path separator or a YAML suffix is a path, to the file or to its folder.
    Raises `InputError` with the nearest name.
    """
    given = Path(name)
    if given.suffix in {".yaml", ".yml"} or len(given.parts) != 1 or "/" in name:
        path = given / RECIPE_FILE if given.is_dir() else given
        if not path.is_file():
            raise InputError(
                f"no recipe at `{name}`", hint=f"give a recipe file, or a folder with {RECIPE_FILE}"
            )
        return path.resolve()
    known = recipe_names()
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        guess = f"did you mean `{near[0]}`? " if near else ""
        if (given / RECIPE_FILE).is_file():
            guess = f"did you mean the folder `./{name}`? "
        raise InputError(
            f"unknown recipe `{name}`", hint=f"{guess}bundled recipes: {', '.join(known)}"
        )
    return bundled("recipes") / name / RECIPE_FILE


def load_recipe(name: str) -> LoadedRecipe | LoadedSglangRecipe:
    """Read a recipe of either engine, and check that the files it must have are there.

    Raises `InputError` with `file:line` for a bad recipe.
    """
    path = find_recipe(name)
    head = read_yaml_model(path, RecipeHead)
    if head.engine == "sglang":
        return _load_sglang(path)
    recipe = read_yaml_model(path, Recipe)
    return LoadedRecipe(
        recipe=recipe,
        path=path,
        target=_existing(path, recipe.models.target, "models.target", is_folder=True),
        drafter=_existing(path, recipe.models.drafter, "models.drafter", is_folder=True),
        dev=_existing(path, recipe.prompts.dev, "prompts.dev", is_folder=False),
        unseen=_existing(path, recipe.prompts.unseen, "prompts.unseen", is_folder=False),
    )


def _load_sglang(path: Path) -> LoadedSglangRecipe:
    recipe = read_yaml_model(path, SglangRecipe)
    unseen = None
    if recipe.prompts is not None:
        unseen = _existing(path, recipe.prompts.unseen, "prompts.unseen", is_folder=False)
    return LoadedSglangRecipe(recipe, path, unseen)


def _existing(recipe: Path, relative: str, key: str, *, is_folder: bool) -> Path:
    found = (recipe.parent / relative).resolve()
    if not (found.is_dir() if is_folder else found.is_file()):
        kind = "folder" if is_folder else "file"
        raise InputError(
            f"missing {kind}: `{found}`",
            where=f"{recipe}: {key}",
            hint="paths in a recipe are relative to the recipe's own folder",
        )
    return found


def take_per_benchmark(prompts: list[Prompt], count: int) -> list[Prompt]:
    """The first `count` prompts of every benchmark, in file order."""
    taken: dict[str, int] = {}
    chosen = []
    for prompt in prompts:
        taken[prompt.benchmark] = taken.get(prompt.benchmark, 0) + 1
        if taken[prompt.benchmark] <= count:
            chosen.append(prompt)
    return chosen
