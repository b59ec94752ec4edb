"""config.json of a W12 folder: the source's, and what tells a loader that its weights are W12."""

from __future__ import annotations

from typing import Any

from specpilot_cli.schema.w12_manifest import W12Tensor
from specpilot_kernels.w12 import layout
from specpilot_kernels.w12.manifest import LOADER_NOTICE, QUANT_METHOD

# Named like configurations of models, but no model class is made from one.
_NO_MODEL = {
    "quantization_config", "compression_config", "generation_config", "attn_config", "ffn_config",
}  # fmt: skip


def w12_configuration(config: dict[str, Any], tensors: list[W12Tensor]) -> dict[str, Any]:
    """Return `config` with `quantization_config` and with the notice that stops other loaders.

    transformers ignores a `quant_method` it does not know and would invent the weights; it does
    not ignore `transformers_weights`. It looks for both in the part of the configuration that
    belongs to the class it loads, so every part that may have a class gets them too.
    """
    # Vectors never convert, so only larger tensors need naming.
    kept = [t.name for t in tensors if t.encoding == "stored" and len(t.shape) > 1]
    marked = _marked(config)
    marked["quantization_config"]["kept_tensors"] = kept
    return marked


def _marked(config: dict[str, Any]) -> dict[str, Any]:
    return {
        **{key: _marked(v) if _has_class(key, v) else v for key, v in config.items()},
        "transformers_weights": LOADER_NOTICE,
        "quantization_config": {
            "quant_method": QUANT_METHOD,
            "version": layout.FORMAT_VERSION,
            "layout": layout.LAYOUT,
        },
    }


def _has_class(key: str, value: Any) -> bool:
    """Whether `value` is the configuration of a part that can be loaded alone."""
    if not isinstance(value, dict) or key in _NO_MODEL:
        return False
    return key.endswith("_config") or bool(value.get("model_type"))
