"""The models of a recipe: where they are, and their shape as far as memory depends on it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from specpilot_cli.apply.recipes import LoadedSglangRecipe
from specpilot_cli.apply.sglang.settings import SglangSettings
from specpilot_cli.engines.sglang.model_shape import ModelShape, shape_of
from specpilot_cli.errors import InputError, MachineError
from specpilot_cli.io.hub import fetch_file, is_hub_id
from specpilot_cli.models.hf_config import read_hf_config
from specpilot_cli.models.registry import load_model

_CONFIG = "config.json"


@dataclass(frozen=True, slots=True)
class Model:
    """One model as the server will be given it.

    source: absolute folder, or hub id. folder: None for a hub id. known_from: what the shape was
    read from. stored_w12: the checkpoint was converted beforehand.
    """

    source: str
    folder: Path | None
    shape: ModelShape
    known_from: str
    stored_w12: bool = False

    def file(self, name: str) -> Path | None:
        """A file of the model, None if it has none or it cannot be had."""
        if self.folder is None:
            found = fetch_file(self.source, name)
            return None if isinstance(found, str) else found
        path = self.folder / name
        return path if path.is_file() else None


@dataclass(frozen=True, slots=True)
class Models:
    """tuned_target: what the tuned system loads, the target itself unless the recipe says else."""

    target: Model
    tuned_target: Model
    drafter: Model | None


def find_models(loaded: LoadedSglangRecipe, settings: SglangSettings) -> Models:
    """Every model of the recipe with its shape.

    Raises `InputError` for a folder that is no model, an unknown kind of model, or one of another
    shape than the recipe was made for; `MachineError` for a hub id whose configuration cannot be
    had.
    """
    models = loaded.recipe.models
    if settings.drafter is not None and models.drafter is None:
        raise InputError(
            "the recipe has no drafter to replace", where="--drafter", hint="leave the option out"
        )
    target = _find(loaded, "target", settings.target or models.target, models.target_profile)
    tuned = target
    if models.target_w12 is not None and settings.target is None:
        tuned = _find(loaded, "target_w12", models.target_w12, models.target_profile)
        tuned = replace(tuned, stored_w12=True)
    drafter = None
    if models.drafter is not None:
        given = settings.drafter or models.drafter
        drafter = _find(loaded, "drafter", given, models.drafter_profile)
    return Models(target, tuned, drafter)


def _find(loaded: LoadedSglangRecipe, key: str, given: str, expected: str | None) -> Model:
    folder, where = _folder(loaded, key, given), f"{loaded.path}: models.{key}"
    config = fetch_file(given, _CONFIG) if folder is None else folder / _CONFIG
    profile = None if expected is None else shape_of(load_model(expected))
    if isinstance(config, str):
        if profile is None:
            raise MachineError(
                f"the configuration of `{given}` is not here and cannot be fetched: {config}",
                where=where,
                hint="fetch the model, give a folder, or pip install 'specpilot[hub]'",
            )
        return Model(given, None, profile, f"the model profile {expected} ({config})")
    shape = shape_of(read_hf_config(config, w12=True, any_drafter=True))
    difference = None if profile is None else profile.first_difference(shape)
    if difference is not None:
        raise InputError(
            f"the recipe is for a model of another shape: {difference}",
            where=where,
            hint=f"`{config}` is not the model of profile {expected}, which the recipe names",
        )
    if folder is None:
        return Model(given, None, shape, str(config))
    return Model(str(folder), folder, _with_stored(shape, folder), str(config))


def _folder(loaded: LoadedSglangRecipe, key: str, given: str) -> Path | None:
    """The folder that `given` names; None for a hub id."""
    is_path = given.startswith((".", "/")) or Path(given).is_dir()
    if not is_path:
        if is_hub_id(given):
            return None
        raise InputError(
            f"neither a folder nor a hub id: `{given}`",
            where=f"{loaded.path}: models.{key}",
            hint="a folder begins with `.` or `/`; a hub id is `owner/name`",
        )
    named = loaded.recipe.models
    from_recipe = given in (named.target, named.drafter, named.target_w12)
    base = loaded.path.parent if from_recipe and given.startswith(".") else Path()
    folder = (base / given).resolve()
    if not (folder / _CONFIG).is_file():
        raise InputError(
            f"not a model folder: `{folder}` has no {_CONFIG}",
            where=f"{loaded.path}: models.{key}",
            hint="give a folder with config.json and safetensors files, or a hub id",
        )
    return folder


def _with_stored(shape: ModelShape, folder: Path) -> ModelShape:
    """Count what the files hold beyond the layers: a vision tower, a multi-token head."""
    stored = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    if stored <= shape.weight_bytes:
        return shape
    return replace(shape, other_bytes=stored - shape.linear_bytes)
