"""What goes wrong for users: each case has its exit code, its place, and a hint."""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from specpilot_cli.paths import bundled

Run = Callable[..., subprocess.CompletedProcess[str]]

_DEMO = bundled("recipes") / "demo-cpu"


def _fails(done: subprocess.CompletedProcess[str], code: int, *parts: str) -> None:
    assert done.returncode == code, done.stderr
    assert done.stdout == ""
    assert "\n\nhint: " in done.stderr, done.stderr
    for part in parts:
        assert part in done.stderr


@pytest.fixture
def busy_port() -> Iterator[int]:
    """A port that something else listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


@pytest.fixture
def closed_url() -> str:
    """The address of a server that is not there."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{probe.getsockname()[1]}"


def test_unknown_recipe(specpilot: Run) -> None:
    done = specpilot("apply", "recipe", "demo-cpi")
    _fails(done, 2, "unknown recipe `demo-cpi`", "did you mean `demo-cpu`?")


def test_bad_recipe_names_the_line(specpilot: Run, tmp_path: Path) -> None:
    lines = (_DEMO / "recipe.yaml").read_text(encoding="utf-8").splitlines()
    number = next(i for i, line in enumerate(lines) if line.startswith("stock:"))
    lines[number] = "stok:"
    (tmp_path / "recipe.yaml").write_text("\n".join(lines), encoding="utf-8")
    done = specpilot("apply", "recipe", str(tmp_path / "recipe.yaml"))
    _fails(done, 2, f"recipe.yaml:{number + 1}", "unknown key `stok`", "did you mean `stock`?")


@pytest.mark.parametrize(
    "words",
    [
        ["serve", "--target", "nothing"],
        ["convert-w12", "nothing", "-o", "x"],
        ["w12", "verify", "nothing"],
        ["record", "--target", "nothing", "--drafter", "nothing", "--prompts", "p.jsonl",
         "-o", "x.safetensors"],
        ["profile", "--target", "nothing", "-o", "step.json"],
    ],
    ids=" ".join,
)  # fmt: skip
def test_missing_model(specpilot: Run, tmp_path: Path, words: list[str]) -> None:
    (tmp_path / "p.jsonl").write_text(
        '{"request_id": "a", "benchmark": "b", "text": "c", "max_new_tokens": 4}\n',
        encoding="utf-8",
    )
    _fails(specpilot(*words), 2, "nothing")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["p.jsonl"]


def test_occupied_port(specpilot: Run, busy_port: int) -> None:
    done = specpilot("serve", "--target", str(_DEMO / "target"), "--port", str(busy_port))
    _fails(done, 3, str(busy_port))


@pytest.mark.parametrize("command", ["token-force", "paired-bench"])
def test_unreachable_server(specpilot: Run, closed_url: str, command: str) -> None:
    names = {
        "token-force": ("--system", "--stock", "--scorer", "--ar"),
        "paired-bench": ("--baseline", "--candidate"),
    }[command]
    urls = [word for name in names for word in (name, closed_url)]
    done = specpilot(command, *urls, "--prompts", str(_DEMO / "prompts" / "dev.jsonl"))
    _fails(done, 3, closed_url)


def test_truncated_weights(specpilot: Run, tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    for name in ("config.json", "tokenizer.json"):
        (model / name).write_bytes((_DEMO / "target" / name).read_bytes())
    whole = (_DEMO / "target" / "model.safetensors").read_bytes()
    for size in (len(whole) - 1, 1000, 4, 0):
        (model / "model.safetensors").write_bytes(whole[:size])
        _fails(specpilot("convert-w12", "model", "-o", "w12"), 2, "model.safetensors")
        assert not (tmp_path / "w12").exists()
    _fails(specpilot("serve", "--target", "model"), 2, "model.safetensors")


def test_damaged_recording(specpilot: Run, tmp_path: Path) -> None:
    (tmp_path / "l.safetensors").write_bytes(b"\xff" * 64)
    _fails(specpilot("replay", "l.safetensors"), 2, "l.safetensors")
    _fails(specpilot("replay", "missing.safetensors"), 2, "missing.safetensors")


def test_bad_step_profile(specpilot: Run, tmp_path: Path) -> None:
    (tmp_path / "step.json").write_text('{"schema_version": 1,\n}', encoding="utf-8")
    done = specpilot("ceiling", "step.json", "--tau-best", "3")
    assert done.returncode == 2
    assert "step.json:2" in done.stderr


_RECORD = ["record", "--target", str(_DEMO / "target"), "--drafter", str(_DEMO / "drafter")]


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["ceiling", "{}", "--tau-best", "3"], '{"schema_version": 1,}'),
        (["ceiling", "{}", "--tau-best", "3"], "\xff"),
        (["ceiling", "{}", "--tau-best", "3"], None),
        (["ceiling", ".", "--tau-best", "3"], None),
        (["paired-bench", "--from", "{}"], '{"a": 1, "a": 2}'),
        (["paired-bench", "--from", "{}", "--baseline", "http://x:1"], "{}"),
        ([*_RECORD, "--prompts", "{}", "-o", "l.safetensors"], ""),
        ([*_RECORD, "--prompts", "{}", "-o", "l.safetensors"], "{"),
        ([*_RECORD, "--prompts", "{}", "-o", "l.safetensors"], None),
        ([*_RECORD, "--prompts", "{}", "-o", "l.json"], None),
        (["profile", "--target", "m", "--rows", "1,x"], None),
        (["profile", "--target", "m", "--drafter", "d", "--rows", "1"], None),
        (["profile", "--target", "m", "-o", "."], None),
        (["serve", "--target", "m", "--mode", "tree", "--nodes", "9999"], None),
        (["serve", "--target", "m", "--fault", "logit-bias:after=1,bias=nan"], None),
        (["convert-w12", "m", "-o", "w", "--report", "m/r.json"], None),
        (["apply", "recipe", "{}"], ""),
        (["apply", "recipe", "{}"], "a: \x00"),
    ],
    ids=lambda value: " ".join(value)[-40:] if isinstance(value, list) else repr(value),
)
def test_bad_input_comes_with_a_hint(
    specpilot: Run, tmp_path: Path, words: list[str], text: str | None
) -> None:
    path = tmp_path / "recipe.yaml"
    if text is not None:
        path.write_bytes(text.encode("latin-1"))
    _fails(specpilot(*(word.replace("{}", str(path)) for word in words)), 2, "error: ")


def test_unknown_device(specpilot: Run, tmp_path: Path) -> None:
    curve = bundled("profiles") / "gpus"
    assert (curve / "h200.yaml").is_file()
    done = specpilot("ceiling", "step.json", "--tau-best", "3", "--gpu", "h20")
    assert done.returncode == 2


def test_prompts_with_a_bad_line(specpilot: Run, closed_url: str, tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text('{"request_id": "a"}\n', encoding="utf-8")
    done = specpilot(
        "paired-bench", "--baseline", closed_url, "--candidate", closed_url, "--prompts", "p.jsonl"
    )
    assert done.returncode == 2
    assert "p.jsonl:1" in done.stderr
