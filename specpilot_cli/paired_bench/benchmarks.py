"""The paper's five benchmarks, from files at hand or from the Hub, and this project's own prompts.

A benchmark is only comparable between people if it is the same text, so every source is pinned:
by the SHA-256 of upstream's and of the Hub's file, or by that of all questions, whatever file they
came in. A source that matches neither is refused until the user pins it. Nothing is bundled but the
own prompts; the licences are those of the data's authors. The wording around a question is the
usual one (DFlash, SpecForge), so that tokens per step can be compared.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from specpilot_cli.errors import InputError, MachineError
from specpilot_cli.io.hub import fetch_dataset_file
from specpilot_cli.io.prompts_file import read_prompts
from specpilot_cli.io.table_file import read_table, require_parquet
from specpilot_cli.paths import bundled
from specpilot_cli.schema.prompts import Prompt

OWN = "own"
Part = Literal["dev", "unseen", "all"]
Row = Mapping[str, Any]

_BOXED = "\nPlease reason step by step, and put your final answer within \\boxed{}."
_LEAST_PIN = 16
_TEXT_KEYS = ("prompt", "text", "question", "problem", "instruction", "turns")


@dataclass(frozen=True, slots=True)
class HubFile:
    """A dataset's file on the Hub, at one commit."""

    repo: str
    revision: str
    file: str


@dataclass(frozen=True, slots=True)
class Benchmark:
    """One benchmark: how its rows become prompts, where it lives, and what it must hold.

    home: where upstream's form is seen. rows: questions in the whole set. hub: None where the set
    is the user's own, which nothing but a pin of the user's holds. pins: SHA-256 of files that are
    upstream's, and what each is. texts_pin: of all questions, see `texts_digest`. keep: rows that
    belong to it, where a file holds more.
    """

    name: str
    title: str
    licence: str
    home: str
    rows: int
    hub: HubFile | None
    question: Callable[[Row], Any]
    wrap: Callable[[str], str]
    pins: Mapping[str, str]
    texts_pin: str | None = None
    keep: Callable[[Row], bool] = lambda row: True


@dataclass(frozen=True, slots=True)
class LoadedBenchmark:
    """Prompts with their origin; sha256 is that of the file."""

    name: str
    prompts: tuple[Prompt, ...]
    source: str
    sha256: str
    licence: str


def _code_task(question: str) -> str:
    return (
        "Write a solution to the following problem and make sure that it passes the tests:\n"
        f"```python\n{question}\n```"
    )


def _in_mbpp_test(row: Row) -> bool:
    """Upstream's one file holds every split; the test split is tasks 11 to 510."""
    return 11 <= int(row.get("task_id", 11)) <= 510


_UPSTREAM, _HUB = "upstream's file", "the Hub's {}"

