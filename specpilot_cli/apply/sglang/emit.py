"""A deployment as files, instead of a launch: a shell script, a Docker image, Kubernetes objects.

What is written is what `apply recipe` would start: the same arguments, environment and plugin
configuration, and for an image this very specpilot as a wheel. No secret is ever written; a token
is passed on by name only.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

from specpilot_cli import __version__
from specpilot_cli.apply.sglang.containers import (
    container,
    docker_run,
    dockerfile,
    kubernetes_objects,
)
from specpilot_cli.apply.sglang.preflight import CheckedSglang
from specpilot_cli.apply.sglang.systems import SglangSystem, plugin_text
from specpilot_cli.errors import InputError
from specpilot_cli.io import own_wheel
from specpilot_cli.schema.plugin_config import PLUGIN_ENV
from specpilot_cli.ui import printable

EmitKind = Literal["sh", "docker", "k8s"]

PLUGIN_FILE = "plugin.json"
DEFAULT_PORT = 30000


def emit(checked: CheckedSglang, kind: EmitKind) -> dict[str, bytes]:
    """The files of the deployment, by name.

    Raises `InputError` unless exactly one system is chosen, and for a host, a name or a path that
    this kind of deployment cannot have; `MachineError` if specpilot cannot be packed.
    """
    if len(checked.systems) != 1:
        raise InputError(
            "a deployment has one server", where="--system", hint="choose stock or tuned"
        )
    system = checked.systems[0].system
    texts = _texts(checked, system, kind, checked.settings.first_port or DEFAULT_PORT)
    files = {name: _encoded(text) for name, text in texts.items()}
    if "Dockerfile" in files:
        files[own_wheel.NAME] = own_wheel.own_wheel()
    return files


def _texts(
    checked: CheckedSglang, system: SglangSystem, kind: EmitKind, port: int
) -> dict[str, str]:
    about = _about(checked, system)
    files = {} if system.plugin is None else {PLUGIN_FILE: plugin_text(system.plugin)}
    if kind == "sh":
        return {**files, "serve.sh": _shell(about, system, port)}
    box = container(checked, system, port)
    if system.plugin is not None:
        files["Dockerfile"] = dockerfile(about, checked.loaded.recipe.engine_versions.pinned)
    if kind == "docker":
        return {**files, "run.sh": _script(about, docker_run(box))}
    head = "".join(f"{line}\n" for line in about)
    if system.plugin is not None:
        head += (
            f"# First build the image: docker build --tag {box.image} .\n"
            "# Then push it where the cluster finds it, and write that name behind `image:`.\n"
        )
    return {**files, "deployment.yaml": head + kubernetes_objects(box)}


def _encoded(text: str) -> bytes:
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InputError(
            "a path or an argument is not UTF-8, and no deployment can name it",
            hint="rename the folder",
        ) from error


def _about(checked: CheckedSglang, system: SglangSystem) -> list[str]:
    recipe = checked.loaded.recipe
    title = printable(" ".join(recipe.title.split()))  # a comment ends with its line
    return [
        f"# {title}: the {system.label} server of recipe {recipe.name}.",
        f"# Written by specpilot {__version__} for SGLang {recipe.engine_versions.pinned}.",
    ]


def _shell(about: Sequence[str], system: SglangSystem, port: int) -> str:
    # the interpreter comes first and is chosen where the script runs
    command = replace(system, python="", plugin_file=Path(PLUGIN_FILE))
    exports = [
        f'export {name}="$here/{PLUGIN_FILE}"'
        if name == PLUGIN_ENV and value
        else f"export {name}={shlex.quote(value)}"
        for name, value in command.environment().items()
    ]
    words = command.command(port)[1:]
    return _script(about, f'exec "${{PYTHON:-python3}}" {shlex.join(words)}', exports)


def _script(about: Sequence[str], last: str, before: Sequence[str] = ()) -> str:
    lines = ["#!/bin/sh", *about, "set -eu", 'here=$(cd "$(dirname "$0")" && pwd)', *before, last]
    return "\n".join(lines) + "\n"
