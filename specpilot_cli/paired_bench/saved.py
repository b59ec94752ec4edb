"""A saved result read back, so that it can be shown again without measuring."""

from __future__ import annotations

from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from specpilot_cli.errors import InputError
from specpilot_cli.io.json_file import read_json_model
from specpilot_cli.paired_bench.types import PairedBenchSummary
from specpilot_cli.schema.result import Envelope


def read_saved(path: Path) -> tuple[Envelope, PairedBenchSummary]:
    """The envelope in `path` and its summary.

    Raises InputError if the file holds another command's result or a damaged one. Keys added by a
    later version are ignored.
    """
    envelope = read_json_model(path, Envelope)
    if envelope.command != "paired-bench":
        raise InputError(
            f"`{path}` holds a result of `{envelope.command}`, not of `paired-bench`",
            where=str(path),
        )
    try:
        summary = TypeAdapter(PairedBenchSummary).validate_python(envelope.results)
    except ValidationError as error:
        problem = error.errors(include_url=False, include_input=False)[0]
        key = ".".join(str(part) for part in problem["loc"])
        raise InputError(f"`results.{key}`: {problem['msg']}", where=str(path)) from None
    return envelope, summary
