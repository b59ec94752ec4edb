"""One `token-force` run: open the servers, gather the answers, judge them."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from specpilot_cli.engines.http_client import HttpEngine
from specpilot_cli.errors import InputError
from specpilot_cli.io.jsonl import write_jsonl
from specpilot_cli.io.tokenizer_file import TokenizerFile
from specpilot_cli.schema.outputs import OutputRecord
from specpilot_cli.token_force.collect import (
    Question,
    collect,
    is_url,
    questions_from_outputs,
    questions_from_prompts,
    read_outputs,
    select,
    with_known_ids,
)
from specpilot_cli.token_force.config import TokenForceSettings
from specpilot_cli.token_force.result import TokenForceResult
from specpilot_cli.token_force.run import run_token_force
from specpilot_cli.ui import Reporter, SilentReporter

Role = Literal["system", "stock", "ar"]
_ROLES: tuple[Role, ...] = ("system", "stock", "ar")
_STALL_LIMIT_S = 120.0

# What a server says about itself that a reader of the result needs.
_RECORDED_INFO = (
    "version",
    "model_path",
    "dtype",
    "quantization",
    "speculative_algorithm",
    "speculative_draft_model_path",
    "speculative_num_draft_tokens",
    "enable_fp32_lm_head",
    "enable_deterministic_inference",
    "specpilot",
)


@dataclass(frozen=True, slots=True)
class Sources:
    """Where everything comes from; `system`, `stock` and `ar` are URLs or JSONL files.

    timeout_s: limit of one request. save_outputs: folder for the answers of live servers.
    """

    system: str
    stock: str
    scorer: str
    ar: str | None = None
    prompts: Path | None = None
    tokenizer: Path | None = None
    limit: int | None = None
    concurrency: int = 8
    timeout_s: float = 600.0
    save_outputs: Path | None = None
    overwrite: bool = False

    def of(self, role: Role) -> str | None:
        """URL or file of one role."""
        return {"system": self.system, "stock": self.stock, "ar": self.ar}[role]

    def live(self) -> tuple[Role, ...]:
        """Roles whose answers come from a server."""
        given = {role: self.of(role) for role in _ROLES}
        return tuple(role for role, source in given.items() if source and is_url(source))

    def roles(self, url: str) -> str:
        """What the server at `url` is in this audit."""
        named = ["AR" if role == "ar" else role for role in self.live() if self.of(role) == url]
        return " and ".join([*named, "scorer"] if url == self.scorer else named)


def run_session(
    sources: Sources,
    settings: TokenForceSettings,
    *,
    reporter: Reporter = SilentReporter(),
) -> tuple[TokenForceResult, dict[str, Any]]:
    """Gather all answers and judge them; also returns what the servers say about themselves.

    Cheap failures come first: options, files, then every server's health, before any of them
    is asked to work.
    """
    _check(sources, settings)
    text = None if sources.tokenizer is None else TokenizerFile(sources.tokenizer)
    with ExitStack() as stack:
        run = _Session(sources, stack, reporter)
        run.load(text)
        engines = run.describe_engines()
        answers = run.gather()
        scorer = run.engine(sources.scorer)
        scorer.flush_cache()
        result = run_token_force(
            answers["system"],
            answers["stock"],
            answers.get("ar"),
            scorer,
            settings=settings,
            probe=run.engine(sources.stock) if is_url(sources.stock) else None,
            text=text,
            reporter=reporter,
        )
    return result, engines


def _check(sources: Sources, settings: TokenForceSettings) -> None:
    if not is_url(sources.scorer):
        raise InputError(
            f"the scorer must be a server, not `{sources.scorer}`",
            where="--scorer",
            hint="write it as http://host:port",
        )
    if sources.ar is None and settings.delta_nats is None:
        raise InputError(
            "delta needs AR answers to calibrate it, or a value",
            hint="give --ar URL|FILE (stock's engine without speculation; the scorer will do), "
            "or --delta NATS",
        )


@dataclass(slots=True)
class _Session:
    """Open engines and loaded files of one run."""

    sources: Sources
    stack: ExitStack
    reporter: Reporter
    records: dict[Role, list[OutputRecord]] = field(default_factory=dict)
    questions: list[Question] = field(default_factory=list)
    _engines: dict[str, HttpEngine] = field(default_factory=dict)

    def engine(self, url: str) -> HttpEngine:
        """The one client of a URL; roles may share a server."""
        if url not in self._engines:
            timeout_s = self.sources.timeout_s
            self._engines[url] = self.stack.enter_context(
                HttpEngine(
                    url,
                    timeout_s,
                    stall_timeout_s=min(_STALL_LIMIT_S, timeout_s),
                    name=f"{self.sources.roles(url)} server",
                )
            )
        return self._engines[url]

    def load(self, text: TokenizerFile | None) -> None:
        """Read recorded answers and prompts."""
        for role in _ROLES:
            source = self.sources.of(role)
            if source is not None and not is_url(source):
                self.records[role] = read_outputs(source)
        everything = [record for rows in self.records.values() for record in rows]
        if self.sources.prompts is not None:
            encode = None if text is None else text.encode
            questions = questions_from_prompts(self.sources.prompts, encode=encode)
            questions = with_known_ids(questions, everything)
        else:
            questions = self._recorded_questions()
        limit = self.sources.limit
        self.questions = questions if limit is None else questions[:limit]

    def _recorded_questions(self) -> list[Question]:
        base = self.records.get("system") or self.records.get("stock")
        if base is None:
            raise InputError(
                "no prompts: neither --prompts nor recorded answers of the system or of stock",
                where="--prompts",
                hint="give the prompts as JSONL with --prompts",
            )
        if all(role in self.records for role in _ROLES if self.sources.of(role) is not None):
            # Nothing will be asked again, so the limits of the requests do not matter.
            return [
                Question(
                    record.request_id,
                    record.benchmark,
                    record.max_new_tokens or len(record.output_ids),
                    record.prompt_ids,
                )
                for record in base
            ]
        return questions_from_outputs(base)

    def describe_engines(self) -> dict[str, Any]:
        """Check every server's health; return what each says about itself."""
        urls: dict[str, str] = {"scorer": self.sources.scorer}
        for role in self.sources.live():
            urls[role] = str(self.sources.of(role))
        found: dict[str, Any] = {}
        for name, url in urls.items():
            self.engine(url).health()
            info = self.engine(url).server_info()
            found[name] = {key: info[key] for key in _RECORDED_INFO if key in info}
            found[name]["url"] = url
        self._warn_about_scorer(found["scorer"])
        return found

    def _warn_about_scorer(self, info: Mapping[str, Any]) -> None:
        if info.get("speculative_algorithm"):
            self.reporter.warn("the scorer runs speculative decoding; it should be plain stock")
        if info.get("enable_fp32_lm_head") is False:
            self.reporter.warn(
                "the scorer's LM head is not float32 (--enable-fp32-lm-head): near-ties may "
                "count as mismatches, in both systems alike"
            )

    def gather(self) -> dict[Role, list[OutputRecord]]:
        """Answers of every role to the questions: recorded, or asked now, one role at a time."""
        answers: dict[Role, list[OutputRecord]] = {}
        for role in _ROLES:
            source = self.sources.of(role)
            if source is None:
                continue
            if role == "ar" and role in self.records:
                answers[role] = self.records[role]  # any share of the prompts can calibrate
            elif role in self.records:
                answers[role] = select(self.records[role], self.questions, where=source)
            else:
                answers[role] = self._ask(role, source)
        return answers

    def _ask(self, role: Role, url: str) -> list[OutputRecord]:
        engine = self.engine(url)
        engine.flush_cache()
        records = collect(
            engine,
            self.questions,
            concurrency=self.sources.concurrency,
            label=role,
            reporter=self.reporter,
        )
        # Whoever answered text first has decided the prompt ids for everyone else.
        self.questions = with_known_ids(self.questions, records)
        if self.sources.save_outputs is not None:
            path = self.sources.save_outputs / f"{role}.jsonl"
            path.parent.mkdir(parents=True, exist_ok=True)
            write_jsonl(path, records, force=self.sources.overwrite)
            self.reporter.note(f"saved {len(records)} answers to {path}")
        return records
