"""From a trace to its ceiling through the commands, on the extracts of real traces."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Run = Callable[..., subprocess.CompletedProcess[str]]
TRACES = Path(__file__).resolve().parents[1] / "fixtures" / "traces"
DF8 = str(TRACES / "df8.trace.json.gz")
TIMES = "h200-qwen3.8-27b-dflash2-bf16"
MODELS = ("--target", "qwen3.8-27b", "--drafter", "qwen3.8-27b-dflash2")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Step profiles of the servers, as the command writes them; `test_the_command_…` checks it."""
    from specpilot_cli.io.json_file import write_json
    from specpilot_cli.models.registry import load_model
    from specpilot_cli.profile.build import Deployment, profile_of_traces

    folder = tmp_path_factory.mktemp("profiles")
    target, drafter = load_model(MODELS[1]), load_model(MODELS[3])
    found = {}
    for name, block in (("ar", None), ("df8", 8)):
        step = profile_of_traces(
            [TRACES / f"{name}.trace.json.gz"], Deployment(target, drafter, block=block)
        )
        write_json(folder / f"{name}.json", step)
        found[name] = str(folder / f"{name}.json")
    return found


def _ceiling(run: Run, *args: str) -> dict[str, Any]:
    done = run("ceiling", *args, "--json")
    assert done.returncode == 0, done.stderr
    results: dict[str, Any] = json.loads(done.stdout)["results"]
    return results


def test_the_command_writes_the_profile(
    specpilot: Run, made: dict[str, str], tmp_path: Path
) -> None:
    done = specpilot("profile", "--trace", DF8, *MODELS, "--block", "8", "-o", "x.json", "--json")
    assert done.returncode == 0, done.stderr
    written = json.loads((tmp_path / "x.json").read_text())
    assert written == json.loads(Path(made["df8"]).read_text())
    assert json.loads(done.stdout)["results"]["step_profile"] == written


def test_a_trace_never_gives_the_step_time(specpilot: Run, made: dict[str, str]) -> None:
    path = made["df8"]
    done = specpilot("ceiling", path)
    assert done.returncode == 2
    assert "a trace cannot tell it" in done.stderr
    assert "--step-times FILE|NAME" in done.stderr.partition("hint:")[2]


def test_ceiling_of_the_stock_chain(specpilot: Run, made: dict[str, str]) -> None:
    path = made["df8"]
    found = _ceiling(specpilot, path, "--step-times", TIMES)
    assert found["t_step_s"] == 0.0200
    assert TIMES in found["t_step_source"]
    assert found["overhead_factor_ratio"] == pytest.approx(20.0 / 18.208, rel=1e-3)
    assert found["kernel_factor_ratio"] == pytest.approx(1.356, abs=2e-3)
    assert found["step_cost_ratio"] == pytest.approx(
        found["kernel_factor_ratio"] * found["overhead_factor_ratio"]
    )
    assert found["tau_factor_ratio"] is None
    assert found["leading_factor"] == "kernel"
    split = {item["name"]: 1e3 * item["seconds"] for item in found["split"]}
    assert split == pytest.approx(
        {"DRAFT": 1.775, "VERIFY": 16.174, "outside spans": 0.259, "outside the profile": 1.792},
        abs=2e-3,
    )
    assert sum(split.values()) == pytest.approx(20.0, abs=1e-3)
    floors = {item["name"]: 1e3 * item["floor_s"] for item in found["classes"]}
    assert floors["target_gemm"] == pytest.approx(48.701 / 4.8 / 0.9, rel=1e-3)
    assert floors["head"] == pytest.approx(2.5428 / 4.8 / 0.9, rel=1e-3)
    assert any("1.68 ms a step were seen by the client only" in note for note in found["notes"])


