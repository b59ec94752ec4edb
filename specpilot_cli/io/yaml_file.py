"""Read YAML into a model; every error names the line.

Stricter than PyYAML: duplicate keys are errors, `1e12` is a number, and dates stay text.
"""

from __future__ import annotations

import re
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml

from specpilot_cli.errors import InputError
from specpilot_cli.io.json_file import read_text
from specpilot_cli.io.validation import Location, Model, validate


class _Loader(yaml.SafeLoader):
    """SafeLoader with YAML 1.2 floats, no dates, no duplicate keys and no aliases."""

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        # No file here needs an alias, and a few nested ones expand to gigabytes.
        if self.check_event(yaml.AliasEvent):
            event = self.peek_event()  # type: ignore[no-untyped-call]
            raise yaml.composer.ComposerError(
                None, None, f"aliases are not allowed: `*{event.anchor}`", event.start_mark
            )
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                if key.value in seen:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"duplicate key `{key.value}`", key.start_mark
                    )
                seen.add(key.value)
        return super().construct_mapping(node, deep=deep)


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in entries if not tag.endswith(":timestamp")]
    for first, entries in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?[0-9][0-9_]*(?:\.[0-9_]*)?[eE][-+]?[0-9]+$"),
    list("-+0123456789"),
)


def read_yaml_model(path: Path, model: type[Model]) -> Model:
    """The one document in `path` as a `model`. Raises `InputError` with `file:line`."""
    text = read_text(path)
    try:
        loader = _Loader(text)
    except yaml.YAMLError as error:  # a character that YAML does not allow
        raise InputError(
            f"invalid YAML: {error}", where=str(path), hint="the bundled files show the form"
        ) from error
    try:
        node = loader.get_single_node()
        data = loader.construct_document(node) if node is not None else None
    except yaml.MarkedYAMLError as error:
        raise _syntax_error(path, error) from error
    except (yaml.YAMLError, ValueError, KeyError, AttributeError, RecursionError) as error:
        raise InputError(
            f"invalid YAML: {error}", where=str(path), hint="the bundled files show the form"
        ) from error
    finally:
        loader.dispose()
    if node is None:
        raise InputError(
            "the file is empty", where=str(path), hint="the bundled files show the form"
        )
    lines = _lines(node)
    return validate(data, model, lambda location: f"{path}:{_line_of(location, lines)}")


def _syntax_error(path: Path, error: yaml.MarkedYAMLError) -> InputError:
    mark = error.problem_mark or error.context_mark
    problem = error.problem or "cannot be parsed"
    where = str(path) if mark is None else f"{path}:{mark.line + 1}"
    hint = "indent with spaces" if "'\\t'" in problem else None
    return InputError(f"invalid YAML: {problem}", where=where, hint=hint)


def _lines(root: yaml.Node) -> dict[Location, int]:
    """Line (1-based) of every key and list item, by location."""
    lines: dict[Location, int] = {(): root.start_mark.line + 1}

    def walk(node: yaml.Node, location: Location) -> None:
        if isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                if isinstance(key, yaml.ScalarNode):
                    lines[(*location, key.value)] = key.start_mark.line + 1
                    walk(value, (*location, key.value))
        elif isinstance(node, yaml.SequenceNode):
            for index, item in enumerate(node.value):
                lines[(*location, index)] = item.start_mark.line + 1
                walk(item, (*location, index))

    walk(root, ())
    return lines


def _line_of(location: Location, lines: dict[Location, int]) -> int:
    """The line of `location`, or of its nearest ancestor that the file spells out."""
    known = tuple(part for part in location)
    while known and known not in lines:
        known = known[:-1]
    return lines[known]
