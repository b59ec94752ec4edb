#!/usr/bin/env python3
"""Does token forcing accept lossless systems and reject faulty ones, ten times out of ten?

    OMP_NUM_THREADS=1 nice python scripts/measure_token_force.py --work WORK
    python scripts/measure_token_force.py --table     # only print the table of the last run

Every run audits every system below on prompts that no other run uses. Systems and stock are servers
of the reference engine on the demo pair; the scorer is that engine in this process. Answers are
kept in WORK, so an interrupted measurement goes on where it stopped. Writes
docs/measurements/token_force_demo.json and its table in docs/token-force.md. About an hour on two
cores, and half of it on long outputs.

Two faults need long outputs, and their systems are answered for in pieces. A KV slot that is off
from token 1,000 on changes nothing before: the answer is the recording of the same engine without
the fault up to shortly before that, and live from there. One wrong id in 10,000 takes 288,000
tokens; which positions it strikes follows from prompt and seed alone, so a request that it misses
is the recording, and the others (a tenth) are live from shortly before the first strike. Some that
it misses are live from half-way, to see that they are the recorded ones.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from doc_marks import between_marks

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
    WrongIdFault,
)
from specpilot_cli.engines.reference.launch import serve_command
from specpilot_cli.engines.reference.local import LocalScorer
from specpilot_cli.engines.reference.spec import SpecConfig
from specpilot_cli.io.atomic import atomic_write_text
from specpilot_cli.io.jsonl import read_jsonl, write_jsonl
from specpilot_cli.io.prompts_file import read_prompts
from specpilot_cli.main import main as specpilot
from specpilot_cli.report.json_out import build_envelope, render_json
from specpilot_cli.schema.outputs import OutputRecord
from specpilot_cli.token_force import TokenForceResult, TokenForceSettings, run_token_force
from specpilot_cli.token_force.collect import Question, collect

PAIR = Path("recipes/demo-cpu")
OUTPUT = Path("docs/measurements/token_force_demo.json")
PAGE = Path("docs/token-force.md")
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

    def kept(
        self, name: str, run: int, ask: Callable[[], list[OutputRecord]]
    ) -> list[OutputRecord]:
        """The answers of one system in one run: those kept, or else asked now."""
        path = self.work / "answers" / name.replace(" ", "-").replace(",", "") / f"{run}.jsonl"
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
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


def audited(
    bench: Bench,
    probe: HttpEngine,
    answers: Sequence[OutputRecord],
    stock: Sequence[OutputRecord],
    ar: Sequence[OutputRecord] | None,
    settings: TokenForceSettings,
) -> tuple[TokenForceResult, float]:
    """The verdict, and the seconds that scoring and audit took."""
    started = time.monotonic()
    result = run_token_force(
        answers, stock, ar, bench.scorer, settings=settings, probe=probe, text=_Text(bench.engine)
    )
    return result, time.monotonic() - started


@dataclass(frozen=True)
class _Text:
    engine: ReferenceEngine

    def decode(self, ids: Sequence[int]) -> str:
        """Readable text of some token ids."""
        return str(self.engine.tokenizer.decode(list(ids), skip_special_tokens=False))


def row_of(name: str, expected: str, run: int, result: TokenForceResult, audit_s: float) -> Row:
    """What one audit leaves behind: the verdict, both rules, and the three worst events."""
    found = result.to_json()
    found["worst_events"] = found["worst_events"][:3]
    return {
        "name": name,
        "run": run,
        "expected": expected,
        "verdict": result.verdict,
        "audit_s": round(audit_s, 1),
        **found,
    }


def short_rows(bench: Bench, probe: HttpEngine, arms: Sequence[Arm]) -> Iterator[Row]:
    """Every arm in every run, one server per arm."""
    stock, ar = {}, {}
    with bench.server(SpecConfig()) as plain:
        for run, questions in enumerate(bench.questions):
            ar[run] = bench.kept(
                "ar", run, lambda q=questions: asked(plain, q, n_tokens=SHORT, at_once=AT_ONCE)
            )
            stock[run] = bench.kept(
                "stock", run, lambda q=questions: asked(probe, q, n_tokens=SHORT, at_once=AT_ONCE)
            )
    for arm in arms:
        with ExitStack() as stack:
            client: list[HttpEngine] = []

            def live(arm: Arm = arm, stack: ExitStack = stack, c: Any = client) -> HttpEngine:
                if not c:
                    c.append(stack.enter_context(bench.server(arm.spec, arm.fault, w12=arm.w12)))
                return c[0]  # started at the first answer that is not kept

            for run, questions in enumerate(bench.questions):
                base = stock[run]
                if arm.long:
                    base = long_stock(bench, probe, run)[:PROMPTS]

                def ask(
                    arm: Arm = arm, base: Any = base, questions: Any = questions, live: Any = live
                ) -> list[OutputRecord]:
                    if isinstance(arm.fault, KvSlotFault):
                        after = arm.fault.after - 32
                        return resumed(live(), base, [after - len(r.prompt_ids) for r in base])
                    return asked(live(), questions[:PROMPTS], n_tokens=SHORT, at_once=AT_ONCE)

                settings = TokenForceSettings(
                    delta_nats=0.125 if arm.long else None,
                    audit_limit=24,
                    probe_offsets=(0, 4),
                    seed=run,
                )
                answers = bench.kept(arm.name, run, ask)
                plain_answers = None if arm.long else ar[run]
                result, audit_s = audited(bench, probe, answers, base, plain_answers, settings)
                yield row_of(arm.name, arm.expected, run, result, audit_s)


def long_stock(bench: Bench, probe: HttpEngine, run: int) -> list[OutputRecord]:
    """Stock's long answers to one run's prompts."""
    return bench.kept(
        "stock long",
        run,
        lambda: asked(probe, bench.questions[run], n_tokens=LONG, at_once=LONG_AT_ONCE),
    )


def wrong_id_rows(bench: Bench, probe: HttpEngine) -> Iterator[Row]:
    """One audit per seed of the fault, each over the long answers to every prompt."""
    stock = [record for run in range(bench.runs) for record in long_stock(bench, probe, run)]
    for run in range(bench.runs):
        fault = WrongIdFault(WRONG_ID_RATE, seed=run)
        first = {r.request_id: next(iter(fault.armed(r.prompt_ids, LONG)), None) for r in stock}
        struck = [record for record in stock if first[record.request_id] is not None]
        missed = [r for r in stock if first[r.request_id] is None][run::50][:CONTROLS]
        cuts = [max(0, (first[r.request_id] or 0) - 32) for r in struck] + [LONG // 2] * CONTROLS
        asking = [*struck, *missed]

        def ask(fault: Fault = fault, asking: Any = asking, cuts: Any = cuts) -> list[OutputRecord]:
            with bench.server(CHAIN, fault) as client:
                return resumed(client, asking, cuts)

        live = {record.request_id: record for record in bench.kept(WRONG_ID, run, ask)}
        same = sum(live[record.request_id].output_ids == record.output_ids for record in missed)
        settings = TokenForceSettings(
            delta_nats=0.125, audit_limit=40, probe_offsets=(0, 4), seed=run
        )
        answers = [live.get(record.request_id, record) for record in stock]
        result, audit_s = audited(bench, probe, answers, stock, None, settings)
        row = row_of(WRONG_ID, "reject", run, result, audit_s)
        yield {
            **row,
            "live_requests": len(struck),
            "controls": len(missed),
            "controls_equal_to_the_recording": same,
        }


def table(rows: Sequence[Row]) -> str:
    """One line per system: verdicts, rates and events over its runs."""
    lines = [
        "| system | expected | as expected | mismatches % | stock % | unexplained events "
        "(requests) | tokens a run |",
        "|---|---|---|---|---|---|---|",
    ]
    for name in dict.fromkeys(row["name"] for row in rows):
        own = [row for row in rows if row["name"] == name]
        right = sum(row["verdict"] == row["expected"] for row in own)

        def span(key: Callable[[Row], float], digits: int, own: list[Row] = own) -> str:
            values = sorted(key(row) for row in own)
            ends = [f"{value:.{digits}f}" for value in (values[0], values[-1])]
            return ends[0] if ends[0] == ends[1] else " to ".join(ends)

        lines.append(
            f"| {name} | {own[0]['expected']} | {right} of {len(own)} "
            f"| {span(lambda r: r['system']['mismatch_rate_pct'], 2)} "
            f"| {span(lambda r: r['stock']['mismatch_rate_pct'], 2)} "
            f"| {span(lambda r: r['event_rule']['system']['n_requests_with_unexplained'], 0)} "
            f"| {span(lambda r: r['system']['n_tokens'], 0)} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Measure what is not kept yet, and write everything that was asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-o", "--output", type=Path, default=OUTPUT)
    parser.add_argument("--work", type=Path, default=Path("token-force-work"))
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--only", default="", help="part of a system's name")
    parser.add_argument("--table", action="store_true", help="print the table of --output")
    options = parser.parse_args()
    if options.table:
        print(table(json.loads(options.output.read_text(encoding="utf-8"))["results"]["audits"]))
        return
    options.work.mkdir(parents=True, exist_ok=True)
    bench = Bench(options.work, options.runs)
    rows: list[Row] = []
    with bench.server(CHAIN) as probe:
        arms = [arm for arm in ARMS if options.only in arm.name]
        wrong = wrong_id_rows(bench, probe) if options.only in WRONG_ID else iter(())
        for part in (short_rows(bench, probe, arms), wrong):
            for row in part:
                rows.append(row)
                print(f"{row['name']}, run {row['run']}: {row['verdict']}", flush=True)
    results = {"runs": options.runs, "as_expected": _all_right(rows), "audits": rows}
    document = render_json(build_envelope("measure_token_force", results))
    atomic_write_text(options.output, document, force=True)
    if options.output == OUTPUT:
        page = PAGE.read_text(encoding="utf-8")
        marked = between_marks(page, "token-force", table(rows), word="measured")
        atomic_write_text(PAGE, marked, force=True)
    print(table(rows))
    raise SystemExit(0 if _all_right(rows) else 1)


def _all_right(rows: Sequence[Row]) -> bool:
    return all(row["verdict"] == row["expected"] for row in rows)


if __name__ == "__main__":
    main()
