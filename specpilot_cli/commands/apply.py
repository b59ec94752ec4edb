"""`specpilot apply`: a recipe on its engine, and a look at a server that runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from specpilot_cli.commands import options

if TYPE_CHECKING:
    from specpilot_cli.apply.recipes import LoadedRecipe, LoadedSglangRecipe

app = typer.Typer(
    no_args_is_help=True,
    help="""Apply validated mechanisms to a deployment.

    A recipe names models, mechanisms and the gates that decide about them.

    Examples:

        specpilot apply recipe demo-cpu

        specpilot apply recipe qwen3.8-27b-h200-w12 --dry-run

        specpilot apply check --url http://localhost:30000
    """,
)

_SIZE, _SGLANG = "Size", "Recipes for SGLang"
_FAULT = "Fault injection (recipes for the reference engine)"

NameArgument = Annotated[
    str | None, typer.Argument(metavar="NAME", help="A bundled recipe, or a path to one.")
]
OutOption = Annotated[
    Path | None,
    typer.Option(
        "--out",
        metavar="DIR",
        help="New folder for everything. Default: specpilot-runs/NAME-TIME.",
    ),
]
ListFlag = Annotated[bool, typer.Option("--list", help="List the bundled recipes, and stop.")]
ShowFlag = Annotated[bool, typer.Option("--show", help="Print the recipe's YAML, and stop.")]
DryRunFlag = Annotated[
    bool, typer.Option("--dry-run", help="Check everything, say what would run, start nothing.")
]
LimitOption = Annotated[
    int | None,
    typer.Option(min=2, help="Unseen prompts per benchmark. Default: the recipe's.",
                 rich_help_panel=_SIZE),
]  # fmt: skip
PortOption = Annotated[
    int | None,
    typer.Option(min=1, max=65533, help="First of three ports. Default: free ones."),
]


def _sglang(help_text: str, metavar: str | None = None) -> Any:
    return typer.Option(metavar=metavar, help=help_text, rich_help_panel=_SGLANG)


SystemOption = Annotated[
    Literal["stock", "tuned", "both"] | None,
    _sglang("Which servers. Default: both, with --serve or --emit tuned."),
]
ServeFlag = Annotated[
    bool,
    typer.Option("--serve", help="Keep one server running until Ctrl-C.", rich_help_panel=_SGLANG),
]
EmitOption = Annotated[
    Literal["sh", "docker", "k8s"] | None,
    _sglang("Write the deployment as files, and start nothing."),
]
HostOption = Annotated[
    str | None, _sglang("Address that servers listen on. Default: 127.0.0.1.", "HOST")
]
PythonOption = Annotated[
    str | None, _sglang("Python that has SGLang. Default: the one of specpilot.", "PATH")
]
PromptsOption = Annotated[Path | None, _sglang("Unseen prompts for the gates (JSONL).", "FILE")]
TargetOption = Annotated[
    str | None, _sglang("Folder or hub id, in place of the recipe's target.", "MODEL")
]
DrafterOption = Annotated[
    str | None, _sglang("Folder or hub id, in place of the recipe's drafter.", "MODEL")
]
GpuOption = Annotated[
    str | None, _sglang("GPU profile to plan for with --dry-run and --emit.", "NAME")
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
UrlOption = Annotated[str, typer.Option("--url", metavar="URL", help="The server.")]
ExpectOption = Annotated[
    list[str] | None,
    typer.Option("--expect", metavar="MECHANISM", help="One that must be active; repeatable."),
]

# Options that only one engine's recipes have, by parameter name.
_ONLY = {
    "reference": ("fault_after", "fault_every", "fault_bias"),
    "sglang": (
        "system", "serve", "emit", "host", "python", "prompts", "target", "drafter", "gpu",
    ),
}  # fmt: skip


@app.command()
def recipe(
    context: typer.Context,
    name: NameArgument = None,
    out: OutOption = None,
    list_known: ListFlag = False,
    show: ShowFlag = False,
    dry_run: DryRunFlag = False,
    limit: LimitOption = None,
    port: PortOption = None,
    system: SystemOption = None,
    serve: ServeFlag = False,
    emit: EmitOption = None,
    host: HostOption = None,
    python: PythonOption = None,
    prompts: PromptsOption = None,
    target: TargetOption = None,
    drafter: DrafterOption = None,
    gpu: GpuOption = None,
    fault_after: FaultAfterOption = None,
    fault_every: FaultEveryOption = 7,
    fault_bias: FaultBiasOption = 2.0,
    as_json: options.JsonFlag = False,
    quiet: options.QuietFlag = False,
    exit_zero: options.ExitZeroFlag = False,
) -> None:
    """Find the speed, apply the mechanisms, prove the gain and the losslessness.

    Starts stock and tuned side by side, runs `paired-bench` and `token-force` on unseen prompts
    and writes result.json. On the reference engine it also records and chooses the node budget.

    Examples:

        specpilot apply recipe demo-cpu

        specpilot apply recipe demo-cpu --fault-after 48

        specpilot apply recipe qwen3.8-27b-h200-w12 --dry-run

        specpilot apply recipe qwen3.8-27b-h200-w12 --emit k8s --out deployment
    """
    if list_known:
        _list(as_json=as_json)
    else:
        _apply(context, name)


@app.command()
def check(
    url: UrlOption,
    expect: ExpectOption = None,
    as_json: options.JsonFlag = False,
    output: options.OutputFile = None,
    force: options.ForceFlag = False,
    exit_zero: options.ExitZeroFlag = False,
) -> None:
    """Say which mechanisms a running server has active; ask nothing else of it.

    Exit 1: one that is expected is missing, or specpilot's plugin reports a problem.

    Examples:

        specpilot apply check --url http://localhost:30000

        specpilot apply check --url http://localhost:30000 --expect w12 --json
    """
    from specpilot_cli.apply.sglang.inspect import check_server
    from specpilot_cli.engines.http_client import HttpEngine
    from specpilot_cli.report.json_out import build_envelope, plain
    from specpilot_cli.report.sglang_text import print_check

    options.check_output(output, force)
    with HttpEngine(url, 60.0) as engine:
        found = check_server(engine, url, expect or ())
    options.finish(
        build_envelope("apply check", plain(found), verdict=found.verdict),
        as_json=as_json,
        output=output,
        force=force,
        exit_zero=exit_zero,
        text=lambda: print_check(found),
    )


def _apply(context: typer.Context, name: str | None) -> None:
    from specpilot_cli.apply.recipes import LoadedSglangRecipe, load_recipe
    from specpilot_cli.commands import apply_reference, apply_sglang
    from specpilot_cli.errors import InputError

    if name is None:
        raise InputError("which recipe? NAME is missing", hint="see them with --list")
    loaded, given = load_recipe(name), context.params
    if given["show"]:
        _show(loaded, as_json=given["as_json"])
        return
    _refuse_other_options(context, loaded.recipe.engine)
    if isinstance(loaded, LoadedSglangRecipe):
        apply_sglang.apply(loaded, given)
    else:
        apply_reference.apply(loaded, given)


def _refuse_other_options(context: typer.Context, engine: str) -> None:
    """An option that the recipe's engine does not have would be ignored without a word."""
    from specpilot_cli.errors import InputError

    for owner, names in _ONLY.items():
        for name in names:
            source = context.get_parameter_source(name)
            if owner != engine and source is not None and source.name == "COMMANDLINE":
                raise InputError(
                    f"recipes for the engine `{engine}` have no such option",
                    where=f"--{name.replace('_', '-')}",
                    hint=f"it is for recipes of the engine `{owner}`",
                )


