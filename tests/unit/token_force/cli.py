"""`specpilot token-force` in this process, for tests of the command."""

from __future__ import annotations

import contextlib
import io
import os
from types import SimpleNamespace
from unittest import mock

from specpilot_cli.main import main

N_TOKENS = 24
N_REQUESTS = 10


def run(*args, cwd):
    out, err = io.StringIO(), io.StringIO()
    with (
        contextlib.chdir(cwd),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        mock.patch.dict(os.environ, {"COLUMNS": "200"}),
    ):
        code = main(["token-force", *map(str, args)])
    return SimpleNamespace(returncode=code, stdout=out.getvalue(), stderr=err.getvalue())


def flags(servers, system):
    return [
        "--system", servers[system].url, "--stock", servers["stock"].url,
        "--scorer", servers["scorer"].url, "--ar", servers["ar"].url,
    ]  # fmt: skip
