"""Parts of `specpilot paired-bench`: prompts, servers, noise, from options to what it measures."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from specpilot_cli.errors import InputError

if TYPE_CHECKING:
    from specpilot_cli.engines.base import EngineClient
    from specpilot_cli.paired_bench.run import Basis
    from specpilot_cli.paired_bench.stage import Stage
    from specpilot_cli.paired_bench.types import PromptForm, TokenPrompt
    from specpilot_cli.schema.prompts import Prompt
    from specpilot_cli.ui import Reporter


@dataclass(frozen=True, slots=True)
class PromptOptions:
    """Which requests, and how texts become tokens.

    files: JSONL files. benchmarks: as `load_benchmark` takes them. thinking: the template's switch,
    None leaves its default. seen: files with prompts that a sealed final may not hold.
    """

    files: tuple[Path, ...] = ()
    benchmarks: tuple[str, ...] = ()
    max_new_tokens: int = 2048
    tokenizer: Path | None = None
    chat: bool = False
    thinking: bool | None = None
    sealed: bool = False
    seen: tuple[Path, ...] = ()

    def check(self) -> None:
        """InputError for options that do not go together."""
        if not self.files and not self.benchmarks:
            raise InputError(
                "--prompts is missing", hint="a JSONL file, one prompt a line, or --benchmark NAME"
            )
        if self.chat and self.tokenizer is None:
            raise InputError("--chat needs --tokenizer", hint="the folder holds the chat template")
        if self.thinking is not None and not self.chat:
            raise InputError("--thinking needs --chat", hint="it is a switch of the chat template")
        if self.sealed and self.files and not self.seen:
            raise InputError(
                "--sealed needs --seen FILE",
                hint="the prompts that development used, so that the final can be told apart",
            )

    def inputs(self) -> list[Path]:
        """Every file that goes into the result."""
        local = [Path(spec.partition("#")[0].partition("=")[2]) for spec in self.benchmarks
                 if "=" in spec]  # fmt: skip
        folder = [] if self.tokenizer is None else [self.tokenizer]
        return [*self.files, *local, *folder]


@dataclass(frozen=True, slots=True)
class LoadedPrompts:
    """Texts, and where benchmarks came from."""

    texts: list[Prompt]
    origins: list[dict[str, str]]


def load_prompts(options: PromptOptions) -> LoadedPrompts:
    """All prompts, those of files first. Raises InputError as the loaders do."""
    from specpilot_cli.io.prompts_file import read_prompts
    from specpilot_cli.paired_bench.benchmarks import load_benchmark
    from specpilot_cli.paired_bench.sealed import check_unseen
    from specpilot_cli.schema.prompts import check_unique_ids

    part: Literal["dev", "unseen"] = "unseen" if options.sealed else "dev"
    texts = [prompt for file in options.files for prompt in read_prompts(file)]
    loaded = [
        load_benchmark(spec, max_new_tokens=options.max_new_tokens, part=part)
        for spec in options.benchmarks
    ]
    texts += [prompt for one in loaded for prompt in one.prompts]
    check_unique_ids(texts, where="prompts")
    if options.sealed:
        seen = [prompt for file in options.seen for prompt in read_prompts(file)]
        check_unseen(texts, seen, where="--sealed")
    origins = [
        {"benchmark": one.name, "source": one.source, "sha256": one.sha256,
         "licence": one.licence, "part": part}
        for one in loaded
    ]  # fmt: skip
    return LoadedPrompts(texts, origins)


def tokenize_prompts(
    loaded: LoadedPrompts, options: PromptOptions, baseline: EngineClient | None,
    reporter: Reporter,
) -> tuple[list[TokenPrompt], PromptForm]:  # fmt: skip
    """Token ids of every prompt, through the chat template if asked, and how they were made.

    baseline: tokenises where no folder is given; None where no server runs yet.
    """
    from specpilot_cli.io.chat_template import ChatTemplate
    from specpilot_cli.io.hashing import sha256_file
    from specpilot_cli.io.tokenizer_file import TokenizerFile
    from specpilot_cli.paired_bench.tokens import texts_sha256, tokenize, tokenize_with_server
    from specpilot_cli.paired_bench.types import PromptForm

    form = PromptForm(texts_sha256(loaded.texts), sealed=options.sealed)
    if options.tokenizer is None:
        if baseline is None:
            raise InputError(
                "--tokenizer is missing",
                hint="servers are started for each run, so none can tokenise beforehand",
            )
        return tokenize_with_server(loaded.texts, baseline, reporter=reporter), form
    tokenizer = TokenizerFile(options.tokenizer)
    folder = options.tokenizer
    file = folder / "tokenizer.json" if folder.is_dir() else folder
    form = replace(form, tokenizer_sha256=sha256_file(file))
    if not options.chat:
        return tokenize(loaded.texts, tokenizer.encode), form
    template = ChatTemplate(folder)
    rendered = [
        prompt.model_copy(update={"text": template.render(prompt.text, thinking=options.thinking)})
        for prompt in loaded.texts
    ]
    form = replace(form, template_sha256=template.sha256, thinking=options.thinking)
    return tokenize(rendered, tokenizer.encode_plain), form


@dataclass(frozen=True, slots=True)
class SystemOptions:
    """Which servers: by role a URL, or something to start; and on which GPUs."""

    sources: Mapping[str, str]
    gpus: tuple[str, ...] = ()
    fresh: bool = False
    timeout_s: float = 600.0
    stall_s: float = 60.0

    def check(self, needed: Sequence[str]) -> None:
        """InputError for a missing system, or servers that cannot be started afresh."""
        from specpilot_cli.apply.bench_systems import is_launched

        for name in needed:
            if name not in self.sources:
                raise InputError(
                    f"--{name} is missing",
                    hint="give http://host:port, RECIPE:stock, a launch file or a sweep's result",
                )
        if not self.starts_fresh:
            return
        if "baseline_again" in self.sources:
            raise InputError(
                "--baseline-again is for servers that stay",
                hint="every A/A session launches the baseline twice",
            )
        for name, source in self.sources.items():
            if not is_launched(source):
                raise InputError(
                    f"--{name} is a server that runs: it cannot be launched for each run",
                    hint="give a recipe's system or a launch file, or leave out --fresh and --gpus",
                )

    @property
    def starts_fresh(self) -> bool:
        """Whether every run launches its servers."""
        return self.fresh or len(self.gpus) > 1

    def shown(self, source: str) -> str:
        """What the server at `source` is in this comparison."""
        shown = {"ar": "AR", "baseline_again": "second baseline"}
        names = [shown.get(name, name) for name, own in self.sources.items() if own == source]
        return f"{' and '.join(names)} server"


@dataclass(slots=True)
class OpenedSystems:
    """The stage of a benchmark; baseline: a client of it if it runs already.

    sweep: where the baseline is a sweep's fastest.
    """

    stage: Stage
    baseline: EngineClient | None
    sweep: dict[str, Any] | None = None


@contextmanager
def opened(options: SystemOptions, work: Path, reporter: Reporter) -> Iterator[OpenedSystems]:
    """Clients of servers that run, and everything that must be started first.

    Raises MachineError for a server that is not there or does not start.
    """
    from specpilot_cli.apply.bench_systems import FreshStage, find_plan, is_launched, resident
    from specpilot_cli.engines.client_process import ProcessEngine
    from specpilot_cli.paired_bench.stage import ResidentStage

    with ExitStack() as stack:
        plans, sweep = {}, None
        for name, source in options.sources.items():
            if is_launched(source):
                plans[name], found = find_plan(source, name, work, reporter)
                sweep = found if name == "baseline" else sweep
        # One engine per server: two names at one URL then share its prefix cache knowingly.
        urls = {source: stack.enter_context(
                    ProcessEngine(source, options.timeout_s, stall_timeout_s=options.stall_s,
                                  name=options.shown(source)))
                for source in dict.fromkeys(options.sources.values()) if not is_launched(source)
               }  # fmt: skip
        for engine in urls.values():
            engine.health()
        if options.starts_fresh:
            yield OpenedSystems(FreshStage(plans, options.gpus, work, reporter), None, sweep)
            return
        device = options.gpus[0] if options.gpus else None
        started = stack.enter_context(resident(plans, device, work, reporter)) if plans else {}
        engines: dict[str, EngineClient] = {
            name: started[name] if name in started else urls[source]
            for name, source in options.sources.items()
        }
        yield OpenedSystems(ResidentStage(engines), engines["baseline"], sweep)


def basis_of(noise: Path | None, form: PromptForm, batches: tuple[int, ...]) -> Basis:
    """The calibration in `noise`, if there is one. InputError unless it is one, at these sizes."""
    from specpilot_cli.io.hashing import sha256_file
    from specpilot_cli.paired_bench.run import Basis
    from specpilot_cli.paired_bench.saved import read_saved

    if noise is None:
        return Basis(form=form)
    _, summary = read_saved(noise)
    if summary.noise is None or summary.noise.source is not None:
        raise InputError(
            f"`{noise}` holds no A/A sessions of its own",
            where="--noise",
            hint="make it with --calibrate K -o FILE.json",
        )
    if summary.settings.batches != batches:
        raise InputError(
            f"`{noise}` was measured at {summary.settings.batches} requests in flight, "
            f"not {batches}",
            where="--noise",
            hint="noise depends on the batch size: calibrate at the same one",
        )
    said = summary.environment.get("server_info")
    info = said.get("baseline") if isinstance(said, dict) else None
    if not isinstance(info, dict):
        raise InputError(
            f"`{noise}` does not say which baseline it was measured on",
            where="--noise",
            hint="the file was edited or damaged: calibrate again",
        )
    return Basis(replace(summary.noise, source=sha256_file(noise)), form, info)


def parse_batches(text: str) -> tuple[int, ...]:
    """`1,8,32` as numbers. InputError for anything else."""
    try:
        return tuple(int(word) for word in text.split(","))
    except ValueError as error:
        raise InputError(
            f"`{text}` is no list of batch sizes", where="--batch", hint="for example 1,8,32"
        ) from error


@dataclass(frozen=True, slots=True)
class OutputOptions:
    """What is kept: the result and its journal, answers for token-force, a table; how it is shown.

    inputs: files that no output may be.
    """

    output: Path | None
    save_outputs: Path | None = None
    export: Path | None = None
    redact: bool = False
    resume: bool = False
    force: bool = False
    as_json: bool = False
    exit_zero: bool = False
    quiet: bool = False
    inputs: tuple[Path | None, ...] = ()

    @property
    def journal(self) -> Path | None:
        """The journal lies beside the result; without a result file there is none."""
        if self.output is None or str(self.output) == "-":
            return None
        return self.output.with_suffix(".journal.jsonl")

    @contextmanager
    def work_folder(self) -> Iterator[Path]:
        """Where servers that are started keep their logs: beside the result, or thrown away."""
        if self.output is not None and self.journal is not None:
            yield self.journal.with_name(f"{self.output.stem}.servers")
            return
        with tempfile.TemporaryDirectory(prefix="specpilot-bench-") as folder:
            yield Path(folder)
