"""Which way of multiplying is fastest for a shape on a GPU: measured, stored, read back.

A plan is looked up in the file that `tune.tune` writes, `w12_plans.json` in the cache folder
($SPECPILOT_CACHE, else the XDG cache folder of specpilot), then in the `plans.json` of this
package, then `DEFAULT` holds. Both files have one form:

    {"NVIDIA H200": {"5120x6144": {"kernel_rows": 64, "passes_rows": 128}}}
"""

from __future__ import annotations

import json
import os
import tempfile
import threading
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from specpilot_kernels import build

_SHIPPED = Path(__file__).with_name("plans.json")
_lock = threading.Lock()


class BadPlans(ValueError):
    """A file of plans does not have the form it must have."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How one shape is multiplied on one GPU.

    kernel_rows: up to so many rows (0 to 64) the GEMM is no slower than cuBLAS with BF16 weights.
        Above it, a layer that keeps a BF16 copy uses that.
    passes_rows: up to so many rows (64 or more) repeated passes of the GEMM beat decoding.
    """

    kernel_rows: int = 64
    passes_rows: int = 128

    def __post_init__(self) -> None:
        numbers = (self.kernel_rows, self.passes_rows)
        if not all(isinstance(number, int) for number in numbers):
            raise ValueError(f"not a plan: {numbers}")
        if not (0 <= self.kernel_rows <= 64 <= self.passes_rows):
            raise ValueError(f"kernel_rows must be 0 to 64, passes_rows 64 or more, got {numbers}")


DEFAULT = Plan()


@cache
def plan_for(gpu: str, out_features: int, in_features: int) -> Plan:
    """Return the plan for a weight [out_features, in_features] on the GPU of that name.

    BadPlans if a file is damaged; it names the file.
    """
    name = shape_name(out_features, in_features)
    for path in (cache_file(), _SHIPPED):
        found = read(path).get(gpu, {}).get(name)
        if found is not None:
            return found
    return DEFAULT


def shape_name(out_features: int, in_features: int) -> str:
    """Return the key of a shape in the files."""
    return f"{out_features}x{in_features}"


def cache_file() -> Path:
    """Return the file of plans measured on this machine; it may not exist."""
    return build.cache_folder().parent / "w12_plans.json"


def read(path: Path) -> dict[str, dict[str, Plan]]:
    """Return a file's plans by GPU and shape, none if it does not exist; BadPlans if damaged."""
    try:
        document: dict[str, dict[str, dict[str, Any]]] = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise BadPlans(f"{path}: {error}") from error
    try:
        return {
            gpu: {shape: Plan(**plan) for shape, plan in shapes.items()}
            for gpu, shapes in document.items()
        }
    except (AttributeError, TypeError, ValueError) as error:
        raise BadPlans(f"{path}: {error}") from error


def store(gpu: str, plans: dict[str, Plan], path: Path | None = None) -> Path:
    """Add plans of a GPU by shape name to a file, by default the cache's; return its path."""
    target = path or cache_file()
    with _lock:
        everything = read(target)
        everything.setdefault(gpu, {}).update(plans)
        document = {
            name: {shape: asdict(plan) for shape, plan in sorted(shapes.items())}
            for name, shapes in sorted(everything.items())
        }
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            stream.write(json.dumps(document, indent=2) + "\n")
        Path(temporary).replace(target)
        plan_for.cache_clear()
    return target
