"""What the plugin does in this process, for the handshake (`schema.plugin_config.PluginState`).

SGLang logs a plugin's errors and serves without it. So nothing here raises: a mechanism is active
only if it says so itself, with facts, and everything else is a problem that the handshake finds.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from specpilot_cli import __version__
from specpilot_cli.schema.plugin_config import Mechanism, PluginConfig

_log = logging.getLogger(__name__)

_MOST_PROBLEMS = 20

Facts = Callable[[], dict[str, Any] | str]
"""Called at every `/server_info`: the facts of a mechanism, or why it is not active."""


@dataclass(slots=True)
class State:
    """One per process.

    config: what was asked; None before it was read. config_sha256: of the file's bytes.
    facts: mechanism -> what gives its facts. problems: at most 20, each once.
    """

    config: PluginConfig | None = None
    config_sha256: str | None = None
    sglang_version: str | None = None
    facts: dict[Mechanism, Facts] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def problem(self, text: str) -> None:
        """Note one sentence about what went wrong, and log it."""
        _log.error("specpilot: %s", text)
        if text not in self.problems and len(self.problems) < _MOST_PROBLEMS:
            self.problems.append(text)

    def report(self) -> dict[str, Any]:
        """The `PluginState` as plain values; never raises."""
        active: dict[str, Any] = {}
        problems: list[str] = []
        for mechanism, facts in self.facts.items():
            try:
                found = facts()
            except Exception as error:  # noqa: BLE001 - a broken mechanism must not stop a server
                problems.append(f"{mechanism}: its facts failed: {error!r}")
                continue
            if isinstance(found, str):
                problems.append(f"{mechanism}: {found}")
            else:
                active[mechanism] = found
        return {
            "plugin_version": __version__,
            "sglang_version": self.sglang_version,
            "config_sha256": self.config_sha256,
            "active": active,
            "problems": [*self.problems, *problems],
        }


STATE = State()
"""Of this process."""
