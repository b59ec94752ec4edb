"""Files hold the kinds that their forms ask for: no text for numbers, no numbers for truth."""

from __future__ import annotations

import importlib
import json
import pkgutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import ConfigDict, ValidationError

import specpilot_cli.schema
from specpilot_cli.errors import InputError
from specpilot_cli.io.json_file import read_json_model
from specpilot_cli.io.yaml_file import read_yaml_model
from specpilot_cli.schema.base import FileModel

for _module in pkgutil.iter_modules(specpilot_cli.schema.__path__, "specpilot_cli.schema."):
    importlib.import_module(_module.name)


def _all(model: type[FileModel]) -> Iterator[type[FileModel]]:
    for child in model.__subclasses__():
        yield child
        yield from _all(child)


def _scalars(schema: Any) -> Iterator[dict[str, Any]]:
    if isinstance(schema, dict):
        if schema.get("type") in ("bool", "int", "float", "str"):
            yield schema
        for part in schema.values():
            yield from _scalars(part)
    elif isinstance(schema, (list, tuple)):
        for part in schema:
            yield from _scalars(part)


_MODELS = [model for model in _all(FileModel) if model.__module__.startswith("specpilot_cli.")]


@pytest.mark.parametrize("model", _MODELS, ids=lambda model: model.__name__)
def test_no_file_model_converts_scalars(model: type[FileModel]) -> None:
    found = list(_scalars(model.__pydantic_core_schema__))
    assert all(scalar.get("strict") is True for scalar in found)


def test_there_are_many_of_them() -> None:
    assert len(_MODELS) > 60


class _Inner(FileModel):
    count: int


class _Form(FileModel):
    model_config = ConfigDict(title="form")

    count: int = 1
    share: float = 0.5
    on: bool = False
    word: str = "w"
    maybe: int | None = None
    several: tuple[float, ...] = ()
    named: dict[str, int] | None = None
    inner: tuple[_Inner, ...] = ()


@pytest.mark.parametrize(
    "text",
    [
        '{"count": "8"}', '{"count": true}', '{"count": 8.0}', '{"share": "0.5"}',
        '{"share": true}', '{"on": 1}', '{"on": "yes"}', '{"on": 0.0}', '{"word": 5}',
        '{"maybe": "1"}', '{"maybe": false}', '{"several": [1, "2"]}', '{"several": [true]}',
        '{"named": {"a": "1"}}', '{"inner": [{"count": "1"}]}',
    ],
)  # fmt: skip
def test_another_kind_is_refused_in_json_and_yaml(text: str, tmp_path: Path) -> None:
    key = next(iter(json.loads(text)))
    for name, read in (("form.json", read_json_model), ("form.yaml", read_yaml_model)):
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        with pytest.raises(InputError, match=f"`{key}") as caught:
            read(path, _Form)
        assert name in str(caught.value.where)
    with pytest.raises(ValidationError):
        _Form.model_validate_json(text)


def test_what_a_file_can_only_spell_one_way_is_read(tmp_path: Path) -> None:
    """A whole number for any number, and lists for tuples."""
    path = tmp_path / "form.json"
    path.write_text(
        '{"share": 1, "several": [1, 2.5], "named": {"a": 1}, "inner": [{"count": 2}]}',
        encoding="utf-8",
    )
    found = read_json_model(path, _Form)
    assert (found.share, found.several, found.inner[0].count) == (1.0, (1.0, 2.5), 2)
    assert _Form.model_validate_json(found.model_dump_json()) == found
