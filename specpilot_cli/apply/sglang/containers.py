"""One server in a container: the image, `docker run`, and Kubernetes objects."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

import yaml

from specpilot_cli import __version__
from specpilot_cli.apply.sglang.preflight import CheckedSglang
from specpilot_cli.apply.sglang.systems import SglangSystem, plugin_text

_CONFIG = PurePosixPath("/etc/specpilot/plugin.json")
_MODELS = PurePosixPath("/models")
_HUB_CACHE = "/root/.cache/huggingface"
_TOKEN, _TOKEN_SECRET = "HF_TOKEN", "hf-token"
_PROBE_EVERY_S, _PROBE_TIMEOUT_S, _LIVENESS_FAILURES = 10, 30, 6


@dataclass(frozen=True, slots=True)
class Container:
    """One server as a container runs it.

    models: folders of this machine → where the container sees them. plugin: the configuration's
    text, None for a server without plugin.
    """

    name: str
    image: str
    command: tuple[str, ...]
    environment: Mapping[str, str]
    models: Mapping[str, str]
    plugin: str | None
    port: int
    gpus: int
    ready_timeout_s: float


def container(checked: CheckedSglang, system: SglangSystem, port: int) -> Container:
    """The container of one server; local models are mounted, hub ids are fetched inside."""
    recipe = checked.loaded.recipe
    folders: dict[str, str] = {}

    def inside(source: str | None, name: str) -> str | None:
        if source is None or not source.startswith("/"):
            return source
        folders[source] = str(_MODELS / name)
        return folders[source]

    within = replace(
        system,
        python="python3",
        host="0.0.0.0",
        model=inside(system.model, "target") or system.model,
        drafter=inside(system.drafter, "drafter"),
        plugin_file=Path(_CONFIG),
    )
    pinned = recipe.engine_versions.pinned
    base = base_image(pinned)
    return Container(
        name=f"{recipe.name}-{system.label}".replace(".", "-").replace(" ", "-"),
        image=base if system.plugin is None else f"specpilot-sglang:{pinned}-{__version__}",
        command=tuple(within.command(port)),
        environment=within.environment(),
        models=folders,
        plugin=None if system.plugin is None else plugin_text(system.plugin),
        port=port,
        gpus=recipe.tensor_parallel if recipe.device == "cuda" else 0,
        ready_timeout_s=recipe.ready_timeout_s,
    )


def base_image(version: str) -> str:
    """SGLang's public image of a release."""
    return f"lmsysorg/sglang:v{version}"


def dockerfile(about: list[str], version: str) -> str:
    """SGLang's image with specpilot beside it; its configuration stays outside."""
    return "\n".join(
        [
            *about,
            f"FROM {base_image(version)}",
            f'RUN python3 -m pip install --no-cache-dir "specpilot[gpu]=={__version__}"',
            "",
        ]
    )


def docker_run(box: Container) -> str:
    """The shell lines that build the image, where it is ours, and run it."""
    lines = [] if box.plugin is None else [f'docker build --tag {box.image} "$here"']
    run = ["exec docker run --rm --ipc host"]
    if box.gpus:
        run.append(f"--gpus {box.gpus}")
    run.append(f"--publish {box.port}:{box.port}")
    run.append(f'--env {_TOKEN} --volume "${{HF_HOME:-$HOME/.cache/huggingface}}:{_HUB_CACHE}"')
    run += [f"--env {shlex.quote(f'{name}={value}')}" for name, value in box.environment.items()]
    run += [f"--volume {shlex.quote(f'{here}:{there}:ro')}" for here, there in box.models.items()]
    if box.plugin is not None:
        run.append(f'--volume "$here/{_CONFIG.name}:{_CONFIG}:ro"')
    run += [box.image, shlex.join(box.command)]
    return "\n".join([*lines, " \\\n  ".join(run)])


def kubernetes_objects(box: Container) -> str:
    """ConfigMap (with a plugin), Deployment and Service as one YAML stream."""
    labels = {"app": box.name}
    objects: list[dict[str, Any]] = []
    if box.plugin is not None:
        objects.append(_object("v1", "ConfigMap", box, {"data": {_CONFIG.name: box.plugin}}))
    objects.append(
        _object(
            "apps/v1",
            "Deployment",
            box,
            {
                "spec": {
                    "replicas": 1,
                    # two servers do not share a GPU: the old one goes first
                    "strategy": {"type": "Recreate"},
                    "selector": {"matchLabels": labels},
                    "template": {"metadata": {"labels": labels}, "spec": _pod(box)},
                }
            },
        )
    )
    ports = [{"name": "http", "port": box.port, "targetPort": "http"}]
    objects.append(_object("v1", "Service", box, {"spec": {"selector": labels, "ports": ports}}))
    return yaml.safe_dump_all(objects, sort_keys=False, width=4096)


def _object(version: str, kind: str, box: Container, body: dict[str, Any]) -> dict[str, Any]:
    metadata = {"name": box.name, "labels": {"app": box.name}}
    return {"apiVersion": version, "kind": kind, "metadata": metadata, **body}


def _pod(box: Container) -> dict[str, Any]:
    volumes: list[dict[str, Any]] = [
        {"name": "shared-memory", "emptyDir": {"medium": "Memory"}},
        {"name": "hub-cache", "emptyDir": {}},
    ]
    mounts: list[dict[str, Any]] = [
        {"name": "shared-memory", "mountPath": "/dev/shm"},
        {"name": "hub-cache", "mountPath": _HUB_CACHE},
    ]
    for here, there in box.models.items():
        name = f"model-{PurePosixPath(there).name}"
        volumes.append({"name": name, "hostPath": {"path": here, "type": "Directory"}})
        mounts.append({"name": name, "mountPath": there, "readOnly": True})
    if box.plugin is not None:
        volumes.append({"name": "plugin", "configMap": {"name": box.name}})
        mounts.append({"name": "plugin", "mountPath": str(_CONFIG.parent), "readOnly": True})
    return {"containers": [{**_server(box), "volumeMounts": mounts}], "volumes": volumes}


def _server(box: Container) -> dict[str, Any]:
    variables: list[dict[str, Any]] = [
        {"name": name, "value": value} for name, value in box.environment.items()
    ]
    reference = {"name": _TOKEN_SECRET, "key": "token", "optional": True}
    variables.append({"name": _TOKEN, "valueFrom": {"secretKeyRef": reference}})
    server: dict[str, Any] = {
        "name": "server",
        "image": box.image,
        "command": list(box.command),
        "env": variables,
        "ports": [{"name": "http", "containerPort": box.port}],
    }
    if box.gpus:
        server["resources"] = {"limits": {"nvidia.com/gpu": box.gpus}}
    tries = math.ceil(box.ready_timeout_s / _PROBE_EVERY_S)
    return {
        **server,
        "startupProbe": _probe(failures=tries),
        "readinessProbe": _probe(failures=1),
        "livenessProbe": _probe(failures=_LIVENESS_FAILURES),
    }


def _probe(*, failures: int) -> dict[str, Any]:
    """`/health` generates a token, so it may take a while on a busy server."""
    return {
        "httpGet": {"path": "/health", "port": "http"},
        "periodSeconds": _PROBE_EVERY_S,
        "timeoutSeconds": _PROBE_TIMEOUT_S,
        "failureThreshold": failures,
    }
