"""W12 folders in transformers: import this module, then `from_pretrained` as always.

    import specpilot_kernels.integrations.transformers
    model = AutoModelForCausalLM.from_pretrained("Qwen3-4B-W12")

The model is the one that the BF16 checkpoint gives: plain modules, every weight decoded exactly
while it is loaded, after a check of its stored bytes. Saving it writes a BF16 checkpoint.

How: method "w12" is registered with transformers' quantizers, and one function of the loader,
`PreTrainedModel._load_pretrained_model`, is wrapped so that for W12 shards, whatever the
configuration says of them, it receives the source's tensors as lazy slices. The conversion hooks
that transformers offers to quantizers would not do: they see an encoded tensor's parts only after
all of them were read, decode in one thread, and lose the order of experts of which some were
converted and some were not.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import transformers
from transformers.modeling_utils import PreTrainedModel
from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
from transformers.utils import cached_file
from transformers.utils.quantization_config import QuantizationConfigMixin

from specpilot_kernels.integrations.w12_tensors import holds_records, open_tensors
from specpilot_kernels.w12 import layout
from specpilot_kernels.w12.manifest import (
    LOADER_NOTICE,
    MANIFEST_NAME,
    QUANT_METHOD,
    W12FolderError,
    check_versions,
)

MINIMUM_VERSION = (5, 20)
_SEAM = ("model", "state_dict", "checkpoint_files", "load_config")
_HOOKS = {
    "preprocess_model": ("model",),
    "postprocess_model": ("model",),
    "update_attn_implementation": ("config",),
}


def check_transformers(version: str, loader: Any, quantizer: type) -> None:
    """Raise ImportError unless this is a transformers whose loading this module knows.

    loader: `PreTrainedModel._load_pretrained_model`; quantizer: `HfQuantizer`.
    """
    found = tuple(int(number) for number in re.findall(r"\d+", version)[:2])
    if found < MINIMUM_VERSION:
        wanted = ".".join(map(str, MINIMUM_VERSION))
        raise ImportError(f"W12 needs transformers {wanted} or later, found {version}")
    checked: list[tuple[Any, str, tuple[str, ...]]] = [(loader, "_load_pretrained_model", _SEAM)]
    checked += [(getattr(quantizer, hook, None), hook, names) for hook, names in _HOOKS.items()]
    for function, name, expected in checked:
        parameters = inspect.signature(function).parameters if callable(function) else {}
        given = tuple(parameter for parameter in parameters if parameter != "self")
        if given[: len(expected)] != expected:
            raise ImportError(
                f"transformers {version} loads weights in a way that this version of specpilot "
                f"does not know (`{name}` takes {list(given)}, expected {list(expected)}): "
                "update specpilot, or load the folder that `specpilot w12 restore` writes"
            )


_loader: Any = getattr(PreTrainedModel, "_load_pretrained_model", None)
check_transformers(transformers.__version__, _loader, HfQuantizer)


@register_quantization_config(QUANT_METHOD)
class W12Config(QuantizationConfigMixin):
    """`quantization_config` of a W12 folder.

    version, layout: numbers of the format; unknown ones are refused. kept_tensors: matrices that
    were not converted. dequantize: decode while loading; False, keeping the records for a matrix
    product that reads them, raises NotImplementedError.
    """

    quant_method: Any

    def __init__(
        self,
        version: int = layout.FORMAT_VERSION,
        layout: int = layout.LAYOUT,
        kept_tensors: Sequence[str] = (),
        dequantize: bool = True,
        **others: Any,
    ) -> None:
        check_versions(version, layout, where="quantization_config")
        if not dequantize:
            raise NotImplementedError(
                "dequantize=False: transformers has no matrix product that reads W12 records; "
                "leave it out, and the weights are decoded exactly to BF16"
            )
        self.__dict__.update(others)
        self.quant_method = QUANT_METHOD
        self.version = version
        self.layout = layout
        self.kept_tensors = list(kept_tensors)
        self.dequantize = dequantize

    @classmethod
    def from_dict(
        cls, config_dict: dict[str, Any], return_unused_kwargs: bool = False, **kwargs: Any
    ) -> Any:
        """Return the configuration of a folder, which must state both numbers."""
        check_versions(
            config_dict.get("version"), config_dict.get("layout"), where="quantization_config"
        )
        parent: Any = super()
        return parent.from_dict(config_dict, return_unused_kwargs, **kwargs)


@register_quantizer(QUANT_METHOD)
class W12Quantizer(HfQuantizer):
    """Loads W12 folders as BF16 models; does not encode."""

    def __init__(self, quantization_config: W12Config, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self._shards: list[str] = []
        if not self.pre_quantized:
            raise ValueError(
                "transformers does not encode W12: run `specpilot convert-w12 SRC -o DST` and load "
                "DST without a quantization_config"
            )

    def update_attn_implementation(self, config: Any) -> Any:
        """Remove the notice for readers without this module; the first hook to see the config."""
        _remove_marks(config)
        return config

    def preprocess_model(self, model: Any, dtype: Any = None, **kwargs: Any) -> None:
        """Note which files are the model's: adapters are loaded through the same function."""
        self._shards = list(kwargs.get("checkpoint_files") or ())
        super().preprocess_model(model, dtype=dtype, **kwargs)

    def postprocess_model(self, model: Any, **kwargs: Any) -> Any:
        """Leave a plain model, with the name conversions that saving has to undo."""
        conversions = getattr(model, "_weight_conversions", None)
        processed = super().postprocess_model(model, **kwargs)
        model._weight_conversions = conversions
        return processed

    def loads(self, checkpoint_files: Sequence[str] | None) -> bool:
        """Whether these are the shards of the folder that this quantizer was made for."""
        return bool(self._shards) and list(checkpoint_files or ()) == self._shards

    def is_serializable(self) -> bool:
        """A loaded model is saved as a plain one, without this quantizer."""
        return False

    @property
    def is_trainable(self) -> bool:
        """The weights are ordinary BF16 parameters."""
        return True


