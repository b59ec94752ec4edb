"""What a running SGLang server says of itself in `/server_info`, and whether it is what was asked.

SGLang logs the errors of a plugin and serves without it, so a server is believed only after it
has named every mechanism that was asked for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_args

from pydantic import ValidationError

from specpilot_cli.errors import MachineError
from specpilot_cli.schema.gpu_profile import ComputeType
from specpilot_cli.schema.plugin_config import (
    PLUGIN_STATE_KEY,
    Mechanism,
    PluginConfig,
    PluginState,
)
from specpilot_cli.schema.sglang_recipe import EngineRange

_GIB = 2**30
_MAX_GIB = 2**30  # an exbibyte: what is beyond it is no amount of memory
_LOG_HINT = "its log names the reason (look for `specpilot`); no result was written"


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """A server's version, model and memory; None where it does not say.

    weight_bytes, kv_bytes, graph_bytes: as SGLang measured them; kv_tokens: size of its KV pool.
    engine: None for SGLang, which does not name itself. draft_tokens: rows verified per request;
    draft_block: rows drafted. dtype: None unless it is one that a profile can hold.
    """

    version: str | None
    model_path: str | None
    draft_model_path: str | None
    speculative_algorithm: str | None
    draft_tokens: int | None
    quantization: str | None
    weight_bytes: int | None
    kv_bytes: int | None
    graph_bytes: int | None
    kv_tokens: int | None
    max_requests: int | None
    engine: str | None = None
    draft_block: int | None = None
    dtype: ComputeType | None = None
    device: str | None = None
    threads: int | None = None


def read_facts(info: Mapping[str, Any]) -> ServerFacts:
    """The facts in a `/server_info`; what has another type is taken for not said."""
    inner = _inner(info)
    memory = inner.get("memory_usage")
    usage = memory if isinstance(memory, Mapping) else {}
    own = info.get("specpilot")  # the reference engine's
    return ServerFacts(
        version=_text(info, "version"),
        model_path=_text(info, "model_path"),
        draft_model_path=_text(info, "speculative_draft_model_path"),
        speculative_algorithm=_text(info, "speculative_algorithm"),
        draft_tokens=_whole(info, "speculative_num_draft_tokens"),
        quantization=_text(info, "quantization"),
        weight_bytes=_gib(usage, "weight"),
        kv_bytes=_gib(usage, "kvcache"),
        graph_bytes=_gib(usage, "graph"),
        kv_tokens=_whole(usage, "token_capacity"),
        max_requests=_whole(inner, "effective_max_running_requests_per_dp"),
        engine=_text(info, "engine"),
        draft_block=_whole(info, "speculative_dflash_block_size"),
        dtype=next((name for name in get_args(ComputeType) if name == info.get("dtype")), None),
        device=_text(info, "device"),
        threads=_whole(own, "threads") if isinstance(own, Mapping) else None,
    )


def read_plugin_state(info: Mapping[str, Any]) -> PluginState | None:
    """The plugin's own report in a `/server_info`, None if there is none.

    Raises `MachineError` for a report that this version cannot read.
    """
    raw = _inner(info).get(PLUGIN_STATE_KEY)
    if raw is None:
        return None
    try:
        return PluginState.model_validate(raw)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        raise MachineError(
            f"the plugin's report in /server_info cannot be read: `{key}`: {first['msg']}",
            hint="is the same version of specpilot installed beside SGLang as here?",
        ) from error


def check_version(info: Mapping[str, Any], known: EngineRange, *, name: str) -> None:
    """Raise `MachineError` unless the server's version lies in the range of the recipe."""
    version = _text(info, "version")
    if version is None:
        raise MachineError(f"the {name} does not say its version", hint="is it an SGLang server?")
    if not known.contains(version):
        raise MachineError(
            f"the {name} is SGLang {version}, the recipe is for {known}",
            hint=f"pip install 'sglang=={known.pinned}'",
        )


def check_handshake(
    asked: PluginConfig, state: PluginState | None, *, name: str, config_sha256: str | None = None
) -> None:
    """Compare the plugin's report with what was asked of it.

    config_sha256: of the file that the server was given. Raises `MachineError` that names the
    first mechanism that is not active, and the plugin's reason.
    """
    wanted = asked.asked()
    if state is None:
        if not wanted:
            return
        raise MachineError(
            f"the {name} runs without specpilot's plugin: {', '.join(wanted)} not active",
            hint="install specpilot beside SGLang in one environment; its log says why the plugin "
            "did not load",
        )
    for mechanism in wanted:
        if mechanism not in state.active:
            raise MachineError(
                f"the {name} runs without {mechanism}: {_reason(state, mechanism)}", hint=_LOG_HINT
            )
    unasked = [mechanism for mechanism in state.active if mechanism not in wanted]
    if unasked:
        raise MachineError(f"the {name} runs {unasked[0]}, which nobody asked for", hint=_LOG_HINT)
    if wanted and state.problems:
        raise MachineError(f"the {name} reports: {state.problems[0]}", hint=_LOG_HINT)
    if wanted and config_sha256 is not None and state.config_sha256 != config_sha256:
        raise MachineError(
            f"the {name} read another plugin configuration than the one it was given",
            hint="was the file changed while the server started?",
        )
    _check_verified(asked, state, name)


def _check_verified(asked: PluginConfig, state: PluginState, name: str) -> None:
    if asked.w12 is not None and asked.w12.verify and not state.active["w12"].get("verified"):
        raise MachineError(
            f"the {name} did not verify its W12 weights against the loaded ones", hint=_LOG_HINT
        )


def _reason(state: PluginState, mechanism: Mechanism) -> str:
    """The plugin's problem that names the mechanism, else its first one."""
    own = [problem for problem in state.problems if mechanism in problem.lower()]
    found = (*own, *state.problems)
    return found[0] if found else "the plugin gives no reason"


def _inner(info: Mapping[str, Any]) -> Mapping[str, Any]:
    states = info.get("internal_states")
    first = states[0] if isinstance(states, list) and states else None
    return first if isinstance(first, Mapping) else {}


def _text(holder: Mapping[str, Any], key: str) -> str | None:
    value = holder.get(key)
    return value if isinstance(value, str) else None


def _whole(holder: Mapping[str, Any], key: str) -> int | None:
    value = holder.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _gib(holder: Mapping[str, Any], key: str) -> int | None:
    value = holder.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return int(value * _GIB) if 0 <= value < _MAX_GIB else None  # NaN compares as False
