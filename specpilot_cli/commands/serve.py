"""`specpilot serve`: the reference engine as an HTTP server."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from specpilot_cli.commands import options

_DECODING = "Decoding"
_SERVER = "Server"
_FAULT = "Fault injection (for audits)"


def serve(
    target: Annotated[
        Path, typer.Option("--target", metavar="DIR", help="Target model folder (BF16 or W12).")
    ],
    drafter: Annotated[
        Path | None, typer.Option("--drafter", metavar="DIR", help="DFlash2 drafter folder.")
    ] = None,
    mode: Annotated[
        Literal["ar", "chain", "tree"],
        typer.Option(
            "--mode",
            help="Plain decoding, the stock greedy chain, or a best-first tree.",
            rich_help_panel=_DECODING,
        ),
    ] = "ar",
    block: Annotated[
        int,
        typer.Option(
            "--block", min=2, help="Draft block, anchor included.", rich_help_panel=_DECODING
        ),
    ] = 8,
    nodes: Annotated[
        int,
        typer.Option("--nodes", min=1, help="Nodes of a tree.", rich_help_panel=_DECODING),
    ] = 16,
    scoring: Annotated[
        Literal["conditional", "marginal"],
        typer.Option("--scoring", help="How a tree ranks its nodes.", rich_help_panel=_DECODING),
    ] = "conditional",
    dtype: Annotated[
        Literal["float32", "bfloat16"],
        typer.Option("--dtype", help="Arithmetic of both models.", rich_help_panel=_DECODING),
    ] = "float32",
    host: Annotated[
        str, typer.Option("--host", help="Address to listen on.", rich_help_panel=_SERVER)
    ] = "127.0.0.1",
    port: Annotated[
        int,
        typer.Option(
            "--port", min=1, max=65535, help="Port to listen on.", rich_help_panel=_SERVER
        ),
    ] = 30000,
    threads: Annotated[
        int, typer.Option("--threads", min=1, help="CPU threads.", rich_help_panel=_SERVER)
    ] = 1,
    max_running: Annotated[
        int,
        typer.Option(
            "--max-running", min=1, help="Most requests in flight.", rich_help_panel=_SERVER
        ),
    ] = 48,
    fault_after: Annotated[
        int | None,
        typer.Option(
            "--fault-after",
            min=0,
            metavar="N",
            help="Make the output wrong on purpose: bias logits from output position N on.",
            rich_help_panel=_FAULT,
        ),
    ] = None,
    fault_every: Annotated[
        int,
        typer.Option(
            "--fault-every", min=1, help="Bias every n-th token id.", rich_help_panel=_FAULT
        ),
    ] = 7,
    fault_bias: Annotated[
        float, typer.Option("--fault-bias", help="Bias in logits.", rich_help_panel=_FAULT)
    ] = 2.0,
    quiet: options.QuietFlag = False,
) -> None:
    """Serve a model on the CPU with SGLang's `/generate`, `/server_info` and `/health`.

    Greedy decoding only. Runs until interrupted.

    Examples:

        specpilot serve --target target/ --port 30000

        specpilot serve --target target/ --drafter drafter/ --mode chain --block 8

        specpilot serve --target target/ --drafter drafter/ --mode tree --block 16 --nodes 32
    """
    from specpilot_cli.engines.process import bind_port
    from specpilot_cli.engines.reference.launch import require_engine, watch_parent
    from specpilot_cli.engines.reference.spec import LogitFault, SpecConfig
    from specpilot_cli.ui import ConsoleReporter

    watch_parent()
    spec = SpecConfig(mode=mode, block=block, n_nodes=nodes, scoring=scoring)
    fault = None
    if fault_after is not None:
        fault = LogitFault(after=fault_after, every=fault_every, bias=fault_bias)
    bound = bind_port(port, host=host)  # before the slow part, so that a taken port fails at once
    require_engine()
    from specpilot_cli.engines.reference.engine import ReferenceEngine
    from specpilot_cli.engines.reference.server import ServerOptions
    from specpilot_cli.engines.reference.server import serve as run

    reporter = ConsoleReporter(quiet=quiet)
    engine = ReferenceEngine(target, drafter, spec, dtype=dtype, threads=threads, fault=fault)
    if fault is not None:
        reporter.warn(f"fault injected: output from position {fault.after} on is wrong on purpose")
    reporter.note(f"serving `{target}` ({mode}, {spec.rows} rows) on http://{host}:{port}")
    run(engine, ServerOptions(host=host, port=port, max_running=max_running), bound)