def _list(*, as_json: bool) -> None:
    from specpilot_cli.apply.recipes import load_recipe, recipe_names
    from specpilot_cli.report.json_out import build_envelope
    from specpilot_cli.report.tables import print_table

    known = [load_recipe(name).recipe for name in recipe_names()]
    rows = [(r.name, r.engine, r.title, [m.mechanism for m in r.mechanisms]) for r in known]
    options.emit(
        build_envelope(
            "apply recipe",
            {
                "recipes": [
                    {"name": n, "engine": e, "title": t, "mechanisms": m} for n, e, t, m in rows
                ]
            },
        ),
        as_json=as_json,
        text=lambda: print_table(
            ["recipe", "engine", "deployment", "mechanisms"],
            [(n, e, t, ", ".join(m)) for n, e, t, m in rows],
        ),
    )


def _show(loaded: LoadedRecipe | LoadedSglangRecipe, *, as_json: bool) -> None:
    from specpilot_cli.report.json_out import build_envelope
    from specpilot_cli.report.tables import print_line

    text = loaded.path.read_text(encoding="utf-8").rstrip()
    options.emit(
        build_envelope("apply recipe", {"recipe": loaded.recipe}, inputs=[loaded.path]),
        as_json=as_json,
        text=lambda: print_line(text),
    )
