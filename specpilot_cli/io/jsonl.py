"""JSON Lines: one model per line; a bad line is an error with its number."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from pydantic import BaseModel

from specpilot_cli.errors import InputError
from specpilot_cli.io.atomic import atomic_output
from specpilot_cli.io.json_file import parse_json, refuse_special_file
from specpilot_cli.io.validation import Model, validate


def iter_jsonl(path: Path, model: type[Model]) -> Iterator[Model]:
    """Each line of `path` as a `model`, in order; blank lines are skipped.

    Raises `InputError` with `file:line` for a bad line, or when the file cannot be read.
    """
    refuse_special_file(path)
    try:
        with path.open(encoding="utf-8", newline="\n") as stream:
            for number, line in enumerate(stream, start=1):
                if line.strip():
                    yield _row(line, model, f"{path}:{number}")
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
        raise InputError("not UTF-8 text", where=str(path), hint="is it a text file?") from error


def read_jsonl(path: Path, model: type[Model]) -> list[Model]:
    """All lines of `path`. Raises `InputError` as `iter_jsonl` does, or if there are none."""
    rows = list(iter_jsonl(path, model))
    if not rows:
        raise InputError(
            f"`{path}` holds no rows", where=str(path), hint="write one JSON object a line"
        )
    return rows


def write_jsonl(path: Path, rows: Iterable[BaseModel], *, force: bool = False) -> None:
    """Write one compact line per row, atomically. Raises `ValueError` on NaN or Infinity."""
    with jsonl_output(path, rows, force=force):
        pass


@contextmanager
def jsonl_output(path: Path, rows: Iterable[BaseModel], *, force: bool = False) -> Iterator[None]:
    """`write_jsonl`, but the file gets its name at the end of the block, or never."""
    with atomic_output(path, force=force) as temporary:
        with temporary.open("w", encoding="utf-8") as out:
            for row in rows:
                data = row.model_dump(mode="json")
                out.write(json.dumps(data, ensure_ascii=False, allow_nan=False) + "\n")
        yield


def _row(line: str, model: type[Model], where: str) -> Model:
    try:
        data = parse_json(line, where)
    except InputError as error:
        # The line number inside a one-line document says nothing.
        raise InputError(error.message, where=where, hint="write one JSON object a line") from error
    return validate(data, model, lambda _: where)
