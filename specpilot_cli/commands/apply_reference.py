"""`specpilot apply recipe` for the reference engine: check, run, write, print."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specpilot_cli.commands import options

if TYPE_CHECKING:
    from specpilot_cli.apply.recipes import LoadedRecipe
    from specpilot_cli.apply.reference.preflight import CheckedRecipe
    from specpilot_cli.apply.reference.run import RecipeResult
    from specpilot_cli.schema.result import Envelope


def apply(loaded: LoadedRecipe, given: Mapping[str, Any]) -> None:
    """Do what the options `given` (by parameter name) ask for."""
    checked, out = _check(loaded, given), given["out"]
    if given["dry_run"]:
        _dry_run(checked, out, as_json=given["as_json"])
        return
    result, envelope = _run(checked, out, quiet=given["quiet"])
    options.finish(
        envelope,
        as_json=given["as_json"],
        # no gain may be fine for a caller; tokens that are not the target's never are
        exit_zero=given["exit_zero"] and result.verdict != "reject",
        text=lambda: _print(result),
    )


def _check(loaded: LoadedRecipe, given: Mapping[str, Any]) -> CheckedRecipe:
    from specpilot_cli.apply.reference.preflight import ApplySettings, check_recipe
    from specpilot_cli.engines.reference.faults import LogitFault

    after = given["fault_after"]
    fault = None if after is None else LogitFault(after, given["fault_every"], given["fault_bias"])
    return check_recipe(loaded, ApplySettings(given["limit"], given["port"], fault))


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
