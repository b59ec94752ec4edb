"""Tensors that another engine's hook wrote, taken as what they must be or refused.

A cast that changes a value would give a plausible recording of something else: a token id reduced
modulo 2^32, a position cut to a whole number, a score that became infinite.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from specpilot_cli.errors import InputError

Axes = tuple[str, ...]

#: Raw tensors and their axes: S steps, L positions, K candidates, N nodes.
AXES: Mapping[str, Axes] = {
    "step_request": ("S",),
    "step_position": ("S",),
    "candidate_ids": ("S", "L", "K"),
    "scores": ("S", "L", "K", "K"),
    "unary": ("S", "L", "K"),
    "unary_logsumexp": ("S", "L"),
    "stock_choice": ("S", "L"),
    "node_offsets": ("S + 1",),
    "node_token": ("N",),
    "node_parent": ("N",),
    "node_log_prob": ("N",),
}


@dataclass(frozen=True, slots=True)
class RawTensors:
    """The tensors of one raw file by name; errors name `where`, the tensor and the step."""

    arrays: Mapping[str, npt.NDArray[Any]]
    where: str

    def __contains__(self, name: str) -> bool:
        return name in self.arrays

    def check_axes(self, names: tuple[str, ...]) -> None:
        """Raise `InputError` unless these tensors have their axes, and agree on their sizes."""
        sizes: dict[str, tuple[int, str]] = {}
        for name in names:
            axes, shape = AXES[name], self.arrays[name].shape
            if len(shape) != len(axes):
                raise self.error(name, f"shape {list(shape)} does not have the axes {list(axes)}")
            for axis, size in zip(axes, shape, strict=True):
                if axis in ("L", "K") and size < 1:
                    raise self.error(name, f"axis {axis} is empty")
                if axis == "S + 1":
                    axis, size = "S", size - 1
                known, first = sizes.setdefault(axis, (size, name))
                if known != size:
                    raise self.error(name, f"axis {axis} is {size}, in `{first}` it is {known}")

    def whole(self, name: str, dtype: type[np.int32 | np.int64]) -> npt.NDArray[Any]:
        """Tensor `name` as `dtype`, every value unchanged."""
        array = self.arrays[name]
        if array.dtype.kind not in "iu":
            raise self.error(name, f"its type is {array.dtype}, and it must hold whole numbers")
        limits = np.iinfo(dtype)
        bad = (array < limits.min) | (array > limits.max)
        if np.any(bad):
            value = array[bad].flat[0]
            raise self.error(name, f"{value} does not fit {np.dtype(dtype)}", at=bad)
        return array.astype(dtype)

    def real(self, name: str) -> npt.NDArray[np.float32]:
        """Tensor `name` as float32; no NaN, and infinite only where it is so in the file."""
        array = self.arrays[name]
        if array.dtype.kind != "f":
            raise self.error(name, f"its type is {array.dtype}, and it must hold floats")
        with np.errstate(over="ignore"):  # checked below
            found = array.astype(np.float32)
        if np.any(bad := np.isnan(array)):
            raise self.error(name, "NaN", at=bad)
        if np.any(bad := np.isinf(found) & np.isfinite(array)):
            raise self.error(name, f"{array[bad].flat[0]:g} does not fit float32", at=bad)
        return found

    def error(
        self, name: str, problem: str, *, at: npt.NDArray[np.bool_] | None = None
    ) -> InputError:
        """`problem` of tensor `name`, at the first of `at`, which is laid out as the tensor is."""
        place = f"tensor `{name}`"
        if at is not None:
            first = int(at.reshape(len(at), -1).any(axis=1).argmax())
            place = f"{place}, {self._place(name, first)}"
        return InputError(
            f"{place}: {problem}", where=self.where,
            hint="fix the exporter; docs/replay.md defines every tensor",
        )  # fmt: skip

    def _place(self, name: str, index: int) -> str:
        axis = AXES[name][0]
        return f"node {index}" if axis == "N" else f"step {index}"
