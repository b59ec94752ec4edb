"""`--speculative-algorithm SPECPILOT_TREE`: what SGLang asks an algorithm, and its arguments.

To SGLang the algorithm is DFLASH or DSPARK in everything but its worker and its widths: a draft
pass has a block's rows, a verify pass the tree's.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.srt.speculative.spec_registry import CustomSpecAlgo

from specpilot_cli.engines.sglang.plugin import tree_facts
from specpilot_cli.schema.plugin_config import TREE_ALGORITHM, TreePlugin

_MAX_RUNNING_REQUESTS = 48  # stock's default for these drafters
_ONLY = {
    "tp_size": 1, "pp_size": 1, "dp_size": 1, "attn_cp_size": 1, "kv_cache_dtype": "auto",
    "disaggregation_mode": "null",
}  # fmt: skip
"""Field -> the only value that works."""
_OFF = (
    "speculative_draft_window_size", "enable_linear_replayssm_spec", "enable_two_batch_overlap",
    "enable_unified_memory", "enable_lora",
)  # fmt: skip


class TreeAlgorithm(CustomSpecAlgo):  # type: ignore[misc]
    """Answers as the stock algorithm of the drafter does."""

    settings: TreePlugin

    @property
    def stock(self) -> SpeculativeAlgorithm:
        """The algorithm that serves the same drafter's chain."""
        return SpeculativeAlgorithm[self.settings.drafter]

    def get_num_tokens_per_req_for_target_verify(
        self, num_draft_tokens: int, is_draft_worker: bool
    ) -> int:
        """Rows of one request: of the block in a draft pass, of the tree in a verify pass."""
        if not is_draft_worker:
            return self.settings.rows
        return int(self.stock.get_num_tokens_per_req_for_target_verify(self.settings.block, True))

    def resolve_max_speculative_num_draft_tokens(self, server_args: Any) -> int:
        """KV slots that a step may write."""
        return self.settings.window

    def handle_server_args(self, server_args: Any) -> None:
        """Set the widths, and refuse what trees do not work with. Raises ValueError."""
        settings, given = self.settings, server_args
        if given.speculative_draft_model_path is None:
            raise ValueError(f"{TREE_ALGORITHM} needs --speculative-draft-model-path")
        wrong = [field for field, value in _ONLY.items() if getattr(given, field) != value]
        wrong += [field for field in _OFF if getattr(given, field)]
        if wrong:
            option = wrong[0].replace("_", "-")
            value = getattr(given, wrong[0])
            raise ValueError(f"{TREE_ALGORITHM} does not work with --{option} {value}")
        tokens = given.speculative_num_draft_tokens
        if tokens not in (None, settings.block, settings.rows):
            raise ValueError(
                f"--speculative-num-draft-tokens {tokens} contradicts the tree's block of "
                f"{settings.block}; leave it out"
            )
        given.speculative_num_draft_tokens = settings.rows
        given.speculative_num_steps = 1
        given.speculative_eagle_topk = 1
        if given.max_running_requests is None:
            given.max_running_requests = _MAX_RUNNING_REQUESTS
        if given.speculative_draft_attention_backend is None:
            backend = "torch_native" if given.device == "cpu" else "triton"
            given.speculative_draft_attention_backend = backend
        if given.device == "cpu":
            given.disable_overlap_schedule = True


def _as_stock(name: str) -> Any:
    def ask(self: TreeAlgorithm, *args: Any, **kw: Any) -> Any:
        return getattr(self.stock, name)(*args, **kw)

    ask.__name__ = name
    return ask


_OWN = {"is_none", "is_some", "is_speculative"}
for _name in vars(SpeculativeAlgorithm):
    # every question of this form, and two that the base class does not know
    asks = _name.startswith(("is_", "supports_", "has_", "carries_", "need_"))
    if (asks and _name not in _OWN) or _name in {"build_disagg_draft_input"}:
        setattr(TreeAlgorithm, _name, _as_stock(_name))


def create_future_map(self: TreeAlgorithm, *args: Any, **kw: Any) -> Any:
    """As stock, whose own method passes itself on."""
    return SpeculativeAlgorithm.create_future_map(self, *args, **kw)


TreeAlgorithm.create_future_map = create_future_map


def register(settings: TreePlugin) -> None:
    """Make the algorithm known to this process."""
    algorithm = type("ConfiguredTree", (TreeAlgorithm,), {"settings": settings})

    def worker(_server_args: Any) -> type:
        from specpilot_cli.engines.sglang.plugin.tree_workers import worker_class

        tree_facts.FACTS.asked = True
        return worker_class(settings)

    SpeculativeAlgorithm.register(TREE_ALGORITHM, supports_overlap=True, spec_class=algorithm)(
        worker
    )
