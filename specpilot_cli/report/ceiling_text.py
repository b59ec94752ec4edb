"""The text that `specpilot ceiling` prints."""

from __future__ import annotations

from specpilot_cli.ceiling.answer import CeilingAnswer
from specpilot_cli.ceiling.document import step_split
from specpilot_cli.report import adapters
from specpilot_cli.report.tables import Column, print_line, print_table


def print_answer(answer: CeilingAnswer) -> None:
    """The whole answer on stdout."""
    step, tokens = answer.profile, answer.tokens
    drafter = "no drafter" if step.drafter is None else step.drafter.name
    print_line(
        f"{step.target.name} with {drafter}, {step.engine.name} {step.engine.version}, "
        f"{step.device.name}, {step.dtype}, {step.mode}: {step.nodes} nodes, {step.rows} rows"
    )
    print_table(
        ["factor", Column("ratio", "right"), "from"], adapters.factor_rows(answer.ceiling),
        title=f"ceiling, {adapters.peaks_text(answer.ceiling, step.dtype)}",
    )  # fmt: skip
    right = [Column(title, "right") for title in adapters.CLASS_COLUMNS[1:5]]
    print_table(
        [adapters.CLASS_COLUMNS[0], *right, adapters.CLASS_COLUMNS[5],
         Column(adapters.CLASS_COLUMNS[6], "right")],
        adapters.class_rows(answer.ceiling), title="kernel classes of one step",
    )  # fmt: skip
    _print_split_and_speedup(answer)
    if answer.measured is not None:
        factors = answer.measured.factors
        print_line(
            f"with measured peaks: kernels {factors.kernel:.3f}×, ceiling {factors.product:.3f}× "
            f"({adapters.peaks_text(answer.measured, step.dtype)})"
        )
    print_line(f"τ now: {tokens.tau_source}; best τ: {tokens.tau_best_source}")
    for note in answer.advice.notes:
        print_line(f"note: {note}")
    for lever in adapters.lever_rows(answer.levers):
        print_line(f"projected: {lever[0]}: {lever[1]}: {lever[2]}")
    _print_what_if(answer)
    print_line(f"leading: {answer.advice.headline}")
    print_line(f"next: {answer.advice.next_step}")


def _print_split_and_speedup(answer: CeilingAnswer) -> None:
    split = step_split(answer)
    if split:
        print_table(
            ["part", Column("time", "right"), Column("of the step", "right")],
            adapters.split_rows(split, answer.ceiling.t_step_s),
            title=f"where the step goes (step time: {answer.step_time_source})",
        )
    if answer.over_plain is not None:
        print_line(f"over plain decoding: {answer.over_plain.text}")
    elif answer.profile.mode != "ar":
        print_line("over plain decoding: not known; give --ar PROFILE or --step-times")
    if answer.curve is not None:
        print_table(
            [Column(title, "right") for title in adapters.SPEEDUP_COLUMNS],
            adapters.speedup_rows(answer.speedups),
            title=adapters.speedup_title(answer),
        )
        for reason in answer.projected_because:
            print_line(f"projected: {reason}")


def _print_what_if(answer: CeilingAnswer) -> None:
    if answer.what_if is None:
        return
    first, *others = adapters.WHAT_IF_COLUMNS
    print_table(
        [first, *(Column(title, "right") for title in others)],
        adapters.what_if_rows(answer.what_if), title="the step elsewhere",
    )  # fmt: skip
    print_line(f"what if: {adapters.what_if_text(answer.what_if)}")
