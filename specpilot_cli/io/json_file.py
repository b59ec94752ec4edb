"""Read and write JSON documents; errors name the file, the line or the key."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, NoReturn

from pydantic import BaseModel

from specpilot_cli.errors import InputError
from specpilot_cli.io.atomic import atomic_write_text
from specpilot_cli.io.validation import Model, validate

_STRICT = "strict JSON has no comments, no trailing commas, no NaN, and each key once"


def refuse_special_file(path: Path) -> None:
    """Raise `InputError` for a folder, a pipe or a device: reading one may never end."""
    if path.exists() and not path.is_file():
        kind = "a folder" if path.is_dir() else "not a regular file"
        raise InputError(
            f"cannot read `{path}`: it is {kind}", where=str(path), hint="give a regular file"
        )


def read_text(path: Path) -> str:
    """The file's UTF-8 text. Raises `InputError` if it is missing, unreadable or not UTF-8."""
    refuse_special_file(path)
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise InputError(
            f"no such file: `{path}`", where=str(path), hint="is the path right?"
        ) from error
    except OSError as error:
        raise InputError(
            f"cannot read `{path}`: {error.strerror}",
            where=str(path),
            hint="may this user read it?",
        ) from error
    except UnicodeDecodeError as error:
        raise InputError(
            f"not UTF-8 text: bad byte at offset {error.start}",
            where=str(path),
            hint="is it a text file?",
        ) from error


def parse_json(text: str, where: str, *, finite: bool = True) -> Any:
    """Strict JSON: no NaN or Infinity, no duplicate keys, no half characters.

    `where` prefixes the line number. Without `finite` NaN and Infinity are read, as Python's own
    json writes them. Raises `InputError`.
    """
    numbers: dict[str, Any] = {"parse_constant": _no_constant, "parse_float": _finite}
    try:
        data = json.loads(text, object_pairs_hook=_unique_keys, **(numbers if finite else {}))
        if "\\ud" in text.lower():  # a lone surrogate escape gives text that no file can hold
            json.dumps(data, ensure_ascii=False).encode("utf-8")
        return data
    except json.JSONDecodeError as error:
        raise InputError(
            f"invalid JSON: {error.msg}", where=f"{where}:{error.lineno}", hint=_STRICT
        ) from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"invalid JSON: {error}", where=where, hint=_STRICT) from error


def read_json(path: Path) -> Any:
    """The document in `path`. Raises `InputError` with file and line."""
    return parse_json(read_text(path), str(path))


def read_json_model(path: Path, model: type[Model]) -> Model:
    """The document in `path` as a `model`. Raises `InputError` naming the file and the key."""
    return validate(read_json(path), model, lambda _: str(path))


def write_json(
    path: Path, obj: BaseModel | dict[str, Any] | list[Any], *, force: bool = False
) -> None:
    """Write one indented document atomically. Raises `ValueError` on NaN or Infinity."""
    data = obj.model_dump(mode="json") if isinstance(obj, BaseModel) else obj
    text = json.dumps(data, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    atomic_write_text(path, text, force=force)


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"`{name}` is not a JSON number")


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"`{text}` is too large for a number")
    return value


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise ValueError(f"duplicate key `{key}`")
        result[key] = value
    return result
