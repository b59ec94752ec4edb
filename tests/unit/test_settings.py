from __future__ import annotations

from pathlib import Path

import pytest

from specpilot_cli.errors import InputError
from specpilot_cli.settings import available_cores, load_settings, unknown_variables


@pytest.fixture
def user_file(tmp_path: Path) -> Path:
    path = tmp_path / "config" / "specpilot" / "config.toml"
    path.parent.mkdir(parents=True)
    path.write_text("threads = 3\n", encoding="utf-8")
    return path


@pytest.fixture
def project_file(tmp_path: Path) -> Path:
    path = tmp_path / "project" / "specpilot.toml"
    path.parent.mkdir()
    path.write_text("threads = 5\n", encoding="utf-8")
    return path


def _load(
    tmp_path: Path, env: dict[str, str] | None = None, threads: int | None = None
) -> tuple[int, str]:
    settings = load_settings(
        threads=threads,
        environ={"XDG_CONFIG_HOME": str(tmp_path / "config"), "HOME": str(tmp_path), **(env or {})},
        project_folder=tmp_path / "project",
    )
    return settings.threads, settings.sources["threads"]


def test_each_layer_overrides_the_one_below(
    tmp_path: Path, user_file: Path, project_file: Path
) -> None:
    assert _load(tmp_path, {"SPECPILOT_THREADS": "7"}, threads=9) == (9, "option")
    assert _load(tmp_path, {"SPECPILOT_THREADS": "7"}) == (7, "environment")
    assert _load(tmp_path) == (5, str(project_file))
    project_file.unlink()
    assert _load(tmp_path) == (3, str(user_file))
    user_file.unlink()
    assert _load(tmp_path) == (available_cores(), "default")


def test_both_files_can_be_switched_off(
    tmp_path: Path, user_file: Path, project_file: Path
) -> None:
    assert _load(tmp_path, {"SPECPILOT_NO_CONFIG": "1"})[1] == "default"


def test_cache_folder_follows_xdg(tmp_path: Path) -> None:
    env = {"HOME": "/home/a", "SPECPILOT_NO_CONFIG": "1"}
    assert load_settings(environ=env).cache_dir == Path("/home/a/.cache/specpilot")
    env["XDG_CACHE_HOME"] = "/var/c"
    assert load_settings(environ=env).cache_dir == Path("/var/c/specpilot")
    env["SPECPILOT_CACHE_DIR"] = "/scratch"
    assert load_settings(environ=env).cache_dir == Path("/scratch")


@pytest.mark.parametrize("bad", ["0", "-1", "two", "1.5", "²"])
def test_bad_thread_counts_name_the_variable(tmp_path: Path, bad: str) -> None:
    with pytest.raises(InputError) as caught:
        _load(tmp_path, {"SPECPILOT_THREADS": bad})
    assert caught.value.where == "SPECPILOT_THREADS"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("thread = 2\n", "unknown key `thread`"),
        ("threads = \n", "line 1"),
        ("threads = 1\nthreads = 2\n", "invalid TOML"),
        ("threads = true\n", "whole number"),
        ("cache_dir = 3\n", "must be text"),
    ],
)
def test_bad_files_are_named(tmp_path: Path, project_file: Path, text: str, message: str) -> None:
    project_file.write_text(text, encoding="utf-8")
    with pytest.raises(InputError, match=message) as caught:
        _load(tmp_path)
    assert caught.value.where == str(project_file)


def test_unknown_variables_come_with_the_nearest_known_name() -> None:
    env = {"SPECPILOT_DEBGU": "1", "SPECPILOT_THREADS": "2", "PATH": "x", "SPECPILOT_ZZZZ": "1"}
    assert unknown_variables(env) == [
        ("SPECPILOT_DEBGU", "SPECPILOT_DEBUG"),
        ("SPECPILOT_ZZZZ", None),
    ]
