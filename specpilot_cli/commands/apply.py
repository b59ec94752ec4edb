"""`specpilot apply recipe`: prepare, serve, judge and report one deployment."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from specpilot_cli.commands import options

if TYPE_CHECKING:
    from specpilot_cli.apply.recipes import LoadedRecipe
    from specpilot_cli.apply.run import ApplySettings, RecipeResult
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
    verbose: options.VerboseFlag = 0,
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
        _show(loaded)
        return
    settings = _settings(limit, port, fault_after, fault_every, fault_bias)
    folder = out or _default_folder(loaded)
    if dry_run:
        _dry_run(loaded, folder, settings, as_json=as_json)
        return
    result = _run(loaded, folder, settings, quiet=quiet, verbose=verbose)
    options.finish(
        _write(result), as_json=as_json, exit_zero=exit_zero, text=lambda: _print(result)
    )


def _load(name: str | None) -> LoadedRecipe:
    from specpilot_cli.apply.recipes import load_recipe
    from specpilot_cli.errors import InputError

    if name is None:
        raise InputError("which recipe? NAME is missing", hint="see them with --list")
    return load_recipe(name)


def _settings(
    limit: int | None, port: int | None, after: int | None, every: int, bias: float
) -> ApplySettings:
    from specpilot_cli.apply.run import ApplySettings
    from specpilot_cli.engines.reference.spec import LogitFault

    fault = None if after is None else LogitFault(after, every, bias)
    return ApplySettings(prompts_per_benchmark=limit, first_port=port, fault=fault)


def _default_folder(loaded: LoadedRecipe) -> Path:
    from datetime import UTC, datetime

    stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    return Path("specpilot-runs") / f"{loaded.recipe.name}-{stamp}"


def _run(
    loaded: LoadedRecipe, folder: Path, settings: ApplySettings, *, quiet: bool, verbose: int
) -> RecipeResult:
    from specpilot_cli.apply.run import apply_recipe
    from specpilot_cli.ui import ConsoleReporter

    with ConsoleReporter(quiet, verbose) as reporter:
        return apply_recipe(loaded, folder, settings=settings, reporter=reporter)


def _write(result: RecipeResult) -> Envelope:
    """Report first, result last: a folder with a result is complete."""
    from specpilot_cli.apply.run import REPORT_FILE, RESULT_FILE
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
    from specpilot_cli.apply.run import REPORT_FILE
    from specpilot_cli.report.recipe_text import print_recipe

    print_recipe(result, str((result.folder / REPORT_FILE).resolve()))


def _list(*, as_json: bool) -> None:
    from specpilot_cli.apply.recipes import load_recipe, recipe_names
    from specpilot_cli.report.json_out import build_envelope
    from specpilot_cli.report.tables import print_table

    recipes = [load_recipe(name).recipe for name in recipe_names()]
    rows = [(r.name, r.title, ", ".join(m.mechanism for m in r.mechanisms)) for r in recipes]
    envelope = build_envelope(
        "apply recipe",
        {"recipes": [{"name": n, "title": t, "mechanisms": m.split(", ")} for n, t, m in rows]},
    )
    options.emit(
        envelope,
        as_json=as_json,
        text=lambda: print_table(["recipe", "deployment", "mechanisms"], rows),
    )


def _show(loaded: LoadedRecipe) -> None:
    from specpilot_cli.report.tables import print_line

    print_line(loaded.path.read_text(encoding="utf-8").rstrip())


def _dry_run(loaded: LoadedRecipe, folder: Path, settings: ApplySettings, *, as_json: bool) -> None:
    from specpilot_cli.apply.run import describe_plan
    from specpilot_cli.report.json_out import build_envelope
    from specpilot_cli.report.tables import print_pairs

    plan = describe_plan(loaded, folder, settings)
    options.emit(
        build_envelope("apply recipe", {"dry_run": True, **plan}, inputs=[loaded.path]),
        as_json=as_json,
        text=lambda: print_pairs(list(plan.items()), title=f"would run {loaded.recipe.name}"),
    )
