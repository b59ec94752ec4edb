"""Options of `sglang.launch_server` as a mapping: merged, read as numbers, written as words."""

from __future__ import annotations

from collections.abc import Mapping

from specpilot_cli.errors import InputError
from specpilot_cli.schema.plugin_config import TREE_ALGORITHM
from specpilot_cli.schema.sglang_recipe import Argument

Arguments = Mapping[str, Argument]


def merged(*groups: Arguments) -> dict[str, Argument]:
    """One mapping of all groups; a later one replaces a value, in the place of the first."""
    result: dict[str, Argument] = {}
    for group in groups:
        result.update(group)
    return result


def without_speculation(arguments: Arguments) -> dict[str, Argument]:
    """The same server without a drafter: plain decoding."""
    return {name: v for name, v in arguments.items() if not name.startswith("speculative-")}


def with_tree(arguments: Arguments) -> dict[str, Argument]:
    """The same server with a tree: its widths are the plugin's business."""
    widths = {"speculative-num-draft-tokens", "speculative-dflash-block-size"}
    kept = {
        name: value
        for name, value in arguments.items()
        if name not in {*widths, "speculative-dspark-block-size"}
    }
    return {**kept, "speculative-algorithm": TREE_ALGORITHM}


def words(arguments: Arguments) -> list[str]:
    """The command line words: `--name`, then its values."""
    result: list[str] = []
    for name, value in arguments.items():
        result.append(f"--{name}")
        if isinstance(value, tuple):
            result.extend(str(item) for item in value)
        elif value is not True:
            result.append(str(value))
    return result


def whole(arguments: Arguments, *names: str) -> int | None:
    """The first of the options `names` that is given, as a positive whole number.

    Raises `InputError` for any other value.
    """
    for name in names:
        value = arguments.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise InputError(
                f"`{name}` should be a positive whole number, not {value!r}", where="arguments"
            )
        return value
    return None


def share(arguments: Arguments, name: str) -> float | None:
    """Option `name` as a number above 0 and below 1. Raises `InputError` for any other value."""
    value = arguments.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1:
        raise InputError(f"`{name}` should lie between 0 and 1, not {value!r}", where="arguments")
    return float(value)
