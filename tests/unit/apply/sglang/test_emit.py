"""Deployments as files: complete, valid, free of secrets, and the same as a launch."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.unit.apply.sglang.conftest import QWEN_27B, FakeSglang

Make = Callable[..., Path]
RECIPE = "qwen3.8-27b-h200-dflash2-w12"


@pytest.fixture
def emitted(fake: FakeSglang) -> Callable[..., Path]:
    """`emitted(kind, *options, recipe=)`: the folder that was written."""

    def emit(kind: str, *more: str, recipe: str = RECIPE) -> Path:
        done = fake.run("apply", "recipe", recipe, "--emit", kind, "--out", "d", "--json", *more)
        assert done.returncode == 0, done.stderr
        folder = fake.folder / "d"
        files = json.loads(done.stdout)["results"]["files"]
        assert sorted(files) == sorted(str(path) for path in folder.iterdir())
        return folder

    return emit


def _objects(folder: Path) -> dict[str, Any]:
    text = (folder / "deployment.yaml").read_text(encoding="utf-8")
    return {each["kind"]: each for each in yaml.safe_load_all(text)}


def test_shell_script_starts_what_a_run_would_start(
    fake: FakeSglang, sglang_recipe: Make, emitted: Callable[..., Path], tmp_path: Path
) -> None:
    """Run with a Python that prints its words and variables."""
    folder = emitted("sh", "--port", "31007", recipe=str(sglang_recipe()))
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\nprintf "%s\\n" "$@" "$SPECPILOT_PLUGIN" "$SGLANG_TEST"\n')
    python.chmod(0o755)
    done = subprocess.run(
        [folder / "serve.sh"], env={**os.environ, "PYTHON": str(python)}, cwd="/",
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    *words, plugin, variable = done.stdout.splitlines()
    assert (plugin, variable) == (str(folder / "plugin.json"), "1")
    dry = fake.run("apply", "recipe", str(tmp_path / "recipe"), "--dry-run", "--json",
                   "--system", "tuned", "--port", "31007")  # fmt: skip
    planned = json.loads(dry.stdout)["results"]["dry_run"]["servers"][0]
    assert shlex.split(planned["command"])[1:] == words
    assert json.loads(Path(plugin).read_text()) == planned["plugin"]


def test_kubernetes_objects(emitted: Callable[..., Path]) -> None:
    folder = emitted("k8s")
    found = _objects(folder)
    assert list(found) == ["ConfigMap", "Deployment", "Service"]
    assert len({each["metadata"]["name"] for each in found.values()}) == 1
    name = found["Deployment"]["metadata"]["name"]
    assert name == "qwen3-8-27b-h200-dflash2-w12-tuned"
    pod = found["Deployment"]["spec"]["template"]
    labels = found["Deployment"]["spec"]["selector"]["matchLabels"]
    assert pod["metadata"]["labels"] == labels == found["Service"]["spec"]["selector"]
    (server,) = pod["spec"]["containers"]
    assert server["resources"]["limits"] == {"nvidia.com/gpu": 1}
    for probe, failures in (("startupProbe", 90), ("readinessProbe", 1), ("livenessProbe", 6)):
        assert server[probe]["httpGet"] == {"path": "/health", "port": "http"}
        assert server[probe]["failureThreshold"] == failures
    command = server["command"]
    assert command[:3] == ["python3", "-m", "sglang.launch_server"]
    assert command[command.index("--quantization") + 1] == "w12"
    assert command[command.index("--host") + 1] == "0.0.0.0"
    assert found["Service"]["spec"]["ports"][0]["port"] == server["ports"][0]["containerPort"]
    # the plugin's configuration is mounted where the variable points
    variables = {entry["name"]: entry for entry in server["env"]}
    config = json.loads(found["ConfigMap"]["data"]["plugin.json"])
    assert config == json.loads((folder / "plugin.json").read_text())
    assert config["w12"]["verify"] is True
    mounts = {mount["name"]: mount["mountPath"] for mount in server["volumeMounts"]}
    assert variables["SPECPILOT_PLUGIN"]["value"] == f"{mounts['plugin']}/plugin.json"
    volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
    assert volumes.keys() == mounts.keys()
    assert volumes["plugin"]["configMap"]["name"] == name
    assert "value" not in variables["HF_TOKEN"]


def test_stock_needs_neither_plugin_nor_image(emitted: Callable[..., Path]) -> None:
    folder = emitted("k8s", "--system", "stock")
    assert [path.name for path in folder.iterdir()] == ["deployment.yaml"]
    found = _objects(folder)
    assert list(found) == ["Deployment", "Service"]
    (server,) = found["Deployment"]["spec"]["template"]["spec"]["containers"]
    assert server["image"] == "lmsysorg/sglang:v0.5.23"
    assert "--quantization" not in server["command"]


def test_docker_builds_on_the_pinned_image_and_mounts_local_models(
    emitted: Callable[..., Path], fake: FakeSglang
) -> None:
    target = fake.folder / "model"
    target.mkdir()
    (target / "config.json").write_text(json.dumps(QWEN_27B))
    folder = emitted("docker", "--target", str(target))
    lines = (folder / "Dockerfile").read_text().splitlines()
    assert "FROM lmsysorg/sglang:v0.5.23" in lines
    assert any("pip install" in line and "specpilot[gpu]==" in line for line in lines)
    script = (folder / "run.sh").read_text()
    done = subprocess.run(["sh", "-n"], input=script, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert f"--volume {target}:/models/target:ro" in script
    assert "--model-path /models/target" in script
    assert "--speculative-draft-model-path z-lab/Qwen3.8-27B-DFlash2" in script
    assert '--volume "$here/plugin.json:/etc/specpilot/plugin.json:ro"' in script


@pytest.mark.parametrize("kind", ["sh", "docker", "k8s"])
def test_no_secret_is_written(
    emitted: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    for name in ("HF_TOKEN", "SGLANG_API_KEY"):
        monkeypatch.setenv(name, "hf_do_not_write_me")
    folder = emitted(kind)
    assert not [path for path in folder.iterdir() if "do_not_write_me" in path.read_text()]


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (("--emit", "k8s", "--system", "both"), 2, "--serve and --emit are for one server"),
        (("--emit", "sh", "--serve"), 2, "--emit starts nothing"),
        (("--emit", "sh", "--dry-run"), 2, "--emit starts nothing"),
        (("--fault-after", "3"), 2, "recipes for the engine `sglang` have no such option"),
        (("--gpu", "h100-sxm5", "--dry-run"), 2, "the recipe is not for `h100-sxm5`"),
        (("--gpu", "h2000", "--dry-run"), 2, "unknown GPU `h2000`"),
    ],
)
def test_options_that_do_not_go_together(
    fake: FakeSglang, words: tuple[str, ...], code: int, message: str
) -> None:
    done = fake.run("apply", "recipe", RECIPE, *words)
    assert done.returncode == code, done.stderr
    assert message in done.stderr
    assert done.stdout == ""


def test_a_folder_in_use_is_left_alone(fake: FakeSglang) -> None:
    (fake.folder / "d").mkdir()
    (fake.folder / "d" / "mine").touch()
    done = fake.run("apply", "recipe", RECIPE, "--emit", "sh", "--out", "d")
    assert done.returncode == 2, done.stderr
    assert [path.name for path in (fake.folder / "d").iterdir()] == ["mine"]


def test_a_title_never_becomes_a_command(fake: FakeSglang, sglang_recipe: Make) -> None:
    recipe = sglang_recipe(
        edit={"title: Demo target on a fake SGLang": r'title: "a\ntouch pwned\r\ntouch pwned"'}
    )
    for kind in ("sh", "docker", "k8s"):
        done = fake.run("apply", "recipe", str(recipe), "--emit", kind, "--out", kind)
        assert done.returncode == 0, done.stderr
        for path in (fake.folder / kind).iterdir():
            lines = path.read_text(encoding="utf-8").splitlines()
            assert not [line for line in lines if line.startswith("touch")], path
