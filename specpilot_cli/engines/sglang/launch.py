"""How an SGLang server is started: the interpreter, its command line, its environment, its log.

Nothing here imports SGLang: importing it takes seconds, and it may live in another environment
than specpilot's command.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from specpilot_cli.engines.sglang.arguments import Arguments, words
from specpilot_cli.errors import MachineError
from specpilot_cli.schema.plugin_config import PLUGIN_ENV
from specpilot_cli.schema.sglang_recipe import EngineRange

PLUGIN_NAME = "specpilot"
_PLUGINS_ENV = "SGLANG_PLUGINS"
_PROBE_TIMEOUT_S = 60.0
# Asks the interpreter without importing SGLang: distribution metadata only.
_PROBE = """
import importlib.metadata as m, json, sys
def version(name):
    try:
        return m.version(name)
    except m.PackageNotFoundError:
        return None
points = [p.value for p in m.entry_points(group="sglang.srt.plugins") if p.name == "specpilot"]
print(json.dumps({"sglang": version("sglang"), "specpilot": version("specpilot"),
                  "plugin": points[0] if points else None}))
"""
# SGLang is up: what it logged before has no part in a later death.
_READY = "The server is fired up"
# What a log says, and what the reader can do. The first pattern found decides.
_LOG_HINTS = (
    (r"out of memory|OutOfMemoryError|Not enough memory|leave no GPU memory|failed to allocate",
     "the GPU is out of memory: lower `mem-fraction-static`, `max-running-requests` or the draft "
     "tokens, or free the GPU (`nvidia-smi` shows who uses it)"),
    (r"address already in use|port \d+ is (?:already|not) ",
     "another program uses the port: choose another --port"),
    (r"No CUDA GPUs are available|no NVIDIA driver|CUDA driver version is insufficient",
     "SGLang finds no usable GPU: see `specpilot doctor`"),
    (r"unrecognized arguments|invalid choice|the following arguments are required",
     "this version of SGLang does not know an argument of the recipe"),
    (r"^(?:ModuleNotFoundError|ImportError): ",
     "a package is missing beside SGLang, or does not fit: install it in that environment"),
    (r"(?:does not appear to have|no file named|Can't load|not a valid model identifier)",
     "the model folder is incomplete, or its name is wrong"),
    (r"assert_pkg_version|is installed with the minimum required version",
     "a package beside SGLang is too old: reinstall `specpilot[sglang]`"),
    (r"unspecified launch failure|illegal memory access|device-side assert",
     "a GPU kernel failed: does it with `--system stock` too?"),
    (r"crashed with exit code -9",
     "a process of the server was killed: by somebody, or for the memory of the machine"),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class SglangInstall:
    """What an interpreter would start; plugin: specpilot's entry point for it, or None."""

    python: str
    sglang: str
    specpilot: str | None
    plugin: str | None


def probe(python: str) -> SglangInstall:
    """What is installed for interpreter `python`. Raises `MachineError` if SGLang is not."""
    try:
        done = subprocess.run(
            [python, "-c", _PROBE], capture_output=True, text=True, timeout=_PROBE_TIMEOUT_S,
            check=True,
        )  # fmt: skip
        found = json.loads(done.stdout)
    except FileNotFoundError as error:
        raise MachineError(
            f"no such Python: `{python}`", where="--python", hint="give the path of an interpreter"
        ) from error
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise MachineError(
            f"`{python}` does not run as a Python interpreter", where="--python",
            hint="give the interpreter of the environment that SGLang is installed in",
        ) from error  # fmt: skip
    if found["sglang"] is None:
        raise MachineError(
            f"SGLang is not installed for `{python}`",
            hint="pip install 'specpilot[sglang]', or name its environment with --python",
        )
    return SglangInstall(python, found["sglang"], found["specpilot"], found["plugin"])


def check_install(install: SglangInstall, known: EngineRange, *, needs_plugin: bool) -> None:
    """Raise `MachineError` for a version outside `known`, or where the plugin is not installed."""
    if not known.contains(install.sglang):
        raise MachineError(
            f"SGLang {install.sglang} is installed, the recipe is for {known}",
            where=install.python,
            hint=f"pip install 'sglang=={known.pinned}'",
        )
    if needs_plugin and install.plugin is None:
        raise MachineError(
            "SGLang would start without specpilot's plugin: its entry point is not installed there",
            where=install.python,
            hint=f"`{install.python} -m pip install specpilot`",
        )


def server_command(
    python: str,
    model: str,
    arguments: Arguments,
    *,
    host: str,
    port: int,
    drafter: str | None = None,
) -> list[str]:
    """The command line of one server; `model` and `drafter` are folders or hub ids."""
    command = [python, "-m", "sglang.launch_server", *_source("--model-path", "--revision", model)]
    if drafter is not None:
        command += _source(
            "--speculative-draft-model-path", "--speculative-draft-model-revision", drafter
        )
    return [*command, *words(arguments), "--host", host, "--port", str(port)]


def server_environment(
    extra: Mapping[str, str], plugin_config: Path | None, inherited: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """What is set beside the inherited environment.

    Without `plugin_config` the plugin is switched off, whatever the shell says. A whitelist of
    plugins in the inherited environment gets specpilot's name added, or SGLang would skip it.
    """
    variables = {**extra, PLUGIN_ENV: "" if plugin_config is None else str(plugin_config)}
    allowed = [name for name in inherited.get(_PLUGINS_ENV, "").split(",") if name.strip()]
    if plugin_config is not None and allowed and PLUGIN_NAME not in allowed:
        variables[_PLUGINS_ENV] = ",".join([*allowed, PLUGIN_NAME])
    return variables


def log_meaning(log_path: Path) -> str | None:
    """What the first telling line of a log means, with that line, or None.

    Of a server that was up, only what it logged since.
    """
    try:
        lines = log_path.read_text(errors="replace").splitlines()
    except OSError:
        return None
    up = max((index for index, line in enumerate(lines) if _READY in line), default=-1)
    for pattern, meaning in _LOG_HINTS:
        telling = re.compile(pattern, re.IGNORECASE)
        for line in lines[up + 1 :]:
            # SGLang logs one such line for every optional package it goes without
            if telling.search(line) and "Ignore import" not in line:
                return f"{meaning} (log: `{_short(line)}`)"
    return None


def _short(line: str) -> str:
    text = " ".join(line.split())
    return text if len(text) <= 160 else f"{text[:157]}..."


def _source(option: str, revision_option: str, source: str) -> Sequence[str]:
    """A model's option; a hub id may carry its revision."""
    repo, at, revision = source.partition("@")
    if not at or source.startswith("/"):
        return [option, source]
    return [option, repo, revision_option, revision]
