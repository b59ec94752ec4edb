"""The commands: exit codes, one JSON document, and what the human form names."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from specpilot_cli.io.safetensors_stream import SafetensorsFile
from specpilot_cli.main import main
from tests.unit.convert_w12.conftest import MakeCheckpoint, digests, weights


def run(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    code = main([str(word) for word in words])
    out, err = capsys.readouterr()
    return code, out, err


def run_json(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, dict[str, Any]]:
    code, out, _ = run(capsys, *words, "--json")
    return code, json.loads(out)


def test_convert_verify_inspect_restore(
    make_checkpoint: MakeCheckpoint, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, packed, back = make_checkpoint(), tmp_path / "w12", tmp_path / "back"
    code, result = run_json(capsys, "convert-w12", source, "-o", packed)
    assert (code, result["verdict"], result["command"]) == (0, "identical", "convert-w12")
    assert result["results"]["totals"]["converted_tensors"] == 4
    hashed = {Path(item["path"]).name: item["sha256"] for item in result["inputs"]}
    assert hashed.items() <= digests(source).items()

    code, result = run_json(capsys, "w12", "verify", packed, "--against", source)
    assert (code, result["verdict"]) == (0, "identical")
    assert result["results"]["compared_tensors"] == 13

    code, result = run_json(capsys, "w12", "inspect", packed)
    assert code == 0
    rows = {row["name"]: row for row in result["results"]["tensors"]}
    assert rows["lm_head.weight"]["encoding"] == "w12"
    assert 12 < rows["lm_head.weight"]["bits_per_weight"] < 13
    assert rows["model.embed_tokens.weight"]["reason"].startswith("embedding")
    assert rows["nothing.weight"]["bits_per_weight"] is None

    code, result = run_json(capsys, "w12", "restore", packed, "-o", back)
    assert code == 0
    assert digests(back) == digests(source)


def test_inspect_writes_a_page_and_refuses_another_form(
    make_checkpoint: MakeCheckpoint, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(capsys, "convert-w12", make_checkpoint(), "-o", tmp_path / "w12")
    page = tmp_path / "weights.html"
    assert run(capsys, "w12", "inspect", tmp_path / "w12", "--report", page)[0] == 0
    text = page.read_text(encoding="utf-8")
    assert "12-bit floor" in text
    assert "model.layers.0.mlp.experts.gate_up_proj" in text
    assert "embedding table" in text
    code, result = run_json(capsys, "w12", "inspect", tmp_path / "w12")
    rows = {row["name"]: row for row in result["results"]["tensors"]}
    spread = rows["model.layers.0.self_attn.q_proj.weight"]["windows"]
    assert (spread["channels"], spread["zero_channels"]) == (380, 1)
    assert 90 < spread["least"] <= spread["median"] <= spread["greatest"] < 120
    code, _, err = run(capsys, "w12", "inspect", tmp_path / "w12", "-o", tmp_path / "x.pdf")
    assert code == 2
    assert "unknown format" in err


def test_dry_run_writes_nothing_and_says_why_tensors_stay(
    make_checkpoint: MakeCheckpoint, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = run(capsys, "convert-w12", make_checkpoint(), "--dry-run")
    assert code == 0
    assert "embedding table" in out
    assert "F32: W12 holds BF16 weights only" in out
    assert "4 × 128 pads to 128 × 128" in out
    assert "nothing was written" in out
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model"]


def test_dry_run_says_what_disk_is_needed_and_free(
    make_checkpoint: MakeCheckpoint, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = make_checkpoint()
    code, result = run_json(capsys, "convert-w12", source, "--dry-run", "-o", tmp_path / "w12")
    assert code == 0
    found = result["results"]
    assert (found["dry_run"], result["verdict"]) == (True, None)
    assert found["out"] == str(tmp_path / "w12")
    _, real = run_json(capsys, "convert-w12", source, "-o", tmp_path / "w12")
    for key in ("disk_needed_bytes", "folder_bytes"):
        assert found[key] == real["results"][key]
    written = sum(file.stat().st_size for file in (tmp_path / "w12").rglob("*") if file.is_file())
    # Headers and the manifest are not counted.
    assert written - 20_000 < found["folder_bytes"] < written
    assert written < found["disk_needed_bytes"] < written + (70 << 20)
    assert found["disk_free_bytes"] > 0
    code, out, _ = run(capsys, "convert-w12", source, "--dry-run", "-o", tmp_path / "other")
    assert re.search(r"disk needed\s+\S+ [kM]B at most \+ 67\.1 MB reserve, .*free at", out)


@pytest.mark.parametrize(
    ("words", "where"),
    [
        (("--shard-size", "5 parsec"), "--shard-size"),
        (("--shard-size", "five"), "--shard-size"),
        (("--shard-size", "0"), "--shard-size"),
        ((), "--out"),
    ],
)
def test_errors_of_options_name_the_option_and_say_what_to_do(
    words: tuple[str, ...],
    where: str,
    make_checkpoint: MakeCheckpoint,
    capsys: pytest.CaptureFixture[str],
) -> None:
    dry_run = ("--dry-run",) if words else ()
    code, _, err = run(capsys, "convert-w12", make_checkpoint(), *dry_run, *words)
    assert code == 2
    assert f"  at {where}\n\nhint: " in err


def test_a_mismatch_counts_what_is_wrong_and_names_the_shard(
    make_checkpoint: MakeCheckpoint, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    packed = tmp_path / "w12"
    run(capsys, "convert-w12", make_checkpoint(shards=2), "-o", packed)
    name, shard = "lm_head.weight", packed / "model-00001-of-00002.safetensors"
    with SafetensorsFile(shard) as file:
        position = file.info(name + "_w12").start
    raw = bytearray(shard.read_bytes())
    raw[position] ^= 1
    shard.write_bytes(raw)
    (packed / "tokenizer.json").write_text("{}", encoding="utf-8")
    code, out, _ = run(capsys, "w12", "verify", packed)
    assert code == 1
    assert f"tensor `{name}` in `{shard.name}`: " in out
    assert out.endswith("mismatch: 1 of 13 tensors, 1 of 4 other files\n")


def test_quiet_inspect_prints_totals_only(
    make_checkpoint: MakeCheckpoint, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(capsys, "convert-w12", make_checkpoint(), "-o", tmp_path / "w12")
    _, whole, _ = run(capsys, "w12", "inspect", tmp_path / "w12")
    _, short, _ = run(capsys, "w12", "inspect", tmp_path / "w12", "-q")
    assert "windows from: where" in whole
    assert "lm_head" in whole
    assert "lm_head" not in short
    assert whole.endswith(short)


def test_dry_run_says_what_is_in_the_way(
    make_checkpoint: MakeCheckpoint, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, target = make_checkpoint(), tmp_path / "w12"
    words = ("convert-w12", source, "-o", target)
    assert run(capsys, *words)[0] == 0
    code, _, err = run(capsys, *words, "--dry-run")
    assert code == 0
    assert "would be refused" in err
    assert "--force" in err
    assert "refused" not in run(capsys, *words, "--dry-run", "--force")[2]
    assert "is finished: a run would check it" in run(capsys, *words, "--dry-run", "--resume")[2]
    target.rename(tmp_path / ".w12.partial")
    assert "would remove (without --resume)" in run(capsys, *words, "--dry-run")[2]
    assert "would continue from" in run(capsys, *words, "--dry-run", "--resume")[2]
    assert (tmp_path / ".w12.partial" / "config.json").is_file()


def test_quiet_dry_run_is_short(
    make_checkpoint: MakeCheckpoint, capsys: pytest.CaptureFixture[str]
) -> None:
    source = make_checkpoint({f"layers.{i}.weight": weights(i, 256, 128) for i in range(40)})
    code, out, err = run(capsys, "convert-w12", source, "--dry-run", "-q")
    assert (code, err) == (0, "")
    assert len(out.splitlines()) < 15
    assert "40 of 40 as W12" in out


def test_resume_of_a_finished_folder_says_so(
    make_checkpoint: MakeCheckpoint, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("convert-w12", make_checkpoint(), "-o", tmp_path / "w12", "--resume")
    code, result = run_json(capsys, *words)
    assert (code, result["results"]["found_finished"]) == (0, False)
    before = digests(tmp_path / "w12")
    code, out, _ = run(capsys, *words)
    assert code == 0
    assert "nothing was left to do" in out
    code, again = run_json(capsys, *words)
    assert (code, again["verdict"]) == (0, "identical")
    assert again["results"]["tensors"] == result["results"]["tensors"]
    assert again["results"]["found_finished"]
    assert digests(tmp_path / "w12") == before
    code, _, err = run(capsys, *words, "--exclude", "lm_head")
    assert code == 2
    assert "another conversion" in err


def test_shard_size_is_read_with_its_unit(
    make_checkpoint: MakeCheckpoint, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = make_checkpoint()
    words = ("convert-w12", source, "-o", tmp_path / "w12", "--shard-size")
    assert run(capsys, *words, "200kB")[0] == 0
    assert len(list((tmp_path / "w12").glob("*.safetensors"))) == 4
    for wrong in ("5 parsec", "0"):
        code, _, _ = run(capsys, *words, wrong)
        assert code == 2


def test_other_dtypes_are_said_aloud(
    make_checkpoint: MakeCheckpoint, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, out, _ = run(capsys, "convert-w12", make_checkpoint(), "-o", tmp_path / "w12")
    assert "F16: W12 holds BF16 weights only, carried over untouched" in out
    assert "F32: W12 holds BF16 weights only, carried over untouched" in out


def test_mismatch_is_exit_1_and_names_the_tensor(
    make_checkpoint: MakeCheckpoint, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    packed = tmp_path / "w12"
    run(capsys, "convert-w12", make_checkpoint(), "-o", packed)
    shard = packed / "model.safetensors"
    with SafetensorsFile(shard) as file:
        position = file.info("model.layers.1.mlp.up_proj.weight_w12").start
    raw = bytearray(shard.read_bytes())
    raw[position] ^= 1
    shard.write_bytes(raw)
    code, out, _ = run(capsys, "w12", "verify", packed)
    assert code == 1
    assert "tensor `model.layers.1.mlp.up_proj.weight`" in out
    assert run(capsys, "w12", "verify", packed, "--exit-zero")[0] == 0
    code, result = run_json(capsys, "w12", "verify", packed)
    assert (code, result["verdict"]) == (1, "mismatch")
    assert result["results"]["problems"][0]["name"] == "model.layers.1.mlp.up_proj.weight"


def test_malformed_folder_is_exit_2(
    make_checkpoint: MakeCheckpoint, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    packed = tmp_path / "w12"
    run(capsys, "convert-w12", make_checkpoint(), "-o", packed)
    (packed / "w12_manifest.json").unlink()
    for words in (("verify",), ("inspect",), ("restore", "-o", tmp_path / "back")):
        code, _, err = run(capsys, "w12", words[0], packed, *words[1:])
        assert code == 2
        assert "w12_manifest.json" in err


def test_truncated_source_is_exit_2_and_named(
    make_checkpoint: MakeCheckpoint, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = make_checkpoint()
    with (source / "model.safetensors").open("r+b") as handle:
        handle.truncate(3000)
    code, out, err = run(capsys, "convert-w12", source, "-o", tmp_path / "w12")
    assert (code, out) == (2, "")
    assert str(source / "model.safetensors") in err
    assert "truncated" in err
    assert "hint:" in err


@pytest.mark.parametrize(
    "words",
    [
        ("convert-w12", "no-such-folder", "-o", "x"),
        ("w12", "verify", "no-such-folder"),
        ("w12", "inspect", "no-such-folder"),
        ("w12", "restore", "no-such-folder", "-o", "x"),
    ],
)
def test_missing_folder_is_exit_2(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = run(capsys, *words)
    assert code == 2
    assert ("no such model folder" if words[0] == "convert-w12" else "no such W12 folder") in err


def test_out_is_needed(make_checkpoint: MakeCheckpoint, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "convert-w12", make_checkpoint())
    assert code == 2
    assert "-o DST" in err


def test_force_replaces(
    make_checkpoint: MakeCheckpoint, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = make_checkpoint()
    assert run(capsys, "convert-w12", source, "-o", tmp_path / "w12")[0] == 0
    assert run(capsys, "convert-w12", source, "-o", tmp_path / "w12")[0] == 2
    assert run(capsys, "convert-w12", source, "-o", tmp_path / "w12", "--force")[0] == 0


def test_out_is_the_folder_and_report_the_result(
    make_checkpoint: MakeCheckpoint, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = tmp_path / "result.json"
    words = ("convert-w12", make_checkpoint(), "-o", tmp_path / "w12")
    code, _, _ = run(capsys, *words, "--report", report, "--workers", "2", "--device", "cpu")
    assert code == 0
    written = json.loads(report.read_text(encoding="utf-8"))
    assert written["results"]["out"] == str(tmp_path / "w12")
    code, _, err = run(capsys, *words, "--report", report, "--force")
    assert code == 0
    code, _, err = run(capsys, *words, "--report", report)
    assert code == 2
    assert "--report" in err
