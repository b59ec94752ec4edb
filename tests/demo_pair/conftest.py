"""The shipped pair: its folders, its prompts by a fixed rule, engines, and real servers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from specpilot_cli.engines.base import GenerateRequest
from specpilot_cli.engines.process import ServerProcess
from specpilot_cli.engines.reference.engine import ReferenceEngine
from specpilot_cli.engines.reference.faults import (
    Fault,
    LogitFault,
    PrecisionFault,
    StaleStateFault,
    TemperatureFault,
)
from specpilot_cli.engines.reference.launch import serve_command
from specpilot_cli.engines.reference.spec import SpecConfig
from specpilot_cli.io.prompts_file import read_prompts
from specpilot_cli.main import main
from specpilot_cli.schema.prompts import Prompt
from tests.ports import free_port

FAULT_AFTER = 48  # of 112 output tokens: late enough that a fault must be looked for
SERVERS: dict[str, tuple[SpecConfig, Fault | None]] = {
    "ar": (SpecConfig(), None),
    "chain": (SpecConfig("chain", 8), None),
    "tree": (SpecConfig("tree", 16, 16), None),
    "w12-tree": (SpecConfig("tree", 16, 16), None),
    "faulty-tree": (SpecConfig("tree", 16, 16), LogitFault(FAULT_AFTER)),
    "low-precision": (SpecConfig("tree", 16, 16), PrecisionFault()),
    "stale-state": (SpecConfig("tree", 16, 16), StaleStateFault()),
    "temperature": (SpecConfig("tree", 16, 16), TemperatureFault()),
}


@dataclass(frozen=True)
class Demo:
    """The pair's folder, and its prompts."""

    root: Path
    _sets: dict[str, list[Prompt]] = field(default_factory=dict)

    @property
    def target(self) -> Path:
        return self.root / "target"

    @property
    def drafter(self) -> Path:
        return self.root / "drafter"

    def prompts(self, split: str, count: int) -> list[Prompt]:
        """The first prompts of every kind, kinds taking turns, `count` in all."""
        if split not in self._sets:
            self._sets[split] = read_prompts(self.root / f"prompts/{split}.jsonl")
        by_kind: dict[str, list[Prompt]] = {}
        for prompt in self._sets[split]:
            by_kind.setdefault(prompt.benchmark, []).append(prompt)
        turns = zip(*by_kind.values(), strict=True)
        return [prompt for turn in turns for prompt in turn][:count]


@pytest.fixture(scope="session")
def demo(repo: Path) -> Demo:
    """The shipped pair."""
    return Demo(repo / "recipes/demo-cpu")


@pytest.fixture(scope="session")
def engine(demo: Demo) -> ReferenceEngine:
    """Both models in float32; each test chooses the decoding mode."""
    return ReferenceEngine(demo.target, demo.drafter)


@pytest.fixture(scope="session")
def requests_for(engine: ReferenceEngine) -> Callable[[Sequence[Prompt]], list[GenerateRequest]]:
    """Prompts as the engine's requests."""

    def build(prompts: Sequence[Prompt]) -> list[GenerateRequest]:
        return [
            GenerateRequest(p.request_id, engine.encode(p.text), p.max_new_tokens) for p in prompts
        ]

    return build


@pytest.fixture(scope="session")
def w12_target(demo: Demo, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The target in 12 bits per weight, converted by the command."""
    out = tmp_path_factory.mktemp("w12") / "target"
    assert main(["convert-w12", str(demo.target), "-o", str(out), "--quiet"]) == 0
    return out


@pytest.fixture(scope="module")  # none stays up, idle, through the rest of a long run
def server(
    demo: Demo, w12_target: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str], str]]:
    """URL of a `specpilot serve` process by its name in `SERVERS`; started at first use."""
    logs = tmp_path_factory.mktemp("servers")
    urls: dict[str, str] = {}
    with ExitStack() as stack:

        def url(name: str) -> str:
            if name not in urls:
                spec, fault = SERVERS[name]
                port = free_port()
                command = serve_command(
                    w12_target if name == "w12-tree" else demo.target,
                    None if spec.mode == "ar" else demo.drafter,
                    spec,
                    port=port,
                    fault=fault,
                )
                process = ServerProcess(
                    command,
                    port=port,
                    name=f"{name} server",
                    log_path=logs / f"{name}.log",
                    ready_timeout_s=120,
                )
                urls[name] = stack.enter_context(process).base_url
            return urls[name]

        yield url
