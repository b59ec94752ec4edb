"""The phases of a run: announced as they begin, timed, and reported at the end."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from specpilot_cli.ui import Reporter


@dataclass(slots=True)
class Phases:
    """Announces each of `total` phases and keeps its wall time."""

    reporter: Reporter
    total: int
    seconds: dict[str, float] = field(default_factory=dict)
    _name: str | None = None
    _started: float = 0.0

    def begin(self, name: str, text: str) -> None:
        """End the phase before and announce this one."""
        self.end()
        self._name, self._started = name, time.monotonic()
        self.reporter.note(f"{len(self.seconds) + 1}/{self.total} {text}")

    def end(self) -> None:
        """End the phase that runs, if one does."""
        if self._name is not None:
            self.seconds[self._name] = time.monotonic() - self._started
        self._name = None
