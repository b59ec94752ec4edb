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
_WHOLE, _NUMBER, _TRUTH = "not a whole number", "not a number", "neither true nor false"
_WORDS = {
    "int_type": _WHOLE, "int_parsing": _WHOLE, "int_from_float": _WHOLE,
    "int_parsing_size": "a number too large to be read",
    "float_type": _NUMBER, "float_parsing": _NUMBER, "finite_number": "not a finite number",
    "bool_type": _TRUTH, "bool_parsing": _TRUTH,
    "string_type": "not text", "list_type": "not a list", "tuple_type": "not a list",
    "greater_than": "must be above {gt}", "greater_than_equal": "must be at least {ge}",
    "less_than": "must be below {lt}", "less_than_equal": "must be at most {le}",
    "multiple_of": "must be a multiple of {multiple_of}",
    "string_too_short": "needs at least {min_length} characters",
    "string_too_long": "may have {max_length} characters at most",
    "string_pattern_mismatch": "does not have the form `{pattern}`",
    "too_short": "needs at least {min_length} entries, has {actual_length}",
    "too_long": "may have {max_length} entries at most",
    "literal_error": "must be {expected}",
}  # fmt: skip
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
        text = in_words(problem)
    return f"`{key_path(place)}`: {text}" if place else text


def in_words(problem: ErrorDetails) -> str:
    """What pydantic found, as this program says it."""
    plain = _WORDS.get(problem["type"])
    if plain is not None:
        return plain.format(**problem.get("ctx", {}))
    text = problem["msg"].removeprefix("Value error, ")
    return text[:1].lower() + text[1:]


def first_in_words(error: ValidationError, whole: str) -> tuple[str, str]:
    """Where in the document the first problem is, as a key path, and what it is.

    whole: what to call a problem of the document as such.
    """
    first = error.errors(include_url=False, include_input=False)[0]
    return key_path(first["loc"]) or whole, in_words(first)


def _hint(problem: ErrorDetails, model: type[BaseModel]) -> str | None:
    if problem["type"] == "impossible":
        return str(problem["ctx"]["hint"])
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
