"""`apply recipe` before a run: names, paths, folders, and what goes to which stream."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from specpilot_cli.paths import bundled

Run = Callable[..., subprocess.CompletedProcess[str]]


def _fails(done: subprocess.CompletedProcess[str], code: int, *parts: str) -> None:
    assert done.returncode == code, done.stderr
    assert done.stdout == ""
    for part in parts:
        assert part in done.stderr, done.stderr


def test_name_is_needed(specpilot: Run) -> None:
    _fails(specpilot("apply", "recipe"), 2, "NAME is missing", "hint: see them with --list")


@pytest.mark.parametrize("name", ["demo-cpi", "dmo-cpu"])
def test_unknown_name_gives_the_nearest(specpilot: Run, name: str) -> None:
    _fails(specpilot("apply", "recipe", name), 2, f"`{name}`", "did you mean `demo-cpu`?")


@pytest.mark.parametrize("path", ["no/such", "other.yaml", "./nothing", "/"])
def test_path_without_a_recipe(specpilot: Run, path: str) -> None:
    _fails(specpilot("apply", "recipe", path), 2, f"no recipe at `{path}`", "hint: give a recipe")


@pytest.mark.parametrize(
    ("path", "inside"),
    [("recipe/recipe.yaml", "."), ("./recipe", "."), ("recipe/", "."), ("../recipe", "sub"),
     ("recipe.yaml", "recipe")],
)  # fmt: skip
def test_paths_to_the_file_or_its_folder(
    specpilot: Run, make_recipe: Callable[..., Path], tmp_path: Path, path: str, inside: str
) -> None:
    make_recipe()
    (tmp_path / "sub").mkdir()
    done = specpilot("apply", "recipe", path, "--dry-run", "--json", cwd=tmp_path / inside)
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)["results"]["dry_run"]
    assert plan["target"] == str(tmp_path / "recipe" / "target")
    assert Path(plan["folder"]).parent == (tmp_path / inside).resolve() / "specpilot-runs"


def test_bare_name_of_a_folder_here_is_hinted_at(
    specpilot: Run, make_recipe: Callable[..., Path]
) -> None:
    make_recipe()
    _fails(specpilot("apply", "recipe", "recipe"), 2, "did you mean the folder `./recipe`?")


@pytest.mark.parametrize("words", [("--list",), ("demo-cpu", "--show"), ("demo-cpu", "--dry-run")])
def test_json_is_one_document_and_nothing_else(specpilot: Run, words: tuple[str, ...]) -> None:
    done = specpilot("apply", "recipe", *words, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    envelope = json.loads(done.stdout)
    assert envelope["command"] == "apply recipe"
    assert envelope["verdict"] is None
    results = envelope["results"]
    if words == ("--list",):
        found = {item["name"]: item["mechanisms"] for item in results["recipes"]}
        assert found["demo-cpu"] == ["w12", "best-first-tree"]
    elif "--show" in words:
        assert results["recipe"]["stock"] == {"block": 8}
    else:
        assert [server["name"] for server in results["dry_run"]["servers"]] == [
            "baseline", "candidate", "ar"
        ]  # fmt: skip


def test_show_prints_the_file(specpilot: Run) -> None:
    done = specpilot("apply", "recipe", "demo-cpu", "--show")
    text = (bundled("recipes") / "demo-cpu" / "recipe.yaml").read_text(encoding="utf-8")
    assert (done.returncode, done.stdout, done.stderr) == (0, text, "")


def test_dry_run_shows_what_would_run_and_writes_nothing(specpilot: Run, tmp_path: Path) -> None:
    options = ("--out", "run", "--limit", "3", "--port", "24100", "--fault-after", "48")
    done = specpilot("apply", "recipe", "demo-cpu", "--dry-run", *options)
    assert (done.returncode, done.stderr) == (0, "")
    said = dict(line.split("\t") for line in done.stdout.splitlines()[1:-1])
    assert said["folder"] == str(tmp_path / "run")
    assert said["unseen prompts"] == "24, 2 runs"
    assert "--mode chain --block 8" in said["server baseline"]
    assert "--port 24100 " in said["server baseline"]
    tuned = said["server candidate"]
    assert f"--target {tmp_path / 'run' / 'target-w12'} " in tuned
    assert "--mode tree --block 16 --nodes NODES" in tuned
    assert tuned.endswith("--fault logit-bias:after=48,every=7,bias=2.0")
    assert "--fault" not in said["server baseline"] + said["server ar"]
    assert done.stdout.splitlines()[-1].startswith("deliberate fault in the tuned system: +2 on")
    assert list(tmp_path.iterdir()) == []


def test_folder_in_use_is_left_alone(specpilot: Run, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "mine.txt").touch()
    done = specpilot("apply", "recipe", "demo-cpu", "--out", "run")
    _fails(done, 2, f"`{tmp_path / 'run'}` is in use\n", "at --out", "hint: name a new folder")
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["mine.txt"]


def test_folder_of_an_unfinished_run_is_not_continued(specpilot: Run, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "UNFINISHED").touch()
    done = specpilot("apply", "recipe", "demo-cpu", "--out", "run")
    _fails(done, 2, "is in use: it holds an unfinished run", "hint: name a new folder")


def test_out_that_cannot_be_a_folder(specpilot: Run, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = specpilot("apply", "recipe", "demo-cpu", "--out", "file")
    _fails(done, 2, f"`{tmp_path / 'file'}` is not a folder\n", "at --out", "hint: name a new")
    done = specpilot("apply", "recipe", "demo-cpu", "--out", "file/run")
    _fails(done, 2, "cannot write to", "at --out", "hint: name a folder that this user may write")


@pytest.mark.skipif(not Path("/sys/kernel").is_dir(), reason="needs a folder nobody can write to")
def test_working_folder_that_cannot_be_written_to(specpilot: Run) -> None:
    done = specpilot("apply", "recipe", "demo-cpu", cwd=Path("/sys/kernel"))
    _fails(done, 2, "cannot write to `/sys/kernel/specpilot-runs/demo-cpu-", "with --out")


_LIMIT_FILES = "import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, ({0}, {0}))"


@pytest.mark.parametrize("with_w12", [True, False], ids=["weights", "recording"])
def test_disk_that_fills_up(
    specpilot: Run, make_recipe: Callable[..., Path], tmp_path: Path, with_w12: bool
) -> None:
    """A limit on the size of a file stands for a full disk: the same call fails the same way."""
    recipe = make_recipe(new_tokens=32) / "recipe.yaml"
    if not with_w12:
        text = recipe.read_text(encoding="utf-8")
        recipe.write_text(text.replace("  - mechanism: w12\n", ""), encoding="utf-8")
    done = specpilot(
        "apply", "recipe", str(recipe), "--out", "run", code=_LIMIT_FILES.format(1_000_000),
        OMP_NUM_THREADS="1",
    )  # fmt: skip
    if with_w12:
        _fails(done, 3, "error: a file would be larger than", "or raise `ulimit -f`")
    else:
        _fails(done, 3, "error: File too large: ", "hint: is there space")
    assert f"no result: `{tmp_path / 'run'}` holds an unfinished run" in done.stderr
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["UNFINISHED"]


def test_two_runs_in_one_second_get_folders_of_their_own(tmp_path: Path) -> None:
    """Claimed from several processes at once, as two starts in one second would."""
    program = (
        "import sys\nfrom specpilot_cli.apply import folder\n"
        "folder.default_folder = lambda name: folder._PARENT / f'{name}-20260101-000000'\n"
        "from specpilot_cli.ui import SilentReporter\n"
        "with folder.run_folder(None, 'demo', SilentReporter()) as own:\n"
        "    (own / 'kept').touch()\n    print(own)"
    )
    started = [
        subprocess.Popen(
            [sys.executable, "-c", program], cwd=tmp_path, stdout=subprocess.PIPE, text=True
        )
        for _ in range(4)
    ]
    folders = [run.communicate(timeout=60)[0].strip() for run in started]
    assert all(run.returncode == 0 for run in started)
    assert len(set(folders)) == 4
    assert os.path.commonpath(folders) == str(tmp_path / "specpilot-runs")
