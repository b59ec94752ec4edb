"""Benchmarks from files and the Hub, pins, halves, chat templates, sealed sets."""

from __future__ import annotations

import gzip
import hashlib
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from specpilot_cli.errors import InputError, MachineError
from specpilot_cli.io import table_file
from specpilot_cli.io.chat_template import ChatTemplate
from specpilot_cli.io.table_file import read_table
from specpilot_cli.paired_bench import benchmarks
from specpilot_cli.paired_bench.benchmarks import BENCHMARKS, in_part, load_benchmark
from specpilot_cli.paired_bench.sealed import check_unseen, claim
from specpilot_cli.schema.prompts import Prompt

ROWS: dict[str, list[dict[str, Any]]] = {
    "gsm8k": [{"question": f"How many are {i} and {i}?", "answer": "x"} for i in range(20)],
    "math500": [{"problem": f"Solve x = {i}.", "answer": "1"} for i in range(20)],
    "humaneval": [{"task_id": f"H/{i}", "prompt": f"def f{i}():\n"} for i in range(20)],
    "mbpp": [{"text": f"Write a function number {i}.", "task_id": 11 + i} for i in range(20)],
    "mt-bench": [{"question_id": i, "turns": [f"Tell me about {i}.", "More."]} for i in range(20)],
}


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    data = "".join(json.dumps(row) + "\n" for row in rows).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.parametrize("name", list(ROWS))
@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz"])
def test_every_benchmark_reads_its_own_form_once_pinned(
    tmp_path: Path, name: str, suffix: str
) -> None:
    path = tmp_path / f"data{suffix}"
    digest = write(path, ROWS[name])
    with pytest.raises(InputError, match=r"is not the .* that this version knows") as caught:
        load_benchmark(f"{name}={path}", max_new_tokens=64)
    assert f"#{digest}" in str(caught.value.hint)
    assert f"{name}=FILE" in str(caught.value.hint)
    assert f"the SHA-256 {digest}, expected " in caught.value.message
    assert all(pin in caught.value.message for pin in BENCHMARKS[name].pins)
    parts: dict[str, Any] = {
        part: load_benchmark(f"{name}={path}#{digest[:20]}", max_new_tokens=64, part=part)  # type: ignore[arg-type]
        for part in ("dev", "unseen", "all")
    }
    ids = {part: {p.request_id for p in found.prompts} for part, found in parts.items()}
    assert ids["dev"].isdisjoint(ids["unseen"])
    assert ids["dev"] | ids["unseen"] == ids["all"]
    assert len(ids["all"]) == 20
    assert min(len(ids["dev"]), len(ids["unseen"])) >= 2
    assert parts["all"].sha256 == digest
    assert parts["all"].licence == BENCHMARKS[name].licence
    prompt = parts["all"].prompts[3]
    assert prompt.max_new_tokens == 64
    assert "3" in prompt.text
    with pytest.raises(InputError, match="not " + "0" * 64):
        load_benchmark(f"{name}={path}#{'0' * 64}", max_new_tokens=64)
    with pytest.raises(InputError):
        load_benchmark(f"{name}={path}#{digest[:4]}", max_new_tokens=64)


@pytest.mark.parametrize(
    "row",
    [{"prompt": "Say 1."}, {"text": "Say 1.", "id": 5}, {"question": "Say 1."},
     {"instruction": "Say 1.", "output": "1"}, {"turns": ["Say 1.", "Again."]}],
)  # fmt: skip
def test_any_file_of_texts_is_a_benchmark(tmp_path: Path, row: dict[str, Any]) -> None:
    path = tmp_path / "mine.jsonl"
    digest = write(path, [row, row])
    loaded = load_benchmark(f"mine={path}", max_new_tokens=7, part="all")
    assert [p.text for p in loaded.prompts] == ["Say 1.", "Say 1."]
    assert {p.benchmark for p in loaded.prompts} == {"mine"}
    assert loaded.sha256 == digest
    with pytest.raises(InputError, match="not " + "0" * 64):
        load_benchmark(f"mine={path}#{'0' * 64}", max_new_tokens=7)
    write(path, [row, {"body": "Say 2."}, {"prompt": 5}])
    with pytest.raises(InputError, match="row 2 has no question of mine") as caught:
        load_benchmark(f"mine={path}", max_new_tokens=7)
    assert "a text under prompt, text, " in str(caught.value.hint)


def test_upstreams_questions_are_known_whatever_file_they_came_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "other.jsonl"
    write(path, [{**row, "extra": 1} for row in ROWS["humaneval"]])
    texts = [row["prompt"] for row in ROWS["humaneval"]]
    known = BENCHMARKS["humaneval"]
    changed = benchmarks.Benchmark(
        **{f: getattr(known, f) for f in known.__slots__}
        | {"texts_pin": benchmarks.texts_digest(texts)}
    )
    monkeypatch.setitem(BENCHMARKS, "humaneval", changed)
    loaded = load_benchmark(f"humaneval={path}", max_new_tokens=8, part="all")
    assert loaded.prompts[0].text.endswith("```python\ndef f0():\n\n```")


def test_the_hub_is_asked_for_the_datasets_own_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "question.jsonl"
    digest = write(path, ROWS["mt-bench"])
    asked: list[Any] = []

    def download(repo: str, name: str, **options: Any) -> str:
        asked.append((repo, name, options["repo_type"], options["revision"]))
        return str(path)

    hub = pytest.importorskip("huggingface_hub")
    monkeypatch.setattr(hub, "hf_hub_download", download)
    loaded = load_benchmark(f"mt-bench#{digest}", max_new_tokens=8, part="all")
    commit = "e3a795c5e9a82ee40611c416b8a7786c73198991"
    assert asked == [("HuggingFaceH4/mt_bench_prompts", "raw/question.jsonl", "dataset", commit)]
    assert len(loaded.prompts) == 20
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(MachineError, match="huggingface_hub") as caught:
        load_benchmark("mt-bench", max_new_tokens=8)
    assert "--benchmark mt-bench=FILE" in str(caught.value.hint)


