"""`apply recipe` on a fake SGLang: what a run gives, and each way in which a server can fail."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.fake_sglang.install import install
from tests.ports import free_port
from tests.unit.apply.sglang.conftest import FakeSglang

pytestmark = pytest.mark.slow

Make = Callable[..., Path]


def _apply(fake: FakeSglang, recipe: Path, *words: str, **behaviour: Any) -> Any:
    return fake.run("apply", "recipe", str(recipe), "--out", "run", *words, **behaviour)


def _fails(fake: FakeSglang, done: subprocess.CompletedProcess[str], *parts: str) -> None:
    """One clear error, no answer, no orphan, no half result."""
    assert done.returncode == 3, done.stderr
    assert done.stdout == ""
    assert len(re.findall(r"^error: ", done.stderr, re.MULTILINE)) == 1, done.stderr
    assert "Traceback" not in done.stderr.split("error: ")[0]
    for part in parts:
        assert part in done.stderr, done.stderr
    assert fake.left_over() == []
    assert not (fake.folder / "run" / "result.json").exists()


def test_both_systems_one_after_another(fake: FakeSglang, sglang_recipe: Make) -> None:
    done = _apply(fake, sglang_recipe(), "--json")
    assert done.returncode == 0, done.stderr
    envelope = json.loads(done.stdout)
    results = envelope["results"]
    assert envelope["verdict"] is None
    assert results["judged"] is False
    assert results["reasons"] == ["the recipe has no gates"]
    stock, tuned = results["systems"]
    assert (stock["plugin"], "quantization" in stock["arguments"]) == (None, False)
    assert stock["environment"] == {"SGLANG_TEST": "1", "SPECPILOT_PLUGIN": ""}
    assert tuned["plugin"]["active"]["w12"]["layers"] == 3
    assert tuned["arguments"]["quantization"] == "w12"
    assert "page-size" in stock["arguments"]
    assert "page-size" not in tuned["arguments"]
    assert results["kv_growth_ratio"] == pytest.approx(5096 / 4096)
    run = fake.folder / "run"
    assert json.loads((run / "result.json").read_text()) == envelope
    assert sorted(path.name for path in (run / "logs").iterdir()) == [
        "baseline.log",
        "candidate.log",
    ]
    assert not (run / "UNFINISHED").exists()
    assert "nothing will be judged: the recipe has no gates" in done.stderr
    page = (run / "report.html").read_text(encoding="utf-8")
    assert "not judged" in page
    assert "Memory planned for the tuned server" in page
    assert "Figure" not in page
    assert fake.left_over() == []


def test_gates_promote_a_faster_lossless_system(fake: FakeSglang, sglang_recipe: Make) -> None:
    speed = {"": 0.005, "w12": 0.0005}
    done = _apply(fake, sglang_recipe(gates=True), s_per_token=speed)
    assert done.returncode == 0, done.stderr
    result = json.loads((fake.folder / "run" / "result.json").read_text())
    assert result["verdict"] == "promote"
    assert result["results"]["together"] is True
    assert result["results"]["token_force"]["verdict"] == "accept"
    assert 2 < result["results"]["paired_bench"]["gain"]["gain_ratio"] < 10
    assert "verdict: promote, faster than stock" in done.stdout
    assert f"report: {fake.folder}/run/report.html" in done.stdout
    page = (fake.folder / "run/report.html").read_text(encoding="utf-8")
    for part in ("gain, tuned over stock", "mismatches, tuned", "--quantization w12", "<svg"):
        assert part in page
    # both had the same room for the comparison, so no growth may be claimed
    assert result["results"]["kv_growth_ratio"] is None
    assert fake.left_over() == []


def test_gates_reject_a_system_that_changes_tokens(fake: FakeSglang, sglang_recipe: Make) -> None:
    speed = {"": 0.002, "w12": 0.0005}
    done = _apply(fake, sglang_recipe(gates=True), s_per_token=speed, wrong_every=5)
    assert done.returncode == 1, done.stderr
    assert "verdict: reject, token forcing rejects the tuned system" in done.stdout


def test_with_a_drafter_a_third_server_scores(fake: FakeSglang, sglang_recipe: Make) -> None:
    speed = {"": 0.005, "w12": 0.0005}
    done = _apply(fake, sglang_recipe(drafter=True, gates=True), "--json", s_per_token=speed)
    assert done.returncode == 0, done.stderr
    systems = json.loads(done.stdout)["results"]["systems"]
    assert [system["name"] for system in systems] == ["baseline", "candidate", "ar"]
    plain = systems[2]
    assert not [name for name in plain["arguments"] if name.startswith("speculative")]
    assert plain["facts"]["speculative_algorithm"] is None
    assert systems[1]["facts"]["draft_tokens"] == 8


_ROOM_FOR_ONE = """
import specpilot_cli.apply.sglang.device as device
device.memory_bytes = lambda: 900_000_000
"""


def test_servers_that_do_not_fit_together_take_turns(fake: FakeSglang, sglang_recipe: Make) -> None:
    """What one server is planned to take, and no more than one, fits."""
    speed = {"": 0.005, "w12": 0.0005}
    words = ("apply", "recipe", str(sglang_recipe(gates=True)), "--out", "run")
    done = fake.run(*words, code=_ROOM_FOR_ONE, s_per_token=speed)
    assert done.returncode == 0, done.stderr
    result = json.loads((fake.folder / "run" / "result.json").read_text())
    assert result["verdict"] == "promote"
    assert result["results"]["together"] is False
    assert result["results"]["kv_growth_ratio"] == pytest.approx(5096 / 4096)
    # handshakes: tuned, stock; warm-up: (stock,) tuned; A/A: stock; runs: tuned, then in the other
    # order tuned, stock; which stays to score
    assert re.findall(r"starting (\w+) on port", done.stderr) == [
        "tuned", "stock", "tuned", "stock", "tuned", "stock",
    ]  # fmt: skip
    logs = sorted(path.name for path in (fake.folder / "run/logs").iterdir())
    assert logs == [f"{name}-{n}.log" for name in ("baseline", "candidate") for n in (1, 2, 3)]
    assert "each is started again when it is its turn" in done.stderr
    assert fake.left_over() == []


def test_death_in_turns(fake: FakeSglang, sglang_recipe: Make) -> None:
    words = ("apply", "recipe", str(sglang_recipe(gates=True)), "--out", "run")
    done = fake.run(*words, code=_ROOM_FOR_ONE, dies=6)
    _fails(fake, done, "server ended with status 137", "unspecified launch failure", "run/logs/")


@pytest.mark.parametrize(
    ("line", "meaning"),
    [
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB",
         "the GPU is out of memory: lower `mem-fraction-static`"),
        ("launch_server.py: error: unrecognized arguments: --page-sise 1",
         "does not know an argument of the recipe"),
        ("ModuleNotFoundError: No module named 'flashinfer'", "a package is missing"),
        ("Something nobody has seen", "the whole log is in"),
    ],
)  # fmt: skip
def test_death_during_the_start(
    fake: FakeSglang, sglang_recipe: Make, line: str, meaning: str
) -> None:
    done = _apply(
        fake, sglang_recipe(), dies="at start", says=["Ignore import error: out of memory", line]
    )
    _fails(fake, done, "the stock server ended with status 3", line, meaning)
    assert f"{fake.folder}/run/logs/baseline.log" in done.stderr
    assert (fake.folder / "run" / "UNFINISHED").exists()


def test_a_start_that_takes_too_long(fake: FakeSglang, sglang_recipe: Make) -> None:
    done = _apply(fake, sglang_recipe(ready_s=1.0), start_s=60)
    _fails(fake, done, "the stock server was not ready after 1 s", "run/logs/baseline.log")


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("absent", "the tuned server runs without specpilot's plugin: w12 not active"),
        ("inactive", "runs without w12: w12: Linear.apply has another signature in 0.5.99"),
        ("unverified", "the tuned server did not verify its W12 weights"),
        ("other file", "read another plugin configuration than the one it was given"),
        ("nonsense", "the plugin's report in /server_info cannot be read: `active`"),
        ("uninvited", "the stock server runs w12, which nobody asked for"),
    ],
)
def test_a_mechanism_that_is_not_as_asked(
    fake: FakeSglang, sglang_recipe: Make, kind: str, message: str
) -> None:
    _fails(fake, _apply(fake, sglang_recipe(), plugin=kind), message)


@pytest.mark.parametrize(
    ("behaviour", "message"),
    [
        ({"version": "0.5.24"}, "the stock server is SGLang 0.5.24, the recipe is for 0.5.20 to"),
        ({"version": "0.5.19.post2"}, "is SGLang 0.5.19.post2"),
        ({"serves": "/other/model"}, "runs model '/other/model', asked for"),
    ],
)
def test_a_server_of_another_kind(
    fake: FakeSglang, sglang_recipe: Make, behaviour: dict[str, Any], message: str
) -> None:
    _fails(fake, _apply(fake, sglang_recipe(), **behaviour), message)


@pytest.mark.parametrize("requests", [0, 5, 40])
def test_death_in_the_middle(fake: FakeSglang, sglang_recipe: Make, requests: int) -> None:
    """In the warm-up, the benchmark, the audit."""
    done = _apply(fake, sglang_recipe(gates=True), dies=requests)
    _fails(fake, done, "ended with status 137", "unspecified launch failure", "run/logs/")
    assert "holds an unfinished run" in done.stderr


def test_a_version_that_is_known_before_the_start(
    fake: FakeSglang, sglang_recipe: Make, tmp_path: Path
) -> None:
    old = FakeSglang(tmp_path, install(tmp_path / "old", version="0.5.19"), fake.repo)
    done = _apply(old, sglang_recipe())
    _fails(
        old, done, "SGLang 0.5.19 is installed, the recipe is for", "pip install 'sglang==0.5.23'"
    )
    assert not (tmp_path / "run").exists()


def test_a_plugin_that_is_not_installed(
    fake: FakeSglang, sglang_recipe: Make, tmp_path: Path
) -> None:
    bare = FakeSglang(tmp_path, install(tmp_path / "bare", with_plugin=False), fake.repo)
    recipe = sglang_recipe()
    done = _apply(bare, recipe)
    _fails(bare, done, "would start without specpilot's plugin", "-m pip install specpilot")
    assert _apply(bare, recipe, "--system", "stock").returncode == 0


@pytest.mark.parametrize(
    ("python", "message"),
    [("/no/python", "no such Python: `/no/python`"), ("/bin/false", "does not run as a Python")],
)
def test_an_interpreter_that_is_none(
    fake: FakeSglang, sglang_recipe: Make, python: str, message: str
) -> None:
    _fails(fake, _apply(fake, sglang_recipe(), "--python", python), message, "at --python")


def _ready(process: subprocess.Popen[str]) -> str:
    """The URL that a serving process prints once it is ready."""
    assert process.stdout is not None
    for line in process.stdout:
        found = re.search(r"http://\S+", line)
        if found:
            return found.group()
    raise AssertionError(process.stderr.read() if process.stderr else "")


def test_serve_ends_with_the_user(fake: FakeSglang, sglang_recipe: Make) -> None:
    port = free_port()
    process = fake.start(
        "apply", "recipe", str(sglang_recipe()), "--serve", "--out", "run", "--port", str(port)
    )
    url = _ready(process)
    assert url == f"http://127.0.0.1:{port}"
    checked = fake.run("apply", "check", "--url", url, "--expect", "w12", "--json")
    assert checked.returncode == 0, checked.stderr
    found = json.loads(checked.stdout)
    assert found["verdict"] == "ok"
    assert found["results"]["active"]["w12"]["encoded_bytes"] == 300
    assert fake.run("apply", "check", "--url", url, "--expect", "recorder").returncode == 1
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert "error" not in errors
    assert fake.left_over() == []


def test_serve_ends_with_its_server(fake: FakeSglang, sglang_recipe: Make) -> None:
    process = fake.start("apply", "recipe", str(sglang_recipe()), "--serve", "--out", "run")
    _ready(process)
    for pid in fake.servers():
        os.kill(pid, signal.SIGKILL)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 3, errors
    assert errors.count("error: ") == 1
    assert "the tuned server ended with status 137" in errors
    assert f"{fake.folder}/run/logs/candidate.log" in errors
    assert fake.left_over() == []


def test_serve_ends_when_health_checks_are_missed(fake: FakeSglang, sglang_recipe: Make) -> None:
    often = "import specpilot_cli.apply.sglang.run as run\nrun._HEALTH_EVERY_S = run._WATCH_S = 0.1"
    words = ("apply", "recipe", str(sglang_recipe()), "--serve", "--out", "run")
    process = fake.start(*words, code=often, healthy_checks=9)
    assert _ready(process)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 3, errors
    assert "is not ready: /health answered 503, 3 times in a row" in errors
    assert f"{fake.folder}/run/logs/candidate.log" in errors
    assert fake.left_over() == []


def test_a_killed_parent_leaves_no_server(fake: FakeSglang, sglang_recipe: Make) -> None:
    process = fake.start("apply", "recipe", str(sglang_recipe()), "--serve", "--out", "run")
    _ready(process)
    process.kill()
    process.wait()
    assert fake.left_over() == []


def test_interruption_before_the_server_is_ready(fake: FakeSglang, sglang_recipe: Make) -> None:
    process = fake.start("apply", "recipe", str(sglang_recipe()), "--out", "run", start_s=60)
    while not (fake.folder / "run/logs/baseline.log").exists():
        assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 130
    assert (fake.folder / "run" / "UNFINISHED").exists()
    assert fake.left_over() == []
