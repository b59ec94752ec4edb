"""`specpilot apply recipe` for SGLang: plan, write a deployment, serve, or start and judge."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specpilot_cli.commands import options
from specpilot_cli.errors import InputError

if TYPE_CHECKING:
    from specpilot_cli.apply.recipes import LoadedSglangRecipe
    from specpilot_cli.apply.sglang.run import RunningSystem, SglangResult
    from specpilot_cli.apply.sglang.settings import SglangSettings, SystemChoice
    from specpilot_cli.schema.result import Envelope


def apply(loaded: LoadedSglangRecipe, given: Mapping[str, Any]) -> None:
    """Do what the options `given` (by parameter name) ask for."""
    from specpilot_cli.apply.folder import default_folder

    if given["emit"] and (given["dry_run"] or given["serve"]):
        raise InputError(
            "--emit starts nothing, so it takes neither --dry-run nor --serve", hint="choose one"
        )
    settings = _settings(given)
    out: Path | None = given["out"]
    options.check_not_input({"--out": out}, (loaded.path.parent, settings.prompts))
    if given["dry_run"]:
        folder = (out or default_folder(loaded.recipe.name)).resolve()
        _dry_run(loaded, settings, folder, as_json=given["as_json"])
    elif given["emit"]:
        _emit(loaded, settings, given)
    elif given["serve"]:
        _serve(loaded, settings, given)
    else:
        _run(loaded, settings, given)


def _settings(given: Mapping[str, Any]) -> SglangSettings:
    from specpilot_cli.apply.sglang.settings import DEFAULT_HOST, SglangSettings, checked_host

    _refuse_unused(given)
    single = bool(given["serve"] or given["emit"])
    system: SystemChoice = given["system"] or ("tuned" if single else "both")
    if single and system == "both":
        raise InputError(
            "--serve and --emit are for one server", where="--system", hint="stock or tuned"
        )
    return SglangSettings(
        system=system,
        first_port=given["port"],
        host=checked_host(DEFAULT_HOST if given["host"] is None else given["host"]),
        python=given["python"] or sys.executable,
        prompts_per_benchmark=given["limit"],
        prompts=given["prompts"],
        target=given["target"],
        drafter=given["drafter"],
        gpu=given["gpu"],
    )


def _refuse_unused(given: Mapping[str, Any]) -> None:
    """Refuse options that would be ignored without a word."""
    unused: dict[str, str] = {}
    if given["emit"]:
        unused |= dict.fromkeys(("prompts", "limit"), "--emit judges nothing")
        unused["python"] = "--emit chooses no interpreter: serve.sh takes $PYTHON"
    elif given["serve"]:
        unused |= dict.fromkeys(("prompts", "limit"), "--serve judges nothing")
    if given["emit"] == "k8s":
        unused["host"] = "pods listen on every address; the Service says who reaches them"
    for name, reason in unused.items():
        if given[name] is not None:
            raise InputError(reason, where=f"--{name}", hint="leave the option out")


def _dry_run(
    loaded: LoadedSglangRecipe, settings: SglangSettings, folder: Path, *, as_json: bool
) -> None:
    from specpilot_cli.apply.sglang.dry_run import plan_sglang
    from specpilot_cli.apply.sglang.preflight import check_sglang
    from specpilot_cli.report.json_out import build_envelope
    from specpilot_cli.report.sglang_text import plan_results, print_sglang_plan

    plan = plan_sglang(check_sglang(loaded, settings, folder, for_launch=False), folder)
    options.emit(
        build_envelope("apply recipe", {"dry_run": plan_results(plan)}, inputs=[loaded.path]),
        as_json=as_json,
        text=lambda: print_sglang_plan(plan),
    )


def _emit(loaded: LoadedSglangRecipe, settings: SglangSettings, given: Mapping[str, Any]) -> None:
    from specpilot_cli.apply.sglang.emit import emit
    from specpilot_cli.apply.sglang.preflight import check_sglang
    from specpilot_cli.io.atomic import atomic_folder
    from specpilot_cli.report.json_out import build_envelope
    from specpilot_cli.report.tables import print_line

    kind, gpus = given["emit"], loaded.recipe.gpus
    if settings.gpu is None and gpus:
        settings = replace(settings, gpu=gpus[0])  # it runs elsewhere, not on this machine's GPU
    folder = (given["out"] or Path(f"{loaded.recipe.name}-{kind}")).resolve()
    checked = check_sglang(loaded, settings, folder, for_launch=False)
    files = emit(checked, kind)
    with atomic_folder(folder) as temporary:
        for name, content in files.items():
            path = temporary / name
            path.write_bytes(content)
            if name.endswith(".sh"):
                path.chmod(0o755)
    written = [str(folder / name) for name in files]
    options.emit(
        build_envelope(
            "apply recipe", {"emit": kind, "folder": str(folder), "files": written},
            inputs=[loaded.path],
        ),
        as_json=given["as_json"],
        text=lambda: print_line("\n".join(written)),
    )  # fmt: skip


def _serve(loaded: LoadedSglangRecipe, settings: SglangSettings, given: Mapping[str, Any]) -> None:
    """Until interrupted: that is how a server in the foreground ends, so it is no error."""
    from specpilot_cli.apply.folder import serving_folder
    from specpilot_cli.apply.sglang.preflight import check_sglang
    from specpilot_cli.apply.sglang.run import serve_sglang
    from specpilot_cli.ui import ConsoleReporter

    folder = serving_folder(given["out"], loaded.recipe.name)
    checked = check_sglang(loaded, settings, folder, for_launch=True)
    ready = False

    def on_ready(url: str, running: RunningSystem) -> None:
        nonlocal ready
        _announce(loaded, url, running, as_json=given["as_json"])
        ready = True

    try:
        with ConsoleReporter(given["quiet"]) as reporter:
            reporter.note(f"logs: {folder / 'logs'}")
            serve_sglang(checked, folder, on_ready=on_ready, reporter=reporter)
    except KeyboardInterrupt:
        if not ready:
            raise


def _announce(
    loaded: LoadedSglangRecipe, url: str, running: RunningSystem, *, as_json: bool
) -> None:
    from specpilot_cli.report.json_out import build_envelope
    from specpilot_cli.report.sglang_text import print_running, running_results

    results = {"url": url, "system": running_results(running)}
    options.emit(
        build_envelope("apply recipe", results, inputs=[loaded.path]),
        as_json=as_json,
        text=lambda: print_running(url, running),
    )


def _run(loaded: LoadedSglangRecipe, settings: SglangSettings, given: Mapping[str, Any]) -> None:
    from specpilot_cli.apply.folder import default_folder, run_folder
    from specpilot_cli.apply.sglang.preflight import check_sglang, moved
    from specpilot_cli.apply.sglang.run import apply_sglang
    from specpilot_cli.ui import ConsoleReporter

    out: Path | None = given["out"]
    place = (out or default_folder(loaded.recipe.name)).resolve()
    # checked before a folder is made; the plugin's file goes where the run really is
    checked = check_sglang(loaded, settings, place, for_launch=True)
    with (
        ConsoleReporter(given["quiet"]) as reporter,
        run_folder(out, loaded.recipe.name, reporter) as folder,
    ):
        if checked.no_gates is not None:
            chosen = settings.system != "both"
            (reporter.note if chosen else reporter.warn)(
                f"nothing will be judged: {checked.no_gates}"
            )
        result = apply_sglang(moved(checked, folder), folder, reporter=reporter)
        envelope = _write(result)
    _finish(result, envelope, given)


def _write(result: SglangResult) -> Envelope:
    """Report first, result last: a folder with a result is complete."""
    from specpilot_cli.apply.folder import REPORT_FILE, RESULT_FILE
    from specpilot_cli.io.atomic import atomic_write_text
    from specpilot_cli.report.json_out import build_envelope, render_json
    from specpilot_cli.report.sglang_page import render_sglang_page
    from specpilot_cli.report.sglang_text import sglang_results

    loaded = result.checked.loaded
    envelope = build_envelope(
        "apply recipe",
        sglang_results(result),
        inputs=[loaded.path, *([loaded.unseen] if loaded.unseen else [])],
        verdict=result.verdict,
    )
    atomic_write_text(result.folder / REPORT_FILE, render_sglang_page(result, envelope))
    atomic_write_text(result.folder / RESULT_FILE, render_json(envelope))
    return envelope


def _finish(result: SglangResult, envelope: Envelope, given: Mapping[str, Any]) -> None:
    from specpilot_cli.apply.folder import REPORT_FILE
    from specpilot_cli.report.sglang_text import print_sglang

    options.finish(
        envelope,
        as_json=given["as_json"],
        exit_zero=given["exit_zero"] and result.verdict != "reject",
        text=lambda: print_sglang(result, str(result.folder / REPORT_FILE)),
    )
