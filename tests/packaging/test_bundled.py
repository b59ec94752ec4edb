"""Every shipped profile and recipe is found by walking the folders, and is valid."""

from __future__ import annotations

from pathlib import Path

import pytest

from specpilot_cli.apply.recipes import LoadedRecipe, LoadedSglangRecipe, load_recipe
from specpilot_cli.io.json_file import read_json_model
from specpilot_cli.io.yaml_file import read_yaml_model
from specpilot_cli.schema.batch_times import BatchStepTimes
from specpilot_cli.schema.gpu_profile import GpuProfile
from specpilot_cli.schema.kernel_classes import KernelClasses
from specpilot_cli.schema.model_profile import ModelProfile
from specpilot_cli.schema.step_profile import StepTimeCurve

_REPO = Path(__file__).resolve().parents[2]
_RECIPES = sorted((_REPO / "recipes").rglob("recipe.yaml"))
_GPUS = sorted((_REPO / "profiles" / "gpus").rglob("*.yaml"))
_MODELS = sorted((_REPO / "profiles" / "models").rglob("*.yaml"))
_KERNELS = sorted((_REPO / "profiles" / "kernel_classes").rglob("*.yaml"))
_BATCH_TIMES = sorted((_REPO / "profiles" / "batch_times").rglob("*.json"))
_CURVES = sorted((_REPO / "profiles" / "step_times").rglob("*.json"))

# A clone should stay quick: target and drafter of one recipe, and everything together.
_MAX_MODEL_BYTES, _MAX_REPOSITORY_BYTES = 9_000_000, 14_000_000
_MAX_RECORDING_BYTES = 3_000_000
_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.npz", "*.gguf")


def _name(path: Path) -> str:
    return path.parent.name if path.name == "recipe.yaml" else path.stem


def test_nothing_in_profiles_escapes_these_tests() -> None:
    files = {p for p in (_REPO / "profiles").rglob("*") if p.is_file()}
    own_prompts = _REPO / "profiles" / "prompts" / "own.jsonl"  # read by tests of paired-bench
    known = {*_GPUS, *_MODELS, *_KERNELS, *_CURVES, *_BATCH_TIMES, own_prompts}
    assert files - known == {_REPO / "profiles" / "README.md"}
    assert _RECIPES
    assert _GPUS
    assert _MODELS
    assert _KERNELS
    assert _CURVES


@pytest.mark.parametrize("path", _GPUS, ids=_name)
def test_gpu_profile_is_valid_and_named_as_its_file(path: Path) -> None:
    assert read_yaml_model(path, GpuProfile).name == path.stem


@pytest.mark.parametrize("path", _MODELS, ids=_name)
def test_model_profile_is_valid_and_named_as_its_file(path: Path) -> None:
    assert read_yaml_model(path, ModelProfile).name == path.stem


@pytest.mark.parametrize("path", _KERNELS, ids=_name)
def test_kernel_classes_are_valid_and_named_as_their_file(path: Path) -> None:
    assert read_yaml_model(path, KernelClasses).name == path.stem


@pytest.mark.parametrize("path", _CURVES, ids=_name)
def test_step_times_are_valid_and_named_as_their_file(path: Path) -> None:
    assert read_json_model(path, StepTimeCurve).name == path.stem


@pytest.mark.parametrize("path", _BATCH_TIMES, ids=_name)
def test_batch_times_are_valid_and_named_as_their_file(path: Path) -> None:
    assert read_json_model(path, BatchStepTimes).name == path.stem


@pytest.mark.parametrize("path", _RECIPES, ids=_name)
def test_recipe_is_valid_and_has_what_it_names(path: Path) -> None:
    loaded = load_recipe(str(path))
    assert loaded.recipe.name == path.parent.name
    if isinstance(loaded, LoadedRecipe) and loaded.recipe.projection is not None:
        assert loaded.recipe.projection in {curve.stem for curve in _CURVES}
    if isinstance(loaded, LoadedSglangRecipe):
        assert set(loaded.recipe.gpus) <= {gpu.stem for gpu in _GPUS}


@pytest.mark.parametrize("path", _RECIPES, ids=_name)
def test_recipe_has_its_evidence(path: Path) -> None:
    assert (path.parent / "EVIDENCE.md").is_file()


@pytest.mark.parametrize("path", _RECIPES, ids=_name)
def test_models_of_a_recipe_stay_small(path: Path) -> None:
    files = list(path.parent.rglob("*.safetensors"))
    recorded = [file for file in files if file.parent.name == "recordings"]
    models = sum(file.stat().st_size for file in files if file not in recorded)
    assert models <= _MAX_MODEL_BYTES
    assert sum(file.stat().st_size for file in recorded) <= _MAX_RECORDING_BYTES
    # SGLang's recipes name models that are elsewhere
    assert (models == 0) == isinstance(load_recipe(str(path)), LoadedSglangRecipe)


def test_weights_in_the_repository_stay_small() -> None:
    files = [file for kind in _WEIGHTS for file in (_REPO / "recipes").rglob(kind)]
    assert sum(file.stat().st_size for file in files) <= _MAX_REPOSITORY_BYTES
