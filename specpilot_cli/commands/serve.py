"""`specpilot serve`: the reference engine as an HTTP server."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from specpilot_cli.commands import options

_DECODING = "Decoding"
_SERVER = "Server"
_FAULT = "Fault injection (for audits and benchmarks)"

ModeOption = Annotated[
    Literal["ar", "chain", "tree"],
    typer.Option(
        help="Plain decoding, the stock greedy chain, or a best-first tree.",
        rich_help_panel=_DECODING,
    ),
]
BlockOption = Annotated[
    int, typer.Option(min=2, help="Draft block, anchor included.", rich_help_panel=_DECODING)
]
NodesOption = Annotated[
    int, typer.Option(min=1, help="Nodes of a tree.", rich_help_panel=_DECODING)
]
ScoringOption = Annotated[
    Literal["conditional", "marginal"],
    typer.Option(help="How a tree ranks its nodes.", rich_help_panel=_DECODING),
]
HostOption = Annotated[str, typer.Option(help="Address to listen on.", rich_help_panel=_SERVER)]
PortOption = Annotated[
    int, typer.Option(min=1, max=65535, help="Port to listen on.", rich_help_panel=_SERVER)
]
MaxRunningOption = Annotated[
    int, typer.Option(min=1, help="Most requests in flight.", rich_help_panel=_SERVER)
]
PaceOption = Annotated[
    float | None,
    typer.Option(
        min=0.1,
        metavar="MS",
        help="Make every step take this long: what is timed is then exactly known.",
        rich_help_panel=_SERVER,
    ),
]
SlowOption = Annotated[
    float,
    typer.Option(
        min=0.0,
        metavar="PERCENT",
        help="Make every step this much longer.",
        rich_help_panel=_FAULT,
    ),
]
FaultOption = Annotated[
    str | None,
    typer.Option(
        metavar="NAME[:KEY=VALUE,...]",
        help="Make the output wrong on purpose: logit-bias, low-precision, wrong-id, kv-slot, "
        "stale-state or temperature.",
        rich_help_panel=_FAULT,
    ),
]


def serve(
    target: options.TargetFolder,
    drafter: options.OptionalDrafterFolder = None,
    mode: ModeOption = "ar",
    block: BlockOption = 8,
    nodes: NodesOption = 16,
    scoring: ScoringOption = "conditional",
    dtype: options.DtypeOption = "float32",
    host: HostOption = "127.0.0.1",
    port: PortOption = 30000,
    threads: options.ThreadsOption = 1,
    max_running: MaxRunningOption = 48,
    pace: PaceOption = None,
    slow: SlowOption = 0.0,
    fault: FaultOption = None,
    quiet: options.QuietFlag = False,
) -> None:
    """Serve a model on the CPU with SGLang's `/generate`, `/server_info` and `/health`.

    Greedy decoding only. Runs until interrupted.

    Examples:

        specpilot serve --target target/ --port 30000

        specpilot serve --target target/ --drafter drafter/ --mode chain --block 8

        specpilot serve --target target/ --drafter drafter/ --mode tree --block 16 --nodes 32

        specpilot serve --target target/ --fault logit-bias:after=2048
    """
    from specpilot_cli.engines.process import bind_port
    from specpilot_cli.engines.reference.faults import parse_fault
    from specpilot_cli.engines.reference.launch import require_engine, watch_parent
    from specpilot_cli.engines.reference.spec import SpecConfig

    watch_parent()
    spec = SpecConfig(mode=mode, block=block, n_nodes=nodes, scoring=scoring)
    wrong = None if fault is None else parse_fault(fault)
    bound = bind_port(port, host=host)  # before the slow part, so that a taken port fails at once
    require_engine()
    from specpilot_cli.engines.reference.engine import ReferenceEngine
    from specpilot_cli.engines.reference.server import ServerOptions
    from specpilot_cli.engines.reference.server import serve as run

    engine = ReferenceEngine(target, drafter, spec, dtype=dtype, threads=threads, fault=wrong)
    _announce(
        f"serving `{target}` ({mode}, {spec.rows} rows) on http://{host}:{port}", wrong, quiet
    )
    run(engine, ServerOptions(host, port, max_running, pace and pace / 1000, slow / 100), bound)


def _announce(what: str, fault: object, quiet: bool) -> None:
    from specpilot_cli.ui import ConsoleReporter

    reporter = ConsoleReporter(quiet=quiet)
    if fault is not None:
        reporter.warn(f"a fault is injected, later output is wrong on purpose: {fault}")
    reporter.note(what)
