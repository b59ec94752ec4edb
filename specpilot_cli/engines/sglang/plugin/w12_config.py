"""`--quantization w12`: the quantization method's configuration, and its registration.

Two ways lead here. A BF16 folder with `--quantization w12` makes `W12Config()`; a folder that
`convert-w12` wrote says `quant_method: w12` itself, and its tensors are decoded while SGLang's
loaders read them (`w12_checkpoint`). From there on both are the same: see `w12_linear`.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from typing import Any, Final

import torch
from sglang.srt.layers.linear import LinearBase
from sglang.srt.layers.quantization.base_config import QuantizationConfig
from sglang.srt.layers.quantization.unquant import (
    UnquantizedEmbeddingMethod,
    UnquantizedLinearMethod,
)
from sglang.srt.layers.vocab_parallel_embedding import ParallelLMHead
from sglang.srt.utils.common import is_cpu

from specpilot_cli.engines.sglang.plugin import (
    w12_chained,
    w12_checkpoint,
    w12_head,
    w12_linear,
    w12_models,
    w12_product,
    w12_tied,
)
from specpilot_cli.engines.sglang.plugin.state import State
from specpilot_cli.engines.sglang.plugin.w12_facts import FACTS
from specpilot_cli.schema.plugin_config import QUANTIZATION, PluginConfig, W12Plugin
from specpilot_kernels.w12.manifest import check_versions

_log = logging.getLogger(__name__)

MIN_CAPABILITY: Final = 80

_ENCODERS = re.compile(r"(^|\.)[^.]*(visual|vision|image|audio|speech|mm_proj|multi_modal)[^.]*")
"""Towers that see a picture or a sound once, with thousands of rows: W12 gains nothing there."""

ENCODER = "it encodes images or sound, in large batches"

_settings = W12Plugin()


class W12Config(QuantizationConfig):  # type: ignore[misc]
    """One per model that is built: the target, or the drafter if it was asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.checkpoint_is_w12 = False
        self.prefix = ""
        self.head_reason: str | None = None
        self.quantization_config: dict[str, Any] = {}

    @classmethod
    def get_name(cls) -> str:
        """As on the command line and in config.json."""
        return QUANTIZATION

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        """Weights are BF16 patterns, so inputs are BF16: SGLang refuses others, naming this."""
        return [torch.bfloat16]

    @classmethod
    def get_min_capability(cls) -> int:
        """Compute capability 8.0; SGLang refuses older GPUs, naming this."""
        return MIN_CAPABILITY

    @staticmethod
    def get_config_filenames() -> list[str]:
        """None: a BF16 folder needs no file that describes it."""
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> W12Config:
        """Of a folder that says `quant_method: w12`; W12FolderError for an unknown version."""
        check_versions(config.get("version"), config.get("layout"), where="quantization_config")
        made = cls()
        made.checkpoint_is_w12 = True
        return made

    def get_scaled_act_names(self) -> list[str]:
        """None."""
        return []

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        """W12 for linear layers and the output head; stock, or None for stock, for the others."""
        name = self.prefix + prefix
        if isinstance(layer, LinearBase):
            if _ENCODERS.search(prefix):
                FACTS.keep(_tower(name), ENCODER)
                return UnquantizedLinearMethod()
            return self._method(name, UnquantizedLinearMethod)
        if isinstance(layer, ParallelLMHead):
            if self.head_reason is None:
                return self._method(name, UnquantizedEmbeddingMethod, is_head=True)
            FACTS.keep(name, self.head_reason)
        elif "MoE" in type(layer).__name__:
            FACTS.keep(name, "experts have no W12 kernel")
        return None

    def adopt(self, layer: Any, prefix: str) -> None:
        """Give W12 to a linear layer that was built without a configuration."""
        self._method(self.prefix + prefix, UnquantizedLinearMethod).adopt(layer)

    def _method(self, name: str, stock: Callable[[], Any], *, is_head: bool = False) -> Any:
        return w12_linear.W12LinearMethod(
            name, stock, FACTS, verify=_settings.verify, is_head=is_head
        )


def _tower(name: str) -> str:
    """One entry for a tower, not one for each of its layers."""
    found = _ENCODERS.search(name)
    return name[: found.end()] if found else name


def activate(config: PluginConfig, state: State) -> None:
    """Register the method in this process; imports SGLang's layers."""
    global _settings
    from sglang.srt.layers import quantization
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    from sglang.srt.server_args import add_quantization_method_choices

    if config.w12 is None:
        return
    _settings = config.w12
    add_quantization_method_choices([QUANTIZATION])
    for methods in (
        quantization.QUANTIZATION_METHODS,
        quantization.BASE_QUANTIZATION_METHODS,
        quantization.CPU_QUANTIZATION_METHODS,
    ):
        methods[QUANTIZATION] = W12Config
    loader = "sglang.srt.model_loader"
    HookRegistry.register(f"{loader}.loader._get_quantization_config", prepared, HookType.AROUND)
    for name in w12_checkpoint.ITERATORS:
        HookRegistry.register(
            f"{loader}.weight_utils.{name}", w12_checkpoint.decoding, HookType.AROUND
        )
    HookRegistry.register(
        "sglang.srt.model_executor.model_runner.ModelRunner.load_model", loaded, HookType.AFTER
    )
    state.facts["w12"] = FACTS.report


def prepared(original: Callable[..., Any], model_config: Any, load_config: Any) -> Any:
    """AROUND `_get_quantization_config`, which is called before a model is built.

    Returns None for a drafter that shall stay as it is: then it is built as if without W12.
    W12Error, W12FolderError: the machine or the folder cannot be used; nothing was loaded yet.
    """
    found = original(model_config, load_config)
    if not isinstance(found, W12Config):
        return found
    drafter = bool(getattr(model_config, "is_draft_model", False))
    if drafter and not _settings.drafter:
        return None
    if found.checkpoint_is_w12:
        w12_checkpoint.check_load_format(load_config)
        w12_checkpoint.fetch_manifest(model_config, load_config)
    if torch.cuda.is_available() and not is_cpu():
        w12_product.warm(torch.cuda.current_device())
    w12_models.adapt(W12Config)
    found.prefix = "drafter." if drafter else ""
    found.head_reason = w12_head.reason_to_keep(model_config, asked=_settings.lm_head)
    if not drafter:
        FACTS.asked = True
        FACTS.checkpoint = "w12" if found.checkpoint_is_w12 else "bf16"
        FACTS.tp_size = w12_head.tp_size()
    return found


def loaded(_result: Any, runner: Any) -> None:
    """AFTER `ModelRunner.load_model`: layers are encoded, memory is not yet divided.

    W12Error: SGLang read a W12 folder in a way that passed by the decoder.
    """
    if FACTS.checkpoint == "w12" and not FACTS.decoded:
        raise w12_product.W12Error("SGLang read the W12 folder without decoding it")
    if _settings.chained and w12_chained.available():
        FACTS.chained += w12_chained.adapt(runner.model)
    if runner.is_draft_worker or not FACTS.asked:
        return
    head = getattr(runner.model, "lm_head", None)
    if w12_tied.is_tied(runner.model, head):
        asked = _settings.lm_head and _settings.tied_lm_head
        reason = w12_head.precision_reason(runner.model_config)
        w12_tied.copy_tied_head(head, FACTS, reason=reason if asked else w12_tied.NOT_ASKED)
    _log.info("specpilot: W12: %s", FACTS.summary())
