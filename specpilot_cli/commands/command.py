"""What every command takes, whatever it does: `-q` and `-v`."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer

from specpilot_cli.commands import options

_QUIET, _VERBOSE, _CONTEXT = "quiet", "verbose", "called"
_VerboseFlag = Annotated[
    bool,
    typer.Option(
        "--verbose",
        "-v",
        help="Tell where the value of each option comes from.",
        rich_help_panel="Output",
    ),
]
_PLACES = {"COMMANDLINE": "command line", "ENVIRONMENT": "environment", "DEFAULT": "default"}


def as_command(function: Callable[..., None]) -> Callable[..., None]:
    """`function` as a command with `-v`, which it never sees itself, and with `-q`.

    A function without a parameter `quiet` has no progress and no notes to drop; it takes `-q` all
    the same, so that a script may give it to every command.
    """
    signature = inspect.signature(function, eval_str=True)
    own = signature.parameters
    context = next((p.name for p in own.values() if p.annotation is typer.Context), _CONTEXT)
    added: dict[str, tuple[Any, Any]] = {_VERBOSE: (_VerboseFlag, False)}
    if context not in own:
        added[context] = (typer.Context, inspect.Parameter.empty)
    if _QUIET not in own:
        added[_QUIET] = (options.QuietFlag, False)

    @functools.wraps(function)
    def run(**given: Any) -> None:
        if given[_VERBOSE]:
            for line in _origins(given[context]):
                sys.stderr.write(f"{line}\n")
        function(**{name: value for name, value in given.items() if name in own})

    parameters = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=kind, default=default)
        for name, (kind, default) in added.items()
    ]
    changed = signature.replace(parameters=[*own.values(), *parameters])
    vars(run)["__signature__"] = changed
    return run


def _origins(called: typer.Context) -> list[str]:
    """A line per option or argument that has a value, in the order of the help."""
    from specpilot_cli.ui import printable

    files: dict[str, dict[str, dict[str, Any]]] = called.find_root().obj or {}
    command = called.command_path.partition(" ")[2]
    found = []
    for param in called.command.params:
        name = param.name or ""
        value, source = called.params.get(name), called.get_parameter_source(name)
        if value is None or value in ((), []) or source is None or name == _VERBOSE:
            continue
        # In a configuration file otherwise; the last one that has it wins.
        places = [path for path, defaults in files.items() if name in defaults.get(command, {})]
        place = _PLACES.get(source.name) or (places or ["configuration"])[-1]
        found.append(printable(f"{max(param.opts, key=len)}: {value} ({place})"))
    return found
