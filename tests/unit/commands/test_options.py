from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import typer

from specpilot_cli.commands.options import (
    answer_files,
    check_new_file,
    check_not_input,
    check_output,
    exit_code,
    finish,
)
from specpilot_cli.errors import InputError
from specpilot_cli.report.json_out import build_envelope
from specpilot_cli.schema.result import Envelope


def _envelope(verdict: str | None = None) -> Envelope:
    return build_envelope("ceiling", {"gain_ratio": 1.5}, verdict=verdict)


def _say() -> None:
    print("gain 1.5")  # noqa: T201 - stands for a renderer


@pytest.mark.parametrize(
    ("verdict", "exit_zero", "code"),
    [
        (None, False, 0),
        ("accept", False, 0),
        ("promote", False, 0),
        ("reject", False, 1),
        ("mismatch", False, 1),
        ("no", True, 0),
        ("invalid", False, 4),
        ("invalid", True, 4),
    ],
)
def test_verdict_decides_the_exit_code(
    verdict: str | None, exit_zero: bool, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(typer.Exit) as caught:
        finish(_envelope(verdict), as_json=False, text=_say, exit_zero=exit_zero)
    assert caught.value.exit_code == code
    assert capsys.readouterr().out == "gain 1.5\n"


def test_a_misspelt_verdict_cannot_pass_for_acceptance() -> None:
    with pytest.raises(ValueError, match="unknown verdict 'acept'"):
        exit_code("acept")


def test_json_flag_prints_one_document_and_no_text(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit):
        finish(_envelope(), as_json=True, text=_say)
    assert json.loads(capsys.readouterr().out)["results"] == {"gain_ratio": 1.5}


def test_dash_as_output_means_json_on_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit):
        finish(_envelope(), as_json=False, output=Path("-"), text=_say)
    assert json.loads(capsys.readouterr().out)["command"] == "ceiling"


def test_output_file_is_written_beside_the_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(typer.Exit):
        finish(_envelope(), as_json=False, output=tmp_path / "r.json", text=_say)
    assert json.loads((tmp_path / "r.json").read_text(encoding="utf-8"))["command"] == "ceiling"
    assert capsys.readouterr().out == "gain 1.5\n"


def test_other_suffixes_go_through_their_writer(tmp_path: Path) -> None:
    with pytest.raises(typer.Exit):
        finish(
            _envelope(),
            as_json=True,
            output=tmp_path / "r.html",
            text=_say,
            writers={".html": lambda: "<p>1.5</p>"},
        )
    assert (tmp_path / "r.html").read_text(encoding="utf-8") == "<p>1.5</p>"


def test_bad_output_is_refused_before_the_work(tmp_path: Path) -> None:
    (tmp_path / "old.json").write_text("{}", encoding="utf-8")
    (tmp_path / "d.json").mkdir()
    for name, message in (
        ("x.pdf", "unknown format"),
        ("x", "without a suffix"),
        ("old.json", "already exists"),
        ("d.json", "is a folder"),
    ):
        with pytest.raises(InputError, match=message):
            check_output(tmp_path / name, False, ".html")
    check_output(tmp_path / "old.json", True)
    check_output(tmp_path / "new.html", False, ".html")
    check_output(Path("-"), False)
    check_output(None, False)


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model folder with a file, and a link to it, in the current folder."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}", encoding="utf-8")
    (tmp_path / "link").symlink_to("model", target_is_directory=True)
    (tmp_path / "prompts.jsonl").write_text("{}", encoding="utf-8")
    (tmp_path / "alias.json").symlink_to("prompts.jsonl")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "output",
    ["model", "model/x.json", "model/config.json", "model/deep/er/x.json", "link/x.json",
     "./model/../model/x.json", "model/sub/../x.json", "prompts.jsonl", "alias.json"],
)  # fmt: skip
def test_an_output_may_not_touch_an_input(tree: Path, output: str) -> None:
    inputs = (Path("model"), None, Path("prompts.jsonl"))
    for given in (Path(output), tree / output):
        with pytest.raises(InputError, match="would overwrite or lie inside an input") as caught:
            check_not_input({"--out": given}, inputs)
        assert caught.value.where == "--out"


@pytest.mark.parametrize("output", ["model.json", "model-w12", "new/x.json", "../x.json", "-"])
def test_outputs_beside_the_inputs_are_fine(tree: Path, output: str) -> None:
    check_not_input({"-o": Path(output), "--report": None}, (Path("model"), Path("prompts.jsonl")))


def test_two_outputs_may_not_be_one_file(tree: Path) -> None:
    with pytest.raises(InputError, match="also the output of -o") as caught:
        check_not_input({"-o": Path("x.json"), "--step-times": tree / "x.json"}, ())
    assert caught.value.where == "--step-times"


def _refused(path: Path, message: str) -> None:
    """By every check, as any kind of output, and without a trace."""
    before = sorted(Path().rglob("*"))
    for check in (
        lambda: check_output(path.with_suffix(".json"), True),
        lambda: check_new_file(path.with_suffix(".jsonl"), ".jsonl", where="-o", force=True),
        lambda: answer_files(path.with_suffix(""), ["stock"], force=True),
    ):
        with pytest.raises(InputError, match=message) as caught:
            check()
        assert caught.value.where
        assert caught.value.hint
    assert sorted(Path().rglob("*")) == before


def test_missing_parent_folders_are_fine_and_made_when_written(tree: Path) -> None:
    path = tree / "a" / "b" / "r.json"
    check_output(path, False)
    check_new_file(path, ".json", where="-o", force=False)
    assert answer_files(path.parent, ["stock"], force=False) == {
        "--save-outputs (stock)": path.parent / "stock.jsonl"
    }
    assert not (tree / "a").exists()
    with pytest.raises(typer.Exit):
        finish(_envelope(), as_json=False, output=path, text=_say)
    assert path.is_file()


def test_a_file_where_a_folder_should_be_is_refused(tree: Path) -> None:
    for below in ("prompts.jsonl/r", "prompts.jsonl/deep/er/r", "alias.json/r"):
        _refused(Path(below), "is not a folder")


def test_a_folder_without_permission_is_refused(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tree / "model")
    _refused(Path("model/new/r"), "no permission to write in `.*model`")


def test_a_name_too_long_for_its_temporary_file_is_refused(tree: Path) -> None:
    check_output(Path("x" * 230 + ".json"), False)
    with pytest.raises(InputError, match="name is too long"):
        check_output(Path("x" * 245 + ".json"), False)
    with pytest.raises(InputError, match="name is too long"):
        check_output(Path("new") / ("é" * 122 + ".json"), False)


@pytest.mark.parametrize("kind", ["folder", "pipe"])
def test_what_is_no_regular_file_is_not_replaced_even_by_force(tree: Path, kind: str) -> None:
    for name in ("r.json", "r.jsonl", "r/stock.jsonl"):
        (tree / name).parent.mkdir(exist_ok=True)
        if kind == "folder":
            (tree / name).mkdir()
        else:
            os.mkfifo(tree / name)
    _refused(Path("r"), "is a folder" if kind == "folder" else "not a regular file")


def test_answers_that_exist_need_force(tree: Path) -> None:
    (tree / "answers").mkdir()
    (tree / "answers" / "stock.jsonl").write_text("{}", encoding="utf-8")
    with pytest.raises(InputError, match="already exists") as caught:
        answer_files(Path("answers"), ["system", "stock"], force=False)
    assert caught.value.where == "--save-outputs"
    assert len(answer_files(Path("answers"), ["system", "stock"], force=True)) == 2
    assert answer_files(None, ["system"], force=False) == {}
