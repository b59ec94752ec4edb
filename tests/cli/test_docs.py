"""The written documentation matches the commands and has no dead links."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer.main

from specpilot_cli.app import app

_REPO = Path(__file__).resolve().parents[2]
_PAGES = sorted(
    str(path.relative_to(_REPO))
    for pattern in ("*.md", "docs/*.md", "*/README.md", "recipes/*/*.md", "scripts/*/*.md")
    for path in _REPO.glob(pattern)
)


def test_index_of_docs_is_complete(repo: Path) -> None:
    index = (repo / "docs" / "README.md").read_text(encoding="utf-8")
    pages = {path.name for path in (repo / "docs").glob("*.md")} - {"README.md"}
    assert {name for name in pages if f"]({name})" not in index} == set()


def test_page_of_commands_is_current(repo: Path) -> None:
    done = subprocess.run(
        [sys.executable, "scripts/update_docs.py", "--check"],
        cwd=repo, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_readme_names_every_command(repo: Path) -> None:
    text = (repo / "README.md").read_text(encoding="utf-8")
    root = typer.main.get_command(app)
    missing = [name for name in root.commands if f"specpilot {name}" not in text]  # type: ignore[attr-defined]
    assert missing == []


@pytest.mark.parametrize("page", _PAGES)
def test_links_lead_somewhere(repo: Path, page: str) -> None:
    path = repo / page
    text = path.read_text(encoding="utf-8")
    links = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text)
    dead = [link for link in links if "://" not in link and not (path.parent / link).exists()]
    assert dead == []


@pytest.mark.parametrize(
    ("page", "limit"),
    [("README.md", 250), ("kernels/README.md", 60), ("profiles/README.md", 40),
     ("recipes/README.md", 40)],
)  # fmt: skip
def test_readmes_are_short(repo: Path, page: str, limit: int) -> None:
    assert len((repo / page).read_text(encoding="utf-8").splitlines()) <= limit


def test_examples_in_the_readme_use_real_options(repo: Path) -> None:
    text = (repo / "README.md").read_text(encoding="utf-8").replace("\\\n", " ")
    lines = text.splitlines()
    root = typer.main.get_command(app)
    for line in (line for line in lines if line.startswith("    specpilot ")):
        command, words = root, line.split()[1:]
        while words and words[0] in getattr(command, "commands", {}):
            command = command.commands[words.pop(0)]  # type: ignore[attr-defined]
        known = {flag for param in command.params for flag in (*param.opts, *param.secondary_opts)}
        used = {word for word in words if word.startswith("-")}
        assert used <= known | {"--help", "-h"}, line
