"""`apply recipe` on bad recipes, models, prompts and machines: found before any work is done."""

from __future__ import annotations

import json
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

Run = Callable[..., subprocess.CompletedProcess[str]]
Fails = Callable[..., str]


@pytest.fixture
def recipe(make_recipe: Callable[..., Path]) -> Path:
    """The folder of a good small recipe, to be damaged."""
    return make_recipe()


@pytest.fixture
def fails(specpilot: Run, recipe: Path, tmp_path: Path) -> Fails:
    """Applies the recipe into `run`; it must fail, print no answer and leave no folder."""

    def apply(status: int, *parts: str, options: tuple[str, ...] = (), **more: Any) -> str:
        done = specpilot("apply", "recipe", str(recipe), "--out", "run", *options, **more)
        assert done.returncode == status, done.stderr
        assert done.stdout == ""
        assert done.stderr.count("error: ") == 1
        for part in parts:
            assert part in done.stderr, done.stderr
        assert not (tmp_path / "run").exists()
        return done.stderr

    return apply


def _edit(path: Path, old: str, new: str) -> int:
    """Replace `old`, which occurs once, and return the line it was on."""
    text = path.read_text(encoding="utf-8")
    assert text.count(old) == 1
    path.write_text(text.replace(old, new), encoding="utf-8")
    return text[: text.index(old)].count("\n") + 1


@pytest.mark.parametrize(
    ("old", "new", "below", "message", "hint"),
    [
        ("name: small", "name: small\nname: big", 1, "duplicate key `name`", None),
        ("stock:", "stok:", 0, "unknown key `stok`", "did you mean `stock`?"),
        ("requests: 1", "requests: one", 0, "`regime.requests`: not a whole number",
         None),
        ("  requests: 1", "\trequests: 1", 0, "invalid YAML: found character '\\t'",
         "indent with spaces"),
        ("mechanism: w12", "mechanism: w13", 0, "unknown mechanism `w13` at `mechanisms[0]`",
         "did you mean `w12`?"),
        ("- mechanism: w12", "- {}", 0, "missing key `mechanisms[0].mechanism`", None),
        ("mechanism: w12", "mechanism: best-first-tree\n    block: 8", -11,
         "mechanism listed twice: best-first-tree", None),
        ("    block: 16", "    blok: 16", 0, "unknown key `mechanisms[1].blok`",
         "did you mean `block`?"),
        ("nodes: auto", "nodes: many", 0, "`mechanisms[1].nodes`: not a whole number",
         None),
        ("[8, 16]", "[8, 0]", 0, "`mechanisms[1].budgets[1]`: must be at least", None),
        ("    warmup: 1", "    runs: 3", 0, "`gates.paired_bench.runs`: must be a multiple",
         None),
        ("name: small", "name: ../up", 0, "`name`: does not have the form", None),
        ("schema_version: 1", "schema_version: 2", 0, "reads recipes of version 1, not 2", None),
        ("engine: reference", "engine: sglang", 16, "unknown key `mechanisms[1].budgets`", None),
        ("engine: reference", "engine: vllm", 0, "unknown engine `vllm`", None),
    ],
    ids=["duplicate key", "unknown key", "wrong type", "tab", "unknown mechanism", "no mechanism",
         "mechanism twice", "key of a mechanism", "nodes", "budget", "odd runs", "name",
         "newer version", "sglang", "unknown engine"],
)  # fmt: skip
def test_bad_recipe(
    fails: Fails, recipe: Path, old: str, new: str, below: int, message: str, hint: str | None
) -> None:
    line = _edit(recipe / "recipe.yaml", old, new) + below
    said = fails(2, message)
    if "twice" in message:
        line = 1  # a rule about the whole file
    assert f"recipe.yaml:{line}\n" in said
    if hint is not None:
        assert f"hint: {hint}" in said


@pytest.mark.parametrize(
    ("text", "where", "message"),
    [
        ("", "recipe.yaml\n", "the file is empty"),
        ("# nothing\n", "recipe.yaml\n", "the file is empty"),
        ("- a\n- b\n", "recipe.yaml:1\n", "expected keys with values"),
        ("just text\n", "recipe.yaml:1\n", "expected keys with values"),
        ("name: x\nengine: [\n", "recipe.yaml:3\n", "invalid YAML"),
    ],
    ids=["empty", "comment", "list", "text", "unclosed"],
)
def test_file_that_is_no_recipe(
    fails: Fails, recipe: Path, text: str, where: str, message: str
) -> None:
    (recipe / "recipe.yaml").write_text(text, encoding="utf-8")
    fails(2, where, message)


def test_recipe_without_a_tree(fails: Fails, recipe: Path) -> None:
    text = (recipe / "recipe.yaml").read_text(encoding="utf-8")
    start, end = text.index("  - mechanism: best-first"), text.index("recording:")
    (recipe / "recipe.yaml").write_text(text[:start] + text[end:], encoding="utf-8")
    fails(2, "no mechanism `best-first-tree`", "hint: ")


