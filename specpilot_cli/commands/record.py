"""`specpilot record`: greedy outputs and dense lattices of a target and its drafter."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from specpilot_cli.commands import options


def record(
    target: Annotated[
        Path, typer.Option("--target", metavar="DIR", help="Target model folder (BF16 or W12).")
    ],
    drafter: Annotated[
        Path, typer.Option("--drafter", metavar="DIR", help="DFlash2 drafter folder.")
    ],
    prompts: Annotated[
        Path, typer.Option("--prompts", metavar="FILE", help="Prompt set, JSON lines.")
    ],
    output: Annotated[
        Path,
        typer.Option("--output", "-o", metavar="FILE", help="Lattice file, `.safetensors`."),
    ],
    outputs: Annotated[
        Path | None,
        typer.Option("--outputs", metavar="FILE", help="Also write the answers, `.jsonl`."),
    ] = None,
    block: Annotated[
        int, typer.Option("--block", min=2, help="Draft block, anchor included.")
    ] = 16,
    limit: Annotated[
        int | None, typer.Option("--limit", min=1, help="Record only the first N prompts.")
    ] = None,
    max_new_tokens: Annotated[
        int | None, typer.Option("--max-new-tokens", min=1, help="Cut every output here.")
    ] = None,
    concurrency: Annotated[
        int, typer.Option("--concurrency", min=1, help="Requests decoded at once.")
    ] = 8,
    threads: Annotated[int, typer.Option("--threads", min=1, help="CPU threads.")] = 1,
    dtype: Annotated[
        Literal["float32", "bfloat16"], typer.Option("--dtype", help="Arithmetic of both models.")
    ] = "float32",
    as_json: options.JsonFlag = False,
    force: options.ForceFlag = False,
    quiet: options.QuietFlag = False,
    verbose: options.VerboseFlag = 0,
) -> None:
    """Decode prompts greedily and record a lattice at every output position.

    The recording replays any tree without the model: see `specpilot replay`. About
    `(block - 1) · 16 · 16 · 4` bytes per output token.

    Examples:

        specpilot record --target target/ --drafter drafter/ --prompts dev.jsonl -o dev.safetensors

        specpilot record --target target/ --drafter drafter/ --prompts dev.jsonl --limit 8
        -o dev.safetensors --outputs dev-outputs.jsonl
    """
    from specpilot_cli.engines.reference.launch import require_engine
    from specpilot_cli.io.prompts_file import read_prompts
    from specpilot_cli.ui import ConsoleReporter

    _check_targets(output, outputs, force)
    chosen = read_prompts(prompts)[:limit]
    if max_new_tokens is not None:
        chosen = [
            prompt.model_copy(update={"max_new_tokens": min(prompt.max_new_tokens, max_new_tokens)})
            for prompt in chosen
        ]
    require_engine()
    from specpilot_cli.engines.reference.engine import ReferenceEngine
    from specpilot_cli.engines.reference.record import record_dense
    from specpilot_cli.io.jsonl import write_jsonl
    from specpilot_cli.io.lattice_file import write_lattice
    from specpilot_cli.report.json_out import build_envelope
    from specpilot_cli.report.tables import print_line

    engine = ReferenceEngine(target, drafter, dtype=dtype, threads=threads)
    with ConsoleReporter(quiet=quiet, verbose=verbose) as reporter:
        recorded = record_dense(engine, chosen, block, concurrency=concurrency, reporter=reporter)
    write_lattice(output, recorded.recording, force=force)
    if outputs is not None:
        write_jsonl(outputs, recorded.outputs, force=force)
    recording = recorded.recording
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

    envelope = build_envelope("record", results, inputs=[target, drafter, prompts])
    options.emit(envelope, as_json=as_json, text=text)


def _check_targets(output: Path, outputs: Path | None, force: bool) -> None:
    """Refuse bad output names before anything is computed."""
    from specpilot_cli.errors import InputError

    for path, suffix, option in ((output, ".safetensors", "-o"), (outputs, ".jsonl", "--outputs")):
        if path is None:
            continue
        if path.suffix != suffix:
            raise InputError(f"`{path}` must end in `{suffix}`", where=option)
        if path.exists() and not force:
            raise InputError(
                f"`{path}` already exists", where=option, hint="use --force to overwrite it"
            )
