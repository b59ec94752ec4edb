"""`specpilot apply recipe`: prepare, serve, judge and report one deployment."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from specpilot_cli.commands import options

if TYPE_CHECKING:
    from specpilot_cli.apply.recipes import LoadedRecipe
    from specpilot_cli.apply.reference.preflight import CheckedRecipe
    from specpilot_cli.apply.reference.run import RecipeResult
    from specpilot_cli.engines.reference.spec import LogitFault
    from specpilot_cli.schema.result import Envelope

app = typer.Typer(no_args_is_help=True, help="Apply validated mechanisms to a deployment.")

_SIZE = "Size"
_FAULT = "Fault injection (to see an audit reject)"

NameArgument = Annotated[
    str | None, typer.Argument(metavar="NAME", help="A bundled recipe, or a path to one.")
]
OutOption = Annotated[
    Path | None,
    typer.Option(
        "--out",
        metavar="DIR",
        help="New folder for everything; default specpilot-runs/NAME-TIME.",
    ),
]
ListFlag = Annotated[bool, typer.Option("--list", help="List the bundled recipes, and stop.")]
ShowFlag = Annotated[bool, typer.Option("--show", help="Print the recipe's YAML, and stop.")]
DryRunFlag = Annotated[
    bool, typer.Option("--dry-run", help="Check everything, say what would run, start nothing.")
]
LimitOption = Annotated[
    int | None,
    typer.Option(min=2, help="Unseen prompts per benchmark; default: the recipe's.",
                 rich_help_panel=_SIZE),
]  # fmt: skip
PortOption = Annotated[
    int | None,
    typer.Option(min=1, max=65533, help="First of three ports; default: free ones."),
]
FaultAfterOption = Annotated[
    int | None,
    typer.Option(
        min=0,
        help="Bias the tuned system's logits after this output position.",
        rich_help_panel=_FAULT,
    ),
]
FaultEveryOption = Annotated[
    int, typer.Option(min=1, help="Bias every N-th token id.", rich_help_panel=_FAULT)
]
FaultBiasOption = Annotated[
    float, typer.Option(help="Added to the biased logits.", rich_help_panel=_FAULT)
]


@app.command("recipe")
def recipe(
    name: NameArgument = None,
    out: OutOption = None,
    list_known: ListFlag = False,
    show: ShowFlag = False,
    dry_run: DryRunFlag = False,
    limit: LimitOption = None,
    port: PortOption = None,
    fault_after: FaultAfterOption = None,
    fault_every: FaultEveryOption = 7,
    fault_bias: FaultBiasOption = 2.0,
    as_json: options.JsonFlag = False,
    quiet: options.QuietFlag = False,
    exit_zero: options.ExitZeroFlag = False,
) -> None:
    """Find the speed, apply the mechanisms, prove the gain and the losslessness.

    Converts the target to W12, records lattices, chooses the node budget, serves stock and tuned
    side by side, runs `paired-bench` and `token-force` on unseen prompts, and writes result.json
    and report.html.

    Examples:

        specpilot apply recipe demo-cpu

        specpilot apply recipe demo-cpu --limit 4 --out run1 --json

        specpilot apply recipe demo-cpu --fault-after 48

        specpilot apply recipe --list
    """
    if list_known:
        _list(as_json=as_json)
        return
    loaded = _load(name)
    if show:
        _show(loaded, as_json=as_json)
        return
    checked = _check(loaded, limit, port, _fault(fault_after, fault_every, fault_bias))
    if dry_run:
        _dry_run(checked, out, as_json=as_json)
        return
    result, envelope = _run(checked, out, quiet=quiet)
    options.finish(
        envelope,
        as_json=as_json,
        # no gain may be fine for a caller; tokens that are not the target's never are
        exit_zero=exit_zero and result.verdict != "reject",
        text=lambda: _print(result),
    )


def _load(name: str | None) -> LoadedRecipe:
    from specpilot_cli.apply.recipes import load_recipe
    from specpilot_cli.errors import InputError

    if name is None:
        raise InputError("which recipe? NAME is missing", hint="see them with --list")
    return load_recipe(name)


def _fault(after: int | None, every: int, bias: float) -> LogitFault | None:
    from specpilot_cli.engines.reference.spec import LogitFault

    return None if after is None else LogitFault(after, every, bias)


def _check(
    loaded: LoadedRecipe, limit: int | None, port: int | None, fault: LogitFault | None
) -> CheckedRecipe:
    from specpilot_cli.apply.reference.preflight import ApplySettings, check_recipe

    return check_recipe(loaded, ApplySettings(limit, port, fault))


def _run(checked: CheckedRecipe, out: Path | None, *, quiet: bool) -> tuple[RecipeResult, Envelope]:
    from specpilot_cli.apply.folder import run_folder
    from specpilot_cli.apply.reference.run import apply_recipe
    from specpilot_cli.ui import ConsoleReporter

    loaded = checked.loaded
    options.check_not_input({"--out": out}, (loaded.target, loaded.drafter))
    with (
        ConsoleReporter(quiet) as reporter,
        run_folder(out, loaded.recipe.name, reporter) as folder,
    ):
        result = apply_recipe(checked, folder, reporter=reporter)
        return result, _write(result)


def _write(result: RecipeResult) -> Envelope:
    """Report first, result last: a folder with a result is complete."""
    from specpilot_cli.apply.folder import REPORT_FILE, RESULT_FILE
    from specpilot_cli.io.atomic import atomic_write_text
    from specpilot_cli.report.json_out import build_envelope, render_json
    from specpilot_cli.report.recipe_page import render_recipe_page
    from specpilot_cli.report.recipe_text import recipe_results

    loaded = result.loaded
    envelope = build_envelope(
        "apply recipe",
        recipe_results(result),
        inputs=[loaded.path, loaded.target, loaded.drafter, loaded.dev, loaded.unseen],
        verdict=result.verdict,
    )
    atomic_write_text(result.folder / REPORT_FILE, render_recipe_page(result, envelope))
    atomic_write_text(result.folder / RESULT_FILE, render_json(envelope))
    return envelope


def _print(result: RecipeResult) -> None:
    from specpilot_cli.apply.folder import REPORT_FILE
    from specpilot_cli.report.recipe_text import print_recipe

    print_recipe(result, str(result.folder / REPORT_FILE))


def _list(*, as_json: bool) -> None:
    from specpilot_cli.apply.recipes import load_recipe, recipe_names
    from specpilot_cli.report.json_out import build_envelope
    from specpilot_cli.report.tables import print_table

    known = [load_recipe(name).recipe for name in recipe_names()]
    rows = [(r.name, r.title, [m.mechanism for m in r.mechanisms]) for r in known]
    options.emit(
        build_envelope(
            "apply recipe",
            {"recipes": [{"name": n, "title": t, "mechanisms": m} for n, t, m in rows]},
        ),
        as_json=as_json,
        text=lambda: print_table(
            ["recipe", "deployment", "mechanisms"], [(n, t, ", ".join(m)) for n, t, m in rows]
        ),
    )


def _show(loaded: LoadedRecipe, *, as_json: bool) -> None:
    from specpilot_cli.report.json_out import build_envelope
    from specpilot_cli.report.tables import print_line

    text = loaded.path.read_text(encoding="utf-8").rstrip()
    options.emit(
        build_envelope("apply recipe", {"recipe": loaded.recipe}, inputs=[loaded.path]),
        as_json=as_json,
        text=lambda: print_line(text),
    )


def _dry_run(checked: CheckedRecipe, out: Path | None, *, as_json: bool) -> None:
    from specpilot_cli.apply.folder import default_folder
    from specpilot_cli.apply.reference.dry_run import plan_run
    from specpilot_cli.report.json_out import build_envelope
    from specpilot_cli.report.recipe_text import print_plan

    plan = plan_run(checked, (out or default_folder(checked.loaded.recipe.name)).resolve())
    options.emit(
        build_envelope("apply recipe", {"dry_run": plan}, inputs=[checked.loaded.path]),
        as_json=as_json,
        text=lambda: print_plan(plan),
    )
