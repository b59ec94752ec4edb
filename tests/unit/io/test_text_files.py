"""YAML, JSON and JSONL: what is accepted, and where an error points."""

from __future__ import annotations

import datetime
import os
from pathlib import Path

import pytest
from pydantic import Field, field_validator

from specpilot_cli.errors import InputError
from specpilot_cli.io.json_file import read_json, read_json_model, write_json
from specpilot_cli.io.jsonl import iter_jsonl, read_jsonl, write_jsonl
from specpilot_cli.io.yaml_file import read_yaml_model
from specpilot_cli.schema.base import FileModel


class Peak(FileModel):
    name: str
    flop_per_s: float = Field(gt=0)


class Gpu(FileModel):
    id: str
    peaks: list[Peak] = Field(default_factory=list)
    extra: dict[str, Peak] = Field(default_factory=dict)
    best: Peak | None = None
    measured: str | None = None
    day: datetime.date | None = None

    @field_validator("id")
    @classmethod
    def _short(cls, value: str) -> str:
        if len(value) > 8:
            raise ValueError("an id has at most 8 letters")
        return value


def _yaml_error(tmp_path: Path, text: str) -> tuple[str, str, str | None]:
    path = tmp_path / "gpu.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(InputError) as caught:
        read_yaml_model(path, Gpu)
    where = (caught.value.where or "").removeprefix(str(tmp_path) + "/")
    return where, caught.value.message, caught.value.hint


def test_yaml_reads_exponents_and_keeps_dates_as_text(tmp_path: Path) -> None:
    path = tmp_path / "gpu.yaml"
    path.write_text(
        "id: h200\npeaks:\n  - {name: bf16, flop_per_s: 989e12}\nmeasured: 2026-01-02\n"
        "day: 2026-01-02\n",
        encoding="utf-8",
    )
    gpu = read_yaml_model(path, Gpu)
    assert gpu.peaks[0].flop_per_s == 989e12
    assert gpu.measured == "2026-01-02"
    assert gpu.day == datetime.date(2026, 1, 2)


@pytest.mark.parametrize(
    ("text", "where", "message", "hint"),
    [
        ("id: a\n\npaeks: []\n", "gpu.yaml:3", "unknown key `paeks`", "did you mean `peaks`?"),
        (
            "id: a\npeaks:\n- name: x\n  flop_per_s: 1\n- name: y\n  flops_per_s: 2\n",
            "gpu.yaml:6",
            "unknown key `peaks[1].flops_per_s`; missing key `peaks[1].flop_per_s`",
            "did you mean `flop_per_s`?",
        ),
        (
            "id: a\nextra:\n  one:\n    name: x\n    flop_per_s: 1\n    nmae: y\n",
            "gpu.yaml:6",
            "unknown key `extra.one.nmae`",
            "did you mean `name`?",
        ),
        (
            "id: a\nbest:\n  name: x\n  flop_per_s: -1\n",
            "gpu.yaml:4",
            "`best.flop_per_s`: must be above 0",
            None,
        ),
        ("id: much too long\n", "gpu.yaml:1", "`id`: an id has at most 8 letters", None),
        ("id: a\nid: b\n", "gpu.yaml:2", "invalid YAML: duplicate key `id`", None),
        ("id: a\npeaks: [1, 2\n", "gpu.yaml:3", "invalid YAML: expected ',' or ']'", None),
        ("id: a\n\tpeaks: []\n", "gpu.yaml:2", "invalid YAML: found character '\\t'", None),
        ("- id\n", "gpu.yaml:1", "expected keys with values", None),
        ("", "gpu.yaml", "the file is empty", None),
        ("id: a\n---\nid: b\n", "gpu.yaml:2", "invalid YAML: but found another document", None),
        ("id: !!python/object:os.system x\n", "gpu.yaml:1", "could not determine a constr", None),
    ],
)
def test_yaml_errors_name_line_problem_and_hint(
    tmp_path: Path, text: str, where: str, message: str, hint: str | None
) -> None:
    found_where, found_message, found_hint = _yaml_error(tmp_path, text)
    assert found_where == where
    assert message in found_message
    if hint is not None:
        assert found_hint == hint


def test_unknown_key_without_a_near_match_lists_the_known_ones(tmp_path: Path) -> None:
    _, _, hint = _yaml_error(tmp_path, "id: a\nqqqqqqq: 1\n")
    assert hint == "known keys here: `best`, `day`, `extra`, `id`, `measured`, `peaks`"


def test_many_problems_are_cut_short(tmp_path: Path) -> None:
    rows = "".join(f"- name: x{i}\n" for i in range(9))
    _, message, _ = _yaml_error(tmp_path, f"id: a\npeaks:\n{rows}")
    assert message.endswith("and 4 more")


def _bomb(levels: int) -> str:
    """A few hundred bytes that aliases would expand to 9 ** levels nodes."""
    rows = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    rows += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, levels)]
    return "\n".join(rows) + "\n"


@pytest.mark.parametrize(
    ("text", "line", "name"),
    [
        ("id: a\npeaks: &p [*p]\n", 2, "p"),
        ("id: &i a\nmeasured: *i\n", 2, "i"),
        ("id: a\nbest: &b {name: x, flop_per_s: 1}\nextra:\n  one: {<<: *b}\n", 4, "b"),
        (_bomb(9), 2, "a0"),
    ],
    ids=["itself", "scalar", "merge key", "bomb"],
)
def test_yaml_aliases_are_refused(tmp_path: Path, text: str, line: int, name: str) -> None:
    where, message, _ = _yaml_error(tmp_path, text)
    assert where == f"gpu.yaml:{line}"
    assert message == f"invalid YAML: aliases are not allowed: `*{name}`"


