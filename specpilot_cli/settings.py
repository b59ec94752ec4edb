"""Settings that outlive one command, and every environment variable specpilot reads.

First found wins: option, environment, project file `specpilot.toml` in the working folder, user
file `$XDG_CONFIG_HOME/specpilot/config.toml`, default. `SPECPILOT_NO_CONFIG=1` skips both files.
"""

from __future__ import annotations

import difflib
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specpilot_cli.errors import InputError

_PREFIX = "SPECPILOT_"
KNOWN_VARIABLES = {
    "SPECPILOT_CACHE_DIR": "folder of compiled kernels and other caches",
    "SPECPILOT_DEBUG": "1: show the traceback of an unexpected error",
    "SPECPILOT_NO_CONFIG": "1: ignore both configuration files",
    "SPECPILOT_NO_PROGRESS": "1: no progress bars and no progress lines",
    "SPECPILOT_THREADS": "threads of CPU work; default: the cores this process may use",
    "SPECPILOT_VENV": "virtual environment that scripts/test.sh and scripts/demo.sh use",
}


@dataclass(frozen=True, slots=True)
class Settings:
    """The effective values; `sources` says where each came from."""

    cache_dir: Path
    threads: int
    sources: dict[str, str] = field(default_factory=dict)


def load_settings(
    *,
    cache_dir: Path | None = None,
    threads: int | None = None,
    environ: Mapping[str, str] | None = None,
    project_folder: Path | None = None,
) -> Settings:
    """Merge options, environment and files. Raises `InputError` naming the bad place."""
    env = os.environ if environ is None else environ
    layers: list[tuple[str, dict[str, Any]]] = [
        ("option", _present(cache_dir=cache_dir, threads=threads)),
        (
            "environment",
            _present(
                cache_dir=env.get("SPECPILOT_CACHE_DIR"), threads=env.get("SPECPILOT_THREADS")
            ),
        ),
    ]
    if env.get("SPECPILOT_NO_CONFIG", "0") in ("", "0"):
        project = (Path.cwd() if project_folder is None else project_folder) / "specpilot.toml"
        for path in (project, _user_folder(env, "XDG_CONFIG_HOME", ".config") / "config.toml"):
            layers.append((str(path), _read(path)))
    layers.append(
        (
            "default",
            {
                "cache_dir": _user_folder(env, "XDG_CACHE_HOME", ".cache"),
                "threads": available_cores(),
            },
        )
    )
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for key in ("cache_dir", "threads"):
        source, value = next((name, layer[key]) for name, layer in layers if key in layer)
        values[key], sources[key] = value, source
    return Settings(
        cache_dir=Path(str(values["cache_dir"])).expanduser(),
        threads=_positive(values["threads"], sources["threads"]),
        sources=sources,
    )


def available_cores() -> int:
    """Cores this process may run on, which a container may limit below what the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def unknown_variables(environ: Mapping[str, str]) -> list[tuple[str, str | None]]:
    """Each `SPECPILOT_*` name that nothing reads, with the nearest known one."""
    return [
        (name, _nearest(name))
        for name in sorted(environ)
        if name.startswith(_PREFIX) and name not in KNOWN_VARIABLES
    ]


def _nearest(name: str) -> str | None:
    # Compare without the shared prefix, which alone would make any two names look alike.
    known = [variable.removeprefix(_PREFIX) for variable in KNOWN_VARIABLES]
    close = difflib.get_close_matches(name.removeprefix(_PREFIX), known, n=1)
    return _PREFIX + close[0] if close else None


def _present(**values: Any) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value not in (None, "")}


def _user_folder(env: Mapping[str, str], variable: str, fallback: str) -> Path:
    base = env.get(variable)
    return (Path(base) if base else Path(env.get("HOME", "~")) / fallback) / "specpilot"


def _read(path: Path) -> dict[str, Any]:
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise InputError(f"cannot read `{path}`: {error.strerror}", where=str(path)) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"invalid TOML: {error}", where=str(path)) from error
    for key, value in data.items():
        if key not in ("cache_dir", "threads"):
            raise InputError(
                f"unknown key `{key}`", where=str(path), hint="known keys: `cache_dir`, `threads`"
            )
        if key == "cache_dir" and not isinstance(value, str):
            raise InputError("`cache_dir` must be text", where=str(path))
    return data


def _positive(value: Any, source: str) -> int:
    text = str(value)
    if isinstance(value, bool) or not text.isascii() or not text.isdigit() or int(text) < 1:
        raise InputError(
            f"`threads` must be a whole number of at least 1, not `{value}`",
            where="SPECPILOT_THREADS" if source == "environment" else source,
        )
    return int(text)
