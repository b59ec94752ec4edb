"""Before a launch: models by folder and hub id, shapes, devices, memory, and what is refused."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from specpilot_cli.apply.recipes import LoadedSglangRecipe, load_recipe
from specpilot_cli.apply.sglang import device as device_module
from specpilot_cli.apply.sglang.device import find_device
from specpilot_cli.apply.sglang.dry_run import PlannedSglangRun, plan_sglang
from specpilot_cli.apply.sglang.models import find_models
from specpilot_cli.apply.sglang.preflight import check_sglang
from specpilot_cli.apply.sglang.settings import SglangSettings
from specpilot_cli.doctor.cuda_driver import CudaDevice
from specpilot_cli.errors import InputError, MachineError
from specpilot_cli.schema.sglang_recipe import EngineRange, SglangRecipe
from tests.unit.apply.sglang.conftest import QWEN_27B

Make = Callable[..., Path]
PLAIN, DRAFTED = "qwen3.8-27b-h200-w12", "qwen3.8-27b-h200-dflash2-w12"


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_module, "cuda_devices", list)


def _load(name: str) -> LoadedSglangRecipe:
    loaded = load_recipe(name)
    assert isinstance(loaded, LoadedSglangRecipe)
    return loaded


def _plan(name: str, **settings: Any) -> PlannedSglangRun:
    folder = Path("/run")
    checked = check_sglang(_load(name), SglangSettings(**settings), folder, for_launch=False)
    return plan_sglang(checked, folder)


def test_dry_run_of_the_shipped_recipes_needs_no_network_and_no_gpu() -> None:
    plan = _plan(DRAFTED, python="python3")
    stock, tuned = plan.servers
    assert (plan.together, stock.port) == (False, None)
    assert plan.no_gates == "the recipe names no prompts; give some with --prompts FILE"
    words = shlex.split(tuned.command)
    assert words[:5] == [
        "python3",
        "-m",
        "sglang.launch_server",
        "--model-path",
        "Qwen/Qwen3.8-27B",
    ]
    assert tuned.environment == {"SPECPILOT_PLUGIN": "/run/plugin-candidate.json"}
    assert stock.environment == {"SPECPILOT_PLUGIN": ""}
    assert set(words) - set(shlex.split(stock.command)) == {"--quantization", "w12"}
    assert tuned.memory.kv_tokens > stock.memory.kv_tokens > plan.servers[0].memory.needed_tokens


def test_stock_of_the_plain_recipe_is_the_fastest_stock() -> None:
    stock, tuned = _plan(PLAIN).servers
    assert "--bf16-gemm-backend gemv" in stock.command
    assert "--bf16-gemm-backend" not in tuned.command


def test_servers_that_follow_each_other_share_a_port() -> None:
    assert [server.port for server in _plan(PLAIN, first_port=31000).servers] == [31000, 31000]


def test_more_drafting_than_the_gpu_holds_is_refused(tmp_path: Path, repo: Path) -> None:
    text = (repo / "recipes" / DRAFTED / "recipe.yaml").read_text(encoding="utf-8")
    text = text.replace("max-running-requests: 8", "max-running-requests: 48")
    (tmp_path / "recipe.yaml").write_text(text)
    with pytest.raises(MachineError, match="the stock server does not fit on h200") as error:
        _plan(str(tmp_path))
    assert "GDN snapshots 60.3 GB" in error.value.message
    assert error.value.hint is not None
    assert "draft tokens" in error.value.hint


def test_a_local_model_of_another_shape_is_refused(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(QWEN_27B))
    assert _plan(PLAIN, target=str(model)).target == str(model)
    wider = {**QWEN_27B["text_config"], "intermediate_size": 18432}
    (model / "config.json").write_text(json.dumps(wider))
    with pytest.raises(InputError, match=r"another shape: gate_up: 64 of \[34816, 5120\], 64 of"):
        _plan(PLAIN, target=str(model))


def test_a_profile_that_does_not_exist(tmp_path: Path, repo: Path) -> None:
    text = (repo / "recipes" / PLAIN / "recipe.yaml").read_text(encoding="utf-8")
    (tmp_path / "recipe.yaml").write_text(text.replace("qwen3.8-27b\n", "qwen3.8-72b\n", 1))
    with pytest.raises(InputError):
        _plan(str(tmp_path))


def test_files_larger_than_the_layers_are_counted(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN_27B))
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.truncate(60_000_000_000)  # a hole: no disk is used
    found = find_models(_load(PLAIN), SglangSettings(target=str(tmp_path)))
    assert found.target.shape.weight_bytes == 60_000_000_000


def test_a_converted_target_is_for_the_tuned_system_alone(
    sglang_recipe: Make, tmp_path: Path, repo: Path
) -> None:
    converted = tmp_path / "w12"
    converted.mkdir()
    config = repo / "recipes/demo-cpu/target/config.json"
    (converted / "config.json").write_text(config.read_text(encoding="utf-8"))
    target = f"  target: {repo}/recipes/demo-cpu/target\n"
    recipe = sglang_recipe(edit={target: f"{target}  target_w12: ../w12\n"})
    stock, tuned = _plan(str(recipe)).servers
    assert f"--model-path {repo}/recipes/demo-cpu/target " in stock.command
    assert f"--model-path {converted} " in tuned.command
    # the folder itself says what it is
    assert "--quantization" not in tuned.command
    assert tuned.memory.load_peak_bytes < stock.memory.load_peak_bytes
    (converted / "config.json").unlink()
    with pytest.raises(InputError, match="not a model folder"):
        _plan(str(recipe))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"target": "./nowhere"}, "not a model folder"),
        ({"target": "no-owner"}, "neither a folder nor a hub id"),
        ({"drafter": "a/b"}, "the recipe has no drafter to replace"),
    ],
)
def test_models_that_are_none(settings: dict[str, str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        _plan(PLAIN, **settings)


def test_a_hub_id_whose_configuration_is_nowhere(sglang_recipe: Make, repo: Path) -> None:
    old = f"  target: {repo}/recipes/demo-cpu/target\n"
    recipe = sglang_recipe(edit={old: "  target: some/model\n"})
    with pytest.raises(MachineError, match="the configuration of `some/model` is not here"):
        _plan(str(recipe))


H200 = CudaDevice("NVIDIA H200", (9, 0), 150_754_000_000)
H100 = CudaDevice("NVIDIA H100 80GB HBM3", (9, 0), 85_000_000_000)


def test_the_gpu_in_the_machine_is_planned_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_module, "cuda_devices", lambda: [H200])
    found, taken = find_device(_load(PLAIN).recipe, gpu=None, for_launch=True)
    assert (found.memory_bytes, found.source, taken) == (150_754_000_000, "the driver", 0)


@pytest.mark.parametrize(
    ("devices", "message"),
    [
        ([], "no CUDA device here; the recipe is for h200"),
        ([H100], "unsupported GPU `NVIDIA H100 80GB HBM3`: the recipe is for h200"),
        ([CudaDevice("Unheard Of", (9, 0), 1)], "unsupported GPU `Unheard Of`"),
    ],
)
def test_a_machine_without_the_recipes_gpu(
    monkeypatch: pytest.MonkeyPatch, devices: list[CudaDevice], message: str
) -> None:
    monkeypatch.setattr(device_module, "cuda_devices", lambda: devices)
    with pytest.raises(MachineError, match=message):
        find_device(_load(PLAIN).recipe, gpu=None, for_launch=True)


def test_too_few_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_module, "cuda_devices", lambda: [H200])
    recipe = _load(PLAIN).recipe.model_copy(update={"tensor_parallel": 2})
    with pytest.raises(MachineError, match="1 GPUs here, the recipe needs 2"):
        find_device(recipe, gpu=None, for_launch=True)


def _recipe(**change: Any) -> SglangRecipe:
    base = _load(DRAFTED).recipe.model_dump(mode="json")
    return SglangRecipe.model_validate({**base, **change})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"arguments": {"common": {"host": "0.0.0.0"}}}, "`host` is set through --host, not here"),
        ({"arguments": {"tuned": {"quantization": "fp8"}}}, "through the mechanism `w12`"),
        ({"arguments": {"common": {"api-key": "x"}}}, "`api-key` holds a secret"),
        ({"arguments": {"common": {"Page Size": 1}}}, "`Page Size` is no option name"),
        ({"arguments": {"common": {"page-size": False}}}, "`page-size: false` says nothing"),
        ({"arguments": {}}, "`models.drafter` and the option `speculative-algorithm` go together"),
        ({"environment": {"HF_TOKEN": "x"}}, "`HF_TOKEN` holds a secret"),
        ({"environment": {"SPECPILOT_PLUGIN": "x"}}, "`SPECPILOT_PLUGIN` is set by specpilot"),
        ({"gpus": []}, "`gpus` names the GPUs of a recipe for cuda"),
        ({"mechanisms": [{"mechanism": "w12"}] * 2}, "mechanism listed twice: w12"),
        ({"engine_versions": {"from_version": "0.5.20", "below": "0.5.24", "pinned": "0.5.24"}},
         "pinned 0.5.24 is outside 0.5.20 to below 0.5.24"),
    ],
)  # fmt: skip
def test_recipes_that_contradict_themselves(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        _recipe(**change)


@pytest.mark.parametrize(
    ("version", "inside"),
    [("0.5.20", True), ("0.5.23.post2", True), ("0.5.23+cu130", True), ("0.5.24", False),
     ("0.5.19", False), ("0.6.0", False), ("", False)],
)  # fmt: skip
def test_versions_in_a_range(version: str, inside: bool) -> None:
    known = EngineRange(from_version="0.5.20", below="0.5.24", pinned="0.5.23")
    assert known.contains(version) is inside
