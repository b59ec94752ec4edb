"""Numbers that nothing has, mostly of another unit: refused with a hint, in whichever file."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from specpilot_cli.io.json_file import read_json_model
from specpilot_cli.io.yaml_file import read_yaml_model
from specpilot_cli.main import main
from specpilot_cli.paths import bundled
from specpilot_cli.schema.model_profile import ModelProfile
from specpilot_cli.schema.step_profile import StepProfile, StepTimeCurve

HUGE = 10**400
Ran = Callable[..., tuple[int, str]]
SECONDS, RATES = "times are in seconds", "rates are in bytes/s and FLOP/s"


@pytest.fixture
def ran(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Ran:
    """`ran(*arguments, **files)`: exit code and messages of `specpilot ceiling` beside these."""

    def call(*arguments: object, **files: object) -> tuple[int, str]:
        for name, content in files.items():
            (tmp_path / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
        words = [str(word).replace("@", f"{tmp_path}/") for word in arguments]
        code = main(["ceiling", *words])
        return code, " ".join(capsys.readouterr().err.split())

    return call


GPU = {"name": "a GPU", "kind": "gpu", "gpu_profile": "h200"}


@pytest.mark.parametrize(
    ("changes", "message", "hint"),
    [
        ({"t_step_s": 14.8, "device": GPU}, "no step takes 14.8 s on a GPU", SECONDS),
        ({"t_step_s": 12.0}, "t_step_s and t_prof_s: 12 s beside 0.01 s", SECONDS),
        ({"t_step_s": 5e-324}, "`t_step_s`: no step takes 4.94066e-324 s", SECONDS),
        ({"t_prof_s": 1e308}, "`t_prof_s`: no step takes 1e+308 s", SECONDS),
        ({"t_prof_s": HUGE}, "t_prof_s", ""),
        ({"tau": 8.5}, "tau is 8.5, but a step of 8 rows", "bonus included"),
        ({"nodes": 2**40 - 1, "rows": 2**40}, "`rows`: must be at most 1000000", ""),
        ({"draft_block": 10**9}, "`draft_block`: must be at most 10000", ""),
        ({"requests": 10**12}, "`requests`: must be at most 1000000", ""),
        ({"context": 1e12}, "`context`: must be at most", ""),
    ],
)
def test_a_step_that_cannot_be(
    ran: Ran, profile_dict: Any, changes: dict[str, Any], message: str, hint: str
) -> None:
    code, told = ran("@step.json", step=profile_dict(**changes))
    assert code == 2, told
    assert message in told
    assert hint in told


def test_classes_of_a_step_are_bounded_too(ran: Ran, profile_dict: Any, kernel: Any) -> None:
    for kind, message in (
        (kernel("rest", 5e-324, 0, 0), "no part of a step takes"),
        (kernel("rest", 0.001, 1e308, 0), "`classes[0].bytes`: must be at most"),
        (kernel("rest", 0.001, 0, HUGE), "classes[0].flops"),
    ):
        code, told = ran("@step.json", step=profile_dict(classes=[kind]))
        assert (code, message in told) == (2, True), told


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (("--tau", "0.5"), "0.5 tokens per step: every step commits at least one at --tau"),
        (("--tau", "nan"), "nan tokens per step"), (("--tau", "inf"), "inf tokens per step"),
        (("--tau", "-3"), "-3 tokens per step"), (("--tau", "9"), "this step commits 8 at most"),
        (("--tau", "1e308"), "this step commits 8 at most"),
        (("--tau-best", "0.99"), "at --tau-best"), (("--tau-best", "1e308"), "4097 at most"),
    ],
)  # fmt: skip
def test_tokens_that_no_step_commits(
    ran: Ran, profile_dict: Any, tokens: tuple[str, ...], message: str
) -> None:
    code, told = ran("@step.json", *tokens, step=profile_dict())
    assert code == 2, told
    assert message in told


def test_the_block_bounds_the_best_tokens(ran: Ran, profile_dict: Any) -> None:
    step = profile_dict(draft_block=8)
    assert ran("@step.json", "--tau-best", "9", step=step)[0] == 0
    code, told = ran("@step.json", "--tau-best", "9.1", step=step)
    assert (code, "this step commits 9 at most" in told) == (2, True), told


MODEL = ("--target", "llama-3.1-8b", "--gpu", "h200")


@pytest.mark.parametrize(
    "more",
    [("--rows", "4", "--tau", "5"), ("--tau", "1.5"), ("--tau", "0"), ("--rows", "5000"),
     ("--requests", "9" * 30), ("--context", "9" * 400), ("--block", "100000")],
)  # fmt: skip
def test_a_model_step_that_cannot_be(ran: Ran, more: tuple[str, ...]) -> None:
    assert ran(*MODEL, *more)[0] == 2


def test_the_largest_model_step_still_has_floors(ran: Ran) -> None:
    largest = ("--rows", "4097", "--requests", "1000000", "--context", "1000000000")
    assert ran(*MODEL, *largest)[0] == 0


def _peaks(bandwidth: float, rate: float = 1e14) -> dict[str, Any]:
    own = {"kind": "measured", "source": "invented"}
    return {
        "read_bytes_per_s": [{"value": bandwidth, **own}],
        "flops_per_s": {"bfloat16": [{"value": rate, **own}]},
    }


@pytest.mark.parametrize(
    ("peaks", "message"),
    [
        (_peaks(4800), "no memory is read at 4800 bytes/s"),
        (_peaks(4.8e18), "no memory is read at 4.8e+18 bytes/s"),
        (_peaks(1e-300), "no memory is read at 1e-300 bytes/s"),
        (_peaks(4.8e12, 989), "no device computes at 989 FLOP/s"),
        (_peaks(4.8e12, 1e27), "no device computes at 1e+27 FLOP/s"),
    ],
)
def test_rates_that_no_device_has(ran: Ran, peaks: dict[str, Any], message: str) -> None:
    code, told = ran("--target", "llama-3.1-8b", "--peaks", "@peaks.json", peaks=peaks)
    assert code == 2, told
    assert message in told
    assert RATES in told


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ar_step_s": 14.8}, "no step takes 14.8 s on a GPU"),
        ({"ar_step_s": 5e-324}, "`ar_step_s`: no step takes"),
        ({"ar_step_s": 9.9}, "the first point and ar_step_s"),
        ({"points": [{"rows": 8, "step_s": 17.3}]}, "no step takes 17.3 s on a GPU"),
        ({"points": [{"rows": 8, "step_s": 5e-324}]}, "`points[0].step_s`: no step takes"),
        ({"points": [{"rows": 10**12, "step_s": 0.02}]}, "`points[0].rows`: must be at most"),
    ],
)
def test_step_times_that_cannot_be(
    ran: Ran, profile_dict: Any, changes: dict[str, Any], message: str
) -> None:
    path = bundled("profiles") / "step_times" / "h200-qwen3.8-27b-dflash2-bf16.json"
    curve = json.loads(path.read_text()) | {"ar_range_s": None} | changes
    files = {"step": profile_dict(t_step_s=None), "curve": curve}
    code, told = ran("@step.json", "--step-times", "@curve.json", **files)
    assert code == 2, told
    assert message in told


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("hidden", 10**9, "no model has hidden 1000000000"),
        ("vocab", 10**9, "no model has vocab"),
        ("weight_bytes", 16, "no model has weight_bytes 16"),
        ("hidden", 10**12, "must be at most 1000000000"),
        ("count", 10**6, "no model has count 1000000"), ("heads", 10**8, "no model has heads"),
        ("state_bytes", 32, "no model has state_bytes 32"),
    ],
)  # fmt: skip
def test_sizes_that_no_model_has(
    ran: Ran, tmp_path: Path, key: str, value: int, message: str
) -> None:
    path = bundled("profiles") / "models" / "qwen3.5-4b.yaml"
    model = yaml.safe_load(path.read_text(encoding="utf-8"))
    group = model["layers"][0]
    places = [model, group, group["mixer"], model["layers"][1]["mixer"], group["mlp"]]
    next(place for place in places if key in place)[key]["value"] = value
    (tmp_path / "model.yaml").write_text(yaml.safe_dump(model), encoding="utf-8")
    code, told = ran("--target", "@model.yaml", "--gpu", "h200")
    assert code == 2, told
    assert message in told


def test_everything_bundled_is_possible() -> None:
    profiles = bundled("profiles")
    for path in (profiles / "models").glob("*.yaml"):
        read_yaml_model(path, ModelProfile)
    for path in (profiles / "step_times").glob("*.json"):
        read_json_model(path, StepTimeCurve)
    for path in (Path(__file__).parents[2] / "fixtures" / "paper").glob("*.json"):
        read_json_model(path, StepProfile)