# The Hub's files were hashed by several independent projects, at the very commits named here.
BENCHMARKS = {
    benchmark.name: benchmark
    for benchmark in (
        Benchmark(
            "gsm8k", "GSM8K, test", "MIT", "https://github.com/openai/grade-school-math", 1319,
            HubFile(
                "openai/gsm8k", "740312add88f781978c0658806c59bc2815b9866",
                "main/test-00000-of-00001.parquet",
            ),
            lambda row: row["question"], lambda text: text + _BOXED,
            {
                "ee7b8da9e381df27b9e3f7758a159ab2bdaa4dbaa910546cbbc47e0cb44e4f59": _HUB,
                "3730d312f6e3440559ace48831e51066acaca737f6eabec99bccb9e4b3c39d14": _UPSTREAM,
            },
        ),
        Benchmark(
            "math500", "MATH-500", "MIT", "https://github.com/openai/prm800k", 500,
            HubFile(
                "HuggingFaceH4/MATH-500", "6e4ed1a2a79af7d8630a6b768ec859cb5af4d3be", "test.jsonl"
            ),
            lambda row: row["problem"], lambda text: text + _BOXED,
            {"35dc41080a3680858b27fa7e0533d2d547825316fc5dafe5d316f4ccc5a06132": _HUB},
        ),
        Benchmark(
            "humaneval", "HumanEval", "MIT", "https://github.com/openai/human-eval", 164,
            HubFile(
                "openai/openai_humaneval", "7dce6050a7d6d172f3cc5c32aa97f52fa1a2e544",
                "openai_humaneval/test-00000-of-00001.parquet",
            ),
            lambda row: row["prompt"], _code_task,
            {
                "2f2871a15fbc95b6c683043359f4ed8e144c5a1c4f24f25f66bc51f598dfcfb6": _HUB,
                "b796127e635a67f93fb35c04f4cb03cf06f38c8072ee7cee8833d7bee06979ef": _UPSTREAM,
            },
            texts_pin="8fe0e9352883559eb2e749f13211a07fd40c7f098fc5da165ebdac7abb8b734e",
        ),
        Benchmark(
            "mbpp", "MBPP, test", "CC-BY-4.0",
            "https://github.com/google-research/google-research/tree/master/mbpp", 500,
            HubFile(
                "google-research-datasets/mbpp", "4bb6404fdc6cacfda99d4ac4205087b89d32030c",
                "full/test-00000-of-00001.parquet",
            ),
            lambda row: row.get("text", row.get("prompt")), lambda text: text,
            {
                "566fd53060ffba5766dace1d1e2f4c38906781526de222b0dfbdbc325b696c77": _HUB,
                "ccf64ceae9c5403bf50a044cb6d505bfd2a2963ee58338ba268fd65beab92a9f": _UPSTREAM,
            },
            keep=_in_mbpp_test,
        ),
        Benchmark(
            "mt-bench", "MT-Bench, first turns", "Apache-2.0",
            "https://github.com/lm-sys/FastChat", 80,
            HubFile(
                "HuggingFaceH4/mt_bench_prompts", "e3a795c5e9a82ee40611c416b8a7786c73198991",
                "raw/question.jsonl",
            ),
            lambda row: row.get("turns", row.get("prompt"))[0], lambda text: text,
            {"119565adbab82227089cefdb44c8d7e2cf04dc0a0ec233634c82e7d4e2a944f7": _UPSTREAM},
            texts_pin="bf2ea6a82cbf5995ea2ff687adcfa76321a5b579bbe769c5d54c9aca52e378e4",
        ),
    )
}  # fmt: skip


def load_benchmark(spec: str, *, max_new_tokens: int, part: Part = "dev") -> LoadedBenchmark:
    """Load `NAME`, `NAME=FILE`, or either with `#SHA256` to pin a source that is not known.

    A name of none of the five takes any file whose rows hold a text, see `_anyones`.

    part: the half of the questions to take, split by the hash of each question, so that one half
    stays unseen whatever the order of the file. max_new_tokens: limit of every answer.

    Raises InputError for an unknown name, a file of another form, or one that is not pinned;
    MachineError if the Hub cannot be asked.
    """
    body, _, pin = spec.partition("#")
    name, _, given = body.partition("=")
    if name == OWN:
        return _own(given, max_new_tokens, part)
    benchmark = BENCHMARKS.get(name)
    if benchmark is None and given and name:
        benchmark = _anyones(name)
    if benchmark is None:
        raise InputError(
            f"unknown benchmark `{name}`",
            where="--benchmark",
            hint=f"known: {', '.join([*BENCHMARKS, OWN])}; any other set is read from a file of "
            f"yours: --benchmark {name or 'NAME'}=FILE",
        )
    hub = benchmark.hub
    path = Path(given) if given or hub is None else _from_hub(benchmark, hub)
    source = given if given or hub is None else f"{hub.repo}/{hub.file}"
    questions = _questions(benchmark, read_table(path), path)
    digest = _file_digest(path)
    if pin:
        _check_users_pin(digest, pin, source)
    elif hub is not None:
        _check_known(benchmark, hub, digest, questions, source)
    prompts = [
        Prompt(
            request_id=f"{name}-{number:04d}",
            benchmark=name,
            text=benchmark.wrap(question),
            max_new_tokens=max_new_tokens,
        )
        for number, question in enumerate(questions)
    ]
    return LoadedBenchmark(name, _taken(prompts, part), source, digest, benchmark.licence)