@pytest.mark.parametrize("key", ["target", "drafter", "dev", "unseen"])
def test_missing_files_are_named_with_their_key(fails: Fails, recipe: Path, key: str) -> None:
    name = {"target": "target", "drafter": "drafter"}.get(key, f"{key}.jsonl")
    (recipe / name).rename(recipe / "elsewhere")
    kind = "models" if key in ("target", "drafter") else "prompts"
    fails(2, f"`{recipe / name}`", f"recipe.yaml: {kind}.{key}", "hint: paths in a recipe")


@pytest.mark.parametrize("model", ["target", "drafter"])
@pytest.mark.parametrize("size", [0, 4, 1000, -1])
def test_truncated_weights(fails: Fails, recipe: Path, model: str, size: int) -> None:
    weights = recipe / model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:size])
    fails(2, f"{model}/model.safetensors", "hint: ")


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("hidden_size", 128, "hidden_size of drafter and target differ: 128 and "),
        ("vocab_size", 4096, "vocab_size of drafter and target differ: 4096 and "),
        ("target_layer_ids", [1, 40], "the drafter reads target layer 40, the target has 8 layers"),
        ("architectures", ["Other"], "unsupported drafter architecture: ['Other']"),
    ],
)
def test_models_that_are_no_pair(
    fails: Fails, recipe: Path, key: str, value: Any, message: str
) -> None:
    path = recipe / "drafter" / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    (config if key in config else config["dflash_config"])[key] = value
    path.write_text(json.dumps(config), encoding="utf-8")
    fails(2, message, "drafter/config.json", "hint: ")


@pytest.mark.parametrize("split", ["dev", "unseen"])
def test_prompts_with_a_bad_line(fails: Fails, recipe: Path, split: str) -> None:
    path = recipe / f"{split}.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines()
    lines[2] = '{"request_id": "x", "benchmark": "code", "text": "t", "max_tokens": 4}'
    path.write_text("\n".join(lines), encoding="utf-8")
    fails(2, f"{split}.jsonl:3", "unknown key `max_tokens`")


@pytest.mark.parametrize("split", ["dev", "unseen"])
def test_prompt_longer_than_the_context(fails: Fails, recipe: Path, split: str) -> None:
    path = recipe / f"{split}.jsonl"
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    rows[1]["text"] = "word " * 5000
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    fails(2, f"prompt `{rows[1]['request_id']}` does not fit", f"{split}.jsonl", "hint: shorten")


def test_unseen_prompts_must_be_unseen(fails: Fails, recipe: Path) -> None:
    dev = json.loads((recipe / "dev.jsonl").read_text(encoding="utf-8").splitlines()[0])
    with (recipe / "unseen.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps({**dev, "request_id": "again"}) + "\n")
    fails(
        2, "prompt `again` is a dev prompt too", "unseen.jsonl", "hint: ", options=("--limit", "4")
    )


def test_too_few_prompts_for_a_verdict(fails: Fails, recipe: Path) -> None:
    lines = (recipe / "unseen.jsonl").read_text(encoding="utf-8").splitlines()
    (recipe / "unseen.jsonl").write_text("\n".join(lines[:6]), encoding="utf-8")
    fails(2, "4 timed prompts carry no verdict on losslessness: 8 are needed", "hint: raise")


def test_unknown_projection(fails: Fails, recipe: Path) -> None:
    _edit(recipe / "recipe.yaml", "projection: h200-", "projection: h2000-")
    fails(2, "no step times: `h2000-", "did you mean `h200-qwen3.8")


@pytest.fixture
def busy_ports() -> Iterator[list[int]]:
    """Ports n .. n + 2, of which the last one is taken."""
    while True:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            last = listener.getsockname()[1]
            if last > 65533:
                continue
            listener.listen()
            yield [last - 2, last - 1, last]
            return


@pytest.mark.parametrize("index", [0, 2])
def test_busy_port(fails: Fails, busy_ports: list[int], index: int) -> None:
    first = busy_ports[2] - index
    fails(3, f"port {busy_ports[2]} on 127.0.0.1 is already in use", "hint: stop the server",
          options=("--port", str(first)))  # fmt: skip


@pytest.mark.parametrize(
    ("package", "message"),
    [("torch", "the reference engine needs torch"), ("uvicorn", "the reference engine needs uvi"),
     ("matplotlib", "the report needs matplotlib")],
)  # fmt: skip
def test_missing_package(fails: Fails, package: str, message: str) -> None:
    code = (
        "import importlib.util as u\nreal = u.find_spec\n"
        f"u.find_spec = lambda name, *more: None if name == {package!r} else real(name, *more)"
    )
    fails(3, message, "hint: pip install '.[torch", code=code)


@pytest.mark.parametrize("value", ["nan", "inf"])
def test_fault_that_is_no_number(fails: Fails, value: str) -> None:
    fails(2, "bias", options=("--fault-after", "4", "--fault-bias", value))


def test_fault_behind_the_end_of_every_output(fails: Fails) -> None:
    fails(2, "no output reaches position 64", "hint: a fault", options=("--fault-after", "64"))
