"""`specpilot simulate`: what batching and two-level verification would do."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from specpilot_cli.commands import options
from specpilot_cli.commands.simulate_measure import ConcurrencyOption, measure

if TYPE_CHECKING:
    from specpilot_cli.schema.batch_times import BatchStepTimes
    from specpilot_cli.schema.lattice import LatticeRecording
    from specpilot_cli.simulate.batch import BatchResult
    from specpilot_cli.simulate.plateaus import Plateau
    from specpilot_cli.simulate.tlv import CycleTimes, TwoLevel

_DEFAULT = ("ar", "chain:block=8", "tree:nodes=16,block=8")

_TIMES_HINT = "draft, Q pass, exact pass, glue of one level and of two: 1.05,11.5,14.9,0.55,1.6"
_SHORTEST_PASS_MS, _LONGEST_MS = 0.02, 1e6

app = typer.Typer(
    no_args_is_help=True,
    help="""Predict batched throughput and two-level verification from a recording.

    Dense recordings and measured times say it, without an engine and without a GPU.

    Examples:

        specpilot simulate batch lattices.safetensors --step-times demo-cpu --concurrency 1,8,24

        specpilot simulate tlv lattices.safetensors --q-flags agreement.jsonl --nodes 32

        specpilot simulate plateaus measured.json

        specpilot simulate measure --url http://localhost:30000 -o batch-times.json
    """,
)

StepTimesOption = Annotated[
    str,
    typer.Option("--step-times", metavar="FILE|NAME", help="Measured components of a step's time."),
]
PolicyOption = Annotated[
    list[str] | None,
    typer.Option(
        "--policy",
        metavar="POLICY",
        help="ar · chain:block=8 · tree:nodes=16,block=16 · shared:rows=192,block=16 · "
        "shared:rows=192,block=auto,draft-rows=256; each may have admission=joint; repeatable.",
    ),
]
RepeatOption = Annotated[
    int, typer.Option(min=1, max=1000, help="Run through the requests so many times.")
]
FlagsOption = Annotated[
    Path, typer.Option("--q-flags", metavar="FILE", help="Where the Q pass agrees, `.jsonl`.")
]
NodesOption = Annotated[int, typer.Option(min=1, max=4096, help="Nodes of an exact pass.")]
BlockOption = Annotated[
    int | None, typer.Option(min=2, help="Draft block. Default: the recorded one.")
]
TimesOption = Annotated[
    str | None,
    typer.Option(
        metavar="MS,MS,MS,MS,MS",
        help="Milliseconds: draft, Q pass, exact pass, glue of one level, glue of two levels.",
    ),
]


@app.command()
def batch(
    lattice: options.LatticePath,
    step_times: StepTimesOption,
    policy: PolicyOption = None,
    concurrency: ConcurrencyOption = "1,8,24",
    repeat: RepeatOption = 1,
    as_json: options.JsonFlag = False,
    output: options.OutputFile = None,
    force: options.ForceFlag = False,
    quiet: options.QuietFlag = False,
) -> None:
    """Predict tokens per second of batch policies, step by step, from recorded lattices.

    Speedups are over `ar` or, where it is not among the policies, over the first one.

    Examples:

        specpilot simulate batch lattices.safetensors --step-times demo-cpu

        specpilot simulate batch lattices.safetensors --step-times h200.json \\
          --policy ar --policy tree:nodes=8,block=16 --policy shared:rows=192,block=16 -o batch.html
    """
    from specpilot_cli.io.lattice_file import read_lattice
    from specpilot_cli.report.json_out import build_envelope
    from specpilot_cli.report.simulate_page import render_batch_page
    from specpilot_cli.simulate.batch import simulate_batches
    from specpilot_cli.simulate.inputs import load_batch_times
    from specpilot_cli.simulate.policy import parse_policy
    from specpilot_cli.ui import ConsoleReporter

    options.check_output(output, force, ".html", inputs=(lattice, step_times))
    policies = [parse_policy(text) for text in policy or _DEFAULT]
    counts = _counts(concurrency)
    times = load_batch_times(step_times)
    recording = read_lattice(lattice)
    with ConsoleReporter(quiet) as reporter:
        found = simulate_batches(
            recording, times, policies, counts, repeat=repeat, reporter=reporter
        )
    projected = _projected(recording, times)
    results = {"step_times": times, "projected_because": projected, "runs": found}
    envelope = build_envelope("simulate batch", results, inputs=[lattice])
    options.finish(
        envelope, as_json=as_json, output=output, force=force,
        text=lambda: _print_batches(found, times, projected),
        writers={".html": lambda: render_batch_page(found, times, envelope, projected=projected)},
    )  # fmt: skip


def _projected(recording: LatticeRecording, times: BatchStepTimes) -> tuple[str, ...]:
    """Why tokens and times are not of one deployment; empty if they are."""
    from specpilot_cli.schema.deployment import of_batch_times, of_recording, projected_because

    own = of_recording(recording.metadata)
    return projected_because(own, of_batch_times(times), what="the step times")


def _counts(text: str) -> list[int]:
    from specpilot_cli.errors import InputError

    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and 0 < int(part) <= 4096 for part in parts):
        raise InputError(
            f"`{text}` is no list of request counts", where="--concurrency",
            hint="numbers of 1 to 4096 with commas: 1,8,24",
        )  # fmt: skip
    return sorted({int(part) for part in parts})


def _print_batches(
    found: list[BatchResult], times: BatchStepTimes, projected: tuple[str, ...]
) -> None:
    from specpilot_cli.report.simulate_page import (
        BATCH_COLUMNS,
        batch_finding,
        batch_notes,
        batch_rows,
    )
    from specpilot_cli.report.tables import Column, print_line, print_table

    head = [Column(BATCH_COLUMNS[0]), *(Column(title, "right") for title in BATCH_COLUMNS[1:])]
    print_table(head, batch_rows(found), title=f"simulated; step times: {times.source}")
    for note in batch_notes(found, times, projected):
        print_line(f"note: {note}")
    print_line(batch_finding(found))


@app.command()
def tlv(
    lattice: options.LatticePath,
    q_flags: FlagsOption,
    nodes: NodesOption = 32,
    block: BlockOption = None,
    times: TimesOption = None,
    seed: options.SeedOption = 0,
    as_json: options.JsonFlag = False,
    output: options.OutputFile = None,
    force: options.ForceFlag = False,
    quiet: options.QuietFlag = False,
) -> None:
    """Predict tokens per exact pass with two-level verification, and the Q pass that breaks even.

    The flags are JSON lines, `{"request_id": "r1", "agrees": "1101…"}`, a digit per output token.

    Examples:

        specpilot simulate tlv lattices.safetensors --q-flags agreement.jsonl

        specpilot simulate tlv lattices.safetensors --q-flags agreement.jsonl \\
          --times 1.05,11.5,14.9,0.55,1.6 --json
    """
    from specpilot_cli.io.lattice_file import read_lattice
    from specpilot_cli.report.json_out import build_envelope
    from specpilot_cli.simulate.inputs import read_agreement
    from specpilot_cli.simulate.tlv import two_level
    from specpilot_cli.ui import ConsoleReporter

    options.check_output(output, force, inputs=(lattice, q_flags))
    cycle = None if times is None else _cycle_times(times)
    recording = read_lattice(lattice)
    flags = read_agreement(q_flags, recording)
    with ConsoleReporter(quiet) as reporter:
        found = two_level(
            recording, flags, nodes=nodes, block=block, times=cycle, seed=seed, reporter=reporter
        )
    results = {
        "two_level": found,
        "speedup_ratio": found.speedup,
        "break_even_q_pass_s": found.break_even_q_pass_s,
    }
    envelope = build_envelope("simulate tlv", results, inputs=[lattice, q_flags], seed=seed)
    options.finish(
        envelope, as_json=as_json, output=output, force=force, text=lambda: _print_tlv(found)
    )


def _cycle_times(text: str) -> CycleTimes:
    from specpilot_cli.errors import InputError
    from specpilot_cli.simulate.tlv import CycleTimes

    try:
        values = [float(part) for part in text.split(",")]
        if len(values) != 5 or not all(0 <= value < math.inf for value in values):
            raise ValueError(text)
    except ValueError as error:
        raise InputError(
            f"`{text}` is not five times in milliseconds", where="--times", hint=_TIMES_HINT
        ) from error
    exact = values[2]
    if not _SHORTEST_PASS_MS <= exact <= _LONGEST_MS or max(values) > _LONGEST_MS:
        raise InputError(
            f"an exact pass of {exact:g} ms in steps of up to {max(values):g} ms cannot be",
            where="--times",
            hint=f"times are in milliseconds, 14.9 and not 0.0149: {_TIMES_HINT}",
        )
    return CycleTimes(*(value / 1e3 for value in values))


def _print_tlv(found: TwoLevel) -> None:
    from specpilot_cli.report.tables import print_line
    from specpilot_cli.units import format_percent, format_seconds

    print_line(
        f"{found.nodes} nodes, block {found.block}: {found.tau_one.value:.3f} tokens per exact "
        f"pass with one level, {found.tau_two.value:.3f} with two ({found.ratio.value:.3f}×)"
    )
    print_line(
        f"the Q pass agrees at {format_percent(found.agreement)} of positions and ends "
        f"{format_percent(found.first_wrong)} of the cycles early; as many disagreements at random "
        f"places would give {found.tau_shuffled:.3f}"
    )
    if found.times is None or found.speedup is None or found.break_even_q_pass_s is None:
        print_line("give --times for the speedup and the break-even Q pass")
        return
    verdict = "pays" if found.speedup > 1 else "does not pay"
    print_line(
        f"a cycle of {format_seconds(found.times.cycle_s)} against a step of "
        f"{format_seconds(found.times.one_level_s)}: {found.speedup:.3f}×, it {verdict}; the Q "
        f"pass breaks even at {format_seconds(max(0.0, found.break_even_q_pass_s))}"
    )


@app.command()
def plateaus(
    timings: Annotated[
        Path,
        typer.Argument(metavar="FILE", help="The answer of `doctor --measure --json`, or a list."),
    ],
    as_json: options.JsonFlag = False,
    output: options.OutputFile = None,
    force: options.ForceFlag = False,
) -> None:
    """Find the row counts up to which a step costs the same: the budgets worth choosing.

    The file is what `specpilot doctor --measure --json` prints.

    Examples:

        specpilot simulate plateaus measured.json
    """
    from specpilot_cli.report.json_out import build_envelope
    from specpilot_cli.simulate.inputs import read_row_samples
    from specpilot_cli.simulate.plateaus import find_plateaus

    options.check_output(output, force, inputs=(timings,))
    found = find_plateaus(read_row_samples(timings))
    envelope = build_envelope("simulate plateaus", {"plateaus": found}, inputs=[timings])
    options.finish(
        envelope, as_json=as_json, output=output, force=force, text=lambda: _print_plateaus(found)
    )


app.command()(measure)


def _print_plateaus(found: tuple[Plateau, ...]) -> None:
    from specpilot_cli.report.tables import Column, print_line, print_table
    from specpilot_cli.simulate.plateaus import worth_trying
    from specpilot_cli.units import format_seconds

    titles = ("from rows", "to rows", "time", "next measured", "no slower with")
    print_table(
        [Column(title, "right") for title in titles],
        [
            (
                str(item.first_rows),
                str(item.last_rows),
                format_seconds(item.seconds),
                "–" if item.next_rows is None else str(item.next_rows),
                "–" if item.dominated_by is None else f"{item.dominated_by} rows",
            )
            for item in found
        ],
    )
    budgets = ", ".join(str(rows) for rows in worth_trying(found))
    print_line(f"budgets worth trying, in rows: {budgets}")
