"""The door: inert without a configuration, all or nothing with one, every problem on record."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import tomllib
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from specpilot_cli.engines.sglang.plugin import activate, entry, hooks
from specpilot_cli.engines.sglang.plugin.state import State
from specpilot_cli.schema.plugin_config import PLUGIN_ENV, PluginConfig, PluginState


@pytest.fixture
def state(monkeypatch: pytest.MonkeyPatch) -> State:
    fresh = State()
    monkeypatch.setattr(activate, "STATE", fresh)
    return fresh


@pytest.fixture
def sglang(make_plugin: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """`sglang(version=, problems=)`: pretend that one is installed; problems by mechanism."""
    make_plugin()

    def pretend(version: str = "0.5.23", **problems: str) -> None:
        def check(wanted: Any, source_of: Any, *, version: str) -> list[str]:
            return [problems[hook.mechanism] for hook in wanted if hook.mechanism in problems]

        def installed(name: str) -> str:
            if not version:
                raise metadata.PackageNotFoundError(name)
            return version

        monkeypatch.setattr(hooks, "check_hooks", check)
        monkeypatch.setattr(activate.metadata, "version", installed)

    return pretend


def configuration(folder: Path, **content: Any) -> Path:
    path = folder / "plugin.json"
    path.write_text(json.dumps({"schema_version": 1, **content}), encoding="utf-8")
    return path


def registered() -> list[str]:
    from tests.unit.sglang_plugin.fake_sglang import HookRegistry

    return sorted(HookRegistry.hooks)


@pytest.mark.parametrize("value", [None, ""])
def test_without_a_configuration_nothing_is_imported(value: str | None) -> None:
    code = (
        "import sys; from specpilot_cli.engines.sglang.plugin import entry; "
        "before = set(sys.modules); entry.register(); "
        "new = set(sys.modules) - before; assert not new, new; "
        "assert not any(m.startswith(('torch', 'sglang', 'pydantic')) for m in sys.modules)"
    )
    env = {} if value is None else {PLUGIN_ENV: value}
    done = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": ":".join(sys.path), **env},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_it_is_the_entry_point_that_sglang_loads(repo: Path) -> None:
    project = tomllib.loads((repo / "pyproject.toml").read_text("utf-8"))["project"]
    ((name, value),) = project["entry-points"]["sglang.srt.plugins"].items()
    found = metadata.EntryPoint(name, value, "sglang.srt.plugins")
    assert found.load() is entry.register


def test_what_is_asked_for_is_set_up(sglang: Any, state: State, tmp_path: Path) -> None:
    sglang()
    path = configuration(tmp_path, w12={})
    activate.activate(str(path))
    assert state.problems == []
    assert hooks.STATUS.path in registered()
    assert len(registered()) == 5
    report = PluginState.model_validate(state.report())
    assert report.sglang_version == "0.5.23"
    assert report.config_sha256 == hashlib.sha256(path.read_bytes()).hexdigest()


def test_nothing_asked_for_only_reports(sglang: Any, state: State, tmp_path: Path) -> None:
    sglang()
    activate.activate(str(configuration(tmp_path)))
    assert registered() == [hooks.STATUS.path]
    assert state.report()["problems"] == []


@pytest.mark.parametrize(
    ("version", "problems", "words"),
    [
        ("0.5.24", {}, "SGLang 0.5.24 is not supported: the plugin needs 0.5.20 to 0.5.23"),
        ("0.5.19", {}, "0.5.20 to 0.5.23"),
        ("0.5.23", {"w12": "`a.b` takes (self)"}, "`a.b` takes (self)"),
    ],
)
def test_another_sglang_gets_nothing_but_the_reason(
    sglang: Any, state: State, tmp_path: Path, version: str, problems: Any, words: str
) -> None:
    sglang(version, **problems)
    activate.activate(str(configuration(tmp_path, w12={})))
    assert registered() == [hooks.STATUS.path]
    report = PluginState.model_validate(state.report())
    assert report.active == {}
    assert words in report.problems[0]


def test_a_server_that_cannot_be_asked_is_left_alone(
    sglang: Any, state: State, tmp_path: Path
) -> None:
    sglang(status="`get_internal_state` is missing")
    activate.activate(str(configuration(tmp_path, w12={})))
    assert registered() == []
    assert state.problems == ["`get_internal_state` is missing"]


@pytest.mark.parametrize("text", ["{", '{"schema_version": 2}', '{"schema_version": 1, "w13": 1}'])
def test_a_configuration_that_cannot_be_read(
    sglang: Any, state: State, tmp_path: Path, text: str
) -> None:
    sglang()
    path = tmp_path / "plugin.json"
    path.write_text(text, encoding="utf-8")
    activate.activate(str(path))
    assert registered() == [hooks.STATUS.path]
    assert "configuration cannot be used" in state.report()["problems"][0]
    assert str(path) in state.report()["problems"][0]


def test_a_missing_configuration(sglang: Any, state: State, tmp_path: Path) -> None:
    sglang()
    activate.activate(str(tmp_path / "none.json"))
    assert "no such file" in state.report()["problems"][0]


def test_an_sglang_without_a_version(sglang: Any, state: State, tmp_path: Path) -> None:
    sglang("")
    activate.activate(str(configuration(tmp_path, w12={})))
    assert registered() == []
    assert "its version is unknown" in state.problems[0]


def test_a_mechanism_that_breaks_is_named(
    sglang: Any, state: State, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sglang()
    monkeypatch.setitem(activate.MODULES, "w12", "specpilot_cli.no_such_module")
    activate.activate(str(configuration(tmp_path, w12={})))
    assert "w12 could not be set up" in state.problems[0]


def test_the_door_never_raises(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    monkeypatch.setenv(PLUGIN_ENV, "/x.json")

    def broken(path: str) -> None:
        raise ZeroDivisionError(path)

    monkeypatch.setattr(activate, "activate", broken)
    entry.register()
    assert "the plugin is broken and does nothing" in caplog.text
    assert "ZeroDivisionError" in caplog.text


def test_the_detokenizer_needs_nothing(
    sglang: Any, state: State, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sglang()
    monkeypatch.setitem(sys.modules, "sglang.srt.managers.detokenizer_manager", object())
    activate.activate(str(configuration(tmp_path, w12={})))
    assert registered() == []


def test_the_report_is_added_to_a_reply(state: State) -> None:
    state.config = PluginConfig()
    state.facts["w12"] = lambda: {"layers": 3}
    state.facts["recorder"] = lambda: "no step yet"
    reply = SimpleNamespace(internal_state={"other": 1})
    assert activate.add_report(reply, object(), recv_req=object()) is None
    found = PluginState.model_validate(reply.internal_state["specpilot"])
    assert found.active == {"w12": {"layers": 3}}
    assert found.problems == ("recorder: no step yet",)
    assert reply.internal_state["other"] == 1


def test_a_reply_of_another_form_does_not_stop_a_server(state: State, caplog: Any) -> None:
    assert activate.add_report(object()) is None
    assert "cannot report" in caplog.text


def test_facts_that_fail_do_not_stop_a_server(state: State) -> None:
    def broken() -> dict[str, Any]:
        raise KeyError("x")

    state.facts["w12"] = broken
    report = state.report()
    assert report["active"] == {}
    assert "KeyError" in report["problems"][0]


def test_problems_are_bounded_and_each_is_kept_once(state: State) -> None:
    for number in range(100):
        state.problem(f"problem {number // 2}")
    assert state.problems == [f"problem {number}" for number in range(20)]
