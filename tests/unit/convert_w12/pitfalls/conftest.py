"""The commands as a user runs them, and the whole way there and back in one call."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from specpilot_cli.main import main
from tests.unit.convert_w12.conftest import digests


@dataclass(frozen=True, slots=True)
class Answer:
    """Exit code and what was printed."""

    code: int
    out: str
    err: str

    @property
    def results(self) -> dict[str, Any]:
        """`results` of the JSON document on stdout."""
        found: dict[str, Any] = json.loads(self.out)["results"]
        return found

    @property
    def tensors(self) -> dict[str, dict[str, Any]]:
        """What the document says about each tensor, by name."""
        return {row["name"]: row for row in self.results["tensors"]}


Cli = Callable[..., Answer]
ThereAndBack = Callable[[Path], Answer]


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    """Run `specpilot` with words and paths, in this process."""

    def run(*words: object) -> Answer:
        code = main([str(word) for word in words])
        return Answer(code, *capsys.readouterr())

    return run


@pytest.fixture
def there_and_back(cli: Cli, tmp_path: Path) -> ThereAndBack:
    """Convert to `w12`, verify against the source, restore to `back`, compare every file.

    Returns what convert-w12 answered.
    """

    def run(source: Path) -> Answer:
        before = digests(source)
        packed, back = tmp_path / "w12", tmp_path / "back"
        answer = cli("convert-w12", source, "-o", packed, "--json")
        assert answer.code == 0, answer.err
        verified = cli("w12", "verify", packed, "--against", source, "--json")
        assert verified.code == 0, verified.out
        assert verified.results["compared_tensors"] == len(answer.tensors)
        assert cli("w12", "restore", packed, "-o", back, "--json").code == 0
        assert digests(source) == before
        assert digests(back) == before
        return answer

    return run


def python(code: str, *words: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run Python code in a process of its own."""
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, words)],
        env={**os.environ, **environment},
        capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
