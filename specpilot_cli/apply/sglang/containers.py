"""One server in a container: the image, `docker run`, and Kubernetes objects."""

from __future__ import annotations

import ipaddress
import math
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

import yaml

from specpilot_cli import __version__
from specpilot_cli.apply.sglang.preflight import CheckedSglang
from specpilot_cli.apply.sglang.systems import SglangSystem, plugin_text
from specpilot_cli.errors import InputError
from specpilot_cli.io import own_wheel

_CONFIG = PurePosixPath("/etc/specpilot/plugin.json")
_MODELS = PurePosixPath("/models")
_HUB_CACHE_HERE = ".cache/huggingface"
_HUB_CACHE = f"/root/{_HUB_CACHE_HERE}"
_TOKEN, _TOKEN_SECRET = "HF_TOKEN", "hf-token"
_PROBE_EVERY_S, _PROBE_TIMEOUT_S, _LIVENESS_FAILURES = 10, 30, 6
# Of a Service, the strictest of the objects.
_KUBERNETES_NAME = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?")
# Strings that no reader of YAML takes for a number, a truth value or nothing.
_PLAIN = re.compile(
    r"-{0,2}(?!(?:y|n|yes|no|on|off|true|false|null|nan|inf)$)[a-z/]([\w./-]*[\w/])?", re.I | re.A
)
# Fails the build of an image whose engine would start without the plugin.
_PLUGIN_IS_THERE = (
    "from importlib.metadata import entry_points as e; "
    "e(group='sglang.srt.plugins')['specpilot'].load()"
)


@dataclass(frozen=True, slots=True)
class Container:
    """One server as a container runs it.

    host: the address of the machine on which Docker publishes the port. models: folders of this
    machine → where the container sees them. plugin: the configuration's text, None for a server
    without plugin.
    """

    name: str
    image: str
    command: tuple[str, ...]
    environment: Mapping[str, str]
    models: Mapping[str, str]
    plugin: str | None
    host: str
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
        host=system.host,
        port=port,
        gpus=recipe.tensor_parallel if recipe.device == "cuda" else 0,
        ready_timeout_s=recipe.ready_timeout_s,
    )


def base_image(version: str) -> str:
    """SGLang's public image of a release."""
    return f"lmsysorg/sglang:v{version}"


def dockerfile(about: list[str], version: str) -> str:
    """SGLang's image with specpilot beside it; its configuration stays outside.

    What the image has is kept as it is: a conflict with it fails the build.
    """
    wheel, kept = f"/tmp/{own_wheel.NAME}", "/tmp/kept.txt"
    return "\n".join(
        [
            *about,
            f"FROM {base_image(version)}",
            f"COPY {own_wheel.NAME} /tmp/",
            f"RUN python3 -m pip freeze --exclude-editable | grep '==' > {kept} \\",
            f'    && python3 -m pip install --no-cache-dir --constraint {kept} "{wheel}[gpu]" \\',
            f"    && rm {wheel} {kept} \\",
            f'    && python3 -c "{_PLUGIN_IS_THERE}"',
            "",
        ]
    )


def docker_run(box: Container) -> str:
    """The shell lines that build the image, where it is ours, and run it.

    Raises `InputError` for a host that is no address: Docker publishes on addresses only.
    """
    try:
        address = ipaddress.ip_address(box.host)
    except ValueError as error:
        raise InputError(
            f"Docker publishes a port on an address, and `{box.host}` is a name",
            where="--host",
            hint="give the address, such as 127.0.0.1, or 0.0.0.0 for every one",
        ) from error
    published = f"[{address}]" if address.version == 6 else str(address)
    lines = [f'cache="${{HF_HOME:-$HOME/{_HUB_CACHE_HERE}}}"', 'mkdir -p "$cache"']
    if box.plugin is not None:
        lines.append(f'docker build --tag {box.image} "$here"')
    run = ["exec docker run --rm --init --ipc host"]
    if box.gpus:
        run.append(f"--gpus {box.gpus}")
    run.append(f"--publish {shlex.quote(f'{published}:{box.port}:{box.port}')}")
    run.append(f'--env {_TOKEN} --mount "type=bind,source=$cache,target={_HUB_CACHE}"')
    run += [f"--env {shlex.quote(f'{name}={value}')}" for name, value in box.environment.items()]
    run += [f"--mount {shlex.quote(_mount(here, there))}" for here, there in box.models.items()]
    if box.plugin is not None:
        plugin = f"type=bind,source=$here/{_CONFIG.name},target={_CONFIG},readonly"
        run.append(f'--mount "{plugin}"')
    run += [box.image, shlex.join(box.command)]
    return "\n".join([*lines, " \\\n  ".join(run)])


def _mount(here: str, there: str) -> str:
    """A folder, read-only, as Docker reads it: fields as in a CSV file.

    Unlike with `--volume`, a colon ends no path, and a missing folder is an error.
    """
    source = f"source={here}"
    if any(mark in source for mark in ',"\n'):
        source = '"' + source.replace('"', '""') + '"'
    return f"type=bind,{source},target={there},readonly"


def kubernetes_objects(box: Container) -> str:
    """ConfigMap (with a plugin), Deployment and Service as one YAML stream.

    Raises `InputError` for a name that no Service can have.
    """
    if not _KUBERNETES_NAME.fullmatch(box.name):
        raise InputError(
            f"`{box.name}` can be no Service of Kubernetes: at most 63 characters, and a letter "
            "first",
            hint="give the recipe another name",
        )
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
    return yaml.dump_all(objects, Dumper=_Quoting, sort_keys=False, width=4096)


class _Quoting(yaml.SafeDumper):
    """Quotes more strings than YAML 1.1 asks for: readers of Kubernetes take `1e3` for a number."""

    def ignore_aliases(self, data: Any) -> bool:
        """Write equal parts out, each where it belongs."""
        return True

    def represent_text(self, text: str) -> yaml.ScalarNode:
        """A string as a node: a block of lines, plain where every reader agrees, else quoted."""
        style = "|" if "\n" in text else None if _PLAIN.fullmatch(text) else '"'
        return self.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Quoting.add_representer(str, _Quoting.represent_text)


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
    return {
        # SGLang reads variables that begin with its name, and a Service could be called so
        "enableServiceLinks": False,
        "containers": [{**_server(box), "volumeMounts": mounts}],
        "volumes": volumes,
    }


def _server(box: Container) -> dict[str, Any]:
    variables: list[dict[str, Any]] = [
        {"name": name, "value": _literal(value)} for name, value in box.environment.items()
    ]
    reference = {"name": _TOKEN_SECRET, "key": "token", "optional": True}
    variables.append({"name": _TOKEN, "valueFrom": {"secretKeyRef": reference}})
    server: dict[str, Any] = {
        "name": "server",
        "image": box.image,
        "command": [_literal(word) for word in box.command],
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


def _literal(text: str) -> str:
    """Text that Kubernetes hands on as it is: `$(NAME)` would be a variable's value."""
    return text.replace("$(", "$$(")


def _probe(*, failures: int) -> dict[str, Any]:
    """`/health` generates a token, so it may take a while on a busy server."""
    return {
        "httpGet": {"path": "/health", "port": "http"},
        "periodSeconds": _PROBE_EVERY_S,
        "timeoutSeconds": _PROBE_TIMEOUT_S,
        "failureThreshold": failures,
    }
