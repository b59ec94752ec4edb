"""From a configuration file to hooks in this process; problems go to `state.STATE`."""

from __future__ import annotations

import hashlib
import importlib
import logging
import sys
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from specpilot_cli.engines.sglang.plugin import hooks
from specpilot_cli.engines.sglang.plugin.state import STATE, State
from specpilot_cli.errors import SpecPilotError
from specpilot_cli.io.json_file import read_json_model
from specpilot_cli.schema.plugin_config import (
    PLUGIN_STATE_KEY,
    Mechanism,
    PluginConfig,
)

_log = logging.getLogger(__name__)

MODULES: Final[dict[Mechanism, str]] = {
    "w12": "specpilot_cli.engines.sglang.plugin.w12_config",
    "recorder": "specpilot_cli.engines.sglang.plugin.recorder",
    "tree": "specpilot_cli.engines.sglang.plugin.tree",
}
"""Mechanism -> module with `activate(config, state)`, which registers hooks and sets
`state.facts[mechanism]`. Imported only where the mechanism is asked for."""

_SCHEDULER = "sglang.srt.managers.scheduler"
_DETOKENIZER = "sglang.srt.managers.detokenizer_manager"


def activate(path: str) -> None:
    """Do what the configuration at `path` says, all of it or nothing but reporting why not."""
    if _DETOKENIZER in sys.modules and _SCHEDULER not in sys.modules:
        return  # this process runs no model and answers no `/server_info`
    _read(path, STATE)
    STATE.sglang_version = _version(STATE)
    asked = () if STATE.config is None else STATE.config.asked()
    if STATE.sglang_version is not None and _reports(STATE.sglang_version, STATE):
        wanted = [hook for hook in hooks.HOOKS if hook.mechanism in asked]
        found = hooks.check_hooks(wanted, hooks.installed_source, version=STATE.sglang_version)
        for problem in found:
            STATE.problem(problem)
    if STATE.problems:
        return
    for mechanism in asked:
        try:
            importlib.import_module(MODULES[mechanism]).activate(STATE.config, STATE)
        except Exception as error:  # noqa: BLE001 - whatever it is, the handshake must name it
            STATE.problem(f"{mechanism} could not be set up: {error!r}")


def _read(path: str, state: State) -> None:
    try:
        state.config = read_json_model(Path(path), PluginConfig)
        state.config_sha256 = hashlib.sha256(Path(path).read_bytes()).hexdigest()
    except (SpecPilotError, OSError) as error:
        state.problem(f"the plugin's configuration cannot be used: {error}")


def _version(state: State) -> str | None:
    try:
        version = metadata.version("sglang")
    except metadata.PackageNotFoundError:
        state.problem("SGLang is not installed as a distribution, so its version is unknown")
        return None
    problem = hooks.check_version(version)
    if problem is not None:
        state.problem(problem)
    return version


def _reports(version: str, state: State) -> bool:
    """Hook `/server_info`; False, with the problems noted, if that cannot be done.

    Done whatever else is wrong: an unsupported version can still say so if it can be hooked.
    """
    status = [hook for hook in hooks.HOOKS if hook.mechanism == "status"]
    problems = hooks.check_hooks(status, hooks.installed_source, version=version)
    for problem in problems:
        state.problem(problem)
    if problems:
        return False
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(hooks.STATUS.path, add_report, HookType.AFTER)
    return True


def add_report(reply: Any, *_args: Any, **_kwargs: Any) -> None:
    """AFTER `Scheduler.get_internal_state`: put this plugin's state into its reply.

    Whatever goes wrong, the server goes on; a missing state is a refusal to whoever asks for it.
    """
    try:
        reply.internal_state[PLUGIN_STATE_KEY] = STATE.report()
    except Exception:  # noqa: BLE001 - logged, and the missing state is the answer
        _log.exception("specpilot: the plugin cannot report")
