"""A checked recipe on copies of the demo pair."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specpilot_cli.apply.recipes import load_recipe
from specpilot_cli.apply.reference.preflight import ApplySettings, CheckedRecipe, check_recipe


@pytest.fixture
def checked(make_recipe: Callable[..., Path]) -> Callable[..., CheckedRecipe]:
    """`checked(settings, edit={old: new}, **recipe)`."""

    def check(
        settings: ApplySettings | None = None, edit: dict[str, str] | None = None, **recipe: Any
    ) -> CheckedRecipe:
        path = make_recipe(**recipe) / "recipe.yaml"
        text = path.read_text(encoding="utf-8")
        for old, new in (edit or {}).items():
            assert old in text
            text = text.replace(old, new)
        path.write_text(text, encoding="utf-8")
        return check_recipe(load_recipe(str(path)), settings or ApplySettings())

    return check
