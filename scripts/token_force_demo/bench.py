"""Systems, prompts and kept answers of `scripts/measure_token_force.py`."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np

from specpilot_cli.engines.base import ForcedScores
from specpilot_cli.engines.http_client import HttpEngine
from specpilot_cli.engines.process import ServerProcess, bind_port
from specpilot_cli.engines.reference.engine import ReferenceEngine
from specpilot_cli.engines.reference.faults import (
    Fault,
    KvSlotFault,
    LogitFault,
    PrecisionFault,
    StaleStateFault,
    TemperatureFault,
)
from specpilot_cli.engines.reference.launch import serve_command
from specpilot_cli.engines.reference.local import LocalScorer
from specpilot_cli.engines.reference.spec import SpecConfig
from specpilot_cli.io.json_file import read_json, write_json
from specpilot_cli.io.jsonl import read_jsonl, write_jsonl
from specpilot_cli.io.prompts_file import read_prompts
from specpilot_cli.main import main as specpilot
from specpilot_cli.report.json_out import plain
from specpilot_cli.schema.outputs import OutputRecord
from specpilot_cli.token_force.collect import Question, collect

PAIR = Path("recipes/demo-cpu")
PROMPTS_PER_KIND = 3  # in one run: 24 of eight kinds, all of them for wrong ids
SHORT, LONG = 112, 1200
AT_ONCE, LONG_AT_ONCE = 8, 24
PROMPTS = 16  # of a run's 24, two of each kind, for all other systems
CONTROLS = 4  # unstruck requests asked live in each wrong-id run
WRONG_ID_RATE = 1e-4

CHAIN = SpecConfig("chain", 8)
Row = dict[str, Any]


@dataclass(frozen=True)
class Arm:
    """One system under audit; `long` asks for 1,200 tokens where others are asked for 112."""

    name: str
    expected: Literal["accept", "reject"]
    spec: SpecConfig
    fault: Fault | None = None
    w12: bool = False
    long: bool = False


def tree(nodes: int) -> SpecConfig:
    """A best-first tree on a block of 16."""
    return SpecConfig("tree", 16, nodes)


ARMS = (
    Arm("tree of 8", "accept", tree(8)),
    Arm("tree of 16", "accept", tree(16)),
    Arm("tree of 32", "accept", tree(32)),
    Arm("W12, chain of 8", "accept", CHAIN, w12=True),
    Arm("W12, tree of 16", "accept", tree(16), w12=True),
    Arm("+2 on every 7th id from token 48", "reject", tree(16), LogitFault(48)),
    Arm("low-precision verify pass", "reject", tree(16), PrecisionFault()),
    Arm("stale recurrent state", "reject", tree(16), StaleStateFault()),
    Arm("temperature at 8 requests", "reject", tree(16), TemperatureFault()),
    Arm("KV slot off by one from token 1,000", "reject", CHAIN, KvSlotFault(), long=True),
)
WRONG_ID = "one wrong id in 10,000"


@dataclass
class CachedScorer:
    """A scorer that remembers: stock's answers and unstruck requests are scored once."""

    inner: LocalScorer
    folder: Path
    known: dict[str, ForcedScores] = field(default_factory=dict)

    def score(self, input_ids: Sequence[int], start: int) -> ForcedScores:
        """Score the tokens `input_ids[start:]`."""
        key = hashlib.sha256(np.array([start, *input_ids], dtype=np.int64).tobytes()).hexdigest()
        if key not in self.known:
            path = self.folder / key[:2] / f"{key}.npy"
            if not path.exists():
                found = self.inner.score(input_ids, start)
                path.parent.mkdir(parents=True, exist_ok=True)
                parts = (found.token_logprobs, found.argmax_ids, found.argmax_logprobs)
                np.save(path, np.stack([part.astype(np.float64) for part in parts]))
            own, ids, best = np.load(path)
            self.known[key] = ForcedScores(own, ids.astype(np.int64), best)
        return self.known[key]


