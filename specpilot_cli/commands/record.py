"""`specpilot record`: greedy outputs and dense lattices of a target and its drafter."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from specpilot_cli.commands import options

if TYPE_CHECKING:
    from specpilot_cli.schema.lattice import LatticeRecording
    from specpilot_cli.schema.prompts import Prompt

PromptsOption = Annotated[
    Path, typer.Option("--prompts", metavar="FILE", help="Prompt set, JSON lines.")
]
LatticeOutput = Annotated[
    Path, typer.Option("--output", "-o", metavar="FILE", help="Lattice file, `.safetensors`.")
]
AnswersOutput = Annotated[
    Path | None,
    typer.Option("--outputs", metavar="FILE", help="Also write the answers, `.jsonl`."),
]
BlockOption = Annotated[int, typer.Option(min=2, help="Draft block, anchor included.")]
LimitOption = Annotated[int | None, typer.Option(min=1, help="Record only the first N prompts.")]
CutOption = Annotated[int | None, typer.Option(min=1, help="Cut every output here.")]
ConcurrencyOption = Annotated[int, typer.Option(min=1, help="Requests decoded at once.")]


def record(
    target: options.TargetFolder,
    drafter: options.DrafterFolder,
    prompts: PromptsOption,
    output: LatticeOutput,
    outputs: AnswersOutput = None,
    block: BlockOption = 16,
    limit: LimitOption = None,
    max_new_tokens: CutOption = None,
    concurrency: ConcurrencyOption = 8,
    threads: options.ThreadsOption = 1,
    dtype: options.DtypeOption = "float32",
    as_json: options.JsonFlag = False,
    force: options.ForceFlag = False,
    quiet: options.QuietFlag = False,
    verbose: options.VerboseFlag = 0,
) -> None:
    """Decode prompts greedily and record a lattice at every output position.

    The recording replays any tree without the model: see `specpilot replay`. About
    `(block - 1) * 16 * 16 * 4` bytes per output token.

    Examples:

        specpilot record --target target/ --drafter drafter/ --prompts dev.jsonl -o dev.safetensors

        specpilot record --target target/ --drafter drafter/ --prompts dev.jsonl --limit 8
        -o dev.safetensors --outputs answers.jsonl
    """
    from specpilot_cli.engines.reference.launch import require_engine
    from specpilot_cli.ui import ConsoleReporter

    options.check_new_file(output, ".safetensors", where="-o", force=force)
    options.check_new_file(outputs, ".jsonl", where="--outputs", force=force)
    options.check_not_input({"-o": output, "--outputs": outputs}, (target, drafter, prompts))
    chosen = _chosen(prompts, limit, max_new_tokens)
    require_engine()
    from specpilot_cli.engines.reference.engine import ReferenceEngine
    from specpilot_cli.engines.reference.record import record_dense
    from specpilot_cli.io.jsonl import write_jsonl
    from specpilot_cli.io.lattice_file import write_lattice

    engine = ReferenceEngine(target, drafter, dtype=dtype, threads=threads)
    with ConsoleReporter(quiet=quiet, verbose=verbose) as reporter:
        recorded = record_dense(engine, chosen, block, concurrency=concurrency, reporter=reporter)
    write_lattice(output, recorded.recording, force=force)
    if outputs is not None:
        write_jsonl(outputs, recorded.outputs, force=force)
    _emit(recorded.recording, output, outputs, [target, drafter, prompts], as_json=as_json)


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
    recording: LatticeRecording,
    output: Path,
    outputs: Path | None,
    inputs: list[Path],
    *,
    as_json: bool,
) -> None:
    from specpilot_cli.report.json_out import build_envelope
    from specpilot_cli.report.tables import print_line

    results = {
        "lattice_file": output,
        "outputs_file": outputs,
        "requests": recording.n_requests,
        "output_tokens": int(recording.output_ids.size),
        "lattices": recording.n_steps,
        "positions": recording.n_positions,
        "candidates": recording.n_candidates,
        "lattice_bytes": output.stat().st_size,
    }

    def text() -> None:
        print_line(
            f"{recording.n_requests} requests, {recording.output_ids.size} output tokens, "
            f"{recording.n_steps} lattices of {recording.n_positions} positions: {output}"
        )
        if outputs is not None:
            print_line(f"answers: {outputs}")

    options.emit(build_envelope("record", results, inputs=inputs), as_json=as_json, text=text)