def _remove_marks(config: Any) -> None:
    """Remove from `config` and its parts what stops other loaders; the top keeps its method."""
    if getattr(config, "transformers_weights", None) == LOADER_NOTICE:
        del config.transformers_weights
    for name in config.sub_configs:
        part = getattr(config, name, None)
        if part is None:
            continue
        _remove_marks(part)
        method = getattr(part, "quantization_config", None)
        if isinstance(method, dict) and method.get("quant_method") == QUANT_METHOD:
            del part.quantization_config


def _load_w12(
    model: Any, state_dict: Any, checkpoint_files: Any, load_config: Any, *args: Any, **kwargs: Any
) -> Any:
    quantizer = load_config.hf_quantizer
    ours = isinstance(quantizer, W12Quantizer)
    # The files decide: the configuration may be the BF16 model's, and W12 would not be noticed.
    expected = ours and quantizer.loads(checkpoint_files)
    if state_dict is not None or not (expected or holds_records(checkpoint_files or ())):
        return _loader(model, state_dict, checkpoint_files, load_config, *args, **kwargs)
    if quantizer is not None and not ours:
        raise W12FolderError(
            f"W12 weights cannot be loaded with {type(quantizer).__name__}: load what "
            "`specpilot w12 restore` writes"
        )
    if "disk" in (load_config.device_map or {}).values():
        raise ValueError(
            "a W12 folder cannot be offloaded to disk: transformers would read the weights from "
            "it again; leave `disk` out of device_map, or load what `specpilot w12 restore` writes"
        )
    _fetch_manifest(load_config, checkpoint_files)
    tensors = open_tensors(checkpoint_files)
    # Without a quantizer: these are BF16 tensors, to be cast and renamed as such. (Before 5.21 a
    # renamed tensor of a quantised checkpoint keeps its dtype.)
    plain = dataclasses.replace(load_config, hf_quantizer=None)
    loaded = _loader(model, tensors, checkpoint_files, plain, *args, **kwargs)
    _refuse_missing(model, loaded[0].missing_keys)
    return loaded


def _fetch_manifest(load_config: Any, checkpoint_files: Sequence[str]) -> None:
    """From the Hub, transformers fetched the shards alone: put the manifest beside them."""
    if not Path(checkpoint_files[0]).with_name(MANIFEST_NAME).is_file():
        cached_file(
            load_config.pretrained_model_name_or_path,
            MANIFEST_NAME,
            _raise_exceptions_for_missing_entries=False,
            **(load_config.download_kwargs or {}),
        )


def _refuse_missing(model: Any, missing_keys: set[str]) -> None:
    """Raise W12FolderError if a parameter has no weights: transformers would make them up."""
    tied = model.all_tied_weights_keys
    ignored = model._keys_to_ignore_on_load_missing or ()
    missing = sorted(
        name
        for name, _ in model.named_parameters(remove_duplicate=False)
        if name in missing_keys
        and tied.get(name, name) in missing_keys
        and not any(re.search(pattern, name) for pattern in ignored)
    )
    if missing:
        raise W12FolderError(
            f"the W12 folder has no weights for {len(missing)} parameters of "
            f"{type(model).__name__}, the first is `{missing[0]}`: load the class the checkpoint "
            "was saved from, or give `specpilot w12 restore` a folder and load that"
        )


_seam: Any = PreTrainedModel
_seam._load_pretrained_model = staticmethod(functools.wraps(_loader)(_load_w12))
