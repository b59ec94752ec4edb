"""Recorded step-time curves: bundled ones by name, others by path."""

from __future__ import annotations

import difflib
from pathlib import Path

from specpilot_cli.errors import InputError
from specpilot_cli.io.json_file import read_json_model
from specpilot_cli.paths import bundled
from specpilot_cli.schema.step_profile import StepTimeCurve


def step_time_names() -> list[str]:
    """Names of the bundled step-time curves, sorted."""
    return sorted(path.stem for path in (bundled("profiles") / "step_times").glob("*.json"))


def load_step_times(name_or_path: str) -> StepTimeCurve:
    """The curve in that file, or the bundled one of that name.

    Raises `InputError` listing the bundled names when it is neither.
    """
    path = Path(name_or_path)
    if path.is_file():
        return read_json_model(path, StepTimeCurve)
    names = step_time_names()
    if name_or_path in names:
        return read_json_model(
            bundled("profiles") / "step_times" / f"{name_or_path}.json", StepTimeCurve
        )
    close = difflib.get_close_matches(name_or_path, names, n=1)
    guess = f"did you mean `{close[0]}`? " if close else ""
    raise InputError(
        f"no step times: `{name_or_path}` is neither a file nor a bundled curve",
        hint=f"{guess}bundled: {', '.join(names)}",
    )
