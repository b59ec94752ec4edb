"""Write docs/commands.md from the commands themselves.

python scripts/update_docs.py            rewrite the page
python scripts/update_docs.py --check    exit 1 if it is out of date
"""

from __future__ import annotations

import inspect
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer.main

from specpilot_cli.app import app

PAGE = Path(__file__).resolve().parent.parent / "docs" / "commands.md"
_HEAD = """# Commands

Made by `scripts/update_docs.py` from the commands; do not edit. Every command also takes
`--help`. Exit codes: 0 done or accepted, 1 the verdict is no, 2 bad usage or input, 3 this machine
lacks something, 4 the measurement carries no verdict, 70 a bug, 130 interrupted.
"""


def render() -> str:
    """The whole page."""
    parts = [_HEAD]
    for path, command in _commands(typer.main.get_command(app)):
        parts += [f"## specpilot {' '.join(path)}\n", _text(command.help or ""), _table(command)]
    return "\n".join(parts)


def _commands(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    children = getattr(command, "commands", None)
    if children is None:
        yield path, command
        return
    for name, child in sorted(children.items()):
        yield from _commands(child, (*path, name))


def _text(text: str) -> str:
    """The help text, with the examples as one code block."""
    before, _, after = inspect.cleandoc(text).partition("Examples:")
    examples = "\n".join(line for line in after.splitlines() if line.strip())
    return f"{before.strip()}\n\n{textwrap.indent(textwrap.dedent(examples), '    ')}\n"


def _table(command: Any) -> str:
    rows = [row for param in command.params if (row := _row(param)) is not None]
    return "\n".join(["| option | meaning | default |", "|---|---|---|", *rows, ""])


def _row(param: Any) -> str | None:
    if param.name == "help":
        return None
    flags = [*param.opts, *param.secondary_opts]
    name = (
        ", ".join(f"`{flag}`" for flag in flags) if flags[0].startswith("-") else _argument(param)
    )
    needed = " Required." if param.required else ""
    variable = f" Variable `{param.envvar}`." if getattr(param, "envvar", None) else ""
    meaning = f"{param.help or ''}{needed}{variable}".replace("|", "\\|")
    return f"| {name} | {meaning} | {_default(param)} |"


def _argument(param: Any) -> str:
    return f"`{param.metavar or param.name.upper()}`"


def _default(param: Any) -> str:
    value = param.default if param.show_default is not False else None
    # Unset, off, and computed defaults have nothing to show; the help text explains the last.
    plain = isinstance(value, str | int | float) and not isinstance(value, bool)
    return f"`{value}`" if plain and value != "" and not param.required else ""


def main() -> int:
    """Write or check the page."""
    page = render()
    if "--check" in sys.argv[1:]:
        current = PAGE.read_text(encoding="utf-8") if PAGE.exists() else ""
        if current != page:
            sys.stderr.write("docs/commands.md is out of date: run scripts/update_docs.py\n")
            return 1
        return 0
    PAGE.write_text(page, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
