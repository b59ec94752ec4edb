"""The base of every file model."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, GetCoreSchemaHandler
from pydantic_core import CoreSchema

_SCALARS = ("bool", "int", "float", "str")


def _on_one_line(text: str) -> str:
    if any(ord(character) < 32 or ord(character) == 127 for character in text):
        raise ValueError("holds a tab, a line break or another control character")
    return text


#: What a request or a benchmark is called: it must stand in a cell of a tab-separated table.
Label = Annotated[str, Field(min_length=1), AfterValidator(_on_one_line)]


def _make_strict(schema: Any) -> None:
    """Switch off conversions of scalars, wherever in `schema` they stand.

    `ConfigDict(strict=True)` would refuse lists for tuples as well.
    """
    if isinstance(schema, dict):
        if schema.get("type") in _SCALARS:
            schema["strict"] = True
        for part in schema.values():
            _make_strict(part)
    elif isinstance(schema, (list, tuple)):
        for part in schema:
            _make_strict(part)


class FileModel(BaseModel):
    """Frozen, and an unknown key is an error: a silently ignored typo is a wrong measurement.

    So is a number that is not finite: YAML can spell one, and every later sum would be lost. And so
    is a scalar of another kind: `"8"` and `true` are no numbers, `1` and `"no"` no truth values,
    `8.0` is no count; only a whole number may stand for any number. Lists may stand for tuples,
    which JSON and YAML cannot spell.
    Pydantic lives at this boundary only; inside, code uses frozen dataclasses.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, ser_json_inf_nan="constants"
    )

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        schema = handler(source)
        _make_strict(handler.resolve_ref_schema(schema))
        return schema
