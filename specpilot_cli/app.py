"""The Typer application: root options and the table of commands.

Command modules are imported here and must be cheap: they import their work inside the function.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from specpilot_cli import __version__
from specpilot_cli.commands import (
    apply,
    ceiling,
    convert_w12,
    diagnose,
    doctor,
    lattice,
    paired_bench,
    profile,
    record,
    replay,
    serve,
    simulate,
    token_force,
    w12,
)
from specpilot_cli.commands.command import as_command
from specpilot_cli.settings import option_defaults, read_config, unknown_variables
from specpilot_cli.ui import ConsoleReporter

app = typer.Typer(
    name="specpilot",
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    add_completion=True,
    no_args_is_help=True,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        sys.stdout.write(f"specpilot {__version__}\n")
        raise typer.Exit


@app.callback()
def root(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option(
            "--version", "-V", callback=_print_version, is_eager=True, help="Show the version."
        ),
    ] = False,
) -> None:
    """Find where a speculative-decoding server loses time, fix it, and prove it lossless.

    Examples:

        specpilot doctor

        specpilot apply recipe demo-cpu

        specpilot replay lattices.safetensors --nodes 8,16,32

    Exit codes: 0 done or accepted · 1 the verdict is no · 2 bad usage or input · 3 this machine
    lacks something · 4 the measurement carries no verdict · 70 a bug · 130 interrupted.
    """
    commands = dict(_leaves(context.command))
    _warn_about_variables(commands.values())
    options = {" ".join(path): _names(command) for path, command in commands.items()}
    files = read_config(os.environ, Path.cwd())
    defaults = option_defaults(files, options)
    context.obj = {str(file.path): option_defaults([file], options) for file in files}
    nested: dict[str, Any] = {}
    for path in commands:
        level = nested
        for part in path[:-1]:
            level = level.setdefault(part, {})
        level[path[-1]] = defaults.get(" ".join(path), {})
    context.default_map = nested


def _leaves(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every command that does something, with its words."""
    children = getattr(command, "commands", None)
    if children is None:
        yield path, command
        return
    for name, child in children.items():
        yield from _leaves(child, (*path, name))


def _names(command: Any) -> dict[str, str]:
    """Long option names without dashes → parameter names."""
    return {
        flag.removeprefix("--"): param.name
        for param in command.params
        for flag in param.opts
        if flag.startswith("--") and flag != "--help"
    }


def _warn_about_variables(commands: Iterable[Any]) -> None:
    declared: set[str] = set()
    for param in (param for command in commands for param in command.params):
        names = getattr(param, "envvar", None) or ()
        declared |= {names} if isinstance(names, str) else set(names)
    for name, nearest in unknown_variables(os.environ, declared):
        meant = f"; did you mean `{nearest}`?" if nearest else ""
        ConsoleReporter().warn(f"unknown variable `{name}` is ignored{meant}")


_COMMANDS: dict[str, Callable[..., None]] = {
    "ceiling": ceiling.ceiling,
    "replay": replay.replay,
    "diagnose": diagnose.diagnose,
    "record": record.record,
    "profile": profile.profile,
    "convert-w12": convert_w12.convert_w12,
    "token-force": token_force.token_force,
    "paired-bench": paired_bench.paired_bench,
    "serve": serve.serve,
    "doctor": doctor.doctor,
}
_GROUPS: dict[str, typer.Typer] = {
    "apply": apply.app,
    "simulate": simulate.app,
    "lattice": lattice.app,
    "w12": w12.app,
}
for _name, _command in _COMMANDS.items():
    app.command(_name)(as_command(_command))
for _name, _group in _GROUPS.items():
    for _info in _group.registered_commands:
        if _info.callback is not None:
            _info.callback = as_command(_info.callback)
    app.add_typer(_group, name=_name)
