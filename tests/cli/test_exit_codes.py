"""Exit codes and messages of the entry point, seen from outside the process."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from specpilot_cli import __version__

Run = Callable[..., subprocess.CompletedProcess[str]]

_RAISE = """
import specpilot_cli.doctor.checks as checks
from specpilot_cli.errors import InputError, MachineError, MeasurementInvalid
def fail():
    raise {error}
checks.run_checks = fail
"""


def test_version_and_help_exit_zero(specpilot: Run) -> None:
    for flag in ("--version", "-V"):
        done = specpilot(flag)
        assert (done.returncode, done.stdout, done.stderr) == (0, f"specpilot {__version__}\n", "")
    for flag in ("--help", "-h"):
        done = specpilot(flag)
        assert done.returncode == 0
        assert "Exit codes: 0 done or accepted" in " ".join(done.stdout.split())


def test_unknown_command_names_the_nearest(specpilot: Run) -> None:
    done = specpilot("docto")
    assert done.returncode == 2
    assert done.stdout == ""
    assert "Did you mean 'doctor'?" in done.stderr


@pytest.mark.parametrize("args", [("doctor", "--nope"), ("doctor", "--require", "gp"), ("-x",)])
def test_bad_usage_exits_two(specpilot: Run, args: tuple[str, ...]) -> None:
    done = specpilot(*args)
    assert done.returncode == 2
    assert done.stdout == ""


@pytest.mark.parametrize(
    ("error", "code"),
    [("InputError", 2), ("MachineError", 3), ("MeasurementInvalid", 4)],
)
def test_expected_errors_say_what_where_and_a_hint(specpilot: Run, error: str, code: int) -> None:
    raised = f"{error}('tensor [m, n] is short', where='a.yaml:3', hint='see [docs]')"
    done = specpilot("doctor", code=_RAISE.format(error=raised))
    assert done.returncode == code
    assert done.stdout == ""
    assert done.stderr == "error: tensor [m, n] is short\n  at a.yaml:3\n\nhint: see [docs]\n"


@pytest.mark.parametrize(
    ("name", "code", "hint"),
    [
        ("ENOSPC", 3, "is there space"),
        ("EDQUOT", 3, "is there space"),
        ("EROFS", 3, "is there space"),
        ("EIO", 3, "is there space"),
        ("EMFILE", 3, "is there space"),
        ("EACCES", 2, "may this user"),
        ("EPERM", 2, "may this user"),
        ("ENAMETOOLONG", 2, "shorter"),
        ("ELOOP", 2, "leads back to itself"),
        ("ENOENT", 2, "exist"),
        ("ENOTDIR", 2, "exist"),
    ],
)
def test_errors_of_the_file_system_are_explained(
    specpilot: Run, name: str, code: int, hint: str
) -> None:
    raised = f"OSError(__import__('errno').{name}, 'the system said so', 'folder/file')"
    done = specpilot("doctor", code=_RAISE.format(error=raised))
    assert done.returncode == code
    assert done.stdout == ""
    assert done.stderr.startswith("error: the system said so\n  at folder/file\n\nhint: ")
    assert hint in done.stderr


def test_an_os_error_without_a_number_is_a_bug(specpilot: Run) -> None:
    done = specpilot("doctor", code=_RAISE.format(error="OSError('what?')"))
    assert done.returncode == 70
    assert "internal error: OSError: what?" in done.stderr


def test_a_bug_exits_seventy_with_a_traceback_only_on_request(specpilot: Run) -> None:
    code = _RAISE.format(error="KeyError('lost [x]')")
    done = specpilot("doctor", code=code)
    assert done.returncode == 70
    assert "internal error: KeyError: 'lost [x]'" in done.stderr
    assert "Traceback" not in done.stderr
    done = specpilot("doctor", code=code, SPECPILOT_DEBUG="1")
    assert done.returncode == 70
    assert "Traceback" in done.stderr


def test_missing_requirement_still_prints_the_answer(specpilot: Run) -> None:
    code = "import specpilot_cli.doctor.checks as checks\nchecks.cuda_devices = list"
    done = specpilot("doctor", "--require", "gpu", code=code)
    assert done.returncode == 3
    assert done.stdout.startswith("check\tstate\tfound\tenables\npython\tok\t")
    assert "gpu required, but missing: cuda device" in done.stderr


def test_unknown_variable_is_a_warning_and_nothing_more(specpilot: Run) -> None:
    done = specpilot("doctor", "--help", SPECPILOT_DEBGU="1")
    assert done.returncode == 0
    assert done.stderr == (
        "warning: unknown variable `SPECPILOT_DEBGU` is ignored; did you mean `SPECPILOT_DEBUG`?\n"
    )


def test_variables_that_an_option_declares_are_known(specpilot: Run) -> None:
    assert specpilot("doctor", "--help", SPECPILOT_GPU="h200").stderr == ""


def test_project_file_gives_defaults_that_options_override(specpilot: Run, tmp_path: Path) -> None:
    config = tmp_path / "specpilot.toml"
    config.write_text('[doctor]\nrequire = ["gpu"]\n', encoding="utf-8")
    code = "import specpilot_cli.doctor.checks as checks\nchecks.cuda_devices = list"
    assert specpilot("doctor", code=code).returncode == 3
    assert specpilot("doctor", "--require", "torch", code=code).returncode == 0
    assert specpilot("doctor", code=code, SPECPILOT_NO_CONFIG="1").returncode == 0
    config.write_text("[docter]\n", encoding="utf-8")
    done = specpilot("doctor")
    assert done.returncode == 2
    assert done.stderr == (
        f"error: no command is called `docter`\n  at {config}\n\nhint: did you mean `doctor`?\n"
    )


_SLEEP = """
import sys, time
import specpilot_cli.doctor.checks as checks
from specpilot_cli.main import main
def sleep():
    print("ready", file=sys.stderr, flush=True)
    time.sleep(60)
checks.run_checks = sleep
sys.exit(main(["doctor"]))
"""


def test_interrupt_exits_130_without_a_traceback(tmp_path: Path) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", _SLEEP], stderr=subprocess.PIPE, text=True, cwd=tmp_path
    )
    try:
        assert child.stderr is not None
        assert child.stderr.readline() == "ready\n"
        child.send_signal(signal.SIGINT)
        rest = child.stderr.read()
        assert child.wait(timeout=60) == 130
    finally:
        child.kill()
        child.wait(timeout=60)
    assert "Traceback" not in rest


def test_reader_that_leaves_early_is_no_verdict(tmp_path: Path) -> None:
    done = subprocess.run(
        f"{sys.executable} -m specpilot_cli doctor | true; echo ${{PIPESTATUS[0]}}",
        shell=True,
        executable="/bin/bash",
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=120,
        check=True,
    )
    assert done.stdout == "141\n"
    assert "error" not in done.stderr.lower()
