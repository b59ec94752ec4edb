from __future__ import annotations

import sys

import pytest
from rich.console import Console

from specpilot_cli.report import tables
from specpilot_cli.report.tables import Column, print_line, print_pairs, print_table


def test_piped_tables_are_tab_separated_and_uncut(capsys: pytest.CaptureFixture[str]) -> None:
    name = "model.layers.0.mlp." + "x" * 200
    print_table(["tensor", Column("bits [b]", "right")], [(name, 12.5), ("a\tb", 1)], title="W12")
    assert capsys.readouterr().out == f"# W12\ntensor\tbits [b]\n{name}\t12.5\na b\t1\n"


def test_terminal_tables_keep_brackets(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(tables, "stdout_console", lambda: Console(width=60, highlight=False))
    print_table(["shape"], [("[m, n]",)], title="[bf16]")
    print_pairs([("head", "[1, 2]")])
    out = capsys.readouterr().out
    assert "[m, n]" in out
    assert "[bf16]" in out
    assert "head  [1, 2]" in out


def test_pairs_and_lines(capsys: pytest.CaptureFixture[str]) -> None:
    print_pairs([("gain", 1.3), ("τ", 4)], title="result")
    print_line("done [x]")
    assert capsys.readouterr().out == "# result\ngain\t1.3\nτ\t4\ndone [x]\n"


def test_short_rows_are_a_programming_error() -> None:
    with pytest.raises(ValueError, match="1 cells for 2 columns"):
        print_table(["a", "b"], [(1,)])
