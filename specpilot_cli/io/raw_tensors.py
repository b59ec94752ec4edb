"""Raw tensors that an engine's hook wrote, and the parts of a drafter's weights they need."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from specpilot_cli.errors import InputError
from specpilot_cli.io.json_file import parse_json, read_text
from specpilot_cli.io.safetensors_stream import SafetensorsFile

Float32 = npt.NDArray[np.float32]

_FACTORS = ("markov_w1", "markov_w2")
_HEAD_TYPE = "markov_head_type"


def read_tensors(path: Path) -> dict[str, npt.NDArray[Any]]:
    """All tensors of a safetensors file; BF16 and F16 become float32. Raises InputError."""
    with SafetensorsFile(path) as file:
        return {name: _read(file, name) for name in file.names}


def read_markov_head(folder: Path) -> tuple[Float32, Float32]:
    """W1 and W2 [V, r] of a DSpark drafter's Markov head (paper Eq. 1), from its folder.

    Raises InputError where they are missing, or where the head is of a kind whose score does not
    follow from the two neighbouring tokens alone, so that no lattice is exact.
    """
    _refuse_other_heads(folder)
    found: dict[str, Float32] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with SafetensorsFile(path) as file:
            for name in file.names:
                for factor in _FACTORS:
                    if name.split(".")[-2:] in ([factor, "weight"], ["markov_head", factor]):
                        found[factor] = _read(file, name)
    for factor in _FACTORS:
        if factor not in found or found[factor].ndim != 2:
            raise InputError(
                f"no tensor `{factor}.weight` of two axes in the drafter's folder",
                where=str(folder),
                hint="is this the folder of a DSpark drafter?",
            )
    w1, w2 = (found[factor] for factor in _FACTORS)
    if w1.shape != w2.shape or not w1.size:
        raise InputError(
            f"`markov_w1.weight` {list(w1.shape)} and `markov_w2.weight` {list(w2.shape)} are not "
            "of one shape",
            where=str(folder),
            hint="both hold one row of the head's rank for every token",
        )
    return w1, w2


def _refuse_other_heads(folder: Path) -> None:
    config = folder / "config.json"
    if not config.is_file():
        return
    document = parse_json(read_text(config), str(config), finite=False)
    fields = document if isinstance(document, dict) else {}
    nested = fields.get("dspark_config")
    kinds = [fields.get(_HEAD_TYPE), fields.get(f"dspark_{_HEAD_TYPE}")]
    kinds += [nested.get(_HEAD_TYPE)] if isinstance(nested, dict) else []
    kind = next((value for value in kinds if value is not None), "vanilla")
    if kind != "vanilla":
        raise InputError(
            f"this DSpark drafter has a `{kind}` Markov head; only `vanilla` gives exact lattices",
            where=f"{config}: {_HEAD_TYPE}",
            hint="record `scores` of the candidates in the engine instead",
        )


def _read(file: SafetensorsFile, name: str) -> npt.NDArray[Any]:
    dtype = file.info(name).dtype
    if dtype.startswith("F8"):
        raise InputError(
            f"tensor `{name}` is {dtype}, whose values are not read",
            where=str(file.path),
            hint="write it in BF16, F16 or F32",
        )
    array = file.read_array(name)
    if dtype == "BF16":
        return (array.astype(np.uint32) << 16).view(np.float32)
    return array.astype(np.float32) if dtype == "F16" else array
