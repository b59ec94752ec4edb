"""GPU profiles by name: the bundled ones, and those measured on this machine.

`specpilot doctor --measure` writes the user's own GPU to the local folder:
`$SPECPILOT_GPU_PROFILES`, else `$XDG_CONFIG_HOME/specpilot/gpus`, else `~/.config/specpilot/gpus`.
A local profile with a bundled one's name takes its place; it carries the bundled data-sheet
numbers too, so that only the measured ones are this machine's. `SPECPILOT_NO_CONFIG=1` ignores
local profiles unless their folder is named.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from pathlib import Path

from specpilot_cli.errors import InputError
from specpilot_cli.io.yaml_file import read_yaml_model
from specpilot_cli.paths import bundled
from specpilot_cli.schema.gpu_profile import GpuProfile


def local_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Where profiles measured on this machine are kept; it may not exist."""
    chosen = environ.get("SPECPILOT_GPU_PROFILES")
    if chosen:
        return Path(chosen).expanduser()
    base = environ.get("XDG_CONFIG_HOME")
    config = Path(base) if base else Path(environ.get("HOME", "~")).expanduser() / ".config"
    return config / "specpilot" / "gpus"


def gpu_files(environ: Mapping[str, str] = os.environ) -> dict[str, Path]:
    """Every profile's file by name, sorted; a local file replaces the bundled one."""
    files = {path.stem: path for path in bundled_files()}
    ignored = environ.get("SPECPILOT_NO_CONFIG", "0") not in ("", "0")
    if not ignored or environ.get("SPECPILOT_GPU_PROFILES"):
        files |= {path.stem: path for path in local_folder(environ).glob("*.yaml")}
    return dict(sorted(files.items()))


def bundled_files() -> list[Path]:
    """The files of the bundled profiles, sorted."""
    return sorted((bundled("profiles") / "gpus").glob("*.yaml"))


def load_gpu(name: str, environ: Mapping[str, str] = os.environ) -> GpuProfile:
    """The profile called `name`, or that lists it as an alias (case does not matter).

    Raises `InputError` naming the closest match and every known name.
    """
    wanted = name.strip().casefold()
    files = gpu_files(environ)
    if wanted in files:  # most are asked for by their file's name
        profile = read_yaml_model(files[wanted], GpuProfile)
        if wanted in _names(profile):
            return profile
    profiles = [read_yaml_model(path, GpuProfile) for path in files.values()]
    for profile in profiles:
        if wanted in _names(profile):
            return profile
    names = [profile.name for profile in profiles]
    close = difflib.get_close_matches(wanted, names, n=1, cutoff=0.5)
    guess = f"did you mean `{close[0]}`? " if close else ""
    raise InputError(
        f"unknown GPU `{name}`",
        hint=f"{guess}known: {', '.join(names)}; or measure it with `specpilot doctor --measure`, "
        "or pass your own numbers with --peaks FILE",
    )


def bundled_gpu(device_name: str) -> GpuProfile | None:
    """The bundled profile of the device that a driver calls `device_name`, or None."""
    wanted = device_name.strip().casefold()
    for path in bundled_files():
        profile = read_yaml_model(path, GpuProfile)
        if wanted in _names(profile):
            return profile
    return None


def _names(profile: GpuProfile) -> set[str]:
    return {name.casefold() for name in (profile.name, *profile.aliases)}