@pytest.mark.parametrize(
    "text",
    [
        "id: !!int x\n",
        "id: !!float x\n",
        "id: !!bool maybe\n",
        "id: !!timestamp soon\n",
        "id: a\nbest: {name: x, flop_per_s: .inf}\n",
        "id: a\nbest: {name: x, flop_per_s: .nan}\n",
        "id: a\nbest: {name: x, flop_per_s: 1e999}\n",
        "? [a, b]\n: c\n",
        "? {a: b}\n: c\n",
        "id: \x00\n",
        "id: \x1b[2J\n",
        "%YAML 9.9\n---\nid: a\n",
        "&",
        "[" * 20_000,
        "{a: " * 20_000,
    ],
    ids=lambda text: repr(text[:16]),
)
def test_hostile_yaml_is_an_input_error(tmp_path: Path, text: str) -> None:
    where, message, _ = _yaml_error(tmp_path, text)
    assert where.startswith("gpu.yaml")
    assert message


@pytest.mark.parametrize("reader", [read_yaml_model, read_json_model, read_jsonl])
@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_pipes_and_devices_are_refused_without_reading(
    tmp_path: Path, reader: object, kind: str
) -> None:
    assert callable(reader)
    path = Path("/dev/zero")
    if kind == "pipe":
        path = tmp_path / "pipe"
        os.mkfifo(path)
    with pytest.raises(InputError, match="not a regular file"):
        reader(path, Gpu)


@pytest.mark.parametrize("reader", [read_yaml_model, read_json_model, read_jsonl])
def test_missing_files_and_bad_bytes_are_input_errors(tmp_path: Path, reader: object) -> None:
    assert callable(reader)
    with pytest.raises(InputError, match="no such file"):
        reader(tmp_path / "nothing", Gpu)
    (tmp_path / "latin").write_bytes(b"id: \xff\n")
    with pytest.raises(InputError, match="UTF-8"):
        reader(tmp_path / "latin", Gpu)
    with pytest.raises(InputError, match="cannot read"):
        reader(tmp_path, Gpu)


@pytest.mark.parametrize(
    ("text", "where", "message"),
    [
        ('{"id": "a",\n "peaks": }', "x.json:2", "invalid JSON"),
        ('{"id": NaN}', "x.json", "`NaN` is not a JSON number"),
        ('{"id": "a", "id": "b"}', "x.json", "duplicate key `id`"),
        ('{"id": "a", "peak": []}', "x.json", "unknown key `peak`"),
        ("[" * 100_000, "x.json", "invalid JSON"),
        ('{"id": Infinity}', "x.json", "`Infinity` is not a JSON number"),
        ('{"id": 1e999}', "x.json", "`1e999` is too large"),
        ('{"id": -1e999}', "x.json", "`-1e999` is too large"),
        ('{"id": ' + "9" * 5000 + "}", "x.json", "invalid JSON"),
        ('{"id": "\\ud800"}', "x.json", "surrogates not allowed"),
        ('{"id": "\\uDC00x"}', "x.json", "surrogates not allowed"),
        ('{"\\ud800": "a"}', "x.json", "surrogates not allowed"),
    ],
)
def test_json_is_strict(tmp_path: Path, text: str, where: str, message: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(InputError, match=message) as caught:
        read_json_model(path, Gpu)
    assert caught.value.where == str(tmp_path / where)


def test_a_whole_surrogate_pair_is_one_character(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text('{"id": "\\ud83d\\ude00"}', encoding="utf-8")
    assert read_json_model(path, Gpu).id == "\U0001f600"


def test_json_round_trip_and_refusal_of_nan(tmp_path: Path) -> None:
    gpu = Gpu(id="a", peaks=[Peak(name="τ", flop_per_s=1.5)])
    write_json(tmp_path / "g.json", gpu)
    assert read_json_model(tmp_path / "g.json", Gpu) == gpu
    assert read_json(tmp_path / "g.json")["peaks"][0]["name"] == "τ"
    with pytest.raises(ValueError, match="JSON compliant"):
        write_json(tmp_path / "n.json", {"x": float("nan")})
    assert not (tmp_path / "n.json").exists()


def test_jsonl_round_trip_keeps_order_and_odd_text(tmp_path: Path) -> None:
    rows = [Peak(name=name, flop_per_s=1) for name in ("a\nb", "\u2028", 'q"', "τ")]
    write_jsonl(tmp_path / "p.jsonl", rows)
    assert (tmp_path / "p.jsonl").read_bytes().count(b"\n") == 4
    assert read_jsonl(tmp_path / "p.jsonl", Peak) == rows


def test_jsonl_names_the_bad_line(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    good = '{"name": "a", "flop_per_s": 1}\n'
    path.write_text(good + "\n" + good + '{"name": "b", "flop', encoding="utf-8")
    with pytest.raises(InputError, match="invalid JSON") as caught:
        read_jsonl(path, Peak)
    assert caught.value.where == f"{path}:4"
    path.write_text(good + '{"name": 1, "flop_per_s": 1}\n', encoding="utf-8")
    with pytest.raises(InputError, match="not text") as caught:
        list(iter_jsonl(path, Peak))
    assert caught.value.where == f"{path}:2"


def test_empty_jsonl_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text("\n", encoding="utf-8")
    with pytest.raises(InputError, match="no rows"):
        read_jsonl(tmp_path / "p.jsonl", Peak)
