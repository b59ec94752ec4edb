from __future__ import annotations

from pathlib import Path

import pytest

from specpilot_cli.errors import InputError
from specpilot_cli.settings import (
    ConfigFile,
    option_defaults,
    read_config,
    unknown_variables,
)

_OPTIONS = {
    "ceiling": {"gpu": "gpu", "json": "as_json"},
    "replay": {"json": "as_json", "nodes": "nodes"},
    "w12 verify": {"threads": "threads"},
}


def _defaults(*values: dict[str, object]) -> dict[str, dict[str, object]]:
    return option_defaults([ConfigFile(Path("f"), v) for v in values], _OPTIONS)


def test_plain_keys_reach_every_command_that_has_the_option() -> None:
    assert _defaults({"json": True}) == {"ceiling": {"as_json": True}, "replay": {"as_json": True}}


def test_a_table_beats_a_plain_key_and_the_later_file_beats_both() -> None:
    user = {"json": True, "ceiling": {"json": False, "gpu": "h100"}}
    assert _defaults(user)["ceiling"] == {"as_json": False, "gpu": "h100"}
    assert _defaults(user, {"json": True})["ceiling"] == {"as_json": True, "gpu": "h100"}


def test_nested_commands_are_named_in_full() -> None:
    assert _defaults({"w12 verify": {"threads": 2}}) == {"w12 verify": {"threads": 2}}


@pytest.mark.parametrize(
    ("values", "message", "hint"),
    [
        ({"gpus": "x"}, "no option is called `gpus`", "did you mean `gpu`?"),
        ({"replai": {}}, "no command is called `replai`", "did you mean `replay`?"),
        ({"replay": {"gpu": "x"}}, "no option of `replay` is called `gpu`", "known: json, nodes"),
    ],
)
def test_names_that_nothing_has_are_errors(
    values: dict[str, object], message: str, hint: str
) -> None:
    with pytest.raises(InputError, match=message) as caught:
        _defaults(values)
    assert (caught.value.where, caught.value.hint) == ("f", hint)


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    """A user file and a project file."""
    user = tmp_path / "config" / "specpilot" / "config.toml"
    project = tmp_path / "project" / "specpilot.toml"
    for path in (user, project):
        path.parent.mkdir(parents=True)
        path.write_text(f'gpu = "{path.parent.name}"\n', encoding="utf-8")
    return user, project


def _read(tmp_path: Path, **env: str) -> list[ConfigFile]:
    base = {"XDG_CONFIG_HOME": str(tmp_path / "config"), "HOME": str(tmp_path / "home")}
    return read_config({**base, **env}, tmp_path / "project")


def test_project_file_comes_after_the_user_file(tmp_path: Path, files: tuple[Path, Path]) -> None:
    assert [file.path for file in _read(tmp_path)] == list(files)
    assert _defaults(*(f.values for f in _read(tmp_path)))["ceiling"] == {"gpu": "project"}
    assert _read(tmp_path, SPECPILOT_NO_CONFIG="1") == []
    files[0].unlink()
    assert [file.path for file in _read(tmp_path, SPECPILOT_NO_CONFIG="0")] == [files[1]]


def test_user_file_is_found_below_home_without_xdg(tmp_path: Path) -> None:
    path = tmp_path / ".config" / "specpilot" / "config.toml"
    path.parent.mkdir(parents=True)
    path.write_text("x = 1\n", encoding="utf-8")
    assert read_config({"HOME": str(tmp_path)}, tmp_path) == [ConfigFile(path, {"x": 1})]


def test_bad_toml_names_file_and_line(tmp_path: Path, files: tuple[Path, Path]) -> None:
    files[1].write_text("a = 1\nb = \n", encoding="utf-8")
    with pytest.raises(InputError, match="invalid TOML") as caught:
        _read(tmp_path)
    assert caught.value.where == f"{files[1]}:2"
    files[1].unlink()
    files[1].mkdir()
    with pytest.raises(InputError, match="cannot read"):
        _read(tmp_path)


@pytest.mark.parametrize(
    "raw",
    [b"a = " + b"[" * 20_000, b"a = \xff\n", b"a = 1" + b"9" * 5000,
     b'a = "\x00"\n', b"a = 1\na = 2\n"],
    ids=["deep", "not UTF-8", "long number", "control character", "twice"],
)  # fmt: skip
def test_hostile_toml_is_an_input_error(
    tmp_path: Path, files: tuple[Path, Path], raw: bytes
) -> None:
    files[1].write_bytes(raw)
    with pytest.raises(InputError, match="invalid TOML"):
        _read(tmp_path)


def test_unknown_variables_come_with_the_nearest_known_name() -> None:
    env = {"SPECPILOT_DEBGU": "1", "SPECPILOT_VENV": "2", "PATH": "x", "SPECPILOT_QQ": "1"}
    assert unknown_variables({**env, "SPECPILOT_GPU": "h200"}, ["SPECPILOT_GPU"]) == [
        ("SPECPILOT_DEBGU", "SPECPILOT_DEBUG"),
        ("SPECPILOT_QQ", None),
    ]
