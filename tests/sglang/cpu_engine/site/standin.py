"""Modules whose names can all be imported and none of whose functions work; tests only."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterable
from typing import Any


class Missing:
    """A name of a stand-in module: its attributes can be read, calling it raises."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Missing:
        if name.startswith("__"):
            raise AttributeError(name)
        return Missing(f"{self._name}.{name}")

    def __call__(self, *_args: object, **_kwargs: object) -> None:
        raise NotImplementedError(f"{self._name} is not part of the CPU stand-in")


def missing_names(module: str, *, absent: frozenset[str] = frozenset()) -> Callable[[str], Any]:
    """A module's `__getattr__`: every name but dunders and `absent` exists as a `Missing`."""

    def get(name: str) -> Any:
        if name.startswith("__") or name in absent:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        return Missing(f"{module}.{name}")

    return get


def add_submodules(package: str, names: Iterable[str]) -> None:
    """Make `package.name` importable for dotted `names`, parents before their children."""
    for name in names:
        full = f"{package}.{name}"
        module = types.ModuleType(full)
        module.__getattr__ = missing_names(full)  # type: ignore[method-assign]
        sys.modules[full] = module
        parent, _, child = full.rpartition(".")
        setattr(sys.modules[parent], child, module)
