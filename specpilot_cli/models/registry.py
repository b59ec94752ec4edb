"""Model profiles: bundled ones by name, any other model by its `config.json`."""

from __future__ import annotations

import difflib
from pathlib import Path

from specpilot_cli.errors import InputError
from specpilot_cli.io.yaml_file import read_yaml_model
from specpilot_cli.models.hf_config import read_hf_config
from specpilot_cli.paths import bundled
from specpilot_cli.schema.model_profile import ModelProfile


def model_names() -> list[str]:
    """Names of the bundled profiles, sorted."""
    return sorted(path.stem for path in (bundled("profiles") / "models").glob("*.yaml"))


def bundled_model(name: str) -> ModelProfile:
    """The bundled profile in the file `name`.yaml."""
    return read_yaml_model(bundled("profiles") / "models" / f"{name}.yaml", ModelProfile)


def load_model(name_or_path: str) -> ModelProfile:
    """A profile file (`.yaml`), a model folder, its `config.json`, or a bundled name or alias.

    Raises `InputError` naming the closest match and every known name.
    """
    path = Path(name_or_path)
    if path.is_dir():
        return read_hf_config(path / "config.json")
    if path.is_file():
        if path.suffix in (".yaml", ".yml"):
            return read_yaml_model(path, ModelProfile)
        return read_hf_config(path)
    wanted = name_or_path.strip().casefold()
    profiles = [bundled_model(name) for name in model_names()]
    for profile in profiles:
        if wanted in {profile.name.casefold(), *(alias.casefold() for alias in profile.aliases)}:
            return profile
    names = [profile.name for profile in profiles]
    close = difflib.get_close_matches(wanted, names, n=1, cutoff=0.5)
    guess = f"did you mean `{close[0]}`? " if close else ""
    raise InputError(
        f"no model profile: `{name_or_path}` is neither a file, a folder nor a bundled name",
        hint=f"{guess}bundled: {', '.join(names)}; or give a model's folder or config.json",
    )
