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


def load_model(name_or_path: str, *, w12: bool = False) -> ModelProfile:
    """A profile file (`.yaml`), a model folder, its `config.json`, or a bundled name or alias.

    w12: read a W12 folder as the model that it was made of, for callers who count its bytes.
    Raises `InputError` naming the closest match and every known name.
    """
    path = Path(name_or_path)
    if path.is_dir():
        return read_hf_config(path / "config.json", w12=w12)
    if path.is_file():
        if path.suffix in (".yaml", ".yml"):
            return read_yaml_model(path, ModelProfile)
        return read_hf_config(path, w12=w12)
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


def load_target(name_or_path: str, *, where: str = "--target", w12: bool = False) -> ModelProfile:
    """As `load_model`, of a target. Raises `InputError` for a drafter, at option `where`."""
    found = load_model(name_or_path, w12=w12)
    if found.drafter is not None:
        raise InputError(
            f"`{found.title}` is a drafter, not a target", where=where,
            hint="it borrows embedding and head: name the model that it drafts for",
        )  # fmt: skip
    return found


def load_drafter(
    name_or_path: str, target: ModelProfile | None, *, where: str = "--drafter"
) -> ModelProfile:
    """As `load_model`, of the drafter of `target`; None is a target that nobody named.

    Raises `InputError` for a model that drafts nothing, or for another target.
    """
    found = load_model(name_or_path)
    if found.drafter is None:
        raise InputError(
            f"`{found.title}` is not a DFlash drafter", where=where,
            hint="its configuration names neither target layers nor a block",
        )  # fmt: skip
    if target is None:
        return found
    for what, own, other in (
        ("hidden size", found.hidden.value, target.hidden.value),
        ("vocabulary", found.vocab.value, target.vocab.value),
    ):
        if own != other:
            raise InputError(
                f"`{found.title}` drafts for another target: its {what} is {own}, that of "
                f"`{target.title}` {other}",
                where=where, hint="name the drafter that was trained for this target",
            )  # fmt: skip
    return found
