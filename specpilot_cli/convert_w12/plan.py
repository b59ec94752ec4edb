"""Which tensors convert to W12, and why the others stay as they are.

W12 is for weights that a matrix product reads in full at every step: 2-D Linear weights and 3-D
stacks of expert weights. Names decide, because a checkpoint says nothing else about a tensor's
use. A wrong guess costs speed, never exactness, and every guess is reported.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from specpilot_cli.errors import InputError
from specpilot_cli.io.hf_folder import HfFolder
from specpilot_cli.io.safetensors_stream import TensorInfo
from specpilot_kernels.w12 import layout
from specpilot_kernels.w12.manifest import MANIFEST_NAME

# Matched against the module that holds the weight: the last but one part of the name.
_MODULES = (
    (
        re.compile(r"embed(?!_out$)\w*|\w*_?embed(s|ding|dings)?|wte|wpe|relative_attention_bias"),
        "embedding table: rows are looked up, not multiplied",
    ),
    (re.compile(r"\w*conv\w*"), "convolution"),
    (re.compile(r"\w*norm\w*|ln(_\w+)?"), "norm"),
)
_ROUTER = re.compile(r"\.(gate|router|shared_expert_gate)(\.\w+)?\.weight$")
_LM_HEAD = re.compile(r"(^|\.)lm_head\.weight$")
_EXPERTS = re.compile(r"(^|\.)experts(\.|$)")

GROWS = "W12 would take"
"""How the reason begins for a tensor that W12 would not shrink."""

EXCLUDED = "excluded by"
"""How the reason begins for a tensor that matches a pattern to exclude."""

NOT_INCLUDED = "not among the included"
"""The reason for a tensor that matches no pattern to include."""

MAX_INPUTS = layout.MAX_INPUTS


@dataclass(frozen=True, slots=True)
class Selection:
    """Glob patterns on full names: convert only `include` (all if empty), minus `exclude`.

    A pattern matches the whole name of a tensor or of the module that holds it, never a part.
    """

    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Outcome:
    """What becomes of one tensor, known exactly: the weights were read.

    raw_bytes: as in the source; stored_bytes: in the W12 folder, without file headers.
    escapes, window_low and window_high (lowest exponent field of the channels' windows, least
    and greatest) only where the tensor converts; otherwise `reason` says why not.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    shard: str
    raw_bytes: int
    stored_bytes: int
    escapes: int | None = None
    window_low: int | None = None
    window_high: int | None = None
    reason: str | None = None

    @property
    def converted(self) -> bool:
        """Whether the tensor is stored as W12."""
        return self.reason is None

    @property
    def weights(self) -> int:
        """Number of elements."""
        count = 1
        for length in self.shape:
            count *= length
        return count

    @property
    def bits_per_weight(self) -> float | None:
        """Stored bits per element; None for an empty tensor."""
        return self.stored_bytes * 8 / self.weights if self.weights else None

    @property
    def padding_ratio(self) -> float | None:
        """Places in the records that cover the tensor per element: above 1 where channels or
        inputs do not fill them. None for an empty tensor or a vector."""
        if len(self.shape) < 2 or not self.weights:
            return None
        rows, cols = layout.grid(*self.shape[-2:])
        places = rows * layout.RECORD_ROWS * cols * layout.RECORD_COLS
        return places / (self.shape[-2] * self.shape[-1])


def refuse_quantised(folder: HfFolder) -> None:
    """Raise InputError if the source is not a plain checkpoint, with the reason."""
    if MANIFEST_NAME in folder.carried:
        raise InputError(
            f"the source holds `{MANIFEST_NAME}`: it is a W12 folder, or was one",
            where=str(folder.path),
            hint="convert the original BF16 checkpoint, or `specpilot w12 restore` this one first",
        )
    configs = [folder.config, *(v for v in folder.config.values() if isinstance(v, dict))]
    for config in configs:
        quantization = config.get("quantization_config") or config.get("compression_config")
        if quantization:
            method = quantization.get("quant_method") if isinstance(quantization, dict) else None
            raise InputError(
                f"the source is already quantised: `quantization_config` says "
                f"{method or 'so, without a method'!r}",
                where=str(folder.path / "config.json"),
                hint="W12 stores BF16 weights; convert the original BF16 checkpoint",
            )
    for shard, info in folder.tensors:
        if info.dtype.startswith("F8") or info.name.endswith((".qweight", ".weight_packed")):
            raise InputError(
                f"the source is already quantised: `{info.name}` is {info.dtype}",
                where=str(folder.path / shard),
                hint="W12 stores BF16 weights; convert the original BF16 checkpoint",
            )


