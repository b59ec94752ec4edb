"""The errors a user can meet, each with the exit code that `main.py` returns for it.

    SpecPilotError            70  never raised itself
    ├── InputError             2  bad usage or bad input: unknown name, invalid file
    ├── MachineError           3  this machine lacks something: no torch, server unreachable
    └── MeasurementInvalid     4  the measurement cannot carry a verdict

A verdict of "no" (exit code 1) is an answer, not an error: commands return it through
`commands.options.finish`.
"""

from __future__ import annotations

from typing import ClassVar


class SpecPilotError(Exception):
    """What failed, where, and what to do about it.

    `message` is one sentence without a full stop. `where` is `file:line` or a key path.
    `hint` says what the reader can do next. Rendered only by `main.py`.
    """

    exit_code: ClassVar[int] = 70

    def __init__(self, message: str, *, hint: str | None = None, where: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.where = where

    def __str__(self) -> str:
        return self.message if self.where is None else f"{self.where}: {self.message}"


class InputError(SpecPilotError):
    """Bad usage or bad input; nothing was changed."""

    exit_code: ClassVar[int] = 2


class MachineError(SpecPilotError):
    """This machine lacks something the command needs."""

    exit_code: ClassVar[int] = 3


class MeasurementInvalid(SpecPilotError):
    """The measurement cannot carry a verdict, so none is given."""

    exit_code: ClassVar[int] = 4
