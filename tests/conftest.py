"""What every test runs under: a home of its own, no network, GPU tests skipped aloud."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from specpilot_cli.doctor.cuda_driver import cuda_devices
from specpilot_cli.schema.prompts import Prompt

_NO_DEVICE = "no CUDA device"
_NOT_ASKED = "long: runs with --extended"
_STOCK_SOURCE = "SPECPILOT_SGLANG_SOURCE"  # GPU tests compare with the stock kernels there
_LOOPBACK = ("127.", "::1", "localhost", "0.0.0.0")

# Read once, when huggingface_hub is imported, which can be while tests are collected. Asking a Hub
# that cannot be reached takes it half a minute.
os.environ["HF_HUB_OFFLINE"] = "1"

# Workers of pytest-xdist share the cores, and compile at the same time, which numba's cache on disk
# is not made for. Both are read once, when torch and numba are imported.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ["NUMBA_CACHE_DIR"] = str(
        Path(__file__).parents[1] / ".pytest_cache/numba" / os.environ["PYTEST_XDIST_WORKER"]
    )

# A shell without job control starts background jobs with SIGINT ignored, and every child inherits
# that: the tests of interruption would then test the shell.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--extended`: the long tests, too, for which CI has no time."""
    parser.addoption("--extended", action="store_true", help="run the tests marked `extended`, too")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip `gpu` tests on a machine without a device, and `extended` ones unless asked for.

    Workers of pytest-xdist begin with the files that take longest, and so end together.
    """
    if hasattr(config, "workerinput"):
        slow = {item.path for item in items if item.get_closest_marker("slow")}
        items.sort(key=lambda item: item.path not in slow)
    if not config.getoption("--extended"):
        for item in items:
            if item.get_closest_marker("extended"):
                item.add_marker(pytest.mark.skip(reason=_NOT_ASKED))
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked and not cuda_devices():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason=_NO_DEVICE))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With pytest-xdist, one worker runs all tests of a file, which share what they start.

    The real engine's files go to one worker, too: more of its servers at once would need more
    memory than a small machine has.
    """
    from xdist.scheduler import LoadFileScheduling

    class ByFile(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file: str = super()._split_scope(nodeid)
            return "tests/sglang" if file.startswith("tests/sglang/") else file

    config.option.loadscopereorder = False  # the order of collection, not of numbers of tests
    return ByFile(config, log)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Count what was skipped, so that a green run cannot hide it."""
    reports = [str(r.longrepr) for r in terminalreporter.getreports("skipped")]
    for kind, reason in (("GPU", _NO_DEVICE), ("extended", _NOT_ASKED)):
        count = sum(reason in text for text in reports)
        if count:
            terminalreporter.write_line(f"{count} {kind} tests did not run: {reason}")


@pytest.fixture(autouse=True, scope="session")
def _own_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Point HOME and the XDG folders at a temporary folder, for child processes too."""
    home = tmp_path_factory.mktemp("home")
    patch = pytest.MonkeyPatch()
    patch.setenv("HOME", str(home))
    for variable, name in (
        ("XDG_CONFIG_HOME", ".config"),
        ("XDG_CACHE_HOME", ".cache"),
        ("XDG_DATA_HOME", ".local/share"),
    ):
        patch.setenv(variable, str(home / name))
    for variable in [name for name in os.environ if name.startswith("SPECPILOT_")]:
        if variable != _STOCK_SOURCE:
            patch.delenv(variable)
    patch.setenv("NO_COLOR", "1")
    yield
    patch.undo()


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refuse every connection that leaves this machine."""
    connect = socket.socket.connect

    def guarded(self: socket.socket, address: Any) -> None:
        inet = self.family in (socket.AF_INET, socket.AF_INET6)
        if inet and not str(address[0]).startswith(_LOOPBACK):
            raise OSError(f"tests may not reach {address[0]}")
        connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", guarded)


@pytest.fixture(scope="session")
def repo() -> Path:
    """The repository's root folder."""
    return Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def specpilot_json(
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[..., tuple[int, dict[str, Any]]]:
    """Runs `specpilot ... --json` as a process of its own: its exit code and its one document."""

    folder = tmp_path_factory.mktemp("cwd")

    def run(*words: object) -> tuple[int, dict[str, Any]]:
        done = subprocess.run(
            [sys.executable, "-m", "specpilot_cli", *(str(word) for word in words), "--json"],
            capture_output=True,
            text=True,
            cwd=folder,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            timeout=240,
            check=False,
        )
        assert done.stdout, done.stderr
        return done.returncode, json.loads(done.stdout)

    return run


@pytest.fixture(scope="session")
def prompt_file(
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[Sequence[Prompt]], Path]:
    """Writes prompts to a JSONL file."""

    def write(prompts: Sequence[Prompt]) -> Path:
        path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
        path.write_text("".join(f"{prompt.model_dump_json()}\n" for prompt in prompts))
        return path

    return write


@pytest.fixture
def make_recipe(repo: Path, tmp_path: Path) -> Callable[..., Path]:
    """`make_recipe(new_tokens=, timed=, nodes=, budgets=)`: a small recipe on the demo pair.

    A folder of its own with copies of the models, so that a process on it can be told by its
    command line, and so that a test may damage them. Four kinds of prompts, one dev prompt each.
    """
    demo = repo / "recipes/demo-cpu"

    def prompts(split: str, count: int, new_tokens: int) -> str:
        lines = (demo / "prompts" / f"{split}.jsonl").read_text(encoding="utf-8").splitlines()
        rows = [json.loads(line) for line in lines]
        kinds = ("code", "prose", "records", "stories")
        chosen = [row for k in kinds for row in [r for r in rows if r["benchmark"] == k][:count]]
        return "".join(json.dumps({**r, "max_new_tokens": new_tokens}) + "\n" for r in chosen)

    def make(
        *, new_tokens: int = 64, timed: int = 2, nodes: str = "auto", budgets: str = "[8, 16]"
    ) -> Path:
        folder = tmp_path / "recipe"
        folder.mkdir()
        for model in ("target", "drafter"):
            shutil.copytree(demo / model, folder / model)
        (folder / "dev.jsonl").write_text(prompts("dev", 1, new_tokens), encoding="utf-8")
        (folder / "unseen.jsonl").write_text(
            prompts("unseen", timed + 1, new_tokens), encoding="utf-8"
        )
        text = _SMALL_RECIPE.format(
            timed=timed, nodes=nodes, budgets=budgets, split=new_tokens // 2
        )
        (folder / "recipe.yaml").write_text(text, encoding="utf-8")
        return folder

    return make


_SMALL_RECIPE = """\
schema_version: 1
name: small
title: Demo pair, few prompts
engine: reference
models:
  target: target
  drafter: drafter
prompts:
  dev: dev.jsonl
  unseen: unseen.jsonl
regime:
  requests: 1
stock:
  block: 8
mechanisms:
  - mechanism: w12
  - mechanism: best-first-tree
    block: 16
    nodes: {nodes}
    budgets: {budgets}
recording:
  prompts_per_benchmark: 1
  timed_steps: 4
  timed_blocks: 2
gates:
  paired_bench:
    prompts_per_benchmark: {timed}
    aa_prompts_per_benchmark: 2
    warmup: 1
  token_force:
    split_position: {split}
    audit_limit: 20
    probe_offsets: [0]
projection: h200-qwen3.8-27b-dflash2-bf16
"""
