"""The SGLang servers of a recipe: their command lines, their plugin's configuration, handshake."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specpilot_cli.engines.process import ServerProcess
from specpilot_cli.engines.sglang.arguments import Arguments
from specpilot_cli.engines.sglang.info import (
    check_handshake,
    check_version,
    read_facts,
    read_plugin_state,
)
from specpilot_cli.engines.sglang.launch import log_meaning, server_command, server_environment
from specpilot_cli.errors import MachineError
from specpilot_cli.io.atomic import atomic_write_text
from specpilot_cli.schema.plugin_config import PluginConfig
from specpilot_cli.schema.sglang_recipe import EngineRange

_REVISION = "@"


@dataclass(frozen=True, slots=True)
class SglangSystem:
    """One server. `name` is its role in the benchmark, `label` what people call it.

    model, drafter: folders or hub ids. plugin: None for a server whose plugin stays off.
    plugin_file: where its configuration is written before the start.
    """

    name: str
    label: str
    python: str
    model: str
    drafter: str | None
    arguments: Arguments
    variables: Mapping[str, str]
    plugin: PluginConfig | None
    plugin_file: Path
    versions: EngineRange
    ready_timeout_s: float
    host: str = "127.0.0.1"
    request_timeout_s: float = 600.0

    def command(self, port: int) -> list[str]:
        """The `sglang.launch_server` command line."""
        return server_command(
            self.python, self.model, self.arguments, host=self.host, port=port,
            drafter=self.drafter,
        )  # fmt: skip

    def environment(self) -> dict[str, str]:
        """Variables beside the inherited ones."""
        return server_environment(self.variables, None if self.plugin is None else self.plugin_file)

    def write_plugin(self) -> None:
        """Write the plugin's configuration, if there is one."""
        if self.plugin is not None:
            atomic_write_text(self.plugin_file, plugin_text(self.plugin))

    def check(self, server: ServerProcess, info: Mapping[str, Any]) -> None:
        """Raise `MachineError` unless the server is of a known version and runs what was asked."""
        name = f"{self.label} server"
        check_version(info, self.versions, name=name)
        self._check_served(info, name)
        asked = PluginConfig() if self.plugin is None else self.plugin
        digest = hashlib.sha256(plugin_text(asked).encode()).hexdigest()
        check_handshake(asked, read_plugin_state(info), name=name, config_sha256=digest)

    def _check_served(self, info: Mapping[str, Any], name: str) -> None:
        """A server that was asked for a model or a drafter and runs another would be measured."""
        facts = read_facts(info)
        asked: dict[str, tuple[object, object]] = {
            "model": _same_source(self.model, facts.model_path),
            "drafter": _same_source(self.drafter, facts.draft_model_path),
            "speculative algorithm": (
                self.arguments.get("speculative-algorithm"), facts.speculative_algorithm,
            ),
            "quantization": (self.arguments.get("quantization"), facts.quantization),
        }  # fmt: skip
        tokens = self.arguments.get("speculative-num-draft-tokens")
        if tokens is not None:
            asked["draft tokens"] = (tokens, facts.draft_tokens)
        for what, (wanted, found) in asked.items():
            if wanted != found and not (wanted is None and what == "quantization"):
                raise MachineError(
                    f"the {name} runs {what} {found!r}, asked for {wanted!r}",
                    hint="its log names the reason; no result was written",
                )

    def meaning(self, log_path: Path) -> str | None:
        """What the log says about a failure, or None."""
        return log_meaning(log_path)


def _same_source(asked: str | None, found: str | None) -> tuple[str | None, str | None]:
    """Both names; a hub id may have become the folder it was fetched into."""
    wanted = None if asked is None else asked.partition(_REVISION)[0]
    fetched = wanted is not None and found is not None and found.endswith(f"/{wanted}")
    return wanted, wanted if fetched else found


def plugin_text(config: PluginConfig) -> str:
    """The plugin's configuration file; the handshake compares its hash."""
    return json.dumps(config.model_dump(mode="json"), indent=2) + "\n"
