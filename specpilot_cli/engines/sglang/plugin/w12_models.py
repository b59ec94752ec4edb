"""Models that are built otherwise for any quantization, in a way that W12 has no use for.

Muse Glimmer splits its merged q, k, v projection where a quantization is configured, since others
may treat the three differently. For W12 that is two launches more per layer, for matrices of a few
records. So its attention is built as without a configuration, and its layers are given W12 then;
their stock weights are the ones that W12 creates too.

The gated delta networks of Qwen3.5, Qwen3.6 and later have two input projections, the second of a
few dozen channels. SGLang has a way to multiply both at once, for BF16 weights only. With W12 they
are one weight, for any number of rows: what follows takes views of a wider tensor, as it does in
SGLang's way.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

from sglang.srt.layers.linear import LinearBase
from sglang.srt.runtime_context import get_lora

from specpilot_cli.engines.sglang.plugin.w12_fused import Fusion
from specpilot_cli.engines.sglang.plugin.w12_linear import W12LinearMethod

_MUSE = "sglang.srt.models.muse_glimmer"
_QWEN = "sglang.srt.models.qwen3_5"

LORA = "adapters wrap each layer"
WHOLE = "a projection has a bias or gathers its output"


def adapt(kind: type) -> None:
    """Patch the models that are loaded by now, once.

    kind: W12's configuration class. Models are imported when their configuration is made, before
    they are built; a hook by name would import them in every process.
    """
    module = sys.modules.get(_MUSE)
    if module is not None and not hasattr(module.MuseGlimmerAttention.__init__, "__wrapped__"):
        module.MuseGlimmerAttention.__init__ = _merged(module.MuseGlimmerAttention.__init__, kind)
    module = sys.modules.get(_QWEN)
    if module is not None and not hasattr(module.Qwen3_5GatedDeltaNet, "w12_fusion"):
        network = module.Qwen3_5GatedDeltaNet
        network.w12_fusion = None
        network.__init__ = _fusing(network.__init__)
        network._forward_input_proj = _fused(network._forward_input_proj)


def _merged(original: Any, kind: type) -> Any:
    @functools.wraps(original)
    def build(
        self: Any, config: Any, layer_id: int, quant_config: Any = None, prefix: str = ""
    ) -> None:
        ours = isinstance(quant_config, kind)
        original(self, config, layer_id, None if ours else quant_config, prefix)
        if not ours:
            return
        for name, layer in self.named_children():
            if isinstance(layer, LinearBase):
                quant_config.adopt(layer, f"{prefix}.{name}" if prefix else name)

    return build


def _fusing(original: Any) -> Any:
    @functools.wraps(original)
    def build(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        layers = (self.in_proj_qkvz, self.in_proj_ba)
        if not all(isinstance(layer.quant_method, W12LinearMethod) for layer in layers):
            return
        reason = _reason_to_part(layers)
        if reason is None:
            self.w12_fusion = Fusion(layers)
        else:
            layers[0].quant_method.facts.apart.add(reason)

    return build


def _reason_to_part(layers: tuple[Any, ...]) -> str | None:
    lora = get_lora()
    if lora.enable_lora or lora.lora_paths:
        return LORA
    if any(layer.bias is not None or layer.gather_output for layer in layers):
        return WHOLE
    return None


def _fused(original: Any) -> Any:
    """Neither SGLang's second stream nor its limit of rows matters to one product."""

    @functools.wraps(original)
    def forward(self: Any, hidden_states: Any) -> Any:
        fusion = self.w12_fusion
        if fusion is None or not fusion.is_active:
            return original(self, hidden_states)
        return fusion(hidden_states)

    return forward
