"""The JSON envelope that every command emits with `--json` or `--output FILE.json`."""

from __future__ import annotations

from typing import Any

from specpilot_cli.schema.base import FileModel

SCHEMA_VERSION = 1


class InputFile(FileModel):
    """One file or folder that went into a result."""

    path: str
    sha256: str


class Envelope(FileModel):
    """One result. Keys inside `results` end in their unit (`_s _ms _bytes _ratio _nats _pct`).

    Adding keys keeps `schema_version`; renaming or removing one raises it. Non-finite numbers
    are written as null.
    """

    schema_version: int = SCHEMA_VERSION
    command: str
    specpilot_version: str
    inputs: list[InputFile]
    seed: int | None
    environment: dict[str, Any]
    verdict: str | None
    results: dict[str, Any]
