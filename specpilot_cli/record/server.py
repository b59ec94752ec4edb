"""Finds the recorder of a running SGLang server and waits for its shards."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from specpilot_cli.engines.base import EngineClient
from specpilot_cli.errors import InputError, MachineError, MeasurementInvalid
from specpilot_cli.io.hashing import sha256_folder
from specpilot_cli.record.shards import RequestRows, collect, read_index, same_recording
from specpilot_cli.schema.plugin_config import PLUGIN_STATE_KEY, PluginState
from specpilot_cli.schema.raw_lattice import INDEX_NAME, RecorderIndex

_POLL_S = 0.1
_WRITE_TIMEOUT_S = 60.0
_MAX_COUNT = 2**53  # what a float still counts exactly
_ACTIVATE = (
    "start the server with SPECPILOT_PLUGIN=FILE.json, where FILE.json holds "
    '{"schema_version": 1, "recorder": {"mode": "dense", "folder": "/absolute/folder"}}'
)


@dataclass(frozen=True, slots=True)
class RecorderFacts:
    """What one server process says of its recorder: the parts the client needs."""

    folder: Path
    session: str
    steps: int
    lattices: int
    written_lattices: int
    dropped_steps: int
    seconds: float
    step_seconds: float


def recorder_facts(info: Mapping[str, Any], *, name: str) -> list[RecorderFacts]:
    """The recorders of all scheduler processes, from `/server_info`.

    Raises MachineError naming the server and the reason if one of them does not record.
    """
    inner = info.get("internal_states")
    states = [_plugin_state(state) for state in (inner if isinstance(inner, list) else ())]
    if not states or any(state is None for state in states):
        raise MachineError(f"{name} has no specpilot plugin", hint=_ACTIVATE)
    return [_facts(state, name) for state in states if state is not None]


def _plugin_state(internal: Any) -> PluginState | None:
    if not isinstance(internal, dict) or PLUGIN_STATE_KEY not in internal:
        return None
    try:
        return PluginState.model_validate(internal[PLUGIN_STATE_KEY])
    except ValidationError as error:
        raise MachineError(
            f"the server's plugin speaks another language: {error.errors()[0]['msg']}",
            hint="install the same version of specpilot beside the server and here",
        ) from error


def _facts(state: PluginState, name: str) -> RecorderFacts:
    found = state.active.get("recorder")
    if found is None:
        reason = "; ".join(state.problems) or "its configuration does not ask for it"
        hint = "mend that and restart the server" if state.problems else _ACTIVATE
        raise MachineError(f"{name} does not record lattices: {reason}", hint=hint)
    if found.get("full"):
        raise MachineError(
            f"{name} has recorded as many steps as its `max_steps` allows",
            hint="restart the server, with a larger `max_steps` if this was one recording",
        )
    for key in RecorderFacts.__slots__:
        if not _is_said(key, found.get(key)):
            raise MachineError(
                f"the recorder of {name} does not say '{key}'",
                hint="install the same version of specpilot beside the server and here",
            )
    return RecorderFacts(
        folder=Path(found["folder"]),
        **{key: found[key] for key in RecorderFacts.__slots__ if key != "folder"},
    )


def _is_said(key: str, value: Any) -> bool:
    """Whether `value` can be what a recorder says under `key` of `RecorderFacts`."""
    if key == "folder":
        return isinstance(value, str) and value.startswith("/") and "\0" not in value
    if key == "session":
        return isinstance(value, str)
    if isinstance(value, bool) or not isinstance(value, int | float if "seconds" in key else int):
        return False
    return 0 <= value < _MAX_COUNT


class LiveRecorder:
    """The recorder of one server, from here on: shards that are complete already do not count."""

    def __init__(self, client: EngineClient, *, name: str) -> None:
        """Raises MachineError if the server does not record, or its folder is not on this host."""
        self._client = client
        self._name = name
        self.info = dict(client.server_info())
        self.start = recorder_facts(self.info, name=name)
        self._folders = [facts.folder for facts in self.start]
        self._indexes = [self._index(facts) for facts in self.start]
        self.index = same_recording(self._indexes)

    def _index(self, facts: RecorderFacts) -> RecorderIndex:
        elsewhere = MachineError(
            f"{self._name} writes its recording to `{facts.folder}`, which is not on this machine",
            hint="run this command on the server's machine, or mount the folder here under the "
            "same path",
        )
        if not (facts.folder / INDEX_NAME).is_file():
            raise elsewhere
        index = read_index(facts.folder)
        if index.session != facts.session:
            raise elsewhere
        return index

    def wait(self) -> None:
        """Return when all steps taken so far are in shards.

        Raises MeasurementInvalid if the recorder stops, or does not get there in time.
        """
        deadline_s = time.monotonic() + _WRITE_TIMEOUT_S
        taken = [facts.lattices for facts in self.facts()]
        while True:
            facts = self.facts()
            if all(now.written_lattices >= then for now, then in zip(facts, taken, strict=True)):
                return
            if time.monotonic() > deadline_s:
                raise MeasurementInvalid(
                    f"the recorder of {self._name} did not write its shards in "
                    f"{_WRITE_TIMEOUT_S:g} s",
                    hint="is its disk very slow? `recorder` in /server_info counts what is written",
                )
            time.sleep(_POLL_S)

    def facts(self) -> list[RecorderFacts]:
        """What the recorders say now; MeasurementInvalid if one has stopped."""
        try:
            found = recorder_facts(self._client.server_info(), name=self._name)
        except MachineError as error:
            raise MeasurementInvalid(
                f"the recording broke off: {error}", hint="restart the server, then record again"
            ) from error
        if [facts.session for facts in found] != [facts.session for facts in self.start]:
            raise MeasurementInvalid(
                f"{self._name} was restarted during the recording", hint="record again"
            )
        return found

    def rows(self, wanted: Collection[str]) -> dict[str, RequestRows]:
        """Everything recorded for the server's request ids `wanted`.

        Raises MeasurementInvalid for files that are not what this server has written.
        """
        found: dict[str, RequestRows] = {}
        for folder, before in zip(self._folders, self._indexes, strict=True):
            new = collect(folder, _grown(folder, before), wanted, first_shard=before.shards)
            for name, rows in new.items():
                found.setdefault(name, RequestRows()).parts.extend(rows.parts)
        return found


def _grown(folder: Path, before: RecorderIndex) -> RecorderIndex:
    """The index as it is now, which has only grown."""
    try:
        now = read_index(folder)
    except InputError as error:
        raise _replaced(folder, str(error)) from error
    grown = before.model_copy(update={"shards": now.shards, "lattices": now.lattices})
    if now.model_copy(update={"problem": before.problem}) != grown or now.shards < before.shards:
        raise _replaced(folder, "it describes another recording than before")
    return now


def _replaced(folder: Path, reason: str) -> MeasurementInvalid:
    return MeasurementInvalid(
        f"the recorder's index was damaged or replaced during the recording: {reason}",
        where=str(folder / INDEX_NAME),
        hint="does something else write into the recorder's folder? record again",
    )


def model_sha256(info: Mapping[str, Any], key: str, given: Path | None, *, option: str) -> str:
    """Hash of the model folder that the server names under `key`, or of the one given instead.

    Raises InputError if neither is a folder on this machine.
    """
    named = info.get(key)
    folder = given if given is not None else Path(str(named))
    if not folder.is_dir():
        raise InputError(
            f"the server's model `{named}` is not a folder on this machine, so its hash is unknown",
            where=option,
            hint=f"give {option} DIR with the same files",
        )
    return sha256_folder(folder)
