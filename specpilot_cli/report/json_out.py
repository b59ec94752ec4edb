"""The one JSON document of a result: envelope, environment, strict numbers."""

from __future__ import annotations

import dataclasses
import json
import math
import platform
from collections.abc import Iterable, Mapping
from enum import Enum
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from specpilot_cli import __version__
from specpilot_cli.io.cpu_info import cpu_name
from specpilot_cli.io.hashing import sha256_file, sha256_folder
from specpilot_cli.schema.result import Envelope, InputFile
from specpilot_cli.settings import available_cores
from specpilot_cli.units import writable

_RECORDED_PACKAGES = ("numpy", "torch", "transformers", "sglang", "numba")


def build_envelope(
    command: str,
    results: Mapping[str, Any],
    *,
    inputs: Iterable[Path] = (),
    seed: int | None = None,
    verdict: str | None = None,
    environment: Mapping[str, Any] | None = None,
) -> Envelope:
    """The envelope of one result.

    `inputs` are hashed here: files by content, folders by the model files in them.
    `environment` adds to or overrides what `describe_environment` finds. `results` may hold
    dataclasses, pydantic models, paths and numpy values; non-finite numbers become null.
    """
    return Envelope(
        command=command,
        specpilot_version=__version__,
        inputs=[InputFile(path=writable(str(path)), sha256=_digest(path)) for path in inputs],
        seed=seed,
        environment={**describe_environment(), **plain(dict(environment or {}))},
        verdict=verdict,
        results=plain(dict(results)),
    )


def describe_environment() -> dict[str, Any]:
    """Python, operating system, processor and package versions; imports none of them."""
    found: dict[str, Any] = {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}",
        "cpu": cpu_name(),
        "cpu_count": available_cores(),
    }
    for package in _RECORDED_PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    return found


def render_json(envelope: Envelope) -> str:
    """One indented document with a final newline. Never NaN or Infinity."""
    data = plain(envelope.model_dump(mode="python"))
    return json.dumps(data, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def plain(value: Any) -> Any:
    """`value` as dicts, lists, text and finite numbers; non-finite floats become None.

    Numpy scalars and arrays convert through their own `tolist`, so numpy is not imported here.
    Raises `TypeError` for anything else.
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return writable(value)
    if isinstance(value, Enum):
        return plain(value.value)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, BaseModel):
        return plain(value.model_dump(mode="python"))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(plain(key)): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        items = sorted(value) if isinstance(value, (set, frozenset)) else value
        return [plain(item) for item in items]
    if isinstance(value, Path):
        return writable(str(value))
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    raise TypeError(f"{type(value).__name__} has no JSON form")


def _digest(path: Path) -> str:
    return sha256_folder(path) if path.is_dir() else sha256_file(path)