def test_of_mbpps_one_file_the_test_split_is_taken(tmp_path: Path) -> None:
    path = tmp_path / "mbpp.jsonl"
    digest = write(path, [{"text": f"Task {i}.", "task_id": i} for i in range(1, 975)])
    loaded = load_benchmark(f"mbpp={path}#{digest}", max_new_tokens=8, part="all")
    assert len(loaded.prompts) == BENCHMARKS["mbpp"].rows
    assert (loaded.prompts[0].text, loaded.prompts[-1].text) == ("Task 11.", "Task 510.")
    digest = write(path, [{"text": "Task.", "task_id": "ten"}])
    with pytest.raises(InputError, match="row 1 has no question"):
        load_benchmark(f"mbpp={path}#{digest}", max_new_tokens=8)


@pytest.mark.parametrize(
    ("spec", "words"),
    [("gsm9k", "unknown benchmark"), ("own=x.jsonl", "takes no file"),
     ("gsm8k=absent.jsonl", "no such file")],
)  # fmt: skip
def test_a_benchmark_that_cannot_be_read_is_refused(spec: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        load_benchmark(spec, max_new_tokens=8)


@pytest.mark.parametrize("raw", [b"[]", b"{", b"1\n2\n", b"\xff\xfe", b""])
def test_a_file_that_is_no_table_is_refused(tmp_path: Path, raw: bytes) -> None:
    path = tmp_path / "data.jsonl"
    path.write_bytes(raw)
    with pytest.raises(InputError):
        read_table(path)


def test_parquet_needs_an_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "data.parquet"
    path.write_bytes(b"PAR1")
    monkeypatch.setattr(table_file, "_PARQUET_ENGINES", ("no_such_engine",))
    with pytest.raises(MachineError, match="Parquet needs pandas") as caught:
        read_table(path)
    assert "specpilot[export]" in str(caught.value.hint)


def test_the_own_prompts_are_many_and_split_in_halves() -> None:
    whole = load_benchmark("own", max_new_tokens=99, part="all").prompts
    counts = {
        name: [p.benchmark for p in whole].count(name) for name in {p.benchmark for p in whole}
    }
    assert len(counts) == 5
    assert set(counts.values()) == {12}
    assert len({p.text for p in whole}) == len(whole)
    for part in ("dev", "unseen"):
        for name in counts:
            own = [p for p in whole if p.benchmark == name and in_part(p, part)]  # type: ignore[arg-type]
            assert len(own) >= 2, (part, name)


def template(folder: Path, text: str, **config: Any) -> ChatTemplate:
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": text, **config}))
    return ChatTemplate(folder)


def test_a_chat_template_gets_the_message_and_the_thinking_switch(tmp_path: Path) -> None:
    text = (
        "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
        "{% if enable_thinking is defined and not enable_thinking %}<no>{% endif %}"
    )
    made = template(tmp_path, text, bos_token={"content": "<s>"})
    assert made.render("Hi", thinking=None) == "<s><user>Hi<assistant>"
    assert made.render("Hi", thinking=True) == "<s><user>Hi<assistant>"
    assert made.render("Hi", thinking=False) == "<s><user>Hi<assistant><no>"
    assert made.sha256 == hashlib.sha256(text.encode()).hexdigest()
    (tmp_path / "chat_template.jinja").write_text("file wins: {{ messages[0].content }}")
    assert ChatTemplate(tmp_path).render("x", thinking=None) == "file wins: x"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{% for %}", "does not compile"),
        ("{{ raise_exception('system first') }}", "fails: system first"),
        ("{{ messages.__class__.__mro__ }}", "fails"),
        ("{{ 1 + 'a' }}", "fails"),
    ],
)
def test_a_bad_template_is_bad_input(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        template(tmp_path, text).render("Hi", thinking=None)


def test_a_folder_without_template_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no chat template"):
        ChatTemplate(tmp_path)


def prompt(text: str) -> Prompt:
    return Prompt(request_id=text[:8], benchmark="b", text=text, max_new_tokens=4)


def test_a_sealed_set_holds_nothing_seen_however_it_is_spaced() -> None:
    check_unseen([prompt("fresh words")], [prompt("other words")], where="x")
    with pytest.raises(InputError, match="was seen before the final"):
        check_unseen([prompt("known  words\n")], [prompt("known words")], where="x")


def test_a_sealed_set_is_used_once(tmp_path: Path) -> None:
    ledger, digest = tmp_path / "set.sealed.jsonl", "a" * 64
    first = tmp_path / "one.journal.jsonl"
    claim(ledger, digest, journal=first, candidate="http://a")
    claim(ledger, digest, journal=first, candidate="http://a")  # resumed
    assert len(ledger.read_text().splitlines()) == 1
    with pytest.raises(InputError, match="used in a sealed final"):
        claim(ledger, digest, journal=tmp_path / "two.journal.jsonl", candidate="http://b")
    claim(ledger, "b" * 64, journal=tmp_path / "two.journal.jsonl", candidate="http://b")
    assert len(ledger.read_text().splitlines()) == 2


def test_pins_name_upstreams_files() -> None:
    for benchmark in BENCHMARKS.values():
        assert benchmark.pins
        assert all(re.fullmatch("[0-9a-f]{64}", pin) for pin in benchmark.pins)
        assert benchmark.hub is not None
        assert re.fullmatch("[0-9a-f]{40}", benchmark.hub.revision)
        assert benchmark.licence
        assert benchmark.home.startswith("https://")