@dataclass
class Bench:
    """Prompts of every run, where answers are kept, the scorer, and the weights in W12."""

    work: Path
    runs: int

    def __post_init__(self) -> None:
        self.engine = ReferenceEngine(PAIR / "target", None)
        self.scorer = CachedScorer(LocalScorer(self.engine), self.work / "scores")
        self.w12 = self.work / "w12-target"
        if not self.w12.exists():
            specpilot(["convert-w12", str(PAIR / "target"), "-o", str(self.w12), "--quiet"])
        by_kind: dict[str, list[Question]] = {}
        for name in ("unseen", "dev"):
            for prompt in read_prompts(PAIR / "prompts" / f"{name}.jsonl"):
                ids = self.engine.encode(prompt.text)
                question = Question(prompt.request_id, prompt.benchmark, SHORT, prompt_ids=ids)
                by_kind.setdefault(prompt.benchmark, []).append(question)
        turns = [question for turn in zip(*by_kind.values(), strict=True) for question in turn]
        size = PROMPTS_PER_KIND * len(by_kind)
        self.questions = [turns[run * size : (run + 1) * size] for run in range(self.runs)]

    @contextmanager
    def server(
        self, spec: SpecConfig, fault: Fault | None = None, *, w12: bool = False
    ) -> Iterator[HttpEngine]:
        """A live server and its client."""
        with bind_port(0) as bound:
            port = int(bound.getsockname()[1])
        command = serve_command(
            self.w12 if w12 else PAIR / "target",
            None if spec.mode == "ar" else PAIR / "drafter",
            spec,
            port=port,
            fault=fault,
        )
        log = self.work / f"server-{port}.log"
        with (
            ServerProcess(command, port=port, name="server", log_path=log) as process,
            HttpEngine(process.base_url, 3600.0, stall_timeout_s=600.0) as client,
        ):
            yield client

    def _place(self, kind: str, name: str, run: int) -> Path:
        path = self.work / kind / name.replace(" ", "-").replace(",", "") / f"{run}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def kept_row(self, name: str, run: int, audit: Callable[[], Row]) -> Row:
        """What one audit left behind: the row kept, or else audited now."""
        path = self._place("rows", name, run).with_suffix(".json")
        if not path.exists():
            write_json(path, plain(audit()))
        row: Row = read_json(path)
        return row

    def kept(
        self, name: str, run: int, ask: Callable[[], list[OutputRecord]]
    ) -> list[OutputRecord]:
        """The answers of one system in one run: those kept, or else asked now."""
        path = self._place("answers", name, run)
        if not path.exists():
            write_jsonl(path, ask())
        return read_jsonl(path, OutputRecord)


def asked(
    client: HttpEngine, questions: Sequence[Question], *, n_tokens: int, at_once: int
) -> list[OutputRecord]:
    """Live answers; long ones go on where the model would stop."""
    longer = [
        Question(q.request_id, q.benchmark, n_tokens, q.prompt_ids, ignore_eos=n_tokens > SHORT)
        for q in questions
    ]
    return collect(client, longer, concurrency=at_once, label="server")


def resumed(
    client: HttpEngine, recorded: Sequence[OutputRecord], cuts: Sequence[int]
) -> list[OutputRecord]:
    """Long answers of a system that errs from somewhere on: recorded tokens before each cut.

    The recording is of the same engine without the fault, which is the same engine up to there.
    """
    questions = [
        Question(
            record.request_id,
            record.benchmark,
            LONG - cut,
            (*record.prompt_ids, *record.output_ids[:cut]),
            ignore_eos=True,
        )
        for record, cut in zip(recorded, cuts, strict=True)
    ]
    tails = collect(client, questions, concurrency=LONG_AT_ONCE, label="server")
    return [
        record.model_copy(update={"output_ids": (*record.output_ids[:cut], *tail.output_ids)})
        for record, cut, tail in zip(recorded, cuts, tails, strict=True)
    ]


class LazyServer:
    """A server that starts when it is asked first: kept answers need none."""

    def __init__(
        self, bench: Bench, spec: SpecConfig, fault: Fault | None = None, *, w12: bool = False
    ) -> None:
        self._open = lambda: bench.server(spec, fault, w12=w12)
        self._stack = ExitStack()
        self._client: HttpEngine | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def client(self) -> HttpEngine:
        """The client of the server, running from now on."""
        if self._client is None:
            self._client = self._stack.enter_context(self._open())
        return self._client
