"""The journal on disk: lines are only ever added, and a run counts once its last line is there.

A benchmark that was killed resumes at the run it was in; answers of the unfinished run stay in
the file and are ignored. A benchmark that became invalid does not resume: measuring again until
it works would be a retry.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from specpilot_cli.engines.base import Generation
from specpilot_cli.errors import InputError, MeasurementInvalid
from specpilot_cli.io.jsonl import iter_jsonl
from specpilot_cli.paired_bench.machine import mechanism_state
from specpilot_cli.paired_bench.types import TimedRequest, output_digest
from specpilot_cli.schema.base import FileModel
from specpilot_cli.schema.bench_run import (
    BenchFailure,
    BenchHeader,
    BenchLaunch,
    BenchLine,
    BenchRequest,
    BenchRunEnd,
)

# What a server reports differently at each start or at each question; all else must stay the same.
_VOLATILE_KEYS = frozenset({
    "internal_states", "startup_time", "launch_command", "host", "port", "nccl_port",
    "dist_init_addr", "random_seed", "pid", "uptime_s", "last_gen_throughput",
})  # fmt: skip

RunKey = tuple[str, int]


@dataclass(frozen=True, slots=True)
class FinishedRun:
    """A complete run read back: its answers and its closing line."""

    rows: tuple[TimedRequest, ...]
    end: BenchRunEnd


@dataclass(slots=True)
class Journal:
    """An open journal. `finished` holds the runs that need not be measured again."""

    path: Path
    finished: dict[RunKey, FinishedRun] = field(default_factory=dict)
    redact: bool = False
    _stream: TextIO | None = None

    @classmethod
    def open(
        cls, path: Path, header: BenchHeader, *, resume: bool = False, force: bool = False,
        redact: bool = False,
    ) -> Journal:  # fmt: skip
        """Start a journal, or continue the one at `path` if `resume`.

        `redact` keeps output ids out of it. Raises InputError if the file exists and neither is
        wanted, or if it belongs to another benchmark; MeasurementInvalid if the benchmark in it
        failed.
        """
        if resume and path.exists() and path.stat().st_size > 0:
            journal = cls(path, read_finished(path, header), redact)
            journal._stream = path.open("a", encoding="utf-8")
            return journal
        if path.exists() and not force:
            raise InputError(
                f"`{path}` already exists",
                where=str(path),
                hint="use --resume to continue it, or --force to start over",
            )
        path.parent.mkdir(parents=True, exist_ok=True)
        journal = cls(path, redact=redact)
        journal._stream = path.open("w", encoding="utf-8")
        journal.append(header)
        return journal

    def append(self, line: FileModel, *, sync: bool = True) -> None:
        """Add one line; with `sync` it is on disk when this returns."""
        if self._stream is None:
            raise ValueError("the journal is closed")
        data = line.model_dump(mode="json")
        self._stream.write(json.dumps(data, ensure_ascii=False, allow_nan=False) + "\n")
        if sync:
            self._stream.flush()
            os.fsync(self._stream.fileno())

    def append_request(self, row: TimedRequest) -> None:
        """Add one answer; it reaches the disk with the next synced line."""
        self.append(request_line(row, redact=self.redact), sync=False)

    def close(self) -> None:
        """Flush and close; may be called twice."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None


def request_line(row: TimedRequest, *, redact: bool = False) -> BenchRequest:
    """The journal's form of an answer; `redact` leaves the output ids out."""
    a = row.answer
    return BenchRequest(
        session=row.session,
        run=row.run,
        block=row.block,
        position=row.position,
        system=row.system,
        request_id=a.request_id,
        benchmark=row.benchmark,
        prompt_tokens=a.prompt_tokens,
        batch=row.batch,
        output_ids=[] if redact else list(a.output_ids),
        output_sha256=row.output_digest,
        completion_tokens=a.completion_tokens,
        finish_reason=a.finish_reason,
        verify_steps=a.verify_steps,
        cached_tokens=a.cached_tokens,
        submit_s=a.submit_s,
        first_byte_s=a.first_byte_s,
        last_byte_s=a.last_byte_s,
    )


