"""From kernel names to families, by the patterns of `profiles/kernel_classes`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache

from specpilot_cli.errors import InputError
from specpilot_cli.io.yaml_file import read_yaml_model
from specpilot_cli.paths import bundled
from specpilot_cli.schema.kernel_classes import FamilyName, KernelClasses, SpanRole

_MAX_SHOWN = 96


@dataclass(frozen=True, slots=True)
class Family:
    """What a name says. `known` is False for a name that no pattern matches: family `rest`."""

    name: FamilyName
    known: bool
    w12: bool


class NameTable:
    """Families of names, each name looked up once."""

    def __init__(self, classes: KernelClasses) -> None:
        self._roles = classes.spans
        self._families = [
            (re.compile("|".join(f"(?:{pattern})" for pattern in item.patterns)), item)
            for item in classes.families
        ]
        self._seen: dict[str, Family] = {}

    def family(self, name: str) -> Family:
        """The family of `name`: the first whose patterns match."""
        found = self._seen.get(name)
        if found is None:
            match = next((item for rule, item in self._families if rule.search(name)), None)
            found = Family("rest", False, False)
            if match is not None:
                found = Family(match.family, True, match.w12)
            self._seen[name] = found
        return found

    def role(self, kind: str) -> SpanRole:
        """What a span of `kind` runs. Raises `InputError` for one that is not listed."""
        role = self._roles.get(kind)
        if role is None:
            raise InputError(
                f"a span of unknown kind `{kind}`",
                where="kernel_classes.spans",
                hint=f"known: {', '.join(self._roles)}; add it to a copy of the kernel classes",
            )
        return role


@cache
def load_kernel_classes(name: str = "sglang") -> KernelClasses:
    """The bundled patterns for the engine `name`."""
    return read_yaml_model(bundled("profiles") / "kernel_classes" / f"{name}.yaml", KernelClasses)


def short_name(name: str) -> str:
    """A kernel's name as a reader wants it: no return type, arguments or template arguments."""
    if name.startswith(("Memcpy", "Memset")):
        return name
    text = re.sub(r"^(void|int|float) ", "", name)
    text = text.replace("(anonymous namespace)::", "").replace("at_cuda_detail::", "")
    depth, kept = 0, ""
    for sign in text:
        if sign == "(" and depth == 0 and kept:
            break
        depth += (sign == "<") - (sign == ">" and depth > 0)
        if sign == "<" and depth == 1:
            kept += "<…>"
        elif depth == 0 and sign != ">":
            kept += sign
    kept = kept.strip() or name.strip() or "(no name)"
    return kept if len(kept) <= _MAX_SHOWN else f"{kept[: _MAX_SHOWN - 1]}…"
