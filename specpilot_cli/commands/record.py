"""`specpilot record`: greedy outputs of a target and lattices of its drafter."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from specpilot_cli.commands import options
from specpilot_cli.errors import InputError

if TYPE_CHECKING:
    from specpilot_cli.schema.lattice import LatticeRecording
    from specpilot_cli.schema.outputs import OutputRecord
    from specpilot_cli.schema.prompts import Prompt
    from specpilot_cli.ui import Reporter

PromptsOption = Annotated[Path, typer.Option("--prompts", metavar="FILE", help="Prompts (JSONL).")]
AnswersOutput = Annotated[
    Path | None,
    typer.Option("--outputs", metavar="FILE", help="Also write the answers, `.jsonl`."),
]
BlockOption = Annotated[
    int | None,
    typer.Option(
        min=2, help="Draft block, anchor included. Default: 16, or what the server was given."
    ),
]
LimitOption = Annotated[int | None, typer.Option(min=1, help="Record only the first N prompts.")]
CutOption = Annotated[int | None, typer.Option(min=1, help="Cut every output here.")]
ConcurrencyOption = Annotated[int, typer.Option(min=1, help="Requests in flight.")]
UrlOption = Annotated[
    str | None,
    typer.Option("--url", metavar="URL", help="An SGLang server that records, on this machine."),
]
TargetOption = Annotated[
    Path | None,
    typer.Option("--target", metavar="DIR", help="Target model folder (BF16 or W12)."),
]
TimeoutOption = Annotated[
    float, typer.Option(min=1, metavar="SECONDS", help="With --url: limit of one request, seconds.")
]
_DEFAULT_BLOCK = 16


def record(
    prompts: PromptsOption,
    output: options.LatticeOutput,
    target: TargetOption = None,
    drafter: options.OptionalDrafterFolder = None,
    url: UrlOption = None,
    outputs: AnswersOutput = None,
    block: BlockOption = None,
    limit: LimitOption = None,
    max_new_tokens: CutOption = None,
    concurrency: ConcurrencyOption = 8,
    timeout: TimeoutOption = 600.0,
    threads: options.ThreadsOption = 1,
    dtype: options.DtypeOption = "float32",
    as_json: options.JsonFlag = False,
    force: options.ForceFlag = False,
    quiet: options.QuietFlag = False,
) -> None:
    """Decode prompts greedily and record the drafter's lattices beside the outputs.

    With `--target` and `--drafter` the reference engine decodes, and there is a lattice at every
    output position. With `--url` an SGLang server does, in the mode its plugin was given. The
    recording replays trees without the model: see `specpilot replay`. About
    `(block - 1) * 16 * 16 * 4` bytes per lattice.

    Examples:

        specpilot record --target target/ --drafter drafter/ --prompts dev.jsonl -o dev.safetensors

        specpilot record --url http://127.0.0.1:30000 --prompts dev.jsonl -o dev.safetensors
    """
    from specpilot_cli.ui import ConsoleReporter

    options.check_new_file(output, ".safetensors", where="-o", force=force)
    options.check_new_file(outputs, ".jsonl", where="--outputs", force=force)
    options.check_not_input({"-o": output, "--outputs": outputs}, (target, drafter, prompts))
    chosen = _chosen(prompts, limit, max_new_tokens)
    with ConsoleReporter(quiet=quiet) as reporter:
        if url is not None:
            taken = _from_server(
                url, chosen, target, drafter, block, concurrency, timeout, reporter
            )
        else:
            taken = _from_reference(
                chosen, target, drafter, block, concurrency, threads, dtype, reporter
            )
    _write(taken, output, outputs, force=force)
    inputs = [path for path in (target, drafter, prompts) if path is not None]
    _emit(taken, output, outputs, inputs, as_json=as_json)


@dataclass(frozen=True, slots=True)
class _Taken:
    """A recording, its answers, and what only a server's recording has to say, by JSON key."""

    recording: LatticeRecording
    outputs: list[OutputRecord]
    live: dict[str, Any]


