"""Models that are built otherwise for any quantization, in a way that W12 has no use for.

Muse Glimmer splits its merged q, k, v projection where a quantization is configured, since others
may treat the three differently. For W12 that is two launches more per layer, for matrices of a few
records. So its attention is built as without a configuration, and its layers are given W12 then;
their stock weights are the ones that W12 creates too.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

from sglang.srt.layers.linear import LinearBase

_MUSE = "sglang.srt.models.muse_glimmer"


def adapt(kind: type) -> None:
    """Patch the models that are loaded by now, once.

    kind: W12's configuration class. Models are imported when their configuration is made, before
    they are built; a hook by name would import them in every process.
    """
    module = sys.modules.get(_MUSE)
    if module is not None and not hasattr(module.MuseGlimmerAttention.__init__, "__wrapped__"):
        module.MuseGlimmerAttention.__init__ = _merged(module.MuseGlimmerAttention.__init__, kind)


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
