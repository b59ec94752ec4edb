"""The tiny pair, for SGLang's real engine on a CPU; no skip where CI runs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.sglang.cpu_engine.models import TinyPair, build_tiny_pair
from tests.sglang.cpu_engine.server import PYTHON


@pytest.fixture(scope="session")
def tiny_pair(repo: Path, tmp_path_factory: pytest.TempPathFactory) -> TinyPair:
    """Target and drafter; skips, or fails where CI runs, without the environment of SGLang."""
    if not PYTHON.exists():
        missing = f"{PYTHON} is missing: scripts/test.sh sets it up"
        if os.environ.get("CI") == "true":
            pytest.fail(missing)
        pytest.skip(missing)
    tokenizer = repo / "recipes/demo-cpu/target"
    return build_tiny_pair(tmp_path_factory.mktemp("pair"), tokenizer=tokenizer)
