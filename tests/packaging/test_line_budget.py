"""Files of at most 400 lines and functions of at most 50, so that each fits in one look."""

from __future__ import annotations

import ast
from pathlib import Path

_MAX_FILE, _MAX_FUNCTION = 400, 50
_FOLDERS = ("specpilot_cli", "kernels", "scripts", "tests")
_SUFFIXES = {".py", ".cu", ".cuh", ".sh", ".j2"}


def _sources(repo: Path) -> list[Path]:
    return sorted(
        path
        for folder in _FOLDERS
        for path in (repo / folder).rglob("*")
        if path.suffix in _SUFFIXES
    )


def test_no_file_is_too_long(repo: Path) -> None:
    sources = _sources(repo)
    assert len(sources) > 50
    long = {
        str(path.relative_to(repo)): n
        for path in sources
        if (n := len(path.read_text(encoding="utf-8").splitlines())) > _MAX_FILE
    }
    assert long == {}


def test_no_function_is_too_long(repo: Path) -> None:
    long = {
        f"{path.relative_to(repo)}:{node.lineno} {node.name}": node.end_lineno - node.lineno + 1
        for path in _sources(repo)
        if path.suffix == ".py"
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.end_lineno is not None
        and node.end_lineno - node.lineno + 1 > _MAX_FUNCTION
    }
    assert long == {}
