"""The table of pinned signatures, against small sources and against every supported SGLang."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from specpilot_cli.engines.sglang.plugin import hooks
from specpilot_cli.engines.sglang.plugin.hooks import HOOKS, Hook, check_hooks, check_version

VERSIONS = ("0.5.20", "0.5.21", "0.5.22", "0.5.23")
ENTRIES = (
    "sglang/srt/plugins/__init__.py",
    "sglang/srt/managers/scheduler.py",
)


@pytest.fixture(scope="module")
def wheels(request: pytest.FixtureRequest) -> dict[str, zipfile.ZipFile]:
    """Version -> the wheel that the configured index gives; kept between runs (130 MB)."""
    folder = Path(request.config.cache.mkdir("sglang-wheels"))
    found = {}
    for version in VERSIONS:
        if not list(folder.glob(f"sglang-{version}-*.whl")):
            _download(version, folder)
        (path,) = folder.glob(f"sglang-{version}-*.whl")
        found[version] = zipfile.ZipFile(path)
    return found


def _download(version: str, folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps",
         "--only-binary", ":all:", "--python-version", "3.11", "--implementation", "cp",
         "--platform", "manylinux_2_34_x86_64", "--dest", str(folder), f"sglang=={version}"],
        capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    if done.returncode:
        reason = f"SGLang {version} could not be fetched: {done.stderr.strip()[-500:]}"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)


@pytest.mark.parametrize("version", VERSIONS)
def test_every_supported_sglang_has_the_pinned_signatures(
    wheels: dict[str, zipfile.ZipFile], version: str
) -> None:
    names = set(wheels[version].namelist())
    read: list[str] = []

    def source_of(path: str) -> str | None:
        if path not in names:
            return None
        read.append(path)
        return wheels[version].read(path).decode()

    assert check_version(version) is None
    assert check_hooks(HOOKS, source_of, version=version) == []
    assert len(set(read)) > 8
    assert all(source_of(path) for path in ENTRIES)


def test_a_change_of_any_pinned_place_is_noticed(wheels: dict[str, zipfile.ZipFile]) -> None:
    """Every function gets one parameter more, every other name is taken away."""
    version = VERSIONS[-1]
    names = set(wheels[version].namelist())
    pinned: dict[str, list[Hook]] = {}
    for hook in HOOKS:
        pinned.setdefault(hook.target.partition(":")[0], []).append(hook)

    def changed(path: str) -> str | None:
        if path not in names:
            return None
        module = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        tree = ast.parse(wheels[version].read(path))
        found = {hook: _node(tree, hook) for hook in pinned[module]}
        for hook, node in found.items():
            if hook.signature is not None:
                assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
                node.args.kwonlyargs.append(ast.arg("surplus"))
                node.args.kw_defaults.append(None)
        for hook, node in found.items():
            if hook.signature is None:
                _rename(node, hook.target)
        return ast.unparse(tree)

    problems = check_hooks(HOOKS, changed, version=version)
    assert len(problems) == len(HOOKS)
    for hook in HOOKS:
        assert any(problem.startswith(f"`{hook.path}` of") for problem in problems), hook


def _node(tree: ast.Module, hook: Hook) -> ast.AST:
    found: ast.AST | None = tree
    for name in hook.target.partition(":")[2].split("."):
        found = hooks._member(found, name) if found is not None else None
    assert found is not None, hook
    return found


def _rename(node: ast.AST, target: str) -> None:
    if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        node.name = "another"
        return
    names = node.targets if isinstance(node, ast.Assign) else [node.target]  # type: ignore[attr-defined]
    for name in names:
        assert isinstance(name, ast.Name), target
        name.id = "another"


def test_whatever_the_plugin_imports_of_sglang_is_pinned(repo: Path) -> None:
    """A name that is used and not listed would fail in a server, not in this file."""
    pinned = {hook.target for hook in HOOKS}
    modules = {target.partition(":")[0] for target in pinned}
    folder = repo / "specpilot_cli/engines/sglang/plugin"
    imported = [
        (path.name, node.module, alias.name)
        for path in sorted(folder.glob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("sglang")
        for alias in node.names
    ]
    assert len(imported) > 20
    for file, module, name in imported:
        target = f"{module}:{name}"
        listed = target in pinned or any(each.startswith(f"{target}.") for each in pinned)
        assert listed or f"{module}.{name}" in modules, f"{file} uses {target}"


def test_a_changed_signature_is_named_with_the_range(wheels: dict[str, zipfile.ZipFile]) -> None:
    def changed(path: str) -> str | None:
        text = wheels["0.5.23"].read(path).decode()
        return text.replace("def get_internal_state(self, recv_req", "def get_internal_state(self")

    (problem,) = check_hooks([hooks.STATUS], changed, version="0.5.23")
    assert problem.startswith("`sglang.srt.managers.scheduler.Scheduler.get_internal_state`")
    assert "takes (self" in problem
    assert "not (self, recv_req)" in problem
    assert "supports SGLang 0.5.20 to 0.5.23" in problem


@pytest.mark.parametrize(
    ("source", "signature"),
    [
        ("def f(): ...", "()"),
        ("def f(a, b: int = 3, *, c, d=None, **e): ...", "(a, b=, *, c, d=, **e)"),
        ("async def f(self, *parts: str) -> None: ...", "(self, *parts)"),
        ("def f(a, /, b): ...", "(a, /, b)"),
        ("class f: ...", "not a function"),
        ("f = 3", "not a function"),
    ],
)
def test_how_signatures_are_written(source: str, signature: str) -> None:
    assert hooks.signature_of(ast.parse(source).body[0]) == signature


SOURCES = {
    "pkg/a.py": "LIST: list = []\nclass A:\n    @staticmethod\n    def f(x): ...\n",
    "pkg/b/__init__.py": "from x import y\ndef f(): ...\ndef f(z): ...\n",
}


@pytest.mark.parametrize(
    ("target", "signature", "problem"),
    [
        ("pkg.a:A", None, None),
        ("pkg.a:A.f", "(x)", None),
        ("pkg.a:LIST", None, None),
        ("pkg.b:f", "(z)", None),
        ("pkg.a:A.g", "(x)", "is missing"),
        ("pkg.a:B.f", "(x)", "is missing"),
        ("pkg.c:f", "()", "is missing"),
        ("pkg.b:y", None, "is missing"),
        ("pkg.a:A.f", "(y)", "takes (x), not (y)"),
        ("pkg.a:A", "(x)", "takes not a function, not (x)"),
    ],
)
def test_what_is_found(target: str, signature: str | None, problem: str | None) -> None:
    found = check_hooks([Hook("w12", target, signature)], SOURCES.get, version="1")
    assert [problem in text for text in found] == ([True] if problem else [])


@pytest.mark.parametrize(
    ("version", "supported"),
    [
        ("0.5.20", True), ("0.5.23", True), ("0.5.23.post1", True), ("0.5.24", False),
        ("0.5.19", False), ("0.6.0", False), ("main", False), ("0.5", False),
    ],
)  # fmt: skip
def test_supported_versions(version: str, supported: bool) -> None:
    assert (check_version(version) is None) is supported