def _anyones(name: str) -> Benchmark:
    """A user's own set: the text stands under the first of `_TEXT_KEYS` that a row has.

    A list there is a conversation, of which the first turn is taken. Nothing is pinned but by the
    user; the result holds the file's hash.
    """

    def question(row: Row) -> Any:
        found = next((row[key] for key in _TEXT_KEYS if key in row), None)
        return found[0] if isinstance(found, list) else found

    form = f"a text under {', '.join(_TEXT_KEYS[:-1])} or {_TEXT_KEYS[-1]}"
    return Benchmark(
        name, name, "that of the file", form, 0, None, question, lambda text: text, pins={}
    )


def _from_hub(benchmark: Benchmark, hub: HubFile) -> Path:
    """The Hub's file; every failure says how to go on without the Hub."""
    try:
        if hub.file.endswith(".parquet"):
            require_parquet()
        return fetch_dataset_file(hub.repo, hub.file, hub.revision)
    except (InputError, MachineError) as error:
        way = f"fetch `{hub.file}` of {hub.repo} elsewhere, or upstream's file ({benchmark.home})"
        error.hint = f"{error.hint}; or {way}, and give it: --benchmark {benchmark.name}=FILE"
        raise


def texts_digest(questions: Iterable[str]) -> str:
    """SHA-256 over all questions in order: the same whatever file they came in."""
    digest = hashlib.sha256()
    for question in questions:
        digest.update(hashlib.sha256(question.encode()).digest())
    return digest.hexdigest()


def in_part(prompt: Prompt, part: Part) -> bool:
    """Whether a prompt belongs to `part`: half are `dev`, half `unseen`, by the text's hash."""
    if part == "all":
        return True
    odd = hashlib.sha256(prompt.text.encode()).digest()[0] & 1
    return odd == (part == "unseen")


def _taken(prompts: Sequence[Prompt], part: Part) -> tuple[Prompt, ...]:
    return tuple(prompt for prompt in prompts if in_part(prompt, part))


def _own(given: str, max_new_tokens: int, part: Part) -> LoadedBenchmark:
    if given:
        raise InputError(
            "`own` names the bundled prompts and takes no file",
            where="--benchmark",
            hint="give your own file with --prompts",
        )
    path = bundled("profiles") / "prompts" / "own.jsonl"
    prompts = [
        prompt.model_copy(update={"max_new_tokens": max_new_tokens})
        for prompt in read_prompts(path)
    ]
    return LoadedBenchmark(OWN, _taken(prompts, part), "bundled", _file_digest(path), "Apache-2.0")


def _questions(benchmark: Benchmark, rows: Sequence[Row], path: Path) -> list[str]:
    found = []
    for number, row in enumerate(rows, start=1):
        try:
            if not benchmark.keep(row):
                continue
            question = benchmark.question(row)
        except (KeyError, IndexError, TypeError, ValueError, OverflowError):
            question = None
        if not isinstance(question, str) or not question.strip():
            raise InputError(
                f"row {number} has no question of {benchmark.title}",
                where=str(path),
                hint=f"the form: {benchmark.home}",
            )
        found.append(question)
    return found


def _check_users_pin(digest: str, pin: str, source: str) -> None:
    if len(pin) < _LEAST_PIN or not digest.startswith(pin.lower()):
        raise InputError(
            f"`{source}` has the SHA-256 {digest}, not {pin}",
            where="--benchmark",
            hint=f"a pin is the whole hash or at least its first {_LEAST_PIN} digits",
        )


def _check_known(
    benchmark: Benchmark, hub: HubFile, digest: str, questions: Sequence[str], source: str
) -> None:
    if digest in benchmark.pins or texts_digest(questions) == benchmark.texts_pin:
        return
    name = hub.file.rpartition("/")[2]
    wanted = [f"{sha} ({whose.format(name)})" for sha, whose in benchmark.pins.items()]
    raise InputError(
        f"`{source}` is not the {benchmark.title} that this version knows: it has "
        f"{len(questions)} questions of {benchmark.rows} and the SHA-256 {digest}, expected "
        f"{' or '.join(wanted)}",
        where="--benchmark",
        hint=f"give upstream's file ({benchmark.home}) as {benchmark.name}=FILE; if this one is "
        f"what you want, add #{digest} to the option",
    )


def _file_digest(path: Path) -> str:
    from specpilot_cli.io.hashing import sha256_file

    return sha256_file(path)
