"""What `/server_info` says, and every way in which it is not what was asked for."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest

from specpilot_cli.engines.sglang.info import (
    check_handshake,
    check_version,
    read_facts,
    read_plugin_state,
)
from specpilot_cli.errors import MachineError
from specpilot_cli.schema.plugin_config import PluginConfig, RecorderPlugin, W12Plugin
from specpilot_cli.schema.sglang_recipe import EngineRange

ASKED = PluginConfig(w12=W12Plugin(), recorder=RecorderPlugin(mode="dense", folder="/r"))
DIGEST = hashlib.sha256(b"config").hexdigest()
STATE = {
    "plugin_version": "1", "sglang_version": "0.5.23", "config_sha256": DIGEST, "problems": [],
    "active": {"w12": {"layers": 3, "verified": True}, "recorder": {"mode": "dense"}},
}  # fmt: skip
KNOWN = EngineRange(from_version="0.5.20", below="0.5.24", pinned="0.5.23")


def _info(**change: Any) -> dict[str, Any]:
    return {"internal_states": [{"specpilot": {**STATE, **change}}]}


def _shake(info: dict[str, Any], asked: PluginConfig = ASKED) -> None:
    check_handshake(asked, read_plugin_state(info), name="tuned server", config_sha256=DIGEST)


def test_right_handshakes() -> None:
    _shake(_info())
    _shake({"internal_states": [{}]}, PluginConfig())
    _shake(_info(active={}), PluginConfig())
    unverified = {"active": {"w12": {"layers": 1}}}
    _shake(_info(**unverified), PluginConfig(w12=W12Plugin(verify=False)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"active": {"w12": {"verified": True}}, "problems": ["recorder: no such hook"]},
         "runs without recorder: recorder: no such hook"),
        ({"active": {}, "problems": ["SGLang 0.5.99 is not known"]},
         "runs without w12: SGLang 0.5.99 is not known"),
        ({"active": {}}, "runs without w12: the plugin gives no reason"),
        ({"problems": ["the disk is full"]}, "the tuned server reports: the disk is full"),
        ({"config_sha256": "0" * 64}, "read another plugin configuration"),
        ({"config_sha256": None}, "read another plugin configuration"),
        ({"active": {"w12": {}, "recorder": {}}}, "did not verify its W12 weights"),
    ],
)  # fmt: skip
def test_wrong_handshakes_name_mechanism_and_reason(change: dict[str, Any], message: str) -> None:
    with pytest.raises(MachineError, match=message) as error:
        _shake(_info(**change))
    assert error.value.hint


def test_a_mechanism_that_nobody_asked_for() -> None:
    with pytest.raises(MachineError, match="runs recorder, which nobody asked for"):
        _shake(_info(), PluginConfig(w12=W12Plugin()))


@pytest.mark.parametrize("info", [{}, {"internal_states": []}, {"internal_states": [None]}])
def test_no_plugin_at_all(info: dict[str, Any]) -> None:
    assert read_plugin_state(info) is None
    with pytest.raises(MachineError, match="without specpilot's plugin: w12, recorder not active"):
        _shake(info)


@pytest.mark.parametrize("raw", ["yes", {"active": {}}, {**STATE, "more": 1}])
def test_reports_that_cannot_be_read(raw: Any) -> None:
    with pytest.raises(MachineError, match="report in /server_info cannot be read"):
        read_plugin_state({"internal_states": [{"specpilot": raw}]})


@pytest.mark.parametrize("version", ["0.5.24", "0.5.19", "weird", None, 5])
def test_versions_outside_the_range(version: Any) -> None:
    with pytest.raises(MachineError, match=r"the tuned server (is SGLang|does not say)"):
        check_version({"version": version}, KNOWN, name="tuned server")
    check_version({"version": "0.5.23"}, KNOWN, name="tuned server")


def test_facts_are_read_or_left_open() -> None:
    usage = {"weight": 1.5, "kvcache": 2, "graph": None, "token_capacity": 4096}
    facts = read_facts({"version": "0.5.23", "internal_states": [{"memory_usage": usage}]})
    assert facts.weight_bytes == 3 * 2**29
    assert facts.kv_bytes == 2 * 2**30
    assert (facts.kv_tokens, facts.graph_bytes, facts.model_path) == (4096, None, None)
    odd = read_facts({"version": 5, "internal_states": [{"memory_usage": {"weight": "much"}}]})
    assert (odd.version, odd.weight_bytes) == (None, None)
