"""Where the shipped profiles and recipes are: inside the wheel, else beside the sources."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from specpilot_cli.errors import MachineError

_PACKAGE = Path(__file__).resolve().parent


def bundled(kind: Literal["profiles", "recipes"]) -> Path:
    """Folder of the shipped `kind`.

    A wheel holds a copy under `specpilot_cli/_data`; an editable install has none, and the
    repository's own folder is used. Raises `MachineError` when neither exists.
    """
    for folder in (_PACKAGE / "_data" / kind, _PACKAGE.parent / kind):
        if folder.is_dir():
            return folder
    raise MachineError(
        f"the bundled {kind} are missing from this installation",
        where=str(_PACKAGE / "_data" / kind),
        hint="reinstall specpilot, or run it from a complete checkout",
    )
