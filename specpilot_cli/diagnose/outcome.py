"""What a check says."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

State = Literal["found", "clear", "not checked"]
#: fault: something is probably wrong. caution: the number means less than it seems to. note: a
#: property of drafter and text, worth knowing, that nobody made by mistake.
Kind = Literal["fault", "caution", "note"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """One check. `detail` holds the evidence in words, `numbers` the same by name and unit.

    next_steps: what to do about it, most likely first; empty unless found.
    """

    code: str
    state: State
    title: str
    detail: str
    kind: Kind = "fault"
    numbers: dict[str, float] = field(default_factory=dict)
    next_steps: tuple[str, ...] = ()

    @property
    def counts(self) -> bool:
        """Whether it makes the verdict a no."""
        return self.state == "found" and self.kind != "note"


def clear(code: str, title: str, detail: str, **numbers: float) -> Outcome:
    """A check that found nothing."""
    return Outcome(code, "clear", title, detail, numbers=numbers)


def not_checked(code: str, title: str, why: str) -> Outcome:
    """A check that this recording, or what was given with it, does not allow."""
    return Outcome(code, "not checked", title, why)
