"""Deployments as files: complete, valid, free of secrets, and the same as a launch."""

from __future__ import annotations

import csv
import json
import os
import shlex
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml

from specpilot_cli.io import own_wheel
from specpilot_cli.main import main
from tests.unit.apply.sglang.conftest import QWEN_27B

Make = Callable[..., Path]
RECIPE = "qwen3.8-27b-h200-dflash2-w12"


@dataclass(frozen=True, slots=True)
class Done:
    """What a command left: its exit code and its two streams."""

    returncode: int
    stdout: str
    stderr: str


Apply = Callable[..., Done]


@pytest.fixture
def apply(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Apply:
    """`specpilot apply recipe WORDS` in an empty folder, in this process."""
    monkeypatch.chdir(tmp_path)

    def run(*words: str) -> Done:
        capfd.readouterr()
        code = main(["apply", "recipe", *words])
        return Done(code, *capfd.readouterr())

    return run


@pytest.fixture
def emitted(apply: Apply, tmp_path: Path) -> Callable[..., Path]:
    """`emitted(kind, *options, recipe=)`: the folder that was written."""

    def emit(kind: str, *more: str, recipe: str = RECIPE) -> Path:
        done = apply(recipe, "--emit", kind, "--out", "d", "--json", *more)
        assert done.returncode == 0, done.stderr
        folder = tmp_path / "d"
        files = json.loads(done.stdout)["results"]["files"]
        assert sorted(files) == sorted(str(path) for path in folder.iterdir())
        return folder

    return emit


def _texts(folder: Path) -> dict[str, str]:
    """What is to be read by people and programs: all but the wheel."""
    return {
        path.name: path.read_text(encoding="utf-8")
        for path in folder.iterdir()
        if path.name != own_wheel.NAME
    }


def _objects(folder: Path) -> dict[str, Any]:
    text = (folder / "deployment.yaml").read_text(encoding="utf-8")
    return {each["kind"]: each for each in yaml.safe_load_all(text)}


def test_shell_script_starts_what_a_run_would_start(
    apply: Apply, sglang_recipe: Make, emitted: Callable[..., Path], tmp_path: Path
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
    dry = apply(str(tmp_path / "recipe"), "--dry-run", "--json",
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


# A folder that a shell, Docker, YAML and Kubernetes would each read otherwise than it is written.
ODD = """it's, a "model": $(touch pwned) `id` $HOME #1 & ;"""


@pytest.fixture
def odd_model(tmp_path: Path) -> Path:
    """The target's configuration in a folder with an odd name."""
    target = tmp_path / ODD
    target.mkdir()
    (target / "config.json").write_text(json.dumps(QWEN_27B))
    return target


def _printing(folder: Path, name: str) -> Path:
    """A program `name` in a folder of its own that prints its words, one a line."""
    place = folder / f"{name}-bin"
    place.mkdir()
    program = place / name
    program.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    program.chmod(0o755)
    return place


def _run(script: Path, path: Path, **variables: str) -> list[str]:
    done = subprocess.run(
        [script], cwd=path, capture_output=True, text=True, check=True,
        env={**os.environ, "PATH": f"{path}:{os.environ['PATH']}", **variables},
    )  # fmt: skip
    return done.stdout.splitlines()


def test_docker_builds_the_image_and_mounts_what_it_needs(
    emitted: Callable[..., Path], tmp_path: Path, odd_model: Path
) -> None:
    """Run with a `docker` that prints its words."""
    folder = emitted("docker", "--target", str(odd_model))
    home = tmp_path / "home"
    words = _run(folder / "run.sh", _printing(tmp_path, "docker"), HF_HOME=str(home))
    image = f"specpilot-sglang:0.5.23-{own_wheel.NAME.split('-')[1]}"
    assert words[:4] == ["build", "--tag", image, str(folder)]
    options, command = words[4 : (at := words.index(image, 4))], words[at + 1 :]
    assert options[:3] == ["run", "--rm", "--init"]
    assert options[options.index("--publish") + 1] == "127.0.0.1:30000:30000"
    mounts = [
        dict(field.partition("=")[::2] for field in next(csv.reader([after])))
        for word, after in pairwise(options)
        if word == "--mount"
    ]
    assert {mount["target"]: mount["source"] for mount in mounts} == {
        "/root/.cache/huggingface": str(home),
        "/models/target": str(odd_model),
        "/etc/specpilot/plugin.json": str(folder / "plugin.json"),
    }
    assert home.is_dir()
    assert command[command.index("--model-path") + 1] == "/models/target"
    drafter = command[command.index("--speculative-draft-model-path") + 1]
    assert drafter == "z-lab/Qwen3.8-27B-DFlash2"
    assert command[command.index("--host") + 1] == "0.0.0.0"
    assert not list(tmp_path.rglob("pwned"))


@pytest.mark.parametrize("kind", ["docker", "k8s"])
def test_the_image_is_made_of_what_lies_beside_the_dockerfile(
    emitted: Callable[..., Path], kind: str
) -> None:
    folder = emitted(kind)
    assert (folder / own_wheel.NAME).read_bytes() == own_wheel.own_wheel()
    start, *steps = [
        line for line in (folder / "Dockerfile").read_text().splitlines() if line[0] != "#"
    ]
    assert start == "FROM lmsysorg/sglang:v0.5.23"
    assert steps[0] == f"COPY {own_wheel.NAME} /tmp/"
    command = "\n".join(steps[1:]).removeprefix("RUN ")
    assert f'"/tmp/{own_wheel.NAME}[gpu]"' in command
    subprocess.run(["sh", "-n"], input=command, text=True, check=True)


def test_a_shell_script_names_an_odd_folder_as_it_is(
    emitted: Callable[..., Path], tmp_path: Path, odd_model: Path
) -> None:
    folder = emitted("sh", "--target", str(odd_model), "--host", "::1")
    python = _printing(tmp_path, "python")
    words = _run(folder / "serve.sh", python, PYTHON=str(python / "python"))
    assert words[words.index("--model-path") + 1] == str(odd_model)
    assert words[words.index("--host") + 1] == "::1"
    assert not list(tmp_path.rglob("pwned"))


def test_kubernetes_gets_every_string_as_it_is(
    emitted: Callable[..., Path], sglang_recipe: Make, repo: Path, tmp_path: Path
) -> None:
    """Its reader of YAML takes more words for numbers than Python's, and it knows `$(NAME)`."""
    target = tmp_path / ODD
    target.mkdir()
    shutil.copy(repo / "recipes/demo-cpu/target/config.json", target)
    numbers = ["1e3", "0o17", "0x1F", "y", "No", "~", "1_000", "12:30", ".5", "-1", "2026-11-30"]
    text = json.dumps({"a": "$(HOME)"})
    tuned = json.dumps({"lora-paths": numbers, "json-model-override-args": text})
    recipe = sglang_recipe(
        edit={
            f"{repo}/recipes/demo-cpu/target": json.dumps(str(target)),
            "    page-size: 1\n": f"    page-size: 1\n  tuned: {tuned}\n",
        }
    )
    folder = emitted("k8s", recipe=str(recipe))
    written = (folder / "deployment.yaml").read_text(encoding="utf-8")
    (server,) = _objects(folder)["Deployment"]["spec"]["template"]["spec"]["containers"]
    command = server["command"]
    at = command.index("--lora-paths") + 1
    assert command[at : at + len(numbers)] == numbers
    for number in numbers:
        assert f'- "{number}"\n' in written
    override = command[command.index("--json-model-override-args") + 1]
    assert override == text.replace("$(", "$$(")
    assert all(isinstance(word, str) for word in command)
    assert all(isinstance(each["value"], str) for each in server["env"] if "value" in each)
    volumes = _objects(folder)["Deployment"]["spec"]["template"]["spec"]["volumes"]
    assert [v["hostPath"]["path"] for v in volumes if "hostPath" in v] == [str(target)]
    assert "&id" not in written


@pytest.mark.parametrize("kind", ["sh", "docker", "k8s"])
def test_no_secret_is_written(
    emitted: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    for name in ("HF_TOKEN", "SGLANG_API_KEY"):
        monkeypatch.setenv(name, "hf_do_not_write_me")
    assert not [text for text in _texts(emitted(kind)).values() if "do_not_write_me" in text]


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (("--emit", "k8s", "--system", "both"), 2, "--serve and --emit are for one server"),
        (("--emit", "sh", "--serve"), 2, "--emit starts nothing"),
        (("--emit", "sh", "--dry-run"), 2, "--emit starts nothing"),
        (("--fault-after", "3"), 2, "recipes for the engine `sglang` have no such option"),
        (("--gpu", "h100-sxm5", "--dry-run"), 2, "the recipe is not for `h100-sxm5`"),
        (("--gpu", "h2000", "--dry-run"), 2, "unknown GPU `h2000`"),
        (("--emit", "sh", "--host", "my host"), 2, "neither an IP address nor a host name"),
        (("--emit", "sh", "--host", ""), 2, "neither an IP address nor a host name"),
        (("--dry-run", "--host", "1.2.3.4.5"), 2, "neither an IP address nor a host name"),
        (("--serve", "--host", "http://h:1"), 2, "neither an IP address nor a host name"),
        (("--emit", "sh", "--host", "fe80::1%eth0"), 2, "neither an IP address nor a host name"),
        (("--emit", "docker", "--host", "localhost"), 2, "Docker publishes a port on an address"),
        (("--emit", "k8s", "--host", "0.0.0.0"), 2, "pods listen on every address"),
        (("--emit", "sh", "--python", "/opt/python"), 2, "--emit chooses no interpreter"),
        (("--emit", "sh", "--prompts", "p.jsonl"), 2, "--emit judges nothing"),
        (("--serve", "--limit", "3"), 2, "--serve judges nothing"),
    ],
)
def test_options_that_do_not_go_together(
    apply: Apply, words: tuple[str, ...], code: int, message: str
) -> None:
    done = apply(RECIPE, *words)
    assert done.returncode == code, done.stderr
    assert message in done.stderr
    assert done.stdout == ""


def test_a_folder_in_use_is_left_alone(apply: Apply, tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "mine").touch()
    done = apply(RECIPE, "--emit", "sh", "--out", "d")
    assert done.returncode == 2, done.stderr
    assert [path.name for path in (tmp_path / "d").iterdir()] == ["mine"]


def test_a_title_never_becomes_a_command(apply: Apply, tmp_path: Path, sglang_recipe: Make) -> None:
    recipe = sglang_recipe(
        edit={"title: Demo target on a fake SGLang": r'title: "a\ntouch pwned\r\ntouch pwned"'}
    )
    for kind in ("sh", "docker", "k8s"):
        done = apply(str(recipe), "--emit", kind, "--out", kind)
        assert done.returncode == 0, done.stderr
        for name, text in _texts(tmp_path / kind).items():
            assert not [line for line in text.splitlines() if line.startswith("touch")], name


@pytest.mark.parametrize(
    ("host", "published"),
    [("0.0.0.0", "0.0.0.0:30000:30000"), ("::1", "[::1]:30000:30000")],
)
def test_docker_publishes_where_it_is_told(
    emitted: Callable[..., Path], host: str, published: str
) -> None:
    words = shlex.split((emitted("docker", "--host", host) / "run.sh").read_text(), comments=True)
    assert words[words.index("--publish") + 1] == published


def test_a_name_that_is_no_service_is_refused(
    apply: Apply, tmp_path: Path, sglang_recipe: Make
) -> None:
    recipe = sglang_recipe(edit={"name: small": "name: 7b"})
    done = apply(str(recipe), "--emit", "k8s", "--out", "d")
    assert done.returncode == 2, done.stderr
    assert "`7b-tuned` can be no Service of Kubernetes" in done.stderr
    assert not (tmp_path / "d").exists()


def test_a_path_that_is_not_utf_8_is_refused(apply: Apply, tmp_path: Path) -> None:
    target = tmp_path / os.fsdecode(b"caf\xe9")
    target.mkdir()
    (target / "config.json").write_text(json.dumps(QWEN_27B))
    words = ("--target", str(target), "--emit", "sh", "--out", "d")
    done = apply(RECIPE, *words)
    assert done.returncode == 2, done.stderr
    assert "is not UTF-8" in done.stderr
    assert not (tmp_path / "d").exists()
