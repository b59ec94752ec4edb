"""`apply recipe` with the real SGLang: launch, handshake, facts, a clean stop."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.sglang.cpu_engine.models import BLOCK, LAYERS, TinyPair
from tests.sglang.cpu_engine.server import ARGUMENTS, ENVIRONMENT, PYTHON, left_over

pytestmark = [pytest.mark.slow, pytest.mark.extended]


@pytest.fixture
def recipe(tiny_pair: TinyPair, tmp_path: Path) -> Path:
    """DFLASH on the tiny pair, W12 in the tuned system; no gates, which need a quiet machine."""
    folder = tmp_path / "recipe"
    folder.mkdir()
    common = {name: value for name, value in ARGUMENTS.items() if name != "device"}
    content = {
        "schema_version": 1,
        "name": "tiny",
        "title": "A tiny pair on a CPU",
        "engine": "sglang",
        "engine_versions": {"from_version": "0.5.20", "below": "0.5.24", "pinned": "0.5.23"},
        "models": {"target": str(tiny_pair.target), "drafter": str(tiny_pair.drafter)},
        "device": "cpu",
        "regime": {"requests": 2, "context": 512},
        "arguments": {"common": common},
        "environment": dict(ENVIRONMENT),
        "mechanisms": [{"mechanism": "w12"}],
        "ready_timeout_s": 600.0,
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(content), encoding="utf-8")
    return folder


def test_both_systems_start_and_say_what_they_run(
    recipe: Path, specpilot_json: Callable[..., tuple[int, dict[str, Any]]], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    code, answer = specpilot_json("apply", "recipe", recipe, "--python", PYTHON, "--out", run)
    assert code == 0
    assert answer["results"]["reasons"] == ["the recipe has no gates"]
    stock, tuned = answer["results"]["systems"]
    assert stock["plugin"] is None
    assert tuned["plugin"]["active"]["w12"]["layers"] == 4 * LAYERS + 1 - 1
    assert tuned["plugin"]["problems"] == []
    for system in (stock, tuned):
        assert system["facts"]["version"] == "0.5.23"
        assert system["facts"]["draft_tokens"] == BLOCK
        assert system["facts"]["kv_tokens"] == ARGUMENTS["max-total-tokens"]
    assert json.loads((run / "result.json").read_text(encoding="utf-8")) == answer
    for name in ("baseline", "candidate"):
        assert "Uvicorn running" in (run / "logs" / f"{name}.log").read_text(encoding="utf-8")
    assert left_over(run) == {}