def test_levers_are_projections_with_their_arithmetic(specpilot: Run, made: dict[str, str]) -> None:
    path = made["df8"]
    levers = {
        item["name"]: item for item in _ceiling(specpilot, path, "--step-times", TIMES)["levers"]
    }
    assert {item["basis"] for item in levers.values()} == {"projected"}
    # 12.829 + 0.620 ms of weights; a quarter less is 3.35 ms of 20.
    w12 = levers["W12"]
    assert w12["gain_high_ratio"] == pytest.approx(20 / (20 - 13.449 * (1 - 12.02 / 16)), rel=1e-3)
    assert w12["gain_low_ratio"] == pytest.approx(20 / (20 - 13.449 * (1 - 1 / 1.17)), rel=1e-3)
    assert "13.45 ms of 20.00 ms" in w12["arithmetic"]
    # 17 rows beyond the last recorded 16, at 0.1875 ms each.
    tree = levers["tree of 32 nodes"]
    after = 20 + 1.5 + 17 * 1.5 / 8
    assert tree["gain_high_ratio"] == pytest.approx(5.38 / 4.25)
    assert tree["gain_low_ratio"] == pytest.approx(5.38 / 4.25 * 20 / after, rel=1e-6)
    assert "extrapolated" in tree["arithmetic"]
    two = levers["TLV on top of W12"]
    step, exact = 20 - 3.346, 16.174 - 3.346
    cycle = step + 1.775 + exact * 11.5 / 14.9 + 1.6 * 2 / 3
    assert two["gain_high_ratio"] == pytest.approx(11.67 / 6.16 * step / cycle, rel=1e-3)


def test_plain_decoding_takes_the_ar_time(specpilot: Run, made: dict[str, str]) -> None:
    path = made["ar"]
    found = _ceiling(specpilot, path, "--step-times", TIMES)
    assert found["t_step_s"] == 0.0148
    assert found["tau_tokens_per_step"] == 1.0
    names = {item["name"]: item for item in found["levers"]}
    assert names["W12"]["gain_high_ratio"] == pytest.approx(1.279, abs=2e-3)
    assert names["tree of 32 nodes"]["gain_high_ratio"] is None


def test_measured_peaks_are_a_choice(specpilot: Run, made: dict[str, str]) -> None:
    path = made["df8"]
    found = _ceiling(specpilot, path, "--step-times", TIMES, "--measured-peaks")
    assert found["peaks"]["read_bytes_per_s"]["kind"] == "measured"
    done = specpilot("ceiling", path, "--step-times", TIMES, "--measured-peaks", "--gpu", "b200")
    assert done.returncode == 2
    assert "doctor --measure" in done.stderr


def test_the_page_draws_the_waterfall(specpilot: Run, made: dict[str, str], tmp_path: Path) -> None:
    path = made["df8"]
    done = specpilot("ceiling", path, "--step-times", TIMES, "-o", "page.html", "-q")
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert page.count("<svg") == 3  # factors, waterfall, roofline
    for text in ("Where the step goes", "What would change it", "target gemm above its floor",
                 "VERIFY", "speedup, projected"):  # fmt: skip
        assert text in page


def test_step_times_of_another_step_are_refused(
    specpilot: Run, made: dict[str, str], tmp_path: Path
) -> None:
    path = made["df8"]
    profile = json.loads(Path(path).read_text())

    def refused(message: str, **changes: Any) -> None:
        (tmp_path / "other.json").write_text(json.dumps(profile | changes))
        done = specpilot("ceiling", "other.json", "--step-times", TIMES)
        assert done.returncode == 2
        assert message in done.stderr

    refused("no step time recorded for 12 rows", rows=12, nodes=11)
    refused("no step time recorded for 8 rows with block 16", draft_block=16)
    refused("of another engine", engine={"name": "vllm", "version": "1"})
    refused("of another device", device={"name": "B200", "kind": "gpu", "gpu_profile": "b200"})
    refused("of one request, the profile of 4", requests=4)