def refuse_name_clash(folder: HfFolder, converting: Iterable[str]) -> None:
    """Raise InputError if W12 gives a part of a tensor to convert the name of another tensor."""
    names = {info.name for _, info in folder.tensors}
    for name in converting:
        for suffix in layout.PART_SUFFIXES.values():
            if name + suffix in names:
                raise InputError(
                    f"tensor `{name}{suffix}` has the name W12 gives to a part of `{name}`",
                    where=str(folder.path),
                    hint=f"exclude the other one: --exclude {name!r}",
                )


def check_selection(selection: Selection, folder: HfFolder) -> None:
    """Raise InputError for a pattern that matches no tensor: most likely a slip."""
    names = [info.name for _, info in folder.tensors]
    for option, patterns in (("--include", selection.include), ("--exclude", selection.exclude)):
        for pattern in patterns:
            if not any(_matches(name, pattern) for name in names):
                raise InputError(
                    f"`{pattern}` matches no tensor",
                    where=option,
                    hint=f"names look like `{names[0]}`" if names else None,
                )


def reason_to_keep(info: TensorInfo, config: dict[str, Any], selection: Selection) -> str | None:
    """Return why a tensor stays as it is, or None if it should convert.

    Looks at name, dtype and shape; whether W12 shrinks the tensor is known after reading it.
    """
    asked = _selected(info.name, selection)
    if asked is not None:
        return asked
    if info.dtype != "BF16":
        return f"{info.dtype}: W12 holds BF16 weights only, carried over untouched"
    if 0 in info.shape:
        return "no elements"
    if info.shape and info.shape[-1] > MAX_INPUTS:
        return f"rows of {info.shape[-1]} inputs: more than {MAX_INPUTS} are not converted"
    if len(info.shape) == 2:
        return _reason_for_matrix(info.name, config)
    if len(info.shape) == 3 and _EXPERTS.search(info.name) and not info.name.endswith("bias"):
        return None
    if len(info.shape) == 3:
        what = "a convolution" if "conv" in info.name else "not a stack of experts"
        return f"3-D, {what}"
    return f"{len(info.shape)}-D: not a matrix"


def _selected(name: str, selection: Selection) -> str | None:
    for pattern in selection.exclude:
        if _matches(name, pattern):
            return f"{EXCLUDED} `{pattern}`"
    if selection.include and not any(_matches(name, p) for p in selection.include):
        return NOT_INCLUDED
    return None


def _matches(name: str, pattern: str) -> bool:
    return fnmatchcase(name, pattern) or fnmatchcase(name.rpartition(".")[0], pattern)


def _reason_for_matrix(name: str, config: dict[str, Any]) -> str | None:
    if not name.endswith(".weight"):
        return "2-D, but not the weight of a Linear layer by its name"
    module = name.removesuffix(".weight").rpartition(".")[2]
    for pattern, what in _MODULES:
        if pattern.fullmatch(module):
            return what
    if _ROUTER.search(name):
        return "expert router: engines hold it in BF16"
    if _LM_HEAD.search(name) and _tied(config):
        return "LM head tied to the embedding table"
    return None


def _tied(config: dict[str, Any]) -> bool:
    nested = config.get("text_config")
    for level in (config, nested if isinstance(nested, dict) else {}):
        if "tie_word_embeddings" in level:
            return bool(level["tie_word_embeddings"])
    return False


def why_not_smaller(shape: Sequence[int], nbytes: int, escapes: int) -> str:
    """Return the reason given for a tensor that W12 would not shrink."""
    weights = 1
    for length in shape:
        weights *= length
    bits = nbytes * 8 / weights
    share = escapes / weights
    if share > 0.05:
        cause = f"{share:.1%} of the weights are zeros or lie outside their channel's window"
    else:
        rows, cols = layout.RECORD_ROWS, layout.RECORD_COLS
        blocks, columns = layout.grid(*shape[-2:])
        cause = (
            f"{shape[-2]} × {shape[-1]} pads to {blocks * rows} × {columns * cols} "
            f"(records are {rows} × {cols})"
        )
    return f"{GROWS} {bits:.2f} bits per weight: {cause}"
