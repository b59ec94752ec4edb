"""Best-first draft trees: registers the algorithm when the plugin's configuration asks for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from specpilot_cli.engines.sglang.plugin import tree_algorithm
from specpilot_cli.engines.sglang.plugin.hooks import version_numbers
from specpilot_cli.engines.sglang.plugin.state import State
from specpilot_cli.engines.sglang.plugin.tree_facts import FACTS
from specpilot_cli.schema.plugin_config import PluginConfig

SINCE = (0, 5, 23)
"""Earlier versions plan KV slots otherwise."""

_POOLS = "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator"


def activate(config: PluginConfig, state: State) -> None:
    """Register algorithm and hooks. Trees are active once their worker is there, and say so."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if config.tree is None:
        return
    if version_numbers(state.sglang_version or "") < SINCE:
        state.problem("trees need SGLang 0.5.23; w12 and the recorder work with this one")
        return
    tree_algorithm.register(config.tree)
    HookRegistry.register(
        "sglang.srt.speculative.spec_info.create_dummy_verify_input",
        _true_width,
        HookType.AROUND,
    )
    records = config.tree.record_states
    for name, tokens in (("_handle_max_mamba_cache", records), ("_build_hybrid_req_pool", None)):
        HookRegistry.register(f"{_POOLS}.{name}", _with_width(tokens), HookType.AROUND)
    state.facts["tree"] = FACTS.report


def _true_width(original: Callable[..., Any], *args: Any, **kw: Any) -> Any:
    """AROUND create_dummy_verify_input: a warm-up pass has as many rows as a real one.

    Stock gives draft passes the target's width, which is the same for its own algorithms.
    """
    made = original(*args, **kw)
    width = kw.get("num_tokens_per_req", args[2] if len(args) > 2 else None)
    if made is not None and width is not None:
        made.draft_token_num = made.num_tokens_per_req = int(width)
        made.num_tokens_for_logprob_per_req = int(width)
    return made


def _with_width(tokens: int | None) -> Callable[..., Any]:
    """AROUND what sizes and makes recurrent pools: stock keeps one state for each verified row.

    None of them is made; memory for a few is kept free, which the replay records take.
    """

    def around(original: Callable[..., Any], *args: Any, **kw: Any) -> Any:
        from sglang.srt.runtime_context import get_spec

        with get_spec().override(
            speculative_num_draft_tokens=tokens, max_speculative_num_draft_tokens=tokens
        ):
            return original(*args, **kw)

    return around