def timed_request(line: BenchRequest) -> TimedRequest:
    """The answer that a journal line holds."""
    answer = Generation(
        request_id=line.request_id,
        output_ids=tuple(line.output_ids),
        finish_reason=line.finish_reason,
        prompt_tokens=line.prompt_tokens,
        completion_tokens=line.completion_tokens,
        verify_steps=line.verify_steps,
        submit_s=line.submit_s,
        first_byte_s=line.first_byte_s,
        last_byte_s=line.last_byte_s,
        cached_tokens=line.cached_tokens,
    )
    return TimedRequest(
        line.session, line.run, line.block, line.position, line.system, line.benchmark, answer,
        line.batch, "" if line.output_ids else line.output_sha256,
    )  # fmt: skip


def read_finished(path: Path, header: BenchHeader | None = None) -> dict[RunKey, FinishedRun]:
    """The finished runs in a journal by session and run.

    With `header`, to continue it: InputError unless it is of that very benchmark. Without, only to
    read: a benchmark that failed gives what it had.
    """
    if header is not None:
        _drop_partial_line(path)
    lines = iter_jsonl(path, BenchLine)
    first = next(lines, None)
    if first is None or not isinstance(first.root, BenchHeader):
        raise InputError(
            "the first line is not a journal header",
            where=f"{path}:1",
            hint="start over with --force",
        )
    if header is not None:
        _check_same_benchmark(path, first.root, header)
    finished: dict[RunKey, FinishedRun] = {}
    rows: list[TimedRequest] = []
    for line in (entry.root for entry in lines):
        match line:
            case BenchRequest():
                rows.append(_own_ids(line, path))
            case BenchRunEnd():
                key = (line.session, line.run)
                # What an interrupted attempt left behind comes first: keep the last n.
                own = tuple(row for row in rows if (row.session, row.run) == key)
                if len(own) < line.n_requests:
                    raise InputError(
                        f"run {line.run} of session `{line.session}` ends with {len(own)} of its "
                        f"{line.n_requests} answers",
                        where=str(path),
                        hint="lines were removed from the journal; start over with --force",
                    )
                finished[key] = FinishedRun(own[-line.n_requests :], line)
                rows = []
            case BenchLaunch():
                pass
            case BenchFailure() if header is None:
                pass
            case BenchFailure():
                raise MeasurementInvalid(
                    f"this benchmark is already invalid: {line.reason}",
                    where=str(path),
                    hint="an invalid benchmark is not repaired; start a new one with --force",
                )
            case BenchHeader():
                raise InputError("a second header", where=str(path), hint="start over with --force")
    return finished


def _own_ids(line: BenchRequest, path: Path) -> TimedRequest:
    """The answer of a line; InputError if its output ids are not those of its hash."""
    if line.output_ids and output_digest(line.output_ids) != line.output_sha256:
        raise InputError(
            f"the output ids of request `{line.request_id}` are not those of its hash",
            where=str(path),
            hint="the journal was edited or damaged; start over with --force",
        )
    return timed_request(line)


def _drop_partial_line(path: Path) -> None:
    """A process killed while writing leaves half a line; it was never counted, so cut it off."""
    data = path.read_bytes()
    if data and not data.endswith(b"\n"):
        with path.open("r+b") as stream:
            stream.truncate(data.rfind(b"\n") + 1)


def _check_same_benchmark(path: Path, old: BenchHeader, new: BenchHeader) -> None:
    changed = [
        name
        for name in ("journal_version", "prompts_sha256", "settings", "noise_sha256")
        if getattr(old, name) != getattr(new, name)
    ]
    before = {system.name: system.server_info for system in old.systems}
    after = {system.name: system.server_info for system in new.systems}
    if before.keys() != after.keys():
        changed.append("systems")
    for name in before.keys() & after.keys():
        changed += [f"{name}.{key}" for key in changed_keys(before[name], after[name])]
    if changed:
        raise InputError(
            f"the journal belongs to another benchmark; changed: {', '.join(changed[:5])}",
            where=str(path),
            hint="resume with the same prompts, options and servers, or start over with --force",
        )


def changed_keys(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Settings of a server that differ between two of its descriptions, sorted.

    Mechanisms count wherever the server reports them; ports, times and counters do not.
    """
    keys = (before.keys() | after.keys()) - _VOLATILE_KEYS
    found = {key for key in keys if before.get(key) != after.get(key)}
    if mechanism_state(before) != mechanism_state(after):
        found.add("specpilot")
    return sorted(found)
