"""config.json of a W12 folder: the source's, and what tells a loader that its weights are W12."""

from __future__ import annotations

from typing import Any

from specpilot_cli.schema.w12_manifest import W12Tensor
from specpilot_kernels.w12 import layout
from specpilot_kernels.w12.manifest import LOADER_NOTICE, QUANT_METHOD


def w12_configuration(config: dict[str, Any], tensors: list[W12Tensor]) -> dict[str, Any]:
    """Return `config` with `quantization_config` and with the notice that stops other loaders.

    transformers ignores a `quant_method` it does not know and would invent the weights; it does
    not ignore `transformers_weights`. It looks for it in the part of the configuration that
    belongs to the class it loads, so the text part of a composite model gets it too.
    """
    # Vectors never convert, so only larger tensors need naming.
    kept = [t.name for t in tensors if t.encoding == "stored" and len(t.shape) > 1]
    quantization = {
        "quant_method": QUANT_METHOD,
        "version": layout.FORMAT_VERSION,
        "layout": layout.LAYOUT,
        "kept_tensors": kept,
    }
    notice = {"transformers_weights": LOADER_NOTICE}
    marked = {**config, **notice, "quantization_config": quantization}
    if isinstance(config.get("text_config"), dict):
        marked["text_config"] = {**config["text_config"], **notice}
    return marked
