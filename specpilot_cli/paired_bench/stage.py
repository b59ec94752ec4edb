"""Where the systems of a run come from: servers that stay, or servers started for each run."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

from specpilot_cli.engines.base import EngineClient
from specpilot_cli.errors import InputError
from specpilot_cli.paired_bench.journal import changed_keys
from specpilot_cli.paired_bench.machine import recordable
from specpilot_cli.paired_bench.types import BASELINE, BASELINE_AGAIN

ServerInfo = dict[str, dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Launched:
    """The systems of one run: an engine each and, by name, the device it was started on."""

    engines: Mapping[str, EngineClient]
    devices: Mapping[str, str | None] = field(default_factory=dict)


class Stage(Protocol):
    """Gives each run its servers."""

    @property
    def names(self) -> tuple[str, ...]:
        """Every system that takes part."""
        ...

    @property
    def fresh(self) -> bool:
        """Whether every run gets servers of its own, cold."""
        ...

    @property
    def concurrent(self) -> bool:
        """Whether each system has a device of its own, so that all serve at the same time."""
        ...

    def describe(self) -> ServerInfo:
        """What each system is, before anything is served; MachineError for one that is not."""
        ...

    def run(self, systems: tuple[str, ...], number: int) -> AbstractContextManager[Launched]:
        """The servers of the run `number`; whatever was started for it ends with the block."""
        ...


class ResidentStage:
    """Servers that someone else keeps; they are never started, and never work at one moment."""

    fresh = False
    concurrent = False

    def __init__(self, engines: Mapping[str, EngineClient]) -> None:
        self._engines = dict(engines)

    @property
    def names(self) -> tuple[str, ...]:
        """Every system that takes part."""
        return tuple(self._engines)

    def describe(self) -> ServerInfo:
        """Check that each server answers and ask what it runs."""
        info: ServerInfo = {}
        for name, engine in self._engines.items():
            engine.health()
            info[name] = recordable(dict(engine.server_info()))
        if BASELINE_AGAIN in info:
            changed = changed_keys(info[BASELINE], info[BASELINE_AGAIN])
            if changed:
                raise InputError(
                    f"the second baseline runs with other settings: {', '.join(changed[:5])}",
                    hint="the A/A sessions need two launches of the very same system",
                )
        return info

    def run(self, systems: tuple[str, ...], number: int) -> AbstractContextManager[Launched]:
        """The same servers every time; the A/A partner is the baseline unless a second is given."""
        engines = {**self._engines}
        engines.setdefault(BASELINE_AGAIN, engines[BASELINE])
        return nullcontext(Launched({name: engines[name] for name in systems}))
