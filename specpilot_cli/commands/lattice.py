"""`specpilot lattice`: convert, pack and inspect lattice recordings."""

from __future__ import annotations

import re
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specpilot_cli.commands import options

if TYPE_CHECKING:
    from specpilot_cli.replay.convert import Provenance
    from specpilot_cli.schema.lattice import LatticeRecording
    from specpilot_cli.schema.outputs import OutputRecord

app = typer.Typer(
    no_args_is_help=True,
    help="""Convert, pack and inspect lattice recordings.

    `specpilot record` makes them; `replay`, `diagnose`, `simulate` and `ceiling` read them.

    Examples:

        specpilot lattice convert raw.safetensors --outputs answers.jsonl --drafter-kind dspark \\
          --target Qwen3.8-27B --drafter Qwen3.8-27B-DSpark --engine 'sglang 0.5.23' \\
          -o lattices.safetensors

        specpilot lattice pack lattices.safetensors -o packed.safetensors

        specpilot lattice inspect packed.safetensors
    """,
)

Model = Annotated[str, typer.Option(metavar="DIR|SHA256", help="Its folder, or the folder's hash.")]


class KindName(StrEnum):
    """What drafted the raw scores."""

    DFLASH2 = "dflash2"
    DSPARK = "dspark"
    DFLASH = "dflash"
    EAGLE = "eagle"


class RecordedMode(StrEnum):
    """Where the raw file has steps."""

    DENSE = "dense"
    ANCHORED = "anchored"


@app.command()
def convert(
    raw: Annotated[Path, typer.Argument(metavar="RAW", help="Raw tensors, `.safetensors`.")],
    outputs: Annotated[
        Path, typer.Option("--outputs", metavar="FILE", help="The answers, `.jsonl`.")
    ],
    drafter_kind: Annotated[KindName, typer.Option(help="What drafted.")],
    target: Model,
    drafter: Model,
    engine: Annotated[str, typer.Option(help="What recorded, with its version.")],
    output: options.LatticeOutput,
    mode: Annotated[
        RecordedMode, typer.Option(help="A step at every output position, or at some.")
    ] = RecordedMode.DENSE,
    block: Annotated[int | None, typer.Option(min=1, help="Draft block. Default: by kind.")] = None,
    as_json: options.JsonFlag = False,
    force: options.ForceFlag = False,
) -> None:
    """Make a lattice file of raw scores that an engine's hook wrote.

    `docs/replay.md` lists the tensors that each kind needs. `dspark` scores follow from the
    backbone's logits and the drafter's Markov head (paper Eq. 1); `eagle` gives a tree recording.

    Examples:

        specpilot lattice convert raw.safetensors --outputs answers.jsonl --drafter-kind dflash2 \\
          --target Qwen3.8-27B --drafter Qwen3.8-27B-DFlash2 --engine 'sglang 0.5.23' \\
          -o lattices.safetensors

        specpilot lattice convert raw.safetensors --outputs answers.jsonl --drafter-kind eagle \\
          --target gemma-4-12B --drafter gemma-4-12B-EAGLE3 --engine 'sglang 0.5.23' \\
          -o trees.safetensors
    """
    from specpilot_cli.io.jsonl import read_jsonl
    from specpilot_cli.io.raw_tensors import read_tensors
    from specpilot_cli.replay.convert import Provenance
    from specpilot_cli.schema.outputs import OutputRecord

    options.check_new_file(output, ".safetensors", where="-o", force=force)
    options.check_not_input({"-o": output}, (raw, outputs))
    tensors, answers = read_tensors(raw), read_jsonl(outputs, OutputRecord)
    provenance = Provenance(
        kind=drafter_kind.value, mode=mode.value, engine=_engine(engine), block=block,
        raw_file=str(raw), outputs_file=str(outputs),
        target_sha256=_hash_of(target, "--target"), drafter_sha256=_hash_of(drafter, "--drafter"),
    )  # fmt: skip
    facts = _convert(tensors, answers, provenance, drafter, output, force=force)
    _emit_written("lattice convert", facts | {"requests": len(answers)}, raw, output, as_json)


@app.command()
def pack(
    lattice: options.LatticePath,
    output: options.LatticeOutput,
    nodes: Annotated[
        int, typer.Option(min=1, max=4096, help="Budget up to which trees stay exact.")
    ] = 63,
    top_k: Annotated[
        int, typer.Option(min=1, max=64, help="Paths per level for which `eagle-2` stays exact.")
    ] = 4,
    as_json: options.JsonFlag = False,
    force: options.ForceFlag = False,
) -> None:
    """Keep only the scores that trees read, in float16: about a sixth of the size.

    `specpilot replay` reads the result like any recording, and warns where a setting would need
    scores that were dropped.

    Examples:

        specpilot lattice pack lattices.safetensors -o packed.safetensors

        specpilot lattice pack lattices.safetensors -o packed.safetensors --nodes 128
    """
    from specpilot_cli.io.lattice_file import read_lattice
    from specpilot_cli.replay.pack import pack as write_packed
    from specpilot_cli.schema.lattice import Packing

    options.check_new_file(output, ".safetensors", where="-o", force=force)
    options.check_not_input({"-o": output}, (lattice,))
    recording = read_lattice(lattice)
    write_packed(output, recording, Packing(exact_nodes=nodes, top_k=top_k), force=force)
    facts = _counts(recording) | {"requests": recording.n_requests}
    _emit_written("lattice pack", facts, lattice, output, as_json)


