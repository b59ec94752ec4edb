"""`specpilot simulate measure`: step times of running servers, as `simulate batch` reads them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from specpilot_cli.commands import options

if TYPE_CHECKING:
    from specpilot_cli.engines.sglang.info import ServerFacts
    from specpilot_cli.schema.batch_times import BatchStepTimes
    from specpilot_cli.schema.step_profile import DeviceInfo
    from specpilot_cli.simulate.fit import StepSample
    from specpilot_cli.simulate.served import ServedPlan, ServedTimes

UrlOption = Annotated[
    list[str],
    typer.Option(
        "--url",
        metavar="URL",
        help="A server of the deployment; repeat for other speculative settings, plain decoding "
        "among them.",
    ),
]
ConcurrencyOption = Annotated[
    str, typer.Option(metavar="LIST", help="Requests in flight: a comma list.")
]
PromptTokensOption = Annotated[
    str, typer.Option(metavar="LIST", help="Prompt lengths of the timed steps.")
]
PrefillTokensOption = Annotated[
    str, typer.Option(metavar="LIST", help="Prompt lengths of the timed prefills.")
]
NewTokensOption = Annotated[
    int, typer.Option(min=16, max=65536, help="Output tokens of each request.")
]
RoundsOption = Annotated[
    int, typer.Option(min=1, max=1000, help="Repeats, after one that warms up.")
]
GpuOption = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="The servers' device, as in `specpilot ceiling --list`."),
]
TimeoutOption = Annotated[
    float, typer.Option(metavar="SECONDS", min=1.0, help="Limit of one request, seconds.")
]
TimesOutput = Annotated[
    Path | None,
    typer.Option("--output", "-o", metavar="FILE", help="Write the step times, `.json`."),
]


def measure(
    url: UrlOption,
    output: TimesOutput = None,
    concurrency: ConcurrencyOption = "1,4,12",
    prompt_tokens: PromptTokensOption = "64,512",
    prefill_tokens: PrefillTokensOption = "16,64,256,1024",
    new_tokens: NewTokensOption = 128,
    rounds: RoundsOption = 3,
    gpu: GpuOption = None,
    timeout: TimeoutOption = 600.0,
    seed: options.SeedOption = 0,
    as_json: options.JsonFlag = False,
    force: options.ForceFlag = False,
    quiet: options.QuietFlag = False,
) -> None:
    """Time the steps of running servers by requests in flight, for `simulate batch`.

    Steps are counted by the servers themselves. Give a server for each speculative setting, idle
    and of one deployment: one setting alone does not tell what rows, requests and drafting cost.

    Examples:

        specpilot simulate measure --url http://localhost:30000 --url http://localhost:30002 \\
          --gpu h200 -o batch-times.json

        specpilot simulate measure --url http://localhost:30000 --concurrency 1,8,32,64 --json
    """
    from specpilot_cli.io.json_file import write_json
    from specpilot_cli.report.json_out import build_envelope
    from specpilot_cli.simulate.served import batch_times

    options.check_new_file(output, ".json", where="-o", force=force)
    plan = _plan(concurrency, prompt_tokens, prefill_tokens, new_tokens, rounds)
    device = None if gpu is None else _gpu(gpu)
    servers = _servers(url, plan, seed, timeout, quiet=quiet)
    times, error = batch_times(
        servers,
        name=_name(output),
        device=device or _said(servers[0].facts),
        source=f"specpilot simulate measure, {rounds} rounds at {concurrency} requests in flight, "
        f"prompts of {prompt_tokens} tokens: medians, as a client sees them",
    )
    if output is not None:
        write_json(output, times, force=force)
    steps = [sample for one in servers for sample in one.samples]
    results = {"step_times": times, "steps": steps, "fit_mean_absolute_error_ratio": error}
    options.emit(
        build_envelope("simulate measure", results, seed=seed),
        as_json=as_json, text=lambda: _print(steps, times, error),
    )  # fmt: skip


def _plan(
    concurrency: str, prompt_tokens: str, prefill_tokens: str, new_tokens: int, rounds: int
) -> ServedPlan:
    from specpilot_cli.simulate.served import ServedPlan

    return ServedPlan(
        concurrency=_numbers(concurrency, "--concurrency", 4096),
        prompt_tokens=_numbers(prompt_tokens, "--prompt-tokens", 1 << 20),
        new_tokens=new_tokens,
        prefill_tokens=_numbers(prefill_tokens, "--prefill-tokens", 1 << 20),
        rounds=rounds,
    )


def _servers(
    urls: list[str], plan: ServedPlan, seed: int, timeout_s: float, *, quiet: bool
) -> list[ServedTimes]:
    from specpilot_cli.simulate.served import measure_server
    from specpilot_cli.ui import ConsoleReporter

    with ConsoleReporter(quiet) as reporter:
        return [
            measure_server(url, plan, seed=seed + index, timeout_s=timeout_s, reporter=reporter)
            for index, url in enumerate(urls)
        ]


def _numbers(text: str, where: str, most: int) -> tuple[int, ...]:
    from specpilot_cli.errors import InputError

    parts = [part.strip() for part in text.split(",")]
    good = all(re.fullmatch(r"[0-9]{1,7}", part) and 0 < int(part) <= most for part in parts)
    if not good:
        raise InputError(
            f"`{text}` is no list of numbers from 1 to {most}", where=where, hint="such as 1,4,12"
        )
    return tuple(sorted({int(part) for part in parts}))


def _gpu(name: str) -> DeviceInfo:
    from specpilot_cli.ceiling.peaks import load_gpu
    from specpilot_cli.schema.step_profile import DeviceInfo

    return DeviceInfo(name=load_gpu(name).title, kind="gpu", gpu_profile=name)


def _said(facts: ServerFacts) -> DeviceInfo:
    """The device as far as the server names it."""
    from specpilot_cli.schema.step_profile import DeviceInfo

    if facts.device == "cpu":
        return DeviceInfo(name="CPU", kind="cpu", threads=facts.threads or 1)
    return DeviceInfo(name=facts.device or "not said", kind="gpu")


def _name(output: Path | None) -> str:
    """The file's name where it can be that of step times."""
    stem = "measured" if output is None else output.stem.lower()
    return stem if re.fullmatch(r"[a-z0-9][a-z0-9.\-]*", stem) else "measured"


def _print(steps: list[StepSample], times: BatchStepTimes, error: float) -> None:
    from specpilot_cli.report.tables import Column, print_line, print_table
    from specpilot_cli.units import format_percent, format_seconds

    titles = ("in flight", "rows", "drafted rows", "tokens of context", "step")
    print_table(
        [Column(title, "right") for title in titles],
        [
            (
                str(item.requests), str(item.rows), str(item.draft_rows),
                f"{item.context_tokens:.0f}", format_seconds(item.step_s),
            )
            for item in steps
        ],
        title="measured decode steps",
    )  # fmt: skip
    print_table(
        [Column("prompt rows", "right"), Column("time to the first token", "right")],
        [(f"{p.amount:.0f}", format_seconds(p.seconds)) for p in times.prefill.points],
    )
    for note in times.notes:
        print_line(f"note: {note}")
    print_line(f"the fitted components are off by {format_percent(error)} on average")
