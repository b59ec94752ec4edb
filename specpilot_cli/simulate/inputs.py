"""Files that a simulation reads: step times by name or path, agreement flags, row timings."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from specpilot_cli.errors import InputError
from specpilot_cli.io.json_file import read_json, read_json_model
from specpilot_cli.io.jsonl import read_jsonl
from specpilot_cli.paths import bundled
from specpilot_cli.schema.batch_times import BatchStepTimes
from specpilot_cli.schema.lattice import LatticeRecording
from specpilot_cli.schema.q_agreement import QAgreement
from specpilot_cli.simulate.plateaus import RowSamples


def batch_time_names() -> list[str]:
    """Names of the bundled batch step times, sorted."""
    return sorted(path.stem for path in (bundled("profiles") / "batch_times").glob("*.json"))


def load_batch_times(name_or_path: str) -> BatchStepTimes:
    """The times in that file, or the bundled ones of that name; InputError for neither."""
    path = Path(name_or_path)
    if path.is_file():
        return read_json_model(path, BatchStepTimes)
    names = batch_time_names()
    if name_or_path in names:
        folder = bundled("profiles") / "batch_times"
        return read_json_model(folder / f"{name_or_path}.json", BatchStepTimes)
    close = difflib.get_close_matches(name_or_path, names, n=1)
    guess = f"did you mean `{close[0]}`? " if close else ""
    raise InputError(
        f"no batch step times: `{name_or_path}` is neither a file nor a bundled name",
        where="--step-times",
        hint=f"{guess}bundled: {', '.join(names)}; those of `replay` have another form",
    )


def read_agreement(path: Path, recording: LatticeRecording) -> list[npt.NDArray[np.bool_]]:
    """Agreement flags by request of the recording, [n] bool each.

    InputError, naming the request, for one that is missing, given twice, unknown to the recording
    or of another length.
    """
    lines: dict[str, QAgreement] = {}
    for line in read_jsonl(path, QAgreement):
        if line.request_id in lines:
            raise InputError(
                f"request `{line.request_id}` has two lines",
                where=str(path),
                hint="one line per request: which of them counts?",
            )
        lines[line.request_id] = line
    known = {request.request_id for request in recording.metadata.requests}
    if strange := sorted(lines.keys() - known):
        raise InputError(
            f"request `{strange[0]}` is not in the recording"
            + (f", nor are {len(strange) - 1} others" if len(strange) > 1 else ""),
            where=str(path),
            hint="make the flags from the outputs of this recording",
        )
    found = []
    for index, request in enumerate(recording.metadata.requests):
        own = lines.get(request.request_id)
        n_tokens = len(recording.output(index))
        if own is None or len(own.agrees) != n_tokens:
            what = "has no line" if own is None else f"has {len(own.agrees)} flags"
            raise InputError(
                f"request `{request.request_id}` {what}, its output has {n_tokens} tokens",
                where=str(path),
                hint="make the flags from the outputs of this recording",
            )
        found.append(np.array([flag == "1" for flag in own.agrees], dtype=np.bool_))
    return found


def read_row_samples(path: Path) -> list[RowSamples]:
    """Timings by rows: the JSON answer of `doctor --measure`, or a list of rows and seconds.

    The list's items are objects with `rows` and `seconds`, a list of repeats.
    """
    content: Any = read_json(path)
    try:
        if isinstance(content, dict):
            content = content["results"]["measured"]["skinny"]
        return [RowSamples(_rows(item), _seconds(item)) for item in content]
    except (TypeError, KeyError, ValueError, OverflowError) as error:
        raise InputError(
            "no timings by rows in this file",
            where=str(path),
            hint="give the output of `specpilot doctor --measure --json`, or a list like "
            '[{"rows": 8, "seconds": [0.001, 0.001, 0.001]}]',
        ) from error


def _rows(item: Any) -> int:
    rows = item["rows"]
    if type(rows) is not int:  # a truth value is an int to isinstance
        raise TypeError(f"rows: {rows!r}")
    return rows


def _seconds(item: Any) -> tuple[float, ...]:
    seconds = item["seconds"]
    if not isinstance(seconds, list) or not all(type(s) in (int, float) for s in seconds):
        raise TypeError(f"seconds: {seconds!r}")
    return tuple(float(second) for second in seconds)