@app.command()
def inspect(
    lattice: options.LatticePath,
    as_json: options.JsonFlag = False,
    output: options.OutputFile = None,
    force: options.ForceFlag = False,
) -> None:
    """Check every byte of a recording and tell what it holds.

    A recording at fault is refused, and the request, tensor or step named.

    Examples:

        specpilot lattice inspect lattices.safetensors

        specpilot lattice inspect lattices.safetensors --json
    """
    from specpilot_cli.io.lattice_file import lattice_files
    from specpilot_cli.report.json_out import build_envelope
    from specpilot_cli.report.tables import print_table

    options.check_output(output, force, inputs=(lattice,))
    document = _checked(lattice)
    rows = [[key, _cell(value)] for key, value in document.items()]
    envelope = build_envelope("lattice inspect", document, inputs=lattice_files(lattice))
    options.emit(
        envelope, as_json=as_json, output=output, force=force,
        text=lambda: print_table(["field", "value"], rows),
    )  # fmt: skip


def _engine(name: str) -> str:
    from specpilot_cli.errors import InputError

    if not name.strip():
        raise InputError("no engine is named", where="--engine", hint="such as 'sglang 0.5.23'")
    return name


def _checked(lattice: Path) -> dict[str, Any]:
    """What a recording of lattices or of trees holds, after all of it was read."""
    from specpilot_cli.io.lattice_file import LatticeFiles
    from specpilot_cli.io.tree_file import is_tree_file, read_trees
    from specpilot_cli.replay.document import recording_document, tree_recording_document

    if is_tree_file(lattice):
        return tree_recording_document(read_trees(lattice))
    files = LatticeFiles(lattice)
    for _ in files.parts():  # reading checks
        pass
    return recording_document(files)


def _cell(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {item}" for key, item in value.items())
    return "-" if value is None else str(value)


def _convert(
    tensors: dict[str, Any],
    answers: list[OutputRecord],
    provenance: Provenance,
    drafter: str,
    output: Path,
    *,
    force: bool,
) -> dict[str, int]:
    """Convert and write; what was written, counted."""
    from specpilot_cli.io.lattice_file import write_lattice
    from specpilot_cli.io.raw_tensors import read_markov_head
    from specpilot_cli.io.tree_file import write_trees
    from specpilot_cli.replay.convert import MarkovHead, convert_lattice, convert_trees

    if provenance.kind == "eagle":
        trees = convert_trees(tensors, answers, provenance)
        write_trees(output, trees, force=force)
        return {"trees": trees.n_steps, "nodes": int(trees.node_token.size)}
    markov = None
    if provenance.kind == "dspark" and "scores" not in tensors:
        markov = MarkovHead(*read_markov_head(_folder(drafter, "--drafter")))
    recording = convert_lattice(tensors, answers, provenance, markov=markov)
    write_lattice(output, recording, force=force)
    return _counts(recording)


def _counts(recording: LatticeRecording) -> dict[str, int]:
    return {
        "lattices": recording.n_steps,
        "positions": recording.n_positions,
        "candidates": recording.n_candidates,
    }


def _emit_written(
    command: str, facts: dict[str, int], source: Path, output: Path, as_json: bool
) -> None:
    from specpilot_cli.io.lattice_file import lattice_files
    from specpilot_cli.report.json_out import build_envelope
    from specpilot_cli.report.tables import print_line

    before = sum(path.stat().st_size for path in lattice_files(source))
    size = output.stat().st_size
    results = {"lattice_file": output, **facts, "source_bytes": before, "lattice_bytes": size}
    envelope = build_envelope(command, results, inputs=lattice_files(source))
    counts = ", ".join(f"{count} {name}" for name, count in facts.items())
    text = f"{counts}: {output}, {size:,} bytes from {before:,}"
    options.emit(envelope, as_json=as_json, text=lambda: print_line(text))


def _folder(name: str, where: str) -> Path:
    from specpilot_cli.errors import InputError

    if not Path(name).is_dir():
        raise InputError(f"no such folder: `{name}`", where=where, hint="name the model's folder")
    return Path(name)


def _hash_of(name: str, where: str) -> str:
    from specpilot_cli.io.hashing import sha256_folder

    if re.fullmatch(r"[0-9a-f]{64}", name):
        return name
    return sha256_folder(_folder(name, where))
