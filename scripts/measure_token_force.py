#!/usr/bin/env python3
"""Does token forcing accept lossless systems and reject faulty ones, ten times out of ten?

    OMP_NUM_THREADS=1 nice python scripts/measure_token_force.py --work WORK
    python scripts/measure_token_force.py --table     # only print the table of the last run

Every run audits every system on prompts that no other run uses; wrong ids alone, which need many
tokens, have another seed per run and the same prompts. Systems and stock are servers
of the reference engine on the demo pair; the scorer is that engine in this process. Answers and
audits are kept in WORK, so an interrupted measurement goes on where it stopped. Writes
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
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from doc_marks import between_marks
from token_force_demo.bench import (
    ARMS,
    AT_ONCE,
    CHAIN,
    CONTROLS,
    LONG,
    LONG_AT_ONCE,
    PROMPTS,
    SHORT,
    WRONG_ID,
    WRONG_ID_RATE,
    Arm,
    Bench,
    LazyServer,
    Row,
    asked,
    resumed,
)

from specpilot_cli.engines.http_client import HttpEngine
from specpilot_cli.engines.reference.engine import ReferenceEngine
from specpilot_cli.engines.reference.faults import KvSlotFault, WrongIdFault
from specpilot_cli.engines.reference.spec import SpecConfig
from specpilot_cli.io.atomic import atomic_write_text
from specpilot_cli.report.json_out import build_envelope, render_json
from specpilot_cli.schema.outputs import OutputRecord
from specpilot_cli.token_force import TokenForceResult, TokenForceSettings, run_token_force
from specpilot_cli.token_force.collect import Question

OUTPUT = Path("docs/measurements/token_force_demo.json")
PAGE = Path("docs/token-force.md")


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
    stock, ar = [], []
    with LazyServer(bench, SpecConfig()) as plain:
        for run, questions in enumerate(bench.questions):

            def ask_plain(questions: Sequence[Question] = questions) -> list[OutputRecord]:
                return asked(plain.client, questions, n_tokens=SHORT, at_once=AT_ONCE)

            def ask_stock(questions: Sequence[Question] = questions) -> list[OutputRecord]:
                return asked(probe, questions, n_tokens=SHORT, at_once=AT_ONCE)

            ar.append(bench.kept("ar", run, ask_plain))
            stock.append(bench.kept("stock", run, ask_stock))
    for arm in arms:
        with LazyServer(bench, arm.spec, arm.fault, w12=arm.w12) as server:
            for run in range(bench.runs):
                base = long_stock(bench, probe, run)[:PROMPTS] if arm.long else stock[run]
                plain_answers = None if arm.long else ar[run]
                audit = partial(_arm_row, bench, probe, arm, server, run, base, plain_answers)
                yield bench.kept_row(arm.name, run, audit)


def _arm_row(
    bench: Bench,
    probe: HttpEngine,
    arm: Arm,
    server: LazyServer,
    run: int,
    base: Sequence[OutputRecord],
    ar: Sequence[OutputRecord] | None,
) -> Row:
    """The audit of one system in one run."""
    ask = partial(_arm_answers, arm, server, bench.questions[run], base)
    answers = bench.kept(arm.name, run, ask)
    settings = TokenForceSettings(
        delta_nats=0.125 if arm.long else None, audit_limit=24, probe_offsets=(0, 4), seed=run
    )
    result, audit_s = audited(bench, probe, answers, base, ar, settings)
    return row_of(arm.name, arm.expected, run, result, audit_s)


def _arm_answers(
    arm: Arm, server: LazyServer, questions: Sequence[Question], base: Sequence[OutputRecord]
) -> list[OutputRecord]:
    if isinstance(arm.fault, KvSlotFault):
        cuts = [arm.fault.after - 32 - len(record.prompt_ids) for record in base]
        return resumed(server.client, base, cuts)
    return asked(server.client, questions[:PROMPTS], n_tokens=SHORT, at_once=AT_ONCE)


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
        yield bench.kept_row(WRONG_ID, run, partial(_wrong_id_row, bench, probe, run, stock))


def _wrong_id_row(bench: Bench, probe: HttpEngine, run: int, stock: Sequence[OutputRecord]) -> Row:
    fault = WrongIdFault(WRONG_ID_RATE, seed=run)
    first = {r.request_id: next(iter(fault.armed(r.prompt_ids, LONG)), None) for r in stock}
    struck = [record for record in stock if first[record.request_id] is not None]
    missed = [r for r in stock if first[r.request_id] is None][run::50][:CONTROLS]
    cuts = [max(0, (first[r.request_id] or 0) - 32) for r in struck] + [LONG // 2] * len(missed)

    def ask() -> list[OutputRecord]:
        with bench.server(CHAIN, fault) as client:
            return resumed(client, [*struck, *missed], cuts)

    live = {record.request_id: record for record in bench.kept(WRONG_ID, run, ask)}
    same = sum(live[record.request_id].output_ids == record.output_ids for record in missed)
    settings = TokenForceSettings(delta_nats=0.125, audit_limit=40, probe_offsets=(0, 4), seed=run)
    answers = [live.get(record.request_id, record) for record in stock]
    result, audit_s = audited(bench, probe, answers, stock, None, settings)
    return {
        **row_of(WRONG_ID, "reject", run, result, audit_s),
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


def kept(value: Any) -> Any:
    """What is worth keeping of an audit: no texts of events, six digits of a number."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, list):
        return [kept(item) for item in value]
    if isinstance(value, dict):
        return {key: kept(item) for key, item in value.items() if key != "worst_events"}
    return value


def write(path: Path, runs: int, rows: Sequence[Row]) -> None:
    """Write the document, one audit a line."""
    results = {"runs": runs, "as_expected": _all_right(rows), "audits": []}
    text = render_json(build_envelope("measure_token_force", results))
    lines = ",\n".join(json.dumps(kept(row), ensure_ascii=False) for row in rows)
    atomic_write_text(path, text.replace('"audits": []', f'"audits": [\n{lines}\n]'), force=True)


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
    write(options.output, options.runs, rows)
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
