"""Rows of somebody else's table: JSON lines (gzipped or not), a JSON list, or Parquet."""

from __future__ import annotations

import gzip
import importlib.util
import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specpilot_cli.errors import InputError, MachineError
from specpilot_cli.io.json_file import refuse_special_file

_PARQUET_ENGINES = ("pyarrow", "fastparquet")
_MOST_BYTES = 1 << 30


def read_table(path: Path) -> list[Mapping[str, Any]]:
    """All rows of `path`, each a mapping by column.

    Raises InputError for a file that is not there, too large or damaged, MachineError for Parquet
    without pandas and an engine.
    """
    refuse_special_file(path)
    if not path.is_file():
        raise InputError(f"no such file: `{path}`", where=str(path), hint="is the path right?")
    if path.stat().st_size > _MOST_BYTES:
        raise InputError(f"`{path}` is too large for a benchmark", where=str(path))
    if path.suffix == ".parquet":
        return _read_parquet(path)
    try:
        raw = path.read_bytes()
        text = (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode("utf-8")
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise InputError(f"cannot read `{path}`: {error}", where=str(path)) from error
    stripped = text.lstrip()
    try:
        rows = (
            json.loads(stripped)
            if stripped.startswith("[")
            else [json.loads(line) for line in stripped.splitlines() if line.strip()]
        )
    except (ValueError, RecursionError) as error:
        raise InputError(f"`{path}` is no JSON: {error}", where=str(path)) from error
    if not rows or not all(isinstance(row, dict) for row in rows):
        raise InputError(f"`{path}` holds no rows", where=str(path), hint="one JSON object a line")
    return list(rows)


def require_parquet() -> None:
    """Raise MachineError unless pandas and an engine for Parquet are installed."""
    if importlib.util.find_spec("pandas") is None or not any(
        importlib.util.find_spec(name) for name in _PARQUET_ENGINES
    ):
        raise MachineError(
            f"Parquet needs pandas and one of {' and '.join(_PARQUET_ENGINES)}",
            hint="pip install 'specpilot[export]', or use CSV or JSON lines",
        )


def _read_parquet(path: Path) -> list[Mapping[str, Any]]:
    require_parquet()
    import pandas as pd

    try:
        frame = pd.read_parquet(path)
    except Exception as error:  # both engines raise their own
        raise InputError(f"`{path}` is no Parquet file: {error}", where=str(path)) from error
    return [{str(key): value for key, value in row.items()} for row in frame.to_dict("records")]
