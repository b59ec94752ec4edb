"""One `token-force` run: open the servers, gather the answers, judge them or calibrate δ."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from specpilot_cli.engines.http_client import HttpEngine
from specpilot_cli.engines.launches import relaunched
from specpilot_cli.engines.openai_client import OpenAiEngine, is_openai
from specpilot_cli.errors import InputError, MeasurementInvalid, SpecPilotError
from specpilot_cli.io.jsonl import write_jsonl
from specpilot_cli.io.tokenizer_file import TokenizerFile
from specpilot_cli.schema.outputs import OutputRecord
from specpilot_cli.token_force.accuracy import accuracy_change
from specpilot_cli.token_force.calibration import (
    Calibration,
    read_calibration,
    run_calibration,
    stranger_warnings,
)
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
from specpilot_cli.token_force.coverage import concurrency_warning
from specpilot_cli.token_force.greedy import check_greedy
from specpilot_cli.token_force.result import TokenForceResult
from specpilot_cli.token_force.run import run_token_force
from specpilot_cli.token_force.scorer import Scorer
from specpilot_cli.token_force.scorers import open_local, parse_scorer
from specpilot_cli.token_force.sources import ROLES, Role, Sources
from specpilot_cli.token_force.threshold import Threshold
from specpilot_cli.ui import Reporter, SilentReporter

_STALL_LIMIT_S = 120.0

# What a server says about itself that a reader of the result needs.
_RECORDED_INFO = (
    "api",
    "version",
    "model_path",
    "dtype",
    "quantization",
    "max_running_requests",
    "speculative_algorithm",
    "speculative_draft_model_path",
    "speculative_num_draft_tokens",
    "enable_fp32_lm_head",
    "enable_deterministic_inference",
    "specpilot",
)
Engine = HttpEngine | OpenAiEngine
Engines = dict[str, Any]


def run_session(
    sources: Sources,
    settings: TokenForceSettings,
    *,
    reporter: Reporter = SilentReporter(),
) -> tuple[TokenForceResult, Engines]:
    """Gather all answers and judge them; also returns what the servers say about themselves.

    Cheap failures come first: options, files, then every server's health, before any of them
    is asked to work.
    """
    sources.check()
    threshold, calibrated_on = _given_threshold(sources)
    with ExitStack() as stack:
        run = _Session(sources, stack, reporter)
        engines = run.open()
        for warning in stranger_warnings(calibrated_on, engines):
            reporter.warn(warning)
        answers = run.gather()
        probe = sources.probe_url()
        result = run_token_force(
            answers["system"],
            answers["stock"],
            answers.get("ar"),
            run.scorer,
            settings=settings,
            threshold=threshold,
            probe=None if probe is None else run.engine(probe),
            text=run.text,
            reporter=reporter,
        )
        run.check_servers()
        result = run.with_batches_compared(run.with_accuracy(result, answers))
    return result, engines


def run_calibration_session(
    sources: Sources, *, reporter: Reporter = SilentReporter()
) -> tuple[Calibration, Engines]:
    """Gather stock's and AR's answers and calibrate δ; failures as in `run_session`."""
    sources.check()
    with ExitStack() as stack:
        run = _Session(sources, stack, reporter)
        engines = run.open()
        answers = run.gather()
        found = run_calibration(answers["stock"], answers["ar"], run.scorer, reporter=reporter)
        run.check_servers()
    return found, engines


def _given_threshold(sources: Sources) -> tuple[Threshold | None, Mapping[str, Any]]:
    if isinstance(sources.delta, Path):
        return read_calibration(sources.delta)
    return None, {}


@dataclass(slots=True)
class _Session:
    """Open engines and loaded files of one run."""

    sources: Sources
    stack: ExitStack
    reporter: Reporter
    records: dict[Role, list[OutputRecord]] = field(default_factory=dict)
    questions: list[Question] = field(default_factory=list)
    text: TokenizerFile | None = None
    _scorer: Scorer | None = None
    _engines: dict[str, Engine] = field(default_factory=dict)
    _began: dict[str, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def scorer(self) -> Scorer:
        """Whoever scores; only after `open`."""
        if self._scorer is None:
            raise RuntimeError("the session is not open")
        return self._scorer

    def open(self) -> Engines:
        """Read files, check every server's health, load a local scorer; what engines say."""
        if self.sources.tokenizer is not None:
            self.text = TokenizerFile(self.sources.tokenizer)
        self._load()
        found = self._describe()
        local = parse_scorer(self.sources.scorer)
        if local is None:
            self._scorer = self.engine(self.sources.scorer)
            self._warn_about_scorer(found["scorer"])
        else:
            self._scorer, about = open_local(local)
            found["scorer"] = dict(about)
        if self.text is None:
            self.text = _tokenizer_beside(found["scorer"].get("model_path"))
        return found

    def engine(self, url: str) -> Engine:
        """The one client of a URL; roles may share a server."""
        if url not in self._engines:
            timeout_s, name = self.sources.timeout_s, f"{self.sources.roles(url)} server"
            engine: Engine
            if is_openai(url):
                engine = OpenAiEngine(url, timeout_s, name=name)
            else:
                stall_s = min(_STALL_LIMIT_S, timeout_s)
                engine = HttpEngine(url, timeout_s, stall_timeout_s=stall_s, name=name)
            self.stack.callback(engine.close)
            self._engines[url] = engine
        return self._engines[url]

    def _load(self) -> None:
        """Read recorded answers and prompts."""
        for role in ROLES:
            source = self.sources.of(role)
            if source is not None and not is_url(source):
                self.records[role] = read_outputs(source)
        everything = [record for rows in self.records.values() for record in rows]
        if self.sources.prompts is not None:
            encode = None if self.text is None else self.text.encode
            questions = questions_from_prompts(self.sources.prompts, encode=encode)
            questions = with_known_ids(questions, everything)
        else:
            questions = self._recorded_questions()
        limit = self.sources.limit
        self.questions = [self._adapted(q) for q in questions[:limit]]

    def _adapted(self, question: Question) -> Question:
        return replace(
            question,
            max_new_tokens=self.sources.max_new_tokens or question.max_new_tokens,
            ignore_eos=self.sources.ignore_eos,
        )

    def _recorded_questions(self) -> list[Question]:
        base = self.records.get("system") or self.records.get("stock")
        if base is None:
            raise InputError(
                "no prompts: neither --prompts nor recorded answers of the system or of stock",
                where="--prompts",
                hint="give the prompts as JSONL with --prompts",
            )
        if all(role in self.records for role in ROLES if self.sources.of(role) is not None):
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

    def _describe(self) -> Engines:
        """Check every server's health; return what each says about itself."""
        found: Engines = {}
        for name, url in self.sources.urls().items():
            self.engine(url).health()
            info = self.engine(url).server_info()
            self._began[url] = info
            found[name] = {key: info[key] for key in _RECORDED_INFO if key in info}
            found[name]["url"] = url
            most = info.get("max_running_requests")
            if name in ROLES and isinstance(most, int) and most < self.sources.concurrency:
                self.reporter.warn(
                    f"the {name} server runs {most} requests at one time, fewer than the "
                    f"{self.sources.concurrency} asked for"
                )
        return found

    def _warn_about_scorer(self, info: Mapping[str, Any]) -> None:
        if info.get("speculative_algorithm"):
            self.reporter.warn("the scorer runs speculative decoding; it should be plain stock")
        if info.get("enable_fp32_lm_head") is False:
            self.reporter.warn(
                "the scorer's LM head is not float32 (--enable-fp32-lm-head): near-ties may "
                "count as mismatches, in both systems alike"
            )

    def check_servers(self) -> None:
        """MeasurementInvalid for a server that was started anew since the run began."""
        for url, before in self._began.items():
            changed = relaunched(before, self.engine(url).server_info())
            if changed:
                raise MeasurementInvalid(
                    f"the {self.sources.roles(url)} server at {url} was started anew during the "
                    f"audit; changed: {', '.join(changed)}",
                    hint="audit again, keep every server running until the end, and give each an "
                    "address of its own",
                )

    def gather(self) -> dict[Role, list[OutputRecord]]:
        """Answers of every role to the questions: recorded, or asked now, one role at a time."""
        answers: dict[Role, list[OutputRecord]] = {}
        for role in ROLES:
            source = self.sources.of(role)
            if source is None:
                continue
            if role == "ar" and role in self.records:
                answers[role] = self.records[role]  # any share of the prompts can calibrate
            elif role in self.records:
                answers[role] = select(self.records[role], self.questions, where=source)
            else:
                answers[role] = self._ask(role, source)
        scorer = self.sources.scorer
        if is_url(scorer):
            self.engine(scorer).flush_cache()
        return answers

    def _ask(self, role: Role, url: str) -> list[OutputRecord]:
        engine = self.engine(url)
        check_greedy(
            engine, self.questions, self.scorer, label=f"the {self.sources.roles(url)} server"
        )
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

    def with_accuracy(
        self, result: TokenForceResult, answers: Mapping[Role, list[OutputRecord]]
    ) -> TokenForceResult:
        """The result with the paired accuracy change, where prompts hold answers."""
        right = {q.request_id: q.answer for q in self.questions if q.answer is not None}
        if not right:
            return result
        if self.text is None:
            self.reporter.warn("no --tokenizer, so the prompts' answers are not compared")
            return result
        found = accuracy_change(answers["system"], answers["stock"], right, self.text)
        return replace(result, accuracy=found)

    def with_batches_compared(self, result: TokenForceResult) -> TokenForceResult:
        """The result, with a warning where recorded answers were made in batches of another size.

        Answers asked now all have the same concurrency.
        """
        warning = concurrency_warning(*result.coverage)
        if warning is None or {"system", "stock"} <= set(self.sources.live()):
            return result
        self.reporter.warn(warning)
        return replace(result, warnings=(*result.warnings, warning))


def _tokenizer_beside(model_path: Any) -> TokenizerFile | None:
    """The tokenizer of a model folder on this machine, to show events as text; never encodes."""
    try:
        folder = Path(model_path) if isinstance(model_path, str) else None
        if folder is None or not (folder / "tokenizer.json").is_file():
            return None
        return TokenizerFile(folder)
    except (SpecPilotError, OSError, ValueError):  # a path may be anything: too long, half text
        return None  # ids are shown instead