def _from_reference(
    prompts: list[Prompt],
    target: Path | None,
    drafter: Path | None,
    block: int | None,
    concurrency: int,
    threads: int,
    dtype: Literal["float32", "bfloat16"],
    reporter: Reporter,
) -> _Taken:
    from specpilot_cli.engines.reference.launch import require_engine

    for name, given in (("--target", target), ("--drafter", drafter)):
        if given is None:
            raise InputError(
                f"no {name}",
                where=name,
                hint="give --target DIR and --drafter DIR, or --url of a server that records",
            )
    require_engine()
    from specpilot_cli.engines.reference.engine import ReferenceEngine
    from specpilot_cli.engines.reference.record import record_dense

    assert target is not None  # checked above
    engine = ReferenceEngine(target, drafter, dtype=dtype, threads=threads)
    recorded = record_dense(
        engine, prompts, block or _DEFAULT_BLOCK, concurrency=concurrency, reporter=reporter
    )
    return _Taken(recorded.recording, recorded.outputs, {})


def _from_server(
    url: str,
    prompts: list[Prompt],
    target: Path | None,
    drafter: Path | None,
    block: int | None,
    concurrency: int,
    timeout_s: float,
    reporter: Reporter,
) -> _Taken:
    from specpilot_cli.record.live import record_live

    if block is not None:
        raise InputError(
            "the server's draft block cannot be chosen here",
            where="--block",
            hint="start the server with --speculative-num-draft-tokens",
        )
    got = record_live(
        url, prompts, target=target, drafter=drafter, concurrency=concurrency,
        timeout_s=timeout_s, reporter=reporter,
    )  # fmt: skip
    live = {
        "mode": got.recording.metadata.mode,
        "algorithm": got.algorithm,
        "dropped": [{"request_id": loss.request_id, "reason": loss.reason} for loss in got.dropped],
        "stock_outside_ratio": got.stock_outside_ratio,
        "server_steps": got.steps,
        "server_steps_dropped": got.dropped_steps,
        "recorder_s": got.hook_s,
        "steps_s": got.step_s,
        "overhead_ratio": got.hook_s / got.step_s if got.step_s > 0 else None,
    }
    return _Taken(got.recording, got.outputs, live)


def _write(taken: _Taken, output: Path, outputs: Path | None, *, force: bool) -> None:
    """Both files or neither, whatever the disk does."""
    from specpilot_cli.io.jsonl import jsonl_output
    from specpilot_cli.io.lattice_file import write_lattice

    answers = (
        nullcontext() if outputs is None else jsonl_output(outputs, taken.outputs, force=force)
    )
    with answers:
        write_lattice(output, taken.recording, force=force)


def _chosen(prompts: Path, limit: int | None, max_new_tokens: int | None) -> list[Prompt]:
    from specpilot_cli.io.prompts_file import read_prompts

    chosen = read_prompts(prompts)[:limit]
    if max_new_tokens is None:
        return chosen
    return [
        prompt.model_copy(update={"max_new_tokens": min(prompt.max_new_tokens, max_new_tokens)})
        for prompt in chosen
    ]


def _emit(
    taken: _Taken,
    output: Path,
    outputs: Path | None,
    inputs: list[Path],
    *,
    as_json: bool,
) -> None:
    from specpilot_cli.report.json_out import build_envelope
    from specpilot_cli.report.tables import print_line

    recording, live = taken.recording, taken.live
    results = {
        "lattice_file": output,
        "outputs_file": outputs,
        "requests": recording.n_requests,
        "output_tokens": int(recording.output_ids.size),
        "lattices": recording.n_steps,
        "positions": recording.n_positions,
        "candidates": recording.n_candidates,
        "lattice_bytes": output.stat().st_size,
        "server": live or None,
    }

    def text() -> None:
        print_line(
            f"{recording.n_requests} requests, {recording.output_ids.size} output tokens, "
            f"{recording.n_steps} lattices of {recording.n_positions} positions: {output}"
        )
        if live:
            print_line(_live_line(live))
        if outputs is not None:
            print_line(f"answers: {outputs}")

    options.emit(build_envelope("record", results, inputs=inputs), as_json=as_json, text=text)


def _live_line(live: dict[str, Any]) -> str:
    ratio = live["overhead_ratio"]
    cost = "" if ratio is None else f", recorder {100 * ratio:.2f} % of the steps' time"
    return (
        f"{live['algorithm']}, {live['mode']}: {live['server_steps']} server steps{cost}; "
        f"{len(live['dropped'])} requests left out; "
        f"stock outside the candidates at {100 * live['stock_outside_ratio']:.2f} % of positions"
    )
