"""Every command explains itself with examples that name real options."""

from __future__ import annotations

import inspect
import itertools
import re
from collections.abc import Iterator
from typing import Any

import pytest
import typer.main

from specpilot_cli.app import app


def _commands(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    children = getattr(command, "commands", {})
    if not children:
        yield path, command
    for name, child in children.items():
        yield from _commands(child, (*path, name))


_ROOT: Any = typer.main.get_command(app)
_ALL = dict(_commands(_ROOT))
_GROUPS = {(name,): command for name, command in _ROOT.commands.items() if (name,) not in _ALL}
_WITH_GROUPS = _ALL | _GROUPS
_EVERY = pytest.mark.parametrize("path", _ALL, ids=" ".join)
_EVERY_HELP = pytest.mark.parametrize("path", _WITH_GROUPS, ids=" ".join)


def _options(command: Any) -> set[str]:
    return {flag for param in command.params for flag in (*param.opts, *param.secondary_opts)}


def _examples(command: Any) -> list[list[str]]:
    """Words of each example command in the help text; a trailing backslash continues a line."""
    text = (command.help or "").split("Examples:", 1)[-1].replace("\\\n", " ")
    return [line.split() for line in text.splitlines() if line.strip().startswith("specpilot ")]


def test_the_table_of_commands_is_complete() -> None:
    assert set(_ALL) == {
        ("apply", "check"),
        ("apply", "recipe"),
        ("ceiling",),
        ("convert-w12",),
        ("diagnose",),
        ("doctor",),
        ("lattice", "convert"),
        ("lattice", "inspect"),
        ("lattice", "pack"),
        ("paired-bench",),
        ("profile",),
        ("record",),
        ("replay",),
        ("serve",),
        ("simulate", "batch"),
        ("simulate", "measure"),
        ("simulate", "plateaus"),
        ("simulate", "tlv"),
        ("token-force",),
        ("w12", "inspect"),
        ("w12", "restore"),
        ("w12", "verify"),
    }


@_EVERY_HELP
def test_help_is_a_summary_a_paragraph_and_examples(path: tuple[str, ...]) -> None:
    # Without a paragraph between them, examples are not shown as code.
    text = inspect.cleandoc(_WITH_GROUPS[path].help or "")
    summary, about, head, *examples = text.split("\n\n")
    assert summary.endswith(".")
    assert len(summary) <= 100
    assert about
    if head != "Examples:":
        assert examples.pop(0) == "Examples:"
    assert examples
    assert [line for line in examples if not line.startswith("    specpilot ")] == []


@_EVERY_HELP
def test_an_example_of_two_lines_can_be_pasted(path: tuple[str, ...]) -> None:
    lines = (_WITH_GROUPS[path].help or "").split("Examples:", 1)[-1].splitlines()
    for line, following in itertools.pairwise(lines):
        goes_on = following.strip() and not following.strip().startswith("specpilot ")
        assert line.endswith(" \\") == bool(goes_on), line


@_EVERY_HELP
def test_examples_use_the_command_and_its_real_options(path: tuple[str, ...]) -> None:
    for words in _examples(_WITH_GROUPS[path]):
        assert tuple(words[1 : 1 + len(path)]) == path
        of = path if path in _ALL else tuple(words[1:3])
        known = _options(_ALL[of]) | {"--help", "-h"}
        flags = {word.split("=")[0] for word in words if re.match(r"--?[a-zA-Z]", word)}
        assert flags <= known, flags - known


@_EVERY
def test_every_option_has_help(path: tuple[str, ...]) -> None:
    silent = [p.name for p in _ALL[path].params if not getattr(p, "help", None)]
    assert silent == []


@pytest.mark.parametrize("path", [p for p in _ALL if p != ("serve",)], ids=" ".join)
def test_results_can_be_had_as_json(path: tuple[str, ...]) -> None:
    assert "--json" in _options(_ALL[path])
