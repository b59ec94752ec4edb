"""One part of a Hugging Face configuration: its keys, read with errors that name file and key."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from specpilot_cli.errors import InputError

HINT = "a profile file can state the shape instead; see profiles/models"
_MOST = 10**9  # no model has a size beyond it


@dataclass(frozen=True, slots=True)
class ConfigPart:
    """The keys of `data`, called `prefix` + key in the file `where`."""

    data: Mapping[str, Any]
    where: str
    prefix: str

    def whole(self, *keys: str, optional: bool = False, least: int = 1) -> int | None:
        """The first of `keys` that is there, as a whole number of at least `least`."""
        for key in keys:
            value = self.data.get(key)
            if value is None:
                continue
            if isinstance(value, int) and not isinstance(value, bool) and least <= value < _MOST:
                return value
            raise self.error(f"not a whole number of {least} to 10^9: {_short(value)}", key)
        if optional:
            return None
        raise self.error("missing", f"` or `{self.prefix}".join(keys))

    def must(self, *keys: str) -> int:
        """As `whole`; raises `InputError` if none of `keys` is there."""
        value = self.whole(*keys)
        assert value is not None
        return value

    def error(self, problem: str, key: str, *, hint: str = HINT) -> InputError:
        """`problem` at `key`."""
        return InputError(f"{problem}: `{self.prefix}{key}`", where=self.where, hint=hint)


def _short(value: object) -> str:
    text = repr(value) if not isinstance(value, int) or abs(value) < 10**20 else "a huge number"
    return text if len(text) <= 60 else f"{text[:57]}…"
