"""Command lines, environments, and what a log means."""

from __future__ import annotations

from pathlib import Path

import pytest

from specpilot_cli.engines.sglang.arguments import (
    merged,
    with_tree,
    without_speculation,
    words,
)
from specpilot_cli.engines.sglang.launch import log_meaning, server_command, server_environment

CONFIG = Path("/run/plugin.json")


def test_command_in_full() -> None:
    arguments = {"page-size": 1, "disable-radix-cache": True, "cuda-graph-bs": (1, 2, 4)}
    command = server_command("/py", "/models/t", arguments, host="127.0.0.1", port=31000)
    assert command == [
        "/py", "-m", "sglang.launch_server", "--model-path", "/models/t", "--page-size", "1",
        "--disable-radix-cache", "--cuda-graph-bs", "1", "2", "4", "--host", "127.0.0.1",
        "--port", "31000",
    ]  # fmt: skip


def test_hub_ids_carry_their_revision() -> None:
    command = server_command("py", "owner/name@v1", {}, host="h", port=1, drafter="owner/draft@abc")
    assert command[3:11] == [
        "--model-path", "owner/name", "--revision", "v1",
        "--speculative-draft-model-path", "owner/draft",
        "--speculative-draft-model-revision", "abc",
    ]  # fmt: skip
    assert "/a@b" in server_command("py", "/a@b", {}, host="h", port=1)


def test_later_arguments_replace_in_place() -> None:
    both = merged({"a": 1, "b": 2}, {"a": 3, "c": True})
    assert words(both) == ["--a", "3", "--b", "2", "--c"]
    drafted = {"speculative-algorithm": "DFLASH", "a": 1, "speculative-num-draft-tokens": 8}
    assert without_speculation(drafted) == {"a": 1}


def test_a_tree_keeps_the_drafter_and_its_arguments_but_no_width() -> None:
    drafted = {
        "speculative-algorithm": "DFLASH",
        "speculative-draft-attention-backend": "triton",
        "speculative-num-draft-tokens": 8,
        "speculative-dflash-block-size": 8,
        "a": 1,
    }
    assert with_tree(drafted) == {
        "speculative-algorithm": "SPECPILOT_TREE",
        "speculative-draft-attention-backend": "triton",
        "a": 1,
    }


def test_the_plugin_is_off_unless_configured() -> None:
    assert server_environment({"X": "1"}, None, {"SPECPILOT_PLUGIN": "/old"}) == {
        "X": "1",
        "SPECPILOT_PLUGIN": "",
    }


@pytest.mark.parametrize(
    ("inherited", "set_to"),
    [("", None), ("specpilot", None), ("other", "other,specpilot"), ("specpilot,other", None)],
)
def test_a_whitelist_of_plugins_is_widened(inherited: str, set_to: str | None) -> None:
    found = server_environment({}, CONFIG, {"SGLANG_PLUGINS": inherited})
    assert found["SPECPILOT_PLUGIN"] == "/run/plugin.json"
    assert found.get("SGLANG_PLUGINS") == set_to


def test_nothing_inherited_is_repeated() -> None:
    assert set(server_environment({}, CONFIG, {"HF_TOKEN": "secret"})) == {"SPECPILOT_PLUGIN"}


@pytest.mark.parametrize(
    ("line", "meaning"),
    [
        ("RuntimeError: Not enough memory. Please try to increase --mem-fraction-static.",
         "out of memory"),
        ("ValueError: Loaded weights leave no GPU memory for the KV cache", "out of memory"),
        ("OSError: [Errno 98] Address already in use", "choose another --port"),
        ("RuntimeError: No CUDA GPUs are available", "no usable GPU"),
        ("launch_server.py: error: argument --quantization: invalid choice: 'w12'",
         "does not know an argument"),
        ("ModuleNotFoundError: No module named 'xgrammar'", "install it"),
        ("OSError: /models/x does not appear to have a file named config.json", "incomplete"),
    ],
)  # fmt: skip
def test_a_telling_line_is_explained_and_quoted(tmp_path: Path, line: str, meaning: str) -> None:
    log = tmp_path / "log"
    log.write_text(f"Ignore import error: No module named 'x'\nfine\n{line}\nTraceback\n")
    found = log_meaning(log)
    assert found is not None
    assert meaning in found
    assert line[:100] in found


def test_what_was_logged_before_the_server_was_up_explains_nothing(tmp_path: Path) -> None:
    log = tmp_path / "log"
    harmless = (
        "[t] /v1/responses disabled: init failed (ModuleNotFoundError: No module named 'x')\n"
        "[t] CUDA out of memory while trying a larger graph\n"
        "[t] The server is fired up and ready to roll!\n"
    )
    log.write_text(harmless + "[t] decode batch\n")
    assert log_meaning(log) is None
    log.write_text(harmless + "[t] Subprocess scheduler_0 (pid=7) crashed with exit code -9.\n")
    found = log_meaning(log)
    assert found is not None
    assert found.startswith("a process of the server was killed")


def test_a_log_that_says_nothing(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("server is fired up\nIgnore import error: No module named 'x'\n")
    assert log_meaning(log) is None
    assert log_meaning(tmp_path / "none") is None
