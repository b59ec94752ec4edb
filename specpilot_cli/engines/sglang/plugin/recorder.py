"""The lattice recorder: registers its hooks when the plugin's configuration asks for it."""

from __future__ import annotations

import atexit

from specpilot_cli.engines.sglang.plugin.hooks import version_numbers
from specpilot_cli.engines.sglang.plugin.recorder_core import Recorder
from specpilot_cli.engines.sglang.plugin.recorder_dflash import DflashHooks
from specpilot_cli.engines.sglang.plugin.recorder_dspark import SINCE, DsparkHooks, unsupported
from specpilot_cli.engines.sglang.plugin.state import State
from specpilot_cli.schema.plugin_config import PluginConfig


def activate(config: PluginConfig, state: State) -> None:
    """Register the hooks. The recorder is active once the draft worker is there, and says so."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if config.recorder is None:
        return
    recorder = Recorder(config.recorder, engine=f"sglang {state.sglang_version}")
    recent = version_numbers(state.sglang_version or "") >= SINCE
    dspark = DsparkHooks(recorder).table() if recent else unsupported(recorder)
    for target, kind, function in [*DflashHooks(recorder).table(), *dspark]:
        HookRegistry.register(target, function, HookType[kind])
    state.facts["recorder"] = recorder.facts
    atexit.register(recorder.close)