def test_text_shows_spans_classes_and_what_is_unknown(specpilot: Run) -> None:
    done = specpilot("profile", "--trace", DF8, *MODELS, "--block", "8")
    assert done.returncode == 0
    lines = done.stdout.splitlines()
    assert "VERIFY\t16.174\t16.174\t16.170 – 16.197" in lines
    assert "unknown kernels: none" in lines
    assert any(line.startswith("target_gemm\t12.829\t") and "48.7 GB" in line for line in lines)
    assert "counted once" in done.stdout
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("args", "message", "hint"),
    [
        (("--trace", DF8), "how many rows", "--block N"),
        (("--trace", DF8, "--url", "http://x"), "exclude each other", ""),
        (("--trace", DF8, "--step-times", "t.json"), "no step times", "without the profiler"),
        (("--trace", DF8, "--mode", "tree"), "needs its nodes", "--nodes"),
        (("--trace", DF8, "--target", "qwen", "--block", "8"), "no model profile", "bundled"),
        (("--trace", "none.json"), "no such file", ""),
        ((), "nothing to profile", "--trace FILE"),
    ],
)
def test_bad_usage_exits_two(
    specpilot: Run, args: tuple[str, ...], message: str, hint: str
) -> None:
    done = specpilot("profile", *args)
    assert done.returncode == 2
    assert done.stdout == ""
    assert message in done.stderr
    assert hint in done.stderr.partition("hint:")[2]


def test_a_cut_trace_exits_two_naming_file_and_place(specpilot: Run, tmp_path: Path) -> None:
    (tmp_path / "cut.trace.json.gz").write_bytes(Path(DF8).read_bytes()[:40_000])
    done = specpilot("profile", "--trace", "cut.trace.json.gz", "--block", "8", "-o", "x.json")
    assert done.returncode == 2
    assert "cut.trace.json.gz:1" in done.stderr
    assert "in event" in done.stderr
    assert not (tmp_path / "x.json").exists()


def test_an_output_never_overwrites_the_trace(specpilot: Run, tmp_path: Path) -> None:
    trace = tmp_path / "t.json"
    trace.write_bytes(Path(DF8).read_bytes())
    done = specpilot("profile", "--trace", "t.json", "-o", "t.json", "--force", "--block", "8")
    assert done.returncode == 2
    assert trace.read_bytes() == Path(DF8).read_bytes()


def test_floors_of_a_model_need_a_device(specpilot: Run) -> None:
    done = specpilot("ceiling", "--target", "qwen3.8-27b")
    assert done.returncode == 2
    assert "need a device" in done.stderr
    found = _ceiling(specpilot, "--target", "llama-3.1-8b", "--gpu", "h200", "--context", "1000")
    assert {item["name"] for item in found["classes"]} == {
        "target_gemm",
        "head",
        "attention",
        "rest",
    }
    both = specpilot("ceiling", "step.json", "--target", "llama-3.1-8b", "--gpu", "h200")
    assert both.returncode == 2
    assert "PROFILE belongs to a profiled step" in both.stderr


def test_what_if_projects_the_step_on_another_gpu(specpilot: Run, made: dict[str, str]) -> None:
    path = made["df8"]
    found = _ceiling(specpilot, path, "--step-times", TIMES, "--what-if-gpu", "h100-sxm5")
    there = found["what_if"]
    assert there["basis"] == "projected"
    seconds = {item["name"]: item for item in there["classes"]}
    gemm = seconds["target_gemm"]  # bound by bytes: 4.8 TB/s here, 3.35 TB/s there
    assert gemm["projected_s"] == pytest.approx(gemm["measured_s"] * 4.8 / 3.35, rel=1e-6)
    grown = sum(item["projected_s"] - item["measured_s"] for item in there["classes"])
    assert there["t_step_s"] == pytest.approx(0.020 + grown)
    assert there["step_speedup_ratio"] == pytest.approx(0.020 / there["t_step_s"])
    assert _ceiling(specpilot, path, "--step-times", TIMES)["what_if"] is None
    done = specpilot("ceiling", "--target", "llama-3.1-8b", "--gpu", "h200", "--what-if-gpu", "l4")
    assert done.returncode == 2
    assert "--what-if" in done.stderr


def test_peaks_of_another_device_are_pointed_out(specpilot: Run, made: dict[str, str]) -> None:
    path = made["df8"]
    mixed = _ceiling(specpilot, path, "--step-times", TIMES, "--gpu", "b200")["notes"]
    assert any("ran on NVIDIA H200" in note and "--what-if-gpu" in note for note in mixed)
    own = _ceiling(specpilot, path, "--step-times", TIMES, "--gpu", "h200")["notes"]
    assert not any("ran on" in note for note in own)
