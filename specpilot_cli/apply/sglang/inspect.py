"""Which mechanisms a running server has active, asked by URL; nothing is started or changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specpilot_cli.engines.base import EngineClient
from specpilot_cli.engines.sglang.info import ServerFacts, read_facts, read_plugin_state
from specpilot_cli.schema.plugin_config import PluginState


@dataclass(frozen=True, slots=True)
class ServerCheck:
    """What a server says of itself.

    engine: `sglang` or `specpilot-reference`. active: mechanism -> facts. missing: expected and
    not active. problems: the plugin's own.
    """

    url: str
    engine: str
    facts: ServerFacts
    plugin_version: str | None
    active: Mapping[str, Mapping[str, Any]]
    missing: tuple[str, ...]
    problems: tuple[str, ...]

    @property
    def verdict(self) -> str:
        """`no` if something expected is missing or the plugin reports a problem."""
        return "no" if self.missing or self.problems else "ok"


def check_server(engine: EngineClient, url: str, expected: Sequence[str]) -> ServerCheck:
    """Ask the server at `url`. Raises `MachineError` if it does not answer."""
    info = engine.server_info()
    own = info.get("specpilot")
    if isinstance(own, Mapping):
        active = _reference_mechanisms(own)
        name, version, problems = "specpilot-reference", own.get("version"), ()
    else:
        state = read_plugin_state(info)
        active, version, problems = _plugin(state)
        name = "sglang"
    return ServerCheck(
        url=url,
        engine=name,
        facts=read_facts(info),
        plugin_version=version if isinstance(version, str) else None,
        active=active,
        missing=tuple(mechanism for mechanism in expected if mechanism not in active),
        problems=problems,
    )


def _plugin(
    state: PluginState | None,
) -> tuple[dict[str, Mapping[str, Any]], str | None, tuple[str, ...]]:
    if state is None:
        return {}, None, ()
    return dict(state.active), state.plugin_version, state.problems


def _reference_mechanisms(own: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """The reference engine names its decoding mode and weights, not its mechanisms."""
    found: dict[str, Mapping[str, Any]] = {}
    if own.get("weight_format") == "w12":
        found["w12"] = {"form": "decoded to BF16"}
    if own.get("mode") == "tree":
        keys = ("block", "nodes", "rows", "scoring")
        found["best-first-tree"] = {key: own[key] for key in keys if key in own}
    return found
