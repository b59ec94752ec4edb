"""Turn a pydantic error into one `InputError` that says where, what, and what was meant."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from specpilot_cli.errors import InputError

Model = TypeVar("Model", bound=BaseModel)
Location = tuple[int | str, ...]

_MAX_LISTED = 5
_TAG_PROBLEMS = ("union_tag_invalid", "union_tag_not_found")


def validate(data: object, model: type[Model], where: Callable[[Location], str]) -> Model:
    """`data` as a `model`; `where` maps a pydantic location to `file:line`.

    Raises `InputError` naming the first few problems.
    """
    try:
        return model.model_validate(data)
    except ValidationError as error:
        problems = error.errors(include_url=False, include_input=False)
        # A typo shows as an unknown and a missing key; the line to look at is the unknown one's.
        problems.sort(key=lambda problem: problem["type"] != "extra_forbidden")
        places = [_place(problem, data) for problem in problems]
        lines = [_sentence(*pair) for pair in zip(problems, places, strict=True)][:_MAX_LISTED]
        if len(problems) > _MAX_LISTED:
            lines.append(f"and {len(problems) - _MAX_LISTED} more")
        hints = [hint for problem in problems if (hint := _hint(problem, model))]
        raise InputError(
            "; ".join(lines), where=where(places[0]), hint=hints[0] if hints else None
        ) from None


def _place(problem: ErrorDetails, data: object) -> Location:
    """Where in the document the problem is: pydantic's location without the names of unions."""
    place: list[int | str] = []
    last = len(problem["loc"]) - 1
    current: Any = data
    for index, part in enumerate(problem["loc"]):
        in_object = isinstance(current, dict) and part in current
        if in_object or (isinstance(current, list) and part in range(len(current))):
            place.append(part)
            current = current[part]
        elif index == last and problem["type"] == "missing":
            place.append(part)
    if problem["type"] in _TAG_PROBLEMS:
        place.append(problem["ctx"]["discriminator"].strip("'"))
    return tuple(place)


def key_path(location: Location) -> str:
    """`("classes", 0, "bytes")` → `classes[0].bytes`."""
    path = ""
    for part in location:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else part
    return path


def _sentence(problem: ErrorDetails, place: Location) -> str:
    kind = problem["type"]
    if kind == "extra_forbidden":
        return f"unknown key `{key_path(place)}`"
    if kind in ("missing", "union_tag_not_found"):
        return f"missing key `{key_path(place)}`"
    if kind == "union_tag_invalid":
        return f"unknown {place[-1]} `{problem['ctx']['tag']}` at `{key_path(place[:-1])}`"
    if kind in ("model_type", "model_attributes_type", "dict_type"):
        text = "expected keys with values"
    else:
        text = problem["msg"].removeprefix("Value error, ")
    text = text[:1].lower() + text[1:]
    return f"`{key_path(place)}`: {text}" if place else text


def _hint(problem: ErrorDetails, model: type[BaseModel]) -> str | None:
    if problem["type"] == "union_tag_invalid":
        known = [tag.strip("' ") for tag in problem["ctx"]["expected_tags"].split(",")]
        return _nearest(problem["ctx"]["tag"], known, "known")
    if problem["type"] != "extra_forbidden":
        return None
    *parent, key = problem["loc"]
    return _nearest(
        str(key), _known_keys(model.model_json_schema(), tuple(parent)), "known keys here"
    )


def _nearest(name: str, known: list[str], label: str) -> str | None:
    close = difflib.get_close_matches(name, known, n=1)
    if close:
        return f"did you mean `{close[0]}`?"
    return f"{label}: {', '.join(f'`{k}`' for k in known)}" if known else None


def _known_keys(schema: dict[str, Any], location: Location) -> list[str]:
    """Property names of the object at `location`, walking a JSON schema and its `$defs`."""
    nodes = _resolve(schema, schema)
    for part in location:
        following: list[dict[str, Any]] = []
        for node in nodes:
            child = _child(node, part)
            if child is not None:
                following += _resolve(child, schema)
        # Tags of unions appear in locations but not in the schema: stay where we are.
        nodes = following or nodes
    return sorted({key for node in nodes for key in node.get("properties", {})})


def _child(node: dict[str, Any], part: int | str) -> dict[str, Any] | None:
    if isinstance(part, int):
        child = node.get("items")
    else:
        child = node.get("properties", {}).get(part) or node.get("additionalProperties")
    return child if isinstance(child, dict) else None


def _resolve(node: dict[str, Any], root: dict[str, Any]) -> list[dict[str, Any]]:
    if "$ref" in node:
        return _resolve(root["$defs"][node["$ref"].rsplit("/", 1)[-1]], root)
    options = node.get("anyOf", []) + node.get("oneOf", []) + node.get("allOf", [])
    if options:
        return [found for option in options for found in _resolve(option, root)]
    return [node]
