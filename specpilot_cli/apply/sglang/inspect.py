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
    is_reference = isinstance(own, Mapping)
    state = None if is_reference else read_plugin_state(info)
    active = _reference_mechanisms(own) if isinstance(own, Mapping) else _mechanisms(state)
    return ServerCheck(
        url=url,
        engine="specpilot-reference" if is_reference else "sglang",
        facts=read_facts(info),
        plugin_version=None if state is None else state.plugin_version,
        active=active,
        missing=tuple(mechanism for mechanism in expected if mechanism not in active),
        problems=() if state is None else state.problems,
    )


def _mechanisms(state: PluginState | None) -> dict[str, Mapping[str, Any]]:
    return {} if state is None else {str(name): facts for name, facts in state.active.items()}


def _reference_mechanisms(own: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """The reference engine names its decoding mode and weights, not its mechanisms."""
    found: dict[str, Mapping[str, Any]] = {}
    if own.get("weight_format") == "w12":
        found["w12"] = {"form": "decoded to BF16"}
    if own.get("mode") == "tree":
        keys = ("block", "nodes", "rows", "scoring")
        found["best-first-tree"] = {key: own[key] for key in keys if key in own}
    return found
