"""Option defaults from configuration files, and the environment variables specpilot reads.

First found wins: the option itself, its environment variable, the project file `specpilot.toml`
in the working folder, the user file `$XDG_CONFIG_HOME/specpilot/config.toml`, the built-in
default. `SPECPILOT_NO_CONFIG=1` skips both files. A file looks like this:

    gpu = "h200"            # every command that has --gpu

    [paired-bench]          # one command
    seed = 7
"""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specpilot_cli.errors import InputError

_PREFIX = "SPECPILOT_"
# Variables that no option declares; those of options are collected from the commands.
KNOWN_VARIABLES = {
    "SPECPILOT_GPU_PROFILES": "folder of GPU profiles measured on this machine",
    "SPECPILOT_DEBUG": "1: show the traceback of an unexpected error",
    "SPECPILOT_NO_CONFIG": "1: ignore both configuration files",
    "SPECPILOT_NO_PROGRESS": "1: no progress bars and no progress lines",
    "SPECPILOT_PARENT_PID": "set by specpilot for the servers it starts",
    "SPECPILOT_VENV": "virtual environment of scripts/test.sh and scripts/demo.sh",
}

# Command ("ceiling", "w12 verify") → its option names without dashes → parameter names.
Options = Mapping[str, Mapping[str, str]]


@dataclass(frozen=True, slots=True)
class ConfigFile:
    """One configuration file that exists, parsed."""

    path: Path
    values: dict[str, Any]


def read_config(environ: Mapping[str, str], project_folder: Path) -> list[ConfigFile]:
    """The user file, then the project file, as far as they exist: later ones win.

    Raises `InputError` with file and line for a file that cannot be parsed.
    """
    if environ.get("SPECPILOT_NO_CONFIG", "0") not in ("", "0"):
        return []
    base = environ.get("XDG_CONFIG_HOME")
    folder = Path(base) if base else Path(environ.get("HOME", "~")).expanduser() / ".config"
    paths = (folder / "specpilot" / "config.toml", project_folder / "specpilot.toml")
    return [ConfigFile(path, values) for path in paths if (values := _read(path)) is not None]


def option_defaults(files: Iterable[ConfigFile], options: Options) -> dict[str, dict[str, Any]]:
    """Defaults by command and parameter name.

    A table in a file counts for its command and beats a plain key of the same file; a plain key
    counts for every command with that option. Raises `InputError` for a name nothing has.
    """
    defaults: dict[str, dict[str, Any]] = {}
    for file in files:
        plain = {k: v for k, v in file.values.items() if not isinstance(v, dict)}
        tables = {k: v for k, v in file.values.items() if isinstance(v, dict)}
        everything = {name for names in options.values() for name in names}
        for key in plain:
            _known(key, everything, "option", file.path)
        for command in tables:
            _known(command, options, "command", file.path)
        for command, names in options.items():
            own = tables.get(command, {})
            for key in own:
                _known(key, names, f"option of `{command}`", file.path)
            found = {names[k]: v for k, v in {**plain, **own}.items() if k in names}
            if found:
                defaults.setdefault(command, {}).update(found)
    return defaults


def available_cores() -> int:
    """Cores this process may run on, which a container may limit below what the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def unknown_variables(
    environ: Mapping[str, str], declared: Iterable[str] = ()
) -> list[tuple[str, str | None]]:
    """Each `SPECPILOT_*` name that nothing reads, with the nearest known one.

    `declared` are the variables of options.
    """
    known = {*KNOWN_VARIABLES, *declared}
    return [
        (name, _nearest_variable(name, known))
        for name in sorted(environ)
        if name.startswith(_PREFIX) and name not in known
    ]


def _nearest_variable(name: str, known: Iterable[str]) -> str | None:
    # Compare without the shared prefix, which alone would make any two names look alike.
    bare = [variable.removeprefix(_PREFIX) for variable in known]
    close = difflib.get_close_matches(name.removeprefix(_PREFIX), bare, n=1)
    return _PREFIX + close[0] if close else None


def _read(path: Path) -> dict[str, Any] | None:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise InputError(
            f"cannot read `{path}`: {error.strerror}",
            where=str(path),
            hint="may this user read it? SPECPILOT_NO_CONFIG=1 ignores it",
        ) from error
    except (ValueError, RecursionError) as error:  # TOML and UTF-8 errors are ValueErrors
        line = re.search(r"at line (\d+)", str(error))
        where = f"{path}:{line.group(1)}" if line else str(path)
        raise InputError(
            f"invalid TOML: {error}",
            where=where,
            hint="correct the line; SPECPILOT_NO_CONFIG=1 ignores the file",
        ) from error


def _known(key: str, known: Iterable[str], what: str, path: Path) -> None:
    names = sorted(known)
    if key in names:
        return
    close = difflib.get_close_matches(key, names, n=1)
    raise InputError(
        f"no {what} is called `{key}`",
        where=str(path),
        hint=f"did you mean `{close[0]}`?" if close else f"known: {', '.join(names)}",
    )
